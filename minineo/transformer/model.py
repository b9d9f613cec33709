"""The model: tokens in, logits out."""

import numpy as np

from .attention import attention
from .config import InputError
from .functions import add_linear, layer_norm, linear, linear_gelu
from .replaceable import replaceable
from .trace import silent


def forward(tokens, weights, config, cache, *, counts=None, last_only=True, trace=silent):
    """One pass of new tokens through the model.

    Which path it is depends on the cache alone. With `KVCache` the tokens continue those that
    the cache holds; with `Recompute` they are the whole sequence.

    Parameters
    ----------
    tokens : array of int [batch, new]
        The ids of the new tokens. Rows of different lengths are padded on the right, with any id.
    weights : Weights
    config : Config
    cache : Recompute or KVCache
        Holds the tokens before these; it has these too when the pass has succeeded, and is
        unchanged when it has not.
    counts : array of int [batch], optional
        How many tokens of each row are real; by default all of them.
    last_only : bool, optional
        Return the logits of each row's last real token alone, or those of all tokens (those of
        padding mean nothing).
    trace : Trace, optional

    Returns
    -------
    logits : array [batch, 1 or new, vocab]
        For each token, the score of every token that may come next.

    Raises
    ------
    InputError
        If an id or a count is out of range or not a whole number, if the sequence becomes longer
        than the context, or if the cache is too small or of another model or batch.
    """
    tokens, counts = check_input(tokens, counts, config, cache, weights.token_embedding.dtype)
    positions = cache.lengths[:, None] + np.arange(tokens.shape[1])  # [batch or 1, new]
    positions = np.minimum(positions, config.context - 1)  # padding may reach past the end

    residual = embed(tokens, positions, weights)  # [batch, new, width]
    residual = blocks(residual, weights, config, cache, positions, trace)  # [batch, new, width]
    if last_only:
        ends = [residual[row, count - 1 : count] for row, count in enumerate(counts.tolist())]
        residual = np.stack(ends)  # [batch, 1, width]
    final = layer_norm(residual, *weights.norm, config.eps)  # [batch, 1 or new, width]
    logits = linear(final, weights.unembedding)  # [batch, 1 or new, vocab]
    trace(final=final, logits=logits)
    cache.advance(counts)
    return logits


def embed(tokens, positions, weights):
    """The vector of each token plus the vector of its position: [batch, new, width]."""
    token_table, position_table = weights.token_embedding, weights.position_embedding
    return (
        token_table[np.asarray(tokens, like=token_table)]
        + position_table[np.asarray(positions, like=position_table)]
    )


@replaceable
def blocks(residual, weights, config, cache, positions, trace=silent):
    """All layers, one after the other, each with what the one before has made of the residual.

    Parameters and result are those of `block`, but for the weights, which are the whole model's.
    This function has a name of its own because a CPU shares long passes out over its cores.
    """
    for layer in range(config.n_layers):
        inside = trace.within(f"block{layer}")
        residual = block(residual, weights.blocks[layer], config, cache, layer, positions, inside)
    return residual


def block(before, weights, config, cache, layer, positions, trace=silent):
    """One layer: attention between the tokens, then the mlp on each; both add to the residual.

    What attention finds, and what the mlp makes of each token in `inner` numbers, goes through a
    last matrix on its way into the residual.

    Parameters
    ----------
    before : array [batch, new, width]
    weights : Block
    config : Config
    cache : Recompute or KVCache
    layer : int
        The number of this layer, from 0.
    positions : NumPy array [batch or 1, new]
    trace : Trace, optional

    Returns
    -------
    array [batch, new, width]
    """
    attn, mlp, window = weights.attention, weights.mlp, config.windows[layer]

    normed_1 = layer_norm(before, *weights.norm_1, config.eps)  # [batch, new, width]
    trace(before=before, normed_1=normed_1)
    found = attention(normed_1, attn, cache, layer, positions, window, config.n_heads, trace)
    middle = add_linear(before, found, attn.output, attn.output_bias)  # [batch, new, width]

    normed_2 = layer_norm(middle, *weights.norm_2, config.eps)  # [batch, new, width]
    inner = linear_gelu(normed_2, mlp.up, mlp.up_bias)  # [batch, new, inner]
    after = add_linear(middle, inner, mlp.down, mlp.down_bias)  # [batch, new, width]
    trace(middle=middle, normed_2=normed_2, after=after)
    return after


def check_input(tokens, counts, config, cache, dtype):
    """Return tokens and counts as NumPy arrays, or refuse them before any work is done."""
    tokens = check_ids(tokens, config)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InputError(f"tokens have the shape {tokens.shape}; [batch, new] is needed, 1 or more")
    batch, new = tokens.shape
    counts = np.full(batch, new) if counts is None else whole_numbers(counts, "counts")
    if counts.shape != (batch,):
        raise InputError(f"counts must be {batch} whole numbers, one for each row")
    if counts.min() < 1 or counts.max() > new:
        raise InputError(f"counts are {counts.tolist()}; each must lie between 1 and {new}")
    needed = int((cache.lengths + counts).max())
    if needed > config.context:
        raise InputError(f"{needed} positions are needed; this model has {config.context}")
    cache.check(config, batch, counts, dtype)
    return tokens, counts.astype(int)


def check_ids(ids, config):
    """Return token ids as a NumPy array, or name the one that is no token of this model."""
    ids = whole_numbers(ids, "token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < config.vocab):
        wrong = ids[(ids < 0) | (ids >= config.vocab)].flat[0]
        raise InputError(f"{wrong} is no token of this model; ids are 0 to {config.vocab - 1}")
    return ids


def whole_numbers(values, name):
    """Return whole numbers as a NumPy array, or say what they are instead."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{name} must form rows of one length; pad the shorter ones") from None
    if array.size and (array.dtype.kind not in "iu" or holds_bool(values)):
        found = array.dtype if array.dtype.kind not in "iu" else "partly bool"
        raise InputError(f"{name} must be whole numbers; these are {found}")
    return array


def holds_bool(values):
    """Return whether a bool is among listed numbers: NumPy would take it for 0 or 1."""
    if isinstance(values, list | tuple):
        return any(map(holds_bool, values))
    return isinstance(values, bool | np.bool_)
