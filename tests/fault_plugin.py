"""A plugin of pytest that puts a fault of the lab into the whole process: `--fault NAME`.

The fault is there for every thread and every cache, on both paths. With the fault ``control``
the same is done without anything being wrong.
"""

import sys

from minineo.study.faults import FAULTS, WHOLE, Fault, attend_where, in_window
from minineo.transformer import KVCache, functions, replaceable


class Unchanged(KVCache):
    """Does nothing else."""

    def extend(self, layer, new_keys, new_values):
        return super().extend(layer, new_keys, new_values)

    def advance(self, counts):
        super().advance(counts)

    def crop(self, length):
        super().crop(length)


CONTROL = Fault(
    "control",
    "Nothing is wrong.",
    "",
    WHOLE,
    lambda config, passes: None,
    cache=Unchanged,
    functions={
        "attend": attend_where(in_window),
        "gelu_new": functions.gelu_new.__wrapped__,
        "layer_norm": functions.layer_norm.__wrapped__,
    },
)


class Everywhere:
    """Holds replacements as `replaceable` does, and the fault's functions below them all."""

    def __init__(self, functions, inner):
        self.functions, self.inner = functions, inner
        self.set, self.reset = inner.set, inner.reset

    def get(self, default):
        return self.functions | self.inner.get(default)


def put_in(fault):
    """Let every module find the fault's cache in the place of `KVCache`, and call its functions."""
    replaceable._replacements = Everywhere(fault.functions, replaceable._replacements)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "minineo" and vars(module).get("KVCache") is KVCache:
            module.KVCache = fault.cache


def pytest_addoption(parser):
    parser.addoption("--fault")


def pytest_configure(config):
    name = config.getoption("--fault")
    if name:
        put_in(CONTROL if name == CONTROL.name else FAULTS[name])
