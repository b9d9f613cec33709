"""The models that are known by name, and their shapes."""

from math import prod
from typing import NamedTuple

from ..transformer import Config
from .read import expected_shapes


class Shape(NamedTuple):
    """Where a public model is on the hub, and its shape."""

    repo: str
    width: int
    n_layers: int
    n_heads: int


EMBEDDED = ("tiny",)
PUBLIC = {
    "gpt-neo-125m": Shape("EleutherAI/gpt-neo-125m", 768, 12, 12),
    "gpt-neo-1.3b": Shape("EleutherAI/gpt-neo-1.3B", 2048, 24, 16),
    "gpt-neo-2.7b": Shape("EleutherAI/gpt-neo-2.7B", 2560, 32, 20),
    "tinystories-1m": Shape("roneneldan/TinyStories-1M", 64, 8, 16),
    "tinystories-3m": Shape("roneneldan/TinyStories-3M", 128, 8, 16),
    "tinystories-8m": Shape("roneneldan/TinyStories-8M", 256, 8, 16),
    "tinystories-28m": Shape("roneneldan/TinyStories-28M", 512, 8, 16),
    "tinystories-33m": Shape("roneneldan/TinyStories-33M", 768, 4, 16),
}
# what all of them have in common
VOCAB, CONTEXT, WINDOW, END_TOKEN = 50257, 2048, 256, 50256


def public_config(name):
    """Return the config of a public model."""
    _, width, n_layers, n_heads = PUBLIC[name]
    return Config(
        vocab=VOCAB,
        context=CONTEXT,
        width=width,
        inner=4 * width,
        n_layers=n_layers,
        n_heads=n_heads,
        windows=(CONTEXT, WINDOW) * (n_layers // 2),
        end_token=END_TOKEN,
    )


def parameters(config):
    """Return how many numbers a model of this config has learned."""
    return sum(prod(shape) for shape in expected_shapes(config).values())
