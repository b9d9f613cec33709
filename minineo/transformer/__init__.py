"""A GPT-Neo written out: what a learner reads. Start with `model.py`."""

from .cache import KVCache, Recompute
from .config import Config, InputError
from .model import forward
from .trace import Trace, silent
from .weights import Weights

__all__ = ["Config", "InputError", "KVCache", "Recompute", "Trace", "Weights", "forward", "silent"]
