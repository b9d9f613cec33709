"""What compares and explains."""

from .compare import Comparison, compare

__all__ = ["Comparison", "compare"]
