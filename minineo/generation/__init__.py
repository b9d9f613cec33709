"""From a model to text."""

from .generate import Step, generate, greedy

__all__ = ["Step", "generate", "greedy"]
