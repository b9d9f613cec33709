"""The command `minineo`: one file for each command, which parses, calls and prints."""

# ruff: noqa: I001 - the order of these is that of `minineo --help`
from . import compare, step, explore, faults, generate, batch, plan, bench, verify, models, doctor
from .app import main

__all__ = [
    "batch",
    "bench",
    "compare",
    "doctor",
    "explore",
    "faults",
    "generate",
    "main",
    "models",
    "plan",
    "step",
    "verify",
]
