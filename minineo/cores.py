"""Share a long pass out over the cores of a CPU: each core takes some of the tokens.

NumPy multiplies large matrices on all cores, and computes everything else on one. But tokens meet
in one place alone: where each looks at the keys and values of the others. So each core takes its
tokens through all layers by itself, and waits for the others once in a layer, for theirs.
"""

import sys
from _thread import start_new_thread
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock

import numpy as np
from threadpoolctl import ThreadpoolController

from .transformer.attention import QUERY_ROWS
from .transformer.model import blocks
from .transformer.trace import silent

LEAST_TOKENS = 128  # for each core: with fewer, sharing a pass gains nothing
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
        with _changing:  # the last to leave, of whichever thread, takes what the first has found
            for library, threads in zip(libraries, _before.pop(), strict=True):
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
    in_one_piece = partial(blocks.__wrapped__, residual, weights, config, cache, positions, trace)
    parts = shares(config, positions, cores)
    if len(parts) == 1 or trace is not silent:
        return in_one_piece()
    batch, new, _ = residual.shape
    shape = (2, 2, batch, config.n_heads, new, config.head_dim)
    room, arrivals = np.empty(shape, residual.dtype), SimpleQueue()
    guests = [Guest(part, room, arrivals) for part in parts[1:]]
    host = Host(parts[0], room, arrivals, cache, guests)
    after = np.empty_like(residual)

    def work(share):
        own = residual[:, share.part], weights, config, share, positions[:, share.part]
        after[:, share.part] = blocks.__wrapped__(*own)

    def follow(guest):
        try:
            work(guest)
        except BaseException as error:
            arrivals.put(error)
        else:
            arrivals.put(None)

    begun = 0
    with one_core():
        try:
            for guest in guests:
                # of the low level, for Ctrl-C in the midst of a `Thread.start` leaves half a thread
                start_new_thread(copy_context().run, (follow, guest))
                begun += 1
            work(host)
            host.wait()
        except BaseException as error:  # Ctrl-C too
            host.dismiss()
            if isinstance(error, RuntimeError) and begun < len(guests):
                return in_one_piece()  # there can be no more threads, as when a program ends
            raise
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


class Guest:
    """What stands for the cache to a core that has some of the tokens, and follows the host.

    The two meet by queues alone: a lock could be held by whom Ctrl-C ends.

    Parameters
    ----------
    part : slice
        Its tokens.
    room : array [2, 2, batch, heads, new, head_dim]
        For new keys and values: two pairs, in turn, for while some tokens are in the next layer
        others still look at the keys and values of this one.
    arrivals : SimpleQueue
        It says here that it has given what is new, or is done, or why it cannot.
    """

    def __init__(self, part, room, arrivals):
        self.part, self._room, self._arrivals = part, room, arrivals
        self.answers = SimpleQueue()  # all keys and values, layer by layer; None ends it

    def give(self, layer, new_keys, new_values):
        """Put the new keys and values of these tokens where those of all are."""
        keys, values = self._room[layer % 2]
        keys[:, :, self.part], values[:, :, self.part] = new_keys, new_values

    def extend(self, layer, new_keys, new_values):
        """Give the new keys and values of these tokens, and get those of all tokens so far."""
        self.give(layer, new_keys, new_values)
        self._arrivals.put(None)
        answer = self.answers.get()
        if answer is None:
            raise RuntimeError("the pass has ended")
        return answer


class Host(Guest):
    """The same for the core that the pass began on, which speaks with the cache for all.

    Parameters
    ----------
    part, room, arrivals
        As those of a guest.
    cache : Recompute or KVCache
    guests : list of Guest
    """

    def __init__(self, part, room, arrivals, cache, guests):
        super().__init__(part, room, arrivals)
        self._cache, self._guests = cache, guests

    def extend(self, layer, new_keys, new_values):
        """Bring what all have given to the cache, and tell all what it returns."""
        self.give(layer, new_keys, new_values)
        self.wait()
        everything = self._cache.extend(layer, *self._room[layer % 2])
        for guest in self._guests:
            guest.answers.put(everything)
        return everything

    def wait(self):
        """Wait for one arrival of each guest, or raise the error that one has met."""
        for _ in self._guests:
            error = self._arrivals.get()
            try:
                if error is not None:
                    raise error
            finally:
                del error  # or it and its traceback would hold each other, and the cache

    def dismiss(self):
        """Let no guest wait any longer."""
        for guest in self._guests:
            guest.answers.put(None)
