"""Depth: a trace sees every named value of a forward pass at the line where it is made.

Functions call ``trace(queries=queries)``. By default they call `silent`, which does nothing.
"""

from collections.abc import Mapping

import numpy as np


class Silent:
    """The trace that keeps nothing."""

    def __call__(self, **values):
        """Do nothing."""

    def tile(self, rows, slots, whole, **values):
        """Do nothing."""

    def within(self, name):
        """Return itself."""
        return self


silent = Silent()


class Trace(Mapping):
    """Keep a copy of every named value of one forward pass, or of those asked for.

    It only reads: a pass gives the same result, traced or not. Values lie under their own
    name after that of the block they belong to, such as ``trace["block3.pattern"]``.

    Parameters
    ----------
    names : str or iterable of str, optional
        Keep only these values, of all blocks (``"pattern"``) or of one (``"block3.pattern"``); by
        default all of them.

    Examples
    --------
    >>> trace = Trace(names=["pattern"])
    >>> logits = forward(tokens, weights, config, Recompute(), trace=trace)
    >>> trace["block0.pattern"].shape  # [batch, heads, new, all]
    """

    def __init__(self, names=None):
        self._names = frozenset([names] if isinstance(names, str) else names or [])
        self._prefix = ""
        self._values = {}

    def __call__(self, **values):
        """Keep a copy of each value under its name."""
        for name, value in values.items():
            if self._wants(name):
                self._values[self._prefix + name] = value.copy()

    def tile(self, rows, slots, whole, **values):
        """Put scores or a pattern into their place in the matrix [batch, heads, new, all].

        Cells that no tile covers are hidden from their query, and hold what hidden cells do.

        Parameters
        ----------
        rows, slots : slice
            The part of the last two axes that the value covers; the first tile starts at row 0.
        whole : tuple of int
            The length of the last two axes, new and all.
        """
        for name, value in values.items():
            if self._wants(name):
                key = self._prefix + name
                if rows.start == 0:
                    shape = (*value.shape[:2], *whole)
                    outside = 0 if name == "pattern" else float(np.finfo(value.dtype).min)
                    self._values[key] = np.full_like(value, outside, shape=shape)
                self._values[key][:, :, rows, slots] = value

    def within(self, name):
        """Return a trace that writes into this one, with `name` and a dot before each name."""
        inner = Trace(self._names)
        inner._prefix = f"{self._prefix}{name}."
        inner._values = self._values
        return inner

    def __getitem__(self, name):
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def _wants(self, name):
        return not self._names or name in self._names or self._prefix + name in self._names
