"""Two runs of the same passes, held against each other value by value."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import zip_longest
from queue import Empty, Queue
from threading import Event, Thread

import numpy as np

from ..checkpoints import Model
from ..transformer import InputError, KVCache, Recompute, Weights, forward, silent
from .plain import number

# What counts as rounding, as a share of a value's largest number, but of 1 at least: some ten times
# what the embedded model shows. A larger difference in float16 or float32 is judged in float64.
ROUNDING = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-10}
MOST = 0.1  # of a value's largest number: no rounding goes further, whatever float64 says
SHRUNK = 1e-6  # of a difference: float64 leaves less of it if it is rounding
HIDDEN = 1e30  # scores this low are hidden, not measured
AHEAD = 4  # values that a run may be ahead of the other


@dataclass(frozen=True)
class Pass:
    """New tokens for every row.

    Attributes
    ----------
    tokens : NumPy array of int [batch, new]
    counts : tuple of int
        How many tokens of each row are real; the others are padding on the right.
    """

    tokens: np.ndarray
    counts: tuple[int, ...]

    @classmethod
    def of(cls, *rows: Sequence[int]) -> "Pass":
        """Return the pass that feeds these ids, one sequence for each row."""
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=int)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        return cls(tokens, tuple(map(len, rows)))


@dataclass(frozen=True)
class Place:
    """Where a value lies: the step, the layer (None outside the blocks) and the value's name."""

    step: int
    layer: int | None
    value: str

    def __str__(self):
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"step {self.step}, {layer}{self.value}"


@dataclass(frozen=True)
class Divergence(Place):
    """The first value that differs by more than rounding.

    Attributes
    ----------
    difference : float or None
        The largest difference in it, as a share of the value's largest number; None when there
        is no such number, because a path broke down, shapes or dtypes differ, or one path lacks it.
    exact_difference : float or None
        The same in float64, in which rounding would all but vanish.
    """

    difference: float | None = None
    exact_difference: float | None = None

    @property
    def place(self) -> Place:
        """Where it is, alone."""
        return Place(self.step, self.layer, self.value)

    def to_json(self) -> dict:
        """Return it as plain values; what is not a number becomes None."""
        numbers = ("difference", "exact_difference")
        return vars(self) | {name: number(getattr(self, name)) for name in numbers}


@dataclass(frozen=True)
class Lockstep:
    """What holding two runs against each other has shown.

    Attributes
    ----------
    steps : int
        Passes that both runs made.
    values : int
        Values held against each other.
    largest : dict of str to float
        For each name the largest difference met, as a share of the value's largest number.
    divergence : Divergence or None
        The first value that differs by more than rounding; nothing was made after it was found.
    """

    steps: int
    values: int
    largest: dict[str, float]
    divergence: Divergence | None

    @property
    def agree(self) -> bool:
        """Whether no value differs by more than rounding."""
        return self.divergence is None

    @property
    def largest_difference(self) -> float:
        """The largest difference of all, as a share of the value's largest number."""
        return max(self.largest.values(), default=0.0)


def lockstep(
    model: Model,
    passes: Sequence[Pass],
    *,
    cache: Callable[..., KVCache] = KVCache,
    change: Callable[[], AbstractContextManager] = nullcontext,
    prepare: Callable[[Model, KVCache], None] = lambda model, cache: None,
    spare: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Lockstep:
    """Feed a cache one pass after the other, and the naive path all tokens so far each time.

    Both run side by side, each in a thread of its own, and hand over every named value of every
    layer as it is made: no more than a few values of one layer are in memory at a time. Rows and
    positions that only the naive path computes again are left out.

    Where a value differs by more than float32 rounding mostly does, the same passes run once more
    in float64. A difference that shrinks a millionfold there was rounding; otherwise the first
    value of that step that does not is the one to name. What is not a number is never rounding.

    Parameters
    ----------
    model : Model
    passes : sequence of Pass
    cache : class, optional
        Of the cached run's cache.
    change : function, optional
        Returns a context that the cached run's passes are made in, and the naive one's are not.
    prepare : function, optional
        What is done with model and cache before the first pass.
    spare : int, optional
        Slots of the cache beyond those that the passes take.
    progress : function, optional
        Called with the number of passes made after each.

    Returns
    -------
    Lockstep

    Raises
    ------
    InputError
        If there is no pass, or passes have different numbers of rows.
    """
    if not passes or len({len(each.counts) for each in passes}) > 1:
        raise InputError("passes must be one or more, all with the same number of rows")
    given = passes, cache, change, prepare, spare
    runs = Runs(model, *given)
    judge: Runs | None = None
    largest: dict[str, float] = {}
    values = 0
    for step in range(len(passes)):
        met: dict[Place, float | None] = {}  # differences since the last judgement
        exact: dict[Place, float | None] = {}
        with closing(runs.hold(step)) as pairs:
            for place, difference in pairs:
                values += 1
                met[place] = difference
                if difference is None or not difference <= ROUNDING[model.dtype]:
                    if model.dtype == "float64":
                        exact = met
                    elif not exact:
                        judge = judge or Runs(in_float64(model), *given)
                        exact = judge.differences(step)
                    found = first_fault(met, exact)
                    if found:
                        return Lockstep(step, values, largest, found)
                    met.clear()
                largest[place.value] = max(largest.get(place.value, 0.0), difference or 0.0)
        progress(step + 1)
    return Lockstep(len(passes), values, largest, None)


def first_fault(met, exact) -> Divergence | None:
    """Return the first of the differences met that is not rounding, given those in float64."""
    for place, difference in met.items():
        judged = exact.get(place)
        numbers = difference is not None and judged is not None and difference <= MOST
        if not (numbers and judged <= max(ROUNDING["float64"], SHRUNK * difference)):
            return Divergence(place.step, place.layer, place.value, difference, judged)
    return None


Differences = Generator[tuple[Place, float | None], None, None]


class Runs:
    """A cached run and the naive passes beside it."""

    def __init__(self, model, passes, cache, change, prepare, spare):
        self.model, self.passes, self.change = model, passes, change
        batch = len(passes[0].counts)
        self.ends = np.cumsum([each.counts for each in passes], axis=0)  # [passes, batch]
        capacity = min(int(self.ends[-1].max()) + spare, model.config.context)
        with model.device.selected():
            self.cache = cache(model.config, batch, capacity, like=model.weights.token_embedding)
            prepare(model, self.cache)
        self._made = 0

    def differences(self, step) -> dict[Place, float | None]:
        """Return the differences in one step; passes left out before it are made untraced."""
        for before in self.passes[self._made : step]:
            with self.change():
                self._forward(before, self.cache, silent)
        return dict(self.hold(step))

    def hold(self, step) -> Differences:
        """Make a pass in both runs and yield the place of every value and how far it differs."""
        fed, ends = self.passes[step], self.ends[step]
        starts = ends - fed.counts
        so_far = Pass.of(*(self._row(row, step) for row in range(len(ends))))
        places = [slice(*both) for both in zip(starts, ends, strict=True)]
        over = Event()
        cached = _Run(
            self.model,
            over,
            [slice(0, count) for count in fed.counts],
            ends,
            lambda trace: self._forward(fed, self.cache, trace),
            self.change,
        )
        naive = _Run(
            self.model,
            over,
            places,
            ends,
            lambda trace: self._forward(so_far, Recompute(), trace),
            nullcontext,
        )
        with self.model.device.threads(self.model.config):
            try:
                cached.begin()
                naive.begin()
                yield from in_pairs(step, cached, naive)
            finally:
                over.set()
                cached.end()
                naive.end()
                self._made = step + 1

    def _row(self, row, step):
        """Return all ids of a row up to a pass."""
        return np.concatenate(
            [each.tokens[row, : each.counts[row]] for each in self.passes[: step + 1]]
        )

    def _forward(self, fed, cache, trace):
        model = self.model
        forward(fed.tokens, model.weights, model.config, cache, counts=fed.counts, trace=trace)


@dataclass(frozen=True)
class Handed:
    """A value of one run, cut to what both runs have: one array for each row."""

    layer: int | None
    name: str
    rows: list[np.ndarray]


def in_pairs(step, cached, naive) -> Differences:
    """Yield the differences between what two runs hand over, until one has nothing to hold."""
    for ours, theirs in zip_longest(cached, naive):
        for path, handed in (("cached", ours), ("naive", theirs)):
            if isinstance(handed, BaseException):
                reason = str(handed) or type(handed).__name__
                yield Place(step, None, f"the {path} path broke down: {reason}"), None
                return
        if not (ours and theirs and (ours.layer, ours.name) == (theirs.layer, theirs.name)):
            first = theirs or ours
            yield Place(step, first.layer, f"{first.name}, which one path alone makes"), None
            return
        yield Place(step, ours.layer, ours.name), distance(ours.rows, theirs.rows)


class _Run:
    """A trace that hands every value of a pass, made in a thread, over to whoever iterates."""

    def __init__(self, model, over, places, ends, make_pass, change):
        self._get, self._over = model.device.get, over
        self._places, self._ends = places, ends  # the positions compared, and the slots seen
        self._queue: Queue = Queue(AHEAD)
        self._layer = None
        self._open: dict[str, list] = {}

        def work():
            try:
                with model.device.selected(), change():  # CUDA's choice of a GPU is a thread's own
                    make_pass(self)
                self._queue.put(None)
            except _OverError:
                pass
            except BaseException as error:  # or whoever iterates would wait for ever
                self._queue.put(error)

        context = copy_context()  # what is replaced for the caller is replaced for the thread
        self._thread = Thread(target=context.run, args=(work,), daemon=True)

    def begin(self):
        """Make the pass in a thread."""
        self._thread.start()

    def __iter__(self):
        return iter(self._queue.get, None)

    def end(self):
        """Let the thread come to its end, whatever it still has to hand over."""
        while self._thread.is_alive():
            with suppress(Empty):
                self._queue.get(timeout=0.01)

    def within(self, name):
        """Note the layer that the next values are of."""
        self._layer = int(name.removeprefix("block"))
        return self

    def __call__(self, **values):
        """Hand each value over."""
        for name, value in values.items():
            if name in ("keys", "values"):
                rows = [value[row][:, :end] for row, end in enumerate(self._ends)]
            elif name in ("final", "logits"):
                self._layer = None
                rows = list(value)
            else:
                rows = [value[row][..., place, :] for row, place in enumerate(self._places)]
            self._hand_over(name, [np.array(self._get(row)) for row in rows])

    def tile(self, rows, slots, whole, **values):
        """Put a part of scores or pattern into its place, and hand them over when all is there."""
        for name, value in values.items():
            if rows.start == 0:
                outside = 0 if name == "pattern" else float(np.finfo(value.dtype).min)
                self._open[name] = [
                    np.full((value.shape[1], place.stop - place.start, end), outside, value.dtype)
                    for place, end in zip(self._places, self._ends, strict=True)
                ]
            for row, (place, end) in enumerate(zip(self._places, self._ends, strict=True)):
                first, last = max(rows.start, place.start), min(rows.stop, place.stop)
                width = min(slots.stop, end) - slots.start
                if first < last and width > 0:
                    self._open[name][row][
                        :,
                        first - place.start : last - place.start,
                        slots.start : slots.start + width,
                    ] = self._get(value[row, :, first - rows.start : last - rows.start, :width])
            if rows.stop == whole[0]:
                self._hand_over(name, self._open.pop(name))

    def _hand_over(self, name, rows):
        if self._over.is_set():
            raise _OverError
        self._queue.put(Handed(self._layer, name, rows))


class _OverError(Exception):
    """Nobody takes values any more."""


def distance(ours, theirs):
    """Return the largest difference, as a share of the largest number, but of 1 at least.

    It is NaN where something is not a number, and None where the shapes or dtypes differ.
    """
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return None
        share = float(distances(mine, other).max(initial=0)) / size_of(other)
        if not share <= worst:
            worst = share
        if np.isnan(worst):
            return worst
    return worst


def distances(ours, theirs):
    """Return how far each number of a value differs."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.abs(np.where(ours == theirs, 0, ours - theirs))


def size_of(value):
    """Return the largest number of a value that is not hidden, but 1 at least."""
    measured = np.abs(value) < min(HIDDEN, float(np.finfo(value.dtype).max))
    return float(np.abs(np.where(measured, value, 0)).max(initial=1))


def in_float64(model: Model) -> Model:
    """Return the same model with its weights in float64."""

    def widen(part):
        if isinstance(part, tuple):
            parts = [widen(each) for each in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part.astype(np.float64)

    weights: Weights = widen(model.weights)
    return replace(model, weights=weights)
