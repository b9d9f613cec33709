"""Share a long pass out over the cores of a CPU: each core takes some of the tokens.

NumPy multiplies large matrices on all cores, and computes everything else on one. But tokens meet
in one place alone: where each looks at the keys and values of the others. So each core takes its
tokens through all layers by itself, and waits for the others once in a layer, for theirs.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from itertools import pairwise
from threading import Barrier, Lock

import numpy as np
from threadpoolctl import ThreadpoolController

from .transformer.attention import QUERY_ROWS
from .transformer.model import blocks
from .transformer.trace import silent

LEAST_TOKENS = 128  # for each core: with fewer, sharing costs more than it gains
ATTENTION = 3  # so many in a matrix take as long as one in attention, softmax included: measured

_before: list[list[int]] = []  # the numbers of threads, as each who is in `one_core` found them
_changing = Lock()


@contextmanager
def one_core():
    """Let NumPy multiply with one thread inside a `with` block."""
    libraries = blas()  # asked directly: `ThreadpoolController.limit` takes a tenth of a pass
    with _changing:
        _before.append([library.get_num_threads() for library in libraries])
        for library in libraries:
            library.set_num_threads(1)
    try:
        yield
    finally:
        with _changing:
            before = _before.pop()
            if not _before:  # the last to leave, of whichever thread: back to what the first found
                for library, threads in zip(libraries, before, strict=True):
                    library.set_num_threads(threads)


@cache
def blas():
    """Return the libraries that NumPy multiplies with."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def sharers(tokens):
    """Return how many cores share a pass of so many tokens: those that NumPy may use, or one."""
    cores = max((library.get_num_threads() for library in blas()), default=1)
    return 1 if tokens < cores * LEAST_TOKENS or watched() else cores


def watched():
    """Whether a debugger or profiler looks on: it follows one thread."""
    tools = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return bool(
        sys.gettrace()
        or sys.getprofile()
        or (tools and (tools.get_tool(tools.DEBUGGER_ID) or tools.get_tool(tools.PROFILER_ID)))
    )


def shared_blocks(residual, weights, config, cache, positions, trace=silent, *, cores):
    """Take tokens through all layers as `blocks` does, shared out over so many cores."""
    parts = shares(config, positions, cores)
    meeting = Meeting(cache, residual, config, len(parts))
    after = np.empty_like(residual)
    errors = []

    def work(part):
        own = residual[:, part], weights, config, Share(meeting, part), positions[:, part]
        try:
            after[:, part] = blocks.__wrapped__(*own)
        except BaseException as error:  # the first is the cause, those of the others follow from it
            errors.append(error)
            meeting.abort()

    with one_core(), ThreadPoolExecutor(len(parts)) as pool:
        try:
            for part in parts[1:]:
                pool.submit(copy_context().run, work, part)
            work(parts[0])
        except BaseException:  # Ctrl-C between two lines: let nobody wait in vain
            meeting.abort()
            raise
    if errors:
        raise errors[0]
    return after


def shares(config, positions, cores):
    """Return the tokens for each core, as slices that take about as long as one another.

    Later tokens see more, and so take longer. Shares begin where a block of query rows does, so
    that as much is computed as in one piece; so there can be fewer shares than cores.

    Parameters
    ----------
    config : Config
    positions : NumPy array [batch or 1, new]
    cores : int

    Returns
    -------
    list of slice
    """
    seen = sum(np.minimum(positions[0] + 1, window) for window in config.windows)
    matrices = config.n_layers * (4 * config.width + 2 * config.inner) * config.width
    work = np.cumsum(matrices + ATTENTION * 2 * config.width * seen)
    ends = np.searchsorted(work, work[-1] * np.arange(1, cores) / cores)
    blocks_of_rows = np.unique(np.round(ends / QUERY_ROWS)).astype(int) * QUERY_ROWS
    inner = [end for end in blocks_of_rows.tolist() if 0 < end < len(work)]
    return [slice(start, stop) for start, stop in pairwise([0, *inner, len(work)])]


class Meeting:
    """Where the cores meet, once in a layer, each with new keys and values, to get all there are.

    Parameters
    ----------
    cache : Recompute or KVCache
    residual : array [batch, new, width]
    config : Config
    parts : int
        How many cores meet.
    """

    def __init__(self, cache, residual, config, parts):
        batch, new, _ = residual.shape
        shape = (2, 2, batch, config.n_heads, new, config.head_dim)
        self._cache, self._layer = cache, 0
        # two pairs, in turn: some may still look at the keys and values of the layer before
        self.new = np.empty(shape, residual.dtype)
        self._barrier = Barrier(parts, action=self._extend)

    def _extend(self):
        """Bring what all have made to the cache: the last to come does so, while the others wait."""
        self._all = self._cache.extend(self._layer, *self.new[self._layer % 2])
        self._layer += 1

    def all(self):
        """Wait until all have come, and return all keys and values."""
        self._barrier.wait()
        return self._all

    def abort(self):
        """Let nobody wait any longer."""
        self._barrier.abort()


class Share:
    """What stands for the cache to the core that has some of the tokens.

    Parameters
    ----------
    meeting : Meeting
    part : slice
        Its tokens.
    """

    def __init__(self, meeting, part):
        self._meeting, self._part = meeting, part

    def extend(self, layer, new_keys, new_values):
        """Give the new keys and values of these tokens, and get those of all tokens so far."""
        keys, values = self._meeting.new[layer % 2]
        keys[:, :, self._part], values[:, :, self._part] = new_keys, new_values
        return self._meeting.all()
