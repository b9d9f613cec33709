"""The command `minineo`: one file for each command, which parses, calls and prints."""

# ruff: noqa: I001 - the order of these is that of `minineo --help`
from . import compare, generate, bench, verify, models
from .app import main

__all__ = ["bench", "compare", "generate", "main", "models", "verify"]
