"""Does a model say what transformers says? Every layer, on both paths, past the local window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from ..checkpoints import Model, load
from ..checkpoints.find import find
from ..generation.batch import new_cache
from ..transformer import InputError, Trace

PACKAGES = ("torch", "transformers")
DTYPES = ("float32", "float16")  # transformers has no whole float64: its scores are float32
PATHS = ("naive", "token by token", "in chunks")
NAMES = ("before", "pattern", "after", "final", "logits")  # of the values, as in a trace

FACTOR = 32  # how many roundings the two sides may lie apart: correct ones came to 11 at most
FLOOR = 4  # a rounding is not taken for less than so many last bits of the largest number
WINDOW = 64  # in place of the local window where no layer has one
SHORT = 512  # a context up to here is gone through to its end
DECODED = 64  # at most so many tokens at a sequence's end are fed one by one
CHUNKS = 5  # a sequence is fed in so many pieces, that end where no window does
ROWS = 64  # so many tokens at once are run in float64


@dataclass(frozen=True)
class Parity:
    """One value, in minineo and in transformers.

    Attributes
    ----------
    layer : int or None
        None for what lies outside the blocks.
    value : str
        "embedding", "pattern", "after" (the residual behind a block), "final" or "logits".
    difference : float
        The largest absolute difference over all lengths, paths and positions.
    length, position : int
    path : str
        Where it is: at this position of a sequence of this length, fed this way.
    rounding : float
        How far it lies from float64, in minineo or in transformers: the smaller of the two.
    tolerance : float
        The largest difference that rounding explains.
    """

    layer: int | None
    value: str
    difference: float
    length: int
    path: str
    position: int
    rounding: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference. It never explains what is not a number."""
        return self.difference <= self.tolerance

    def __str__(self):
        name = self.value if self.layer is None else f"layer {self.layer}, {self.value}"
        return f"{name} ({self.path}, length {self.length}, position {self.position})"


@dataclass(frozen=True)
class Verification:
    """A model held against transformers.

    Attributes
    ----------
    model : Model
    lengths : tuple of int
        The lengths of the sequences. Each was fed in every way of `PATHS`.
    values : list of Parity
        In the order in which a pass makes them.
    versions : dict of str to str
        Those of the packages that took part.
    """

    model: Model
    lengths: tuple[int, ...]
    values: list[Parity]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether rounding explains every difference."""
        return self.first_difference is None

    @property
    def first_difference(self) -> Parity | None:
        """The first value whose difference rounding does not explain: the fault lies before it."""
        return next((parity for parity in self.values if not parity.agrees), None)

    def to_json(self) -> dict:
        """Return everything as plain numbers. One that is not a number becomes None."""
        first = self.first_difference
        return {
            "schema": 1,
            "model": self.model.name,
            "device": self.model.device.name,
            "dtype": self.model.dtype,
            "versions": self.versions,
            "lengths": list(self.lengths),
            "paths": list(PATHS),
            "passed": self.passed,
            "first_difference": None if first is None else _to_json(first),
            "values": [_to_json(parity) for parity in self.values],
        }


def verify(
    model: Model | str = "tiny",
    *,
    device: str = "auto",
    lengths: Sequence[int] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Run transformers on the same files and hold every layer against it.

    Random tokens go through transformers once. They go through minineo at every length: on the
    naive path in one pass, and on the cached path once with a prefill and then token by token,
    and once in chunks. What a causal model makes of a token does not depend on those behind it,
    so that the one run of transformers tells what is right at all lengths.

    How much a value may differ, the model itself tells. Its weights are run in float64 too, and
    both sides are held against that: the smaller of the two distances is the value's rounding,
    and 32 times as much is allowed. A fault on either side makes one distance large, but not the
    smaller one, so that no fault widens its own tolerance.

    Of transformers all values are kept, for the longest sequence: the patterns alone are
    ``layers x heads x length x length`` numbers. Of minineo none is kept.

    Parameters
    ----------
    model : Model or str, optional
        A model in float32, or float16 on a GPU, that `load` has read from files, or the name or
        folder of one, which is loaded in float32.
    device : str, optional
        Where a model given by its name runs: "auto", "cpu" or "cuda". transformers runs on the
        CPU.
    lengths : sequence of int, optional
        By default 1, 5, the local window less one, the window, one more, and twice the window
        and 3, as far as they fit into the context; and the whole context if that is short.
    progress : function, optional
        Called as ``progress(done, total)`` after each pass.

    Returns
    -------
    Verification

    Raises
    ------
    InputError
        If there is no such model or its dtype is another, a length does not fit, or transformers
        is missing or cannot open the files.

    Examples
    --------
    >>> verification = verify("tiny")
    >>> verification.passed, verification.first_difference
    """
    check_installed()
    loaded = model if isinstance(model, Model) else load(model, device=device)
    if loaded.dtype not in DTYPES:
        raise InputError(f"the model is in {loaded.dtype}; to verify it, load it in float32")
    sizes = check_lengths(lengths, loaded.config)
    ids = np.random.default_rng(0).integers(loaded.config.vocab, size=(1, sizes[-1]))
    blocks = pieces(sizes[-1], ROWS)
    runs = [(size, path, edges) for size in sizes for path, edges in feeds(size).items()]
    done, total = 0, 1 + len(blocks) - 1 + len(runs)

    def count():
        nonlocal done
        done += 1
        progress(done, total)

    folder = find(loaded.name if isinstance(model, Model) else model)
    expected = ask(open_reference(folder, loaded.dtype), ids)
    count()
    distances = measure_distances(loaded, ids, blocks, expected, count)
    largest: dict[str, tuple] = {}
    for size, path, edges in runs:

        def found(name, difference, position, place=(size, path)):
            note(largest, name, difference, *place, position)

        cache = new_cache(loaded, "naive" if path == "naive" else "cached", 1, size)
        for start, stop in pairwise(edges):
            run(loaded, ids[:, start:stop], cache, Against(expected, start, found, loaded.device))
        count()
    floor = FLOOR * float(np.finfo(loaded.dtype).eps)
    values = [
        Parity(*place_of(name), *largest[name], *allowed(expected[name], distances[name], floor))
        for name in expected
    ]
    versions = {package: version(package) for package in ("minineo", "numpy", *PACKAGES)}
    return Verification(loaded, sizes, values, versions)


def check_installed():
    """Refuse to begin without the packages that transformers needs."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise InputError(
            f"verify needs {' and '.join(missing)} beside minineo; "
            "run `pip install torch transformers`"
        )


def check_lengths(lengths, config):
    """Return lengths in rising order: those asked for, or those at which faults show."""
    if lengths is None:
        window = min(config.windows)
        window = window if window < config.context else WINDOW
        wanted = {1, 5, window - 1, window, window + 1, 2 * window + 3}
        wanted |= {config.context} if config.context <= SHORT else set()
        return tuple(sorted(n for n in wanted if 1 <= n <= config.context))
    if not lengths or not all(type(n) is int and 1 <= n <= config.context for n in lengths):
        raise InputError(
            f"lengths are {list(lengths)}; give whole numbers from 1 to {config.context}"
        )
    return tuple(sorted(set(lengths)))


def feeds(length):
    """Return the ways to feed a sequence: for each path, where its passes end and begin."""
    prefill = max((length + 1) // 2, length - DECODED)
    return {
        "naive": [0, length],
        "token by token": [0, *range(prefill, length + 1)],
        "in chunks": pieces(length, max(2, length // CHUNKS)),
    }


def pieces(length, size):
    """Return where pieces of a size end and begin, from 0 to the length."""
    return [*range(0, length, size), length]


def open_reference(folder, dtype):
    """Open a model's folder with transformers.

    Raises
    ------
    InputError
        If transformers cannot open it.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # whatever the files make it raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"transformers cannot open {folder}: {reason}") from None
    return reference.eval()


def ask(reference, ids):
    """Run transformers and return its values by their names in a trace, in their order.

    Returns
    -------
    dict of str to NumPy array
        Rows, the last axis but one, are positions.
    """
    import torch

    seen = []
    norm = reference.transformer.ln_f  # what it is given is the residual behind the last block
    hook = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.inference_mode():
        said = reference(
            torch.from_numpy(ids),
            position_ids=torch.arange(ids.shape[1])[None],
            use_cache=False,
            output_hidden_states=True,
            output_attentions=True,
        )
    hook.remove()
    embedding, *between, final = said.hidden_states
    values = {"block0.before": embedding}
    for layer, after in enumerate([*between, *seen]):
        values[f"block{layer}.pattern"] = said.attentions[layer]
        values[f"block{layer}.after"] = after
    values |= {"final": final, "logits": said.logits}
    return {name: value.numpy() for name, value in values.items()}


def measure_distances(model, ids, blocks, expected, count):
    """Run the model in float64 and return how far both float32 runs lie from that.

    All three go through the sequence block by block, so that only a block's values are kept.

    Returns
    -------
    dict of str to (float, float)
        For each value the largest distance of minineo and that of transformers.
    """
    exact = replace(model, weights=in_float64(model.weights))
    exact_cache, cache = (new_cache(each, "cached", *ids.shape) for each in (exact, model))
    ours: dict[str, tuple] = {}
    theirs: dict[str, tuple] = {}
    for start, stop in pairwise(blocks):
        trace = Trace(NAMES)
        run(exact, ids[:, start:stop], exact_cache, trace)
        truth = {name: model.device.get(trace[name]) for name in expected}
        against = Against(truth, 0, partial(note, ours), model.device)
        run(model, ids[:, start:stop], cache, against)
        for name, value in truth.items():
            difference = largest_difference(rows_of(expected[name], start, value.shape), value)
            note(theirs, name, *difference)
        del trace, truth, against  # or they would lie beside those of the next block
        count()
    return {name: (ours[name][0], theirs[name][0]) for name in expected}


def allowed(expected, distances, floor):
    """Return the rounding of a value, and the largest difference that it explains.

    Parameters
    ----------
    expected : NumPy array
    distances : (float, float)
        How far minineo and transformers lie from float64.
    floor : float
        The least that a rounding is taken for, as a share of the largest number.
    """
    size = max(float(expected.max()), -float(expected.min()))
    rounding = float(np.fmin(*distances))  # the other one, if one is not a number
    return rounding, FACTOR * float(np.fmax(rounding, floor * size))


def run(model, tokens, cache, trace):
    """Make one pass and let a trace see its values at all positions."""
    with np.errstate(all="ignore"):  # what overflows is a finding, not worth a warning
        model.forward(tokens, cache, last_only=False, trace=trace)


class Against:
    """A trace that holds each value against what it should be, and keeps none.

    Parameters
    ----------
    expected : dict of str to NumPy array
        What values should be, by their names in a trace. Others are left alone.
    start : int
        The row of `expected` that belongs to the first token of the pass.
    found : function
        Called as ``found(name, difference, position)`` with the largest difference.
    device : Device
        Where the values are.
    """

    def __init__(self, expected, start, found, device, prefix=""):
        self._expected, self._start, self._found = expected, start, found
        self._device, self._prefix = device, prefix

    def __call__(self, **values):
        """Hold each value against its twin."""
        for name, value in values.items():
            if self._prefix + name in self._expected:
                self._hold(self._prefix + name, self._device.get(value), self._start)

    def tile(self, rows, slots, whole, **values):
        """Hold some rows of a pattern against their twin: what lies beside the tile is 0."""
        for name, value in values.items():
            if self._prefix + name in self._expected:
                value = self._device.get(value)
                full = np.zeros_like(value, shape=(*value.shape[:3], whole[1]))
                full[..., slots] = value
                self._hold(self._prefix + name, full, self._start + rows.start)

    def within(self, name):
        """Return a trace for the values of the block of this name."""
        prefix = f"{self._prefix}{name}."
        return Against(self._expected, self._start, self._found, self._device, prefix)

    def _hold(self, name, value, first):
        want = rows_of(self._expected[name], first, value.shape)
        difference, row = largest_difference(value, want)
        self._found(name, difference, first + row)


def rows_of(array, first, shape):
    """Return the part of an array that belongs to a value of this shape, from a row on."""
    return array[..., first : first + shape[-2], : shape[-1]]


def largest_difference(got, want):
    """Return the largest absolute difference, and its row; what is not a number is larger."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(got, want, dtype=np.result_type(got, want, "float32"))
    np.abs(difference, out=difference)
    rows = difference.ndim - 2
    by_row = difference.max(axis=tuple(axis for axis in range(difference.ndim) if axis != rows))
    row = int(np.argmax(by_row))
    return float(by_row[row]), row


def note(largest, name, difference, *place):
    """Keep a difference and its place if none was larger; the first that is no number stays."""
    before = largest[name][0] if name in largest else -1.0
    if not (np.isnan(before) or difference <= before):
        largest[name] = (difference, *place)


def in_float64(weights):
    """Return the weights in float64. Those of a block become so when a pass comes to it."""
    table = weights.token_embedding.astype("float64")
    tied = weights.unembedding is weights.token_embedding
    blocks: Any = Widened(weights.blocks)
    return weights._replace(
        token_embedding=table,
        position_embedding=weights.position_embedding.astype("float64"),
        blocks=blocks,
        norm=widen(weights.norm),
        unembedding=table if tied else weights.unembedding.astype("float64"),
    )


class Widened(Sequence):
    """Blocks that are in float64 for as long as one looks at them: never all of them at once."""

    def __init__(self, blocks):
        self._blocks = blocks

    def __len__(self):
        return len(self._blocks)

    def __getitem__(self, layer):
        return widen(self._blocks[layer])


def widen(weights):
    """Return an array in float64, or a tuple of such."""
    if isinstance(weights, tuple):
        return type(weights)(*map(widen, weights))
    return weights.astype("float64")


def place_of(name):
    """Return the layer, or None, and the name of a value by its name in a trace."""
    block, _, value = name.rpartition(".")
    if value == "before":
        return None, "embedding"
    return int(block.removeprefix("block")) if block else None, value


def _to_json(parity):
    return {
        **{name: _number(value) for name, value in vars(parity).items()},
        "agrees": parity.agrees,
    }


def _number(value):
    return None if isinstance(value, float) and not np.isfinite(value) else value
