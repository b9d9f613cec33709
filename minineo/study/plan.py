"""What a model needs and how fast it can be at best, from its shape alone: no weights are read.

Memory is counted: weights and cache to the byte, activations as an estimate. Times are floors
from the roofline: a pass takes at least as long as its operations take at the arithmetic peak,
and at least as long as its bytes take at the memory's bandwidth.

References
----------
Williams, Waterman, Patterson (2009), Roofline, doi:10.1145/1498765.1498785.
"""

import reprlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

import numpy as np

from ..checkpoints import hub
from ..checkpoints.find import embedded_folder, existing_folder, hub_name, suggestion
from ..checkpoints.known import EMBEDDED, PUBLIC, parameters, public_config
from ..checkpoints.read import read_config
from ..transformer import Config, InputError, attention
from ..transformer.cache import whole
from . import costs
from .gpus import Processor, is_this_machine, positive, processor
from .shapes import SHAPES, shape_fields

DTYPES = ("float16", "float32", "float64")
USUAL = 300  # tokens of a prompt, and new ones, unless others are asked for
MOST_ROWS = 10**6  # of a batch


@dataclass(frozen=True)
class PassFloor:
    """The least time that a pass can take.

    Attributes
    ----------
    flops : int
        Operations that no implementation can do without.
    weight_bytes, cache_bytes : int
        Bytes of weights read, and of keys and values read or written.
    processor : Processor
    """

    flops: int
    weight_bytes: int
    cache_bytes: int
    processor: Processor

    @property
    def arithmetic_seconds(self) -> float:
        """The time of the operations at the arithmetic peak."""
        return self.flops / self.processor.flops_per_second

    @property
    def memory_seconds(self) -> float:
        """The time of the bytes at the full bandwidth."""
        return (self.weight_bytes + self.cache_bytes) / self.processor.bytes_per_second

    @property
    def seconds(self) -> float:
        """The longer of the two: they can overlap."""
        return max(self.arithmetic_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        """Which of the two is the limit: "arithmetic" or "memory"."""
        return "arithmetic" if self.arithmetic_seconds > self.memory_seconds else "memory"


@dataclass(frozen=True)
class Times:
    """How long a prompt and new tokens take.

    Attributes
    ----------
    prefill_seconds : float
        The pass over the prompt.
    decode_seconds_per_token : float
        A pass over one new token: the mean of all there are.
    new : int
        Number of new tokens.
    """

    prefill_seconds: float
    decode_seconds_per_token: float
    new: int

    @property
    def ttft_seconds(self) -> float:
        """The time to the first token: the prefill's last logits already choose it."""
        return self.prefill_seconds

    @property
    def total_seconds(self) -> float:
        """The usual estimate, prefill + new x decode: one decode step too many."""
        return self.prefill_seconds + self.new * self.decode_seconds_per_token

    @property
    def exact_total_seconds(self) -> float:
        """The same with the decode steps there are: prefill + (new - 1) x decode."""
        return self.prefill_seconds + (self.new - 1) * self.decode_seconds_per_token

    def to_json(self) -> dict:
        """Return the times in seconds."""
        return {
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds_per_token": self.decode_seconds_per_token,
            "ttft_seconds": self.ttft_seconds,
            "total_seconds": self.total_seconds,
            "exact_total_seconds": self.exact_total_seconds,
        }


@dataclass(frozen=True)
class Plan:
    """What a model needs on a processor, and how fast it can be there.

    Attributes
    ----------
    name : str
        The model.
    config : Config
    processor : Processor
    dtype : str
    prompt, new, batch : int
        Tokens of the prompt, new tokens, and rows; all rows have the same length.
    given_efficiency : float or None
        The share of the processor's peaks that is assumed to be reached.
    measured : Times or None
        Times that somebody has measured.
    """

    name: str
    config: Config
    processor: Processor
    dtype: str
    prompt: int
    new: int
    batch: int = 1
    given_efficiency: float | None = None
    measured: Times | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return np.dtype(self.dtype).itemsize

    @property
    def length(self) -> int:
        """Tokens that a row has room for: prompt + new, up to the context.

        The last new token is never fed, so its slot stays free; without it there may be one more
        new token than the context has room for.
        """
        return min(self.prompt + self.new, self.config.context)

    @property
    def decode_depths(self) -> range:
        """How many tokens the cache holds before each decode step; the prefill yields a token."""
        return range(self.prompt, self.prompt + self.new - 1)

    @property
    def parameters(self) -> int:
        """How many numbers the model has learned. Exact."""
        return parameters(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. Exact: those of the arrays that are allocated."""
        return self.itemsize * self.parameters

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a key and a value in every layer. Exact."""
        return self.cache_bytes_of(1)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all rows, all layers kept whole. Exact."""
        return self.batch * self.cache_bytes_of(self.length)

    @property
    def cache_bytes_windowed(self) -> int:
        """The same, if local layers kept no more than their window. Exact."""
        return self.batch * costs.cache_bytes(
            self.config, self.length, self.itemsize, windowed=True
        )

    def cache_bytes_of(self, length) -> int:
        """Return the bytes of the keys and values of one row of so many tokens."""
        return costs.cache_bytes(self.config, length, self.itemsize)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits of one position in each row. Exact."""
        return self.batch * self.config.vocab * self.itemsize

    @property
    def activation_bytes(self) -> int:
        """Bytes of what a prefill of all rows at once has at hand at its widest. Estimated."""
        return self.batch * activation_bytes(self.config, self.prompt, self.itemsize)

    @property
    def needed_bytes(self) -> int:
        """The memory that is needed: weights, cache, logits and activations."""
        return self.weight_bytes + self.batch * self.row_bytes(self.length, self.prompt)

    @property
    def fits(self) -> bool:
        """Whether that is no more than the memory there is."""
        return self.needed_bytes <= self.processor.memory_bytes

    @property
    def max_batch(self) -> int:
        """The most rows of this length that fit; 0 if not even one does."""
        free = self.processor.memory_bytes - self.weight_bytes
        return max(0, free // self.row_bytes(self.length, self.prompt))

    @property
    def max_length(self) -> int:
        """The longest prompt that fits with so many rows, up to the context; 0 if none does."""

        def needed(length):
            return self.weight_bytes + self.batch * self.row_bytes(length, length)

        lengths = range(1, self.config.context + 1)
        return bisect_right(lengths, self.processor.memory_bytes, key=needed)

    def row_bytes(self, length, fed) -> int:
        """Return what one row needs: its cache, its logits, and the activations of a prefill."""
        logits = self.config.vocab * self.itemsize
        activations = activation_bytes(self.config, fed, self.itemsize)
        return self.cache_bytes_of(length) + logits + activations

    @property
    def mean_depth(self) -> int:
        """How many tokens the cache holds before the decode step in the middle of the text."""
        return min(self.prompt + max(0, self.new - 2) // 2, self.config.context - 1)

    @property
    def prefill_floor(self) -> PassFloor:
        """The floor of the pass over the prompt."""
        return PassFloor(
            self.batch * costs.least_flops(self.config, [self.prompt]),
            costs.weight_bytes(self.config, self.itemsize),
            self.batch * self.cache_bytes_of(self.prompt),  # written
            self.processor,
        )

    @property
    def decode_floor(self) -> PassFloor:
        """The floor of a decode step at the mean depth: it looks at what its windows show."""
        return self.decode_floor_at(self.mean_depth)

    def decode_floor_at(self, depth, *, windowed=True) -> PassFloor:
        """Return the floor of a decode step with so many tokens in the cache.

        Parameters
        ----------
        depth : int
        windowed : bool, optional
            Read in a local layer only what its window shows, or all that the cache holds.
        """
        read = costs.cache_bytes(self.config, depth + 1, self.itemsize, windowed=windowed)
        return PassFloor(
            self.batch * costs.least_flops(self.config, [1], [depth]),
            costs.weight_bytes(self.config, self.itemsize),
            self.batch * read,
            self.processor,
        )

    @cached_property
    def floor(self) -> Times:
        """The least time that is possible: each decode step counts at its own depth."""
        depths = self.decode_depths or [self.mean_depth]
        decode = mean(self.decode_floor_at(depth).seconds for depth in depths)
        return Times(self.prefill_floor.seconds, decode, self.new)

    @property
    def expected(self) -> Times | None:
        """The times with the given efficiency."""
        if self.given_efficiency is None:
            return None
        floor, share = self.floor, self.given_efficiency
        return Times(
            floor.prefill_seconds / share, floor.decode_seconds_per_token / share, self.new
        )

    @property
    def efficiency(self) -> dict[str, float] | None:
        """The share of the peaks that prefill and decode reach, as given or as measured."""
        times, floor = self.expected or self.measured, self.floor
        if times is None:
            return None
        return {
            "prefill": floor.prefill_seconds / times.prefill_seconds,
            "decode": floor.decode_seconds_per_token / times.decode_seconds_per_token,
        }

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds and bytes."""
        prefill, decode, limits = self.prefill_floor, self.decode_floor, self.processor
        return {
            "schema": 1,
            "model": self.name,
            "dtype": self.dtype,
            "gpu": {
                "name": limits.name,
                "source": limits.source,
                "memory_bytes": limits.memory_bytes,
                "bytes_per_second": limits.bytes_per_second,
                "flops_per_second": limits.flops_per_second,
            },
            "prompt_tokens": self.prompt,
            "new_tokens": self.new,
            "batch": self.batch,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_windowed": self.cache_bytes_windowed,
            "logits_bytes": self.logits_bytes,
            "activation_bytes": self.activation_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "estimated": ["activation_bytes", "needed_bytes", "fits", "max_batch", "max_length"],
            "max_batch": self.max_batch,
            "max_length": self.max_length,
            "mean_depth": self.mean_depth,
            "floor": {
                **self.floor.to_json(),
                "prefill_flops": prefill.flops,
                "prefill_bound": prefill.bound,
                "decode_weight_bytes": decode.weight_bytes,
                "decode_cache_bytes": decode.cache_bytes,
                "decode_bound": decode.bound,
            },
            "expected": self.expected.to_json() if self.expected else None,
            "measured": self.measured.to_json() if self.measured else None,
            "efficiency": self.efficiency,
        }


def plan(
    model: str | Path | Config = "tiny",
    *,
    gpu: str | None = None,
    dtype: str | None = None,
    prompt: int | None = None,
    new: int | None = None,
    batch: int = 1,
    efficiency: float | None = None,
    prefill_ms: float | None = None,
    decode_ms: float | None = None,
    memory: float | None = None,
    bandwidth: float | None = None,
    tflops: float | None = None,
) -> Plan:
    """Say what a model needs and how fast it can be, from its shape alone.

    Nothing is downloaded for a public model, a shape, a folder or a Config. Of any other model on
    the hub config.json is fetched, and nothing else.

    Parameters
    ----------
    model : str, Path or Config, optional
        A name or a folder as for `load`, the short name of a shape such as "2.7b", or a config.
    gpu : str, optional
        The name of a GPU in `GPUS`; by default this machine's processor, which is measured.
    dtype : "float16", "float32" or "float64", optional
        By default float32 on this machine and float16 on others.
    prompt, new : int, optional
        Tokens of the prompt, and new tokens. By default 300 each, or half of a shorter context.
    batch : int, optional
        Number of such rows.
    efficiency : float, optional
        What share of the processor's peaks to expect: above 0, up to 1.
    prefill_ms, decode_ms : float, optional
        The time of the prefill and of one decode step as somebody has measured them, in
        milliseconds. Both are needed.
    memory, bandwidth, tflops : float, optional
        The processor's own figures in GB, GB/s and TFLOP/s, in place of the published or
        measured ones. With all three no GPU need be named.

    Returns
    -------
    Plan

    Raises
    ------
    InputError
        If there is no such model or GPU, a number is not usable, or prompt and new tokens but
        the last, which is never fed, are more than the context.

    Examples
    --------
    >>> example = plan("gpt-neo-2.7b", gpu="T4", prompt=300, new=300)
    >>> example.weight_bytes, example.max_batch, example.floor.decode_seconds_per_token
    """
    name, config = find_config(model)
    usual = min(USUAL, max(1, config.context // 2))
    prompt = whole(usual if prompt is None else prompt, "prompt", 1)
    new = whole(usual if new is None else new, "new", 1)
    batch = whole(batch, "batch", 1)
    fed = prompt + new - 1
    if fed > config.context:
        counts = [reprlib.repr(count) for count in (prompt, new, fed)]
        raise InputError(
            f"{counts[0]} + {counts[1]} - 1 = {counts[2]} tokens do not fit into the context of "
            f"{config.context} (the last new one is not fed); shorten the prompt or ask for fewer "
            "new tokens"
        )
    if batch > MOST_ROWS:
        raise InputError(f"batch is {reprlib.repr(batch)}; it must be {MOST_ROWS:,} at most")
    if efficiency is not None and not positive(efficiency, "efficiency") <= 1:
        raise InputError(f"efficiency is {efficiency!r}; it is a share, above 0 and up to 1")
    measured = measured_times(prefill_ms, decode_ms, new)
    if measured and efficiency is not None:
        raise InputError("there are measured times and an efficiency; give one of them")
    if dtype is None:
        here = is_this_machine(gpu, memory, bandwidth, tflops)
        dtype = "float32" if here else "float16"
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose {', '.join(DTYPES)}")
    limits = processor(
        gpu,
        config,
        batch * prompt,
        dtype,
        memory=memory,
        bandwidth=bandwidth,
        tflops=tflops,
    )
    return Plan(name, config, limits, dtype, prompt, new, batch, efficiency, measured)


def measured_times(prefill_ms, decode_ms, new) -> Times | None:
    """Return the times that somebody has measured, or None; refuse one without the other."""
    prefill = positive(prefill_ms, "prefill_ms", 1e-3)
    decode = positive(decode_ms, "decode_ms", 1e-3)
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        missing = "prefill" if prefill is None else "decode"
        raise InputError(f"{missing}_ms is missing; give both measured times, or none")
    return Times(prefill, decode, new)


def find_config(model) -> tuple[str, Config]:
    """Return a model's name and shape, in the order in which `load` looks a name up.

    Raises
    ------
    InputError
        If there is no such model, or its config.json is broken or cannot be had.
    """
    if isinstance(model, Config):
        return "a model of this shape", model
    if not isinstance(model, (str, Path)):
        raise InputError(f"{model!r} is no model; give a name, a folder or a Config")
    name = str(model)
    if isinstance(model, str) and name.lower() in EMBEDDED:
        return name.lower(), read_config(embedded_folder(name.lower()))
    folder = existing_folder(model)
    if folder:
        return name, read_config(folder)
    if isinstance(model, str) and name.lower() in SHAPES:
        return name, Config.from_dict(shape_fields(name.lower()))
    on_hub = hub_name(model)
    if on_hub is None:
        raise InputError(f"unknown model {name!r}: {suggestion(name)}")
    repo, revision = on_hub
    if revision is None:
        for short, shape in PUBLIC.items():
            if shape.repo == repo:
                return short, public_config(short)
    folder = hub.cached_folder(repo, revision)
    if folder is None or not (folder / "config.json").is_file():
        folder = hub.download(repo, revision, config_file)
    return name, read_config(folder)


def config_file(names):
    """Choose config.json alone of the files of a repository."""
    if "config.json" not in names:
        raise InputError("has no config.json; it is no model")
    return ["config.json"]


def activation_bytes(config: Config, new, itemsize) -> int:
    """Estimate how much of one row a pass of so many tokens has at hand at its widest, in bytes.

    That is in an mlp, or in attention. Around the mlp, five vectors of width are still in use for
    each token (before, normed_1, attended, middle, normed_2), and inside it two of `inner`: what
    GELU reads and what it writes. In attention there are six (before, normed_1, queries, keys,
    values, mixed), and for a block of queries the scores, the pattern in the making, and the
    pattern of the block before. How memory is fragmented, and what libraries need beside, is not
    counted.
    """
    mlp = new * (5 * config.width + 2 * config.inner)
    block = min(new, attention.QUERY_ROWS)
    scores = (3 if block < new else 2) * config.n_heads * block * new
    return itemsize * max(mlp, new * 6 * config.width + scores)


def bytes_text(count) -> str:
    """Return bytes in decimal units, with three digits."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * size:
            return f"{rounded(count / size)} {unit}"
    return f"{count:.0f} bytes"


def seconds_text(seconds) -> str:
    """Return a time in the unit that suits it, with three digits, and seconds with two decimals."""
    if seconds >= 0.9995:
        return f"{seconds:,.2f} s"
    if seconds >= 0.9995e-3:
        return f"{rounded(1e3 * seconds)} ms"
    return f"{rounded(1e6 * seconds)} µs"


def rounded(number) -> str:
    """Return a number with three digits, and with more where it is above 1,000."""
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
