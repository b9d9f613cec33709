"""Where keys and values come from: the one difference between the two paths.

Both classes have the same `lengths`, `extend` and `advance`. A forward pass calls `extend` once
in every layer, and `advance` once at its end. A batch calls `rows` and `drop` between passes.
"""

import numpy as np

from .config import InputError
from .replaceable import replaceable


def whole(number, name, least=0):
    """Return a whole number, of Python or NumPy and no bool, as an int, or refuse it."""
    if isinstance(number, (int, np.integer)) and type(number) is not bool and number >= least:
        return int(number)
    raise InputError(f"{name} is {number!r}; it must be a whole number from {least}")


class Recompute:
    """The naive path: nothing is remembered, so every pass is fed all tokens again."""

    length = 0
    lengths = np.zeros(1, dtype=int)  # one for all rows: they all begin at position 0
    lengths.flags.writeable = False
    nbytes = token_bytes = used_bytes = 0

    def extend(self, layer, new_keys, new_values):
        """Return what is given: the new keys and values are all there are."""
        return new_keys, new_values

    def advance(self, counts):
        """Remember nothing."""

    def check(self, config, batch, counts, dtype):
        """Accept every input: there is nothing that could fill up."""

    def rows(self, start, stop):
        """Return itself: there is nothing to share."""
        return self

    def drop(self, row, last):
        """Forget nothing: nothing is remembered."""


@replaceable
def append(keys, values, new_keys, new_values, lengths):
    """Append new keys and values to a layer's storage: in each row they lie behind its old ones.

    Parameters
    ----------
    keys, values : array [batch, heads, capacity, head_dim]
    new_keys, new_values : array [batch, heads, new, head_dim]
    lengths : NumPy array of int [batch]
        How many tokens each row holds.
    """
    capacity, new = keys.shape[2], new_keys.shape[2]
    for row, length in enumerate(lengths.tolist()):
        room = capacity - length  # padding may reach past the last slot
        keys[row, :, length : length + new] = new_keys[row, :, :room]
        values[row, :, length : length + new] = new_values[row, :, :room]


class KVCache:
    """The cached path: keys and values of all tokens so far are kept, and only new ones made.

    The key and the value of a row's token at position p lie in slot p. Every row has a length
    of its own; what lies behind it is never seen by a query, and written over later.

    Parameters
    ----------
    config : Config
        The model whose keys and values are kept.
    batch : int
        Number of rows.
    capacity : int
        Number of slots in each row.
    like : array
        An array whose dtype and device the cache takes, such as ``weights.token_embedding``.

    Attributes
    ----------
    keys, values : list of array [batch, heads, capacity, head_dim]
        One of each for every layer.
    lengths : NumPy array of int [batch]
        How many tokens each row holds.

    Raises
    ------
    InputError
        If batch or capacity is below 1, or capacity is above the model's context.
    """

    def __init__(self, config, batch, capacity, like):
        batch, capacity = whole(batch, "batch", 1), whole(capacity, "capacity", 1)
        if capacity > config.context:
            raise InputError(
                f"a capacity of {capacity} slots does not fit this model; "
                f"ask for 1 to {config.context}"
            )
        shape = (batch, config.n_heads, capacity, config.head_dim)

        def storage():  # zeros, so that what is hidden is always a finite number
            return [np.zeros(shape, dtype=like.dtype, like=like) for _ in range(config.n_layers)]

        self.keys, self.values = storage(), storage()
        self.lengths = np.zeros(batch, dtype=int)

    @property
    def length(self):
        """Number of tokens in the longest row."""
        return int(self.lengths.max())

    @property
    def capacity(self):
        """Number of slots in each row."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self):
        """Bytes set aside for keys and values."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    @property
    def token_bytes(self):
        """Bytes of the keys and values of one token, in all layers."""
        return self.nbytes // (len(self.lengths) * self.capacity)

    @property
    def used_bytes(self):
        """Bytes of the keys and values held so far."""
        return self.token_bytes * int(self.lengths.sum())

    def extend(self, layer, new_keys, new_values):
        """Write new keys and values behind each row's old ones and return all of them.

        Parameters
        ----------
        layer : int
        new_keys, new_values : array [batch, heads, new, head_dim]

        Returns
        -------
        keys, values : array [batch, heads, all, head_dim]
            Views of the cache, up to the end of the longest row.
        """
        keys, values = self.keys[layer], self.values[layer]
        append(keys, values, new_keys, new_values, self.lengths)
        filled = self.length + new_keys.shape[2]
        return keys[:, :, :filled], values[:, :, :filled]

    def advance(self, counts):
        """Count the tokens that a forward pass has brought: `counts` of them in each row."""
        self.lengths += counts  # in place: caches over some of the rows share it

    def crop(self, length):
        """Forget every token at position `length` and behind it.

        Raises
        ------
        InputError
            If length is negative or above the length of the longest row.
        """
        length = whole(length, "length")
        if length > self.length:
            raise InputError(f"cannot crop to {length} tokens a cache that holds {self.length}")
        np.minimum(self.lengths, length, out=self.lengths)

    def rows(self, start, stop):
        """Return a cache of the rows from `start` up to `stop`, which are also still this one's.

        It shares their storage and lengths: a pass over it is a pass over these rows alone.

        Raises
        ------
        InputError
            If these are no rows of the cache, or none.
        """
        start, stop = whole(start, "start"), whole(stop, "stop")
        if not start < stop <= len(self.lengths):
            raise InputError(f"a cache of {len(self.lengths)} rows has no rows {start} to {stop}")
        return self._twin(lambda array: array[start:stop])

    def drop(self, row, last):
        """Forget a row. Row `last` moves into its place, so that no gap is left before it.

        Only slots in use are copied. What stays in the others is never seen by a query.

        Raises
        ------
        InputError
            If one is no row of the cache, or `row` lies behind `last`.
        """
        row, last = whole(row, "row"), whole(last, "last")
        if not row <= last < len(self.lengths):
            raise InputError(
                f"row {last} cannot move into row {row} in a cache of {len(self.lengths)} rows"
            )
        length = self.lengths[last]
        if row < last:
            for array in (*self.keys, *self.values):
                array[row, :, :length] = array[last, :, :length]
        self.lengths[row] = length
        self.lengths[last] = 0

    def copy(self):
        """Return a cache that holds the same and shares no memory with this one."""
        return self._twin(lambda array: array.copy())

    def _twin(self, change):
        """Return a cache of arrays that are made from those of this one."""
        twin = object.__new__(type(self))
        twin.keys = [change(array) for array in self.keys]
        twin.values = [change(array) for array in self.values]
        twin.lengths = change(self.lengths)
        return twin

    def check(self, config, batch, counts, dtype):
        """Make sure that a pass fits before anything is written.

        Raises
        ------
        InputError
            If the cache is of another model, batch or dtype, or has too few slots left.
        """
        _, heads, _, head_dim = self.keys[0].shape
        made_for = (len(self.keys), heads, head_dim, len(self.lengths))
        asked = (config.n_layers, config.n_heads, config.head_dim, batch)
        if made_for != asked:
            words = "{} layers, {} heads of {} and {} rows"
            raise InputError(
                f"the cache is made for {words.format(*made_for)}, "
                f"the pass has {words.format(*asked)}"
            )
        if self.keys[0].dtype != dtype:
            raise InputError(
                f"the cache holds {self.keys[0].dtype} and the weights are {dtype}; make it like "
                "weights.token_embedding"
            )
        needed = int((self.lengths + counts).max())
        if needed > self.capacity:
            raise InputError(
                f"the cache has {self.capacity} slots and {needed} are needed; "
                "make it with a larger capacity"
            )
