"""What a pass takes, predicted: its costs divided by what the machine does in a second.

`costs.py` counts what a pass reads and computes. `measure_rates` times small jobs of each kind
with a model's own matrices, and `predict` puts the two together. An operation takes as long as
its bytes or its arithmetic take, whichever is longer; what goes number by number, and the calls
themselves, come on top.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ..checkpoints import Model
from ..checkpoints.read import assemble, expected_shapes
from ..cores import one_core
from ..transformer import Config, KVCache, attention
from ..transformer.attention import hide
from ..transformer.functions import gelu_new, layer_norm, softmax
from . import costs
from .costs import GELU, NORM, SOFTMAX, launches
from .gpus import Processor
from .hardware import matrices_by_layer

REPEATS, BUDGET_SECONDS = 3, 0.3
LAUNCH_SECONDS = 10e-6  # of one kernel on a GPU, from Python, about


class RowRates(NamedTuple):
    """What a machine does in passes of so many rows.

    Attributes
    ----------
    rows : int
        Number of tokens fed.
    flops_per_second : float
        In products with a layer's matrices.
    attention_flops_per_second : float
        In products of a block of queries with the keys, and of its pattern with the values.
    softmax_seconds, gelu_seconds, norm_seconds, add_seconds : float
        Of one number in what is done to scores (which of them are hidden, and `softmax`), in
        `gelu_new`, in `layer_norm`, and where a bias or the residual is added.
    """

    rows: int
    flops_per_second: float
    attention_flops_per_second: float
    softmax_seconds: float = 0.0
    gelu_seconds: float = 0.0
    norm_seconds: float = 0.0
    add_seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, with the matrices of one model.

    Attributes
    ----------
    weight_bytes_per_second : float
        How fast weights are read, in products of one row.
    cache_bytes_per_second : float
        How fast one query reads keys and values.
    launch_seconds : float
        What an operation on arrays takes that has next to nothing to compute.
    by_rows : tuple of RowRates
        In rising order of rows.
    waits : bool
        Whether the program waits for each operation before it begins the next. A GPU works
        while it launches: of the launches and the work, the longer counts.
    kernels : bool
        Whether fused kernels stand in for the functions they equal.
    """

    weight_bytes_per_second: float
    cache_bytes_per_second: float
    launch_seconds: float
    by_rows: tuple[RowRates, ...]
    waits: bool = True
    kernels: bool = False

    def at(self, rows) -> RowRates:
        """Return the rates in passes of so many rows, between those that were measured."""
        measured = np.log([rates.rows for rates in self.by_rows])
        columns = list(zip(*self.by_rows, strict=True))[1:]
        return RowRates(rows, *(float(np.interp(np.log(rows), measured, c)) for c in columns))

    @property
    def peak_flops_per_second(self) -> float:
        """The highest rate of products with a layer's matrices."""
        return max(rates.flops_per_second for rates in self.by_rows)

    def to_json(self) -> dict:
        """Return everything as plain numbers, in base units."""
        return {**vars(self), "by_rows": [rates._asdict() for rates in self.by_rows]}


@dataclass(frozen=True)
class Prediction:
    """What a pass is predicted to take, in seconds, by what they are spent on.

    Attributes
    ----------
    launches : float
        Calls of operations on arrays; where the machine does not wait for them, what they take
        beyond the work.
    weights, cache : float
        Bytes of weights, and of keys and values.
    products : float
        What the operations of matrix products take beyond the time in which their bytes come.
    numbers : float
        What is done number by number: softmax, GELU, norms, sums.
    repeated : float
        The share of the tokens fed that an earlier pass had been fed too.
    """

    launches: float
    weights: float
    cache: float
    products: float
    numbers: float
    repeated: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they are spent on."""
        names = [each.name for each in fields(self) if each.name != "repeated"]
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def repeated_seconds(self) -> float:
        """What it takes to compute again what was computed before."""
        return self.repeated * (self.products + self.numbers)

    def to_json(self) -> dict:
        """Return the seconds, in all and by part."""
        return {
            "seconds": self.seconds,
            **self.parts,
            "repeated": self.repeated,
            "repeated_seconds": self.repeated_seconds,
        }


def predict(
    config: Config, length: int, path: str, rates: Rates, *, itemsize: int = 4
) -> Prediction:
    """Predict the step that looks at `length` tokens and chooses the next.

    Parameters
    ----------
    config : Config
    length : int
    path : "prefill", "cached" or "naive"
        Feed all tokens into an empty cache, the newest behind all others, or all with no cache.
    rates : Rates
    itemsize : int, optional
        Bytes of one number.
    """
    fed = 1 if path == "cached" else length
    held = {"prefill": [0], "cached": [length - 1], "naive": None}[path]
    operations = costs.pass_costs(config, [fed], held, itemsize=itemsize)
    at, weights, cache, products, numbers = rates.at(fed), 0.0, 0.0, 0.0, 0.0
    for operation in operations:
        of_weights = operation.weight_bytes / rates.weight_bytes_per_second
        moved = operation.key_value_bytes + operation.written_bytes
        of_cache = moved / rates.cache_bytes_per_second
        attends = operation.name in ("scores", "mix")
        speed = at.attention_flops_per_second if attends else at.flops_per_second
        weights, cache = weights + of_weights, cache + of_cache
        products += max(0, operation.flops / speed - of_weights - of_cache)
        if operation.name == "scores":
            numbers += at.softmax_seconds * operation.flops / (2 * config.head_dim)
        elif operation.name == "up":  # and its bias
            numbers += (at.gelu_seconds + at.add_seconds) * fed * config.inner
        elif operation.name in ("output", "down"):  # with a bias, and then added to the residual
            numbers += 2 * at.add_seconds * fed * config.width
        elif operation.name in ("norm_1", "norm_2"):
            numbers += at.norm_seconds * fed * config.width
    calls = launches(config, fed, cached=path != "naive", kernels=rates.kernels)
    called = calls * rates.launch_seconds
    if not rates.waits:
        called = max(0, called - weights - cache - products - numbers)
    repeated = (fed - 1) / fed if path == "naive" else 0.0
    return Prediction(called, weights, cache, products, numbers, repeated)


def naive_pays_up_to(config: Config, rates: Rates, *, itemsize: int = 4) -> int:
    """Return the greatest length up to which a naive step is predicted to be no slower.

    0 means that the cache pays from the first step on, and the whole context that it never does.
    """

    def cache_pays(length):
        naive, cached = (
            predict(config, length, path, rates, itemsize=itemsize) for path in ("naive", "cached")
        )
        return naive.seconds > cached.seconds

    low, high = 0, config.context + 1  # it does not pay at low, and does at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cache_pays(middle) else (middle, high)
    return low


def gpu_rates(processor: Processor, launch_seconds: float = LAUNCH_SECONDS) -> Rates:
    """Return what a GPU would do at its peaks, launching one kernel for each operation."""
    flops, read = processor.flops_per_second, processor.bytes_per_second
    return Rates(read, read, launch_seconds, (RowRates(1, flops, flops),), waits=False)


def measure_rates(model: Model, lengths: Sequence[int]) -> Rates:
    """Measure what this machine does in a second with a model's own matrices.

    Parameters
    ----------
    model : Model
    lengths : sequence of int
        In passes of how many rows.
    """
    config = model.config
    layers = matrices_by_layer(model.weights)
    like, depth = model.weights.token_embedding, max(lengths)
    matrices = [*(matrix for layer in layers for matrix in layer), model.weights.unembedding]
    read = _products_seconds(model, 1, matrices)

    shape = (1, config.n_heads, depth, config.head_dim)
    held = [(_full(like, shape), _full(like, shape)) for _ in range(config.n_layers)]
    query, shares = held[0][0][:, :, :1], _full(like, (1, config.n_heads, 1, depth))

    def look():
        for k, v in held:
            query @ k.swapaxes(-1, -2)
            shares @ v

    looked_at = _seconds(model, look)
    launch = _launch_seconds(model)
    return Rates(
        sum(matrix.nbytes for matrix in matrices) / read,
        sum(k.nbytes + v.nbytes for k, v in held) / looked_at,
        launch,
        tuple(_row_rates(model, rows, launch) for rows in sorted(set(lengths))),
        waits=model.device.name == "cpu",
        kernels=bool(model.device.kernels),
    )


def _row_rates(model, rows, launch):
    """Measure passes of so many rows; what the launches take is counted apart."""
    config, weights = model.config, model.weights
    layers, like = matrices_by_layer(weights)[:2], weights.token_embedding
    layer_seconds = _products_seconds(model, rows, [m for layer in layers for m in layer])

    block = min(rows, attention.QUERY_ROWS)
    queries = _full(like, (1, block, config.n_heads, config.head_dim)).swapaxes(1, 2)
    keys = _full(like, (1, rows, config.n_heads, config.head_dim)).swapaxes(1, 2)
    scores = _full(like, (1, config.n_heads, block, rows))
    positions, window = np.arange(rows - block, rows)[None], config.context
    inner, vectors = _full(like, (rows, config.inner)), _full(like, (rows, config.width))
    bias = _full(like, (config.inner,))

    def attend():
        queries @ keys.swapaxes(-1, -2)
        scores @ keys

    def share():  # as `attend` does
        distance = positions[:, :, None] - np.arange(rows)
        hide(scores, (distance < 0) | (distance >= window))
        softmax(scores)

    def add():
        np.add(inner, bias, out=inner)

    cores = model.device.cores(rows)

    def shared(run):
        """Return the time of a call, if each core that shares a pass makes its part of it alone."""
        with one_core() if cores > 1 else nullcontext():
            return _seconds(model, run) / cores

    def of_one_number(array, calls, run):
        return max(0.0, shared(run) - calls * launch / cores) / array.size

    flops = 2 * len(layers) * rows * costs.layer_matrices(config)
    attention_flops = 2 * 2 * block * rows * config.width
    return RowRates(
        rows,
        flops / layer_seconds,
        attention_flops / shared(attend),
        of_one_number(scores, 1 + SOFTMAX, share),
        of_one_number(inner, GELU, lambda: gelu_new(inner)),
        of_one_number(vectors, NORM, lambda: layer_norm(vectors, *weights.norm, config.eps)),
        of_one_number(inner, 1, add),
    )


def _products_seconds(model, rows, matrices):
    """Measure products of so many rows with each of these, as `linear` makes them."""
    like = model.weights.token_embedding
    vectors = {width: _full(like, (rows, width)) for width in {m.shape[1] for m in matrices}}

    def multiply():
        for matrix in matrices:
            vectors[matrix.shape[1]] @ matrix.T

    return _seconds(model, multiply)


def _launch_seconds(model):
    """Measure what an operation takes in a pass with next to nothing to compute."""
    config = model.config
    small = Config(
        vocab=1,
        context=2,
        width=1,
        inner=1,
        n_layers=config.n_layers,
        n_heads=1,
        windows=(2,) * config.n_layers,
    )
    like, shapes = model.weights.token_embedding, expected_shapes(small)
    weights = assemble(lambda name: _full(like, shapes[name]), small)
    empty = Model("small", small, weights, None, model.device)

    cache = KVCache(small, 1, 1, like=like)

    def decode():
        cache.crop(0)
        empty.forward([[0]], cache)

    return _seconds(empty, decode) / launches(small, 1, kernels=bool(model.device.kernels))


def _full(like, shape):
    """Return an array beside another, of numbers that are neither 0 nor too large."""
    return np.full_like(like, 0.01, shape=shape)


def _seconds(model, run):
    """Return the median time of a call, in which NumPy multiplies on as many cores as in a pass."""
    with model.device.threads(model.config):
        return median(_samples(model, run))


def _samples(model, run):
    """Warm up, then time a call several times."""

    def timed():
        model.device.synchronize()
        start = perf_counter()
        run()
        model.device.synchronize()
        return perf_counter() - start

    timed()
    samples = [timed() for _ in range(REPEATS)]
    while sum(samples) < BUDGET_SECONDS and len(samples) < 100:
        samples.append(timed())
    return samples
