"""The parameters of a GPT-Neo and their shapes. Matrices are stored [out, in]."""

from typing import Any, NamedTuple

Array = Any  # a NumPy array on the CPU, a CuPy array on a GPU


class Norm(NamedTuple):
    """Layer norm."""

    scale: Array  # [width]
    shift: Array  # [width]


class Attention(NamedTuple):
    """Self-attention. Queries, keys and values have no bias in GPT-Neo."""

    query: Array  # [width, width]
    key: Array  # [width, width]
    value: Array  # [width, width]
    output: Array  # [width, width]
    output_bias: Array  # [width]


class Mlp(NamedTuple):
    """The two layers that each position passes through on its own."""

    up: Array  # [inner, width]
    up_bias: Array  # [inner]
    down: Array  # [width, inner]
    down_bias: Array  # [width]


class Block(NamedTuple):
    """One layer of the model."""

    norm_1: Norm
    attention: Attention
    norm_2: Norm
    mlp: Mlp


class Weights(NamedTuple):
    """All parameters of a model."""

    token_embedding: Array  # [vocab, width]
    position_embedding: Array  # [context, width]
    blocks: tuple[Block, ...]
    norm: Norm
    unembedding: Array  # [vocab, width]; the token embedding itself when tied
