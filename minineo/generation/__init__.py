"""From a model to text."""

from .batch import Batch, Request, Step
from .generate import generate, generate_batch
from .sampling import Sampling, greedy
from .text import TextStream

__all__ = [
    "Batch",
    "Request",
    "Sampling",
    "Step",
    "TextStream",
    "generate",
    "generate_batch",
    "greedy",
]
