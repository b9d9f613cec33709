"""A GPT-Neo in NumPy and CuPy, with and without a key-value cache, compared step by step."""

from importlib.metadata import version

from .checkpoints import Model, load
from .generation import Batch, Request, Sampling, Step, generate, generate_batch
from .study import Comparison, compare
from .study.explore import Exploration, explore
from .study.plan import Plan, plan
from .study.score import Score, score
from .study.verify import Verification, verify
from .transformer import Config, InputError, KVCache, Recompute, Trace, Weights, forward

__version__ = version("minineo")

__all__ = [
    "Batch",
    "Comparison",
    "Config",
    "Exploration",
    "InputError",
    "KVCache",
    "Model",
    "Plan",
    "Recompute",
    "Request",
    "Sampling",
    "Score",
    "Step",
    "Trace",
    "Verification",
    "Weights",
    "compare",
    "explore",
    "forward",
    "generate",
    "generate_batch",
    "load",
    "plan",
    "score",
    "verify",
]
