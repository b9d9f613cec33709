"""What processors can do at most: GPUs as their data sheets say, and this machine, measured.

The figures of the GPUs are published dense peaks in decimal units, gathered from secondary
sources. No program reaches them, and a card may be sold with others: `plan` takes your own in
their place.
"""

import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from ..device import choose
from ..transformer import Config, InputError
from .costs import layer_matrices
from .hardware import Products

MEGA, GIGA, TERA = 1e6, 1e9, 1e12
THIS = "this"  # the name of this machine's processor
LEAST, MOST = 1e-6, 1e9  # GB, GB/s, TFLOP/s or ms: beyond, it is a slip
MEASURED_BYTES = 2**28  # read for the bandwidth: far more than a processor's cache holds
REPEATS, BUDGET_SECONDS = 5, 0.5
MOST_ROWS = 1024  # of a product: more are no faster, and take time and memory


class Published(NamedTuple):
    """A line of a data sheet: GB, GB/s, and TFLOP/s in either dtype."""

    memory: float
    bandwidth: float
    float32: float
    float16: float  # in tensor cores, added up in float32


GPUS = {
    "T4": Published(16, 320, 8.1, 65),
    "L4": Published(24, 300, 30.3, 121),
    "RTX-3090": Published(24, 936, 35.6, 71),
    "RTX-4090": Published(24, 1008, 82.6, 165),
    "A100-40": Published(40, 1555, 19.5, 312),
    "A100-80": Published(80, 2039, 19.5, 312),
    "H100-SXM": Published(80, 3350, 67, 989),
    "H200": Published(141, 4800, 67, 989),
}


@dataclass(frozen=True)
class Processor:
    """What a processor can do at most, in one dtype.

    Attributes
    ----------
    name : str
    memory_bytes : int
    bytes_per_second : float
        How fast it reads its memory.
    flops_per_second : float
        Floating-point operations in matrix products.
    source : str
        Where these come from.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    source: str


def processor(
    gpu: str | None,
    config: Config,
    rows: int,
    dtype: str,
    *,
    memory: float | None = None,
    bandwidth: float | None = None,
    tflops: float | None = None,
) -> Processor:
    """Return what a processor can do at most.

    Parameters
    ----------
    gpu : str or None
        The name of a GPU, or its beginning; "this", or None, for this machine's processor.
    config : Config
        With the products of which model this machine is measured.
    rows : int
        In how many rows of such a product its arithmetic is measured.
    dtype : str
    memory, bandwidth, tflops : float, optional
        In place of the published or measured figures: GB, GB/s and TFLOP/s. Only what is not
        given is measured.

    Raises
    ------
    InputError
        If the GPU is unknown, nothing is known about this dtype, or a number is not usable.
    """
    given = {
        "memory": positive(memory, "memory", GIGA),
        "bandwidth": positive(bandwidth, "bandwidth", GIGA),
        "tflops": positive(tflops, "tflops", TERA),
    }
    if is_this_machine(gpu, memory, bandwidth, tflops):
        name, source = "this machine", "measured" if None in given.values() else "given"
        measure = {
            "memory": memory_bytes,
            "bandwidth": lambda: measure_bandwidth(config, dtype),
            "tflops": lambda: measure_flops(config, rows, dtype),
        }
        given |= {key: measure[key]() for key, value in given.items() if value is None}
    elif gpu is None:
        name, source = "a processor of these figures", "given"
    else:
        name, sheet = find_gpu(gpu)
        source = "published peaks"
        published = {
            "memory": GIGA * sheet.memory,
            "bandwidth": GIGA * sheet.bandwidth,
            "tflops": peak(sheet, dtype),
        }
        given |= {key: published[key] for key, value in given.items() if value is None}
        if given["tflops"] is None:
            raise InputError(f"no {dtype} peak of the {name} is known; give --tflops")
    own = [
        f"--{key}" for key, value in zip(given, (memory, bandwidth, tflops), strict=True) if value
    ]
    if own and source != "given":
        source += f", but {' and '.join(own)} as given"
    return Processor(name, int(given["memory"]), given["bandwidth"], given["tflops"], source)


def is_this_machine(gpu, memory=None, bandwidth=None, tflops=None) -> bool:
    """Return whether this machine's processor is meant: by name, or as others lack a figure."""
    return None in (memory, bandwidth, tflops) if gpu is None else plain(gpu) == THIS


def find_gpu(name: str) -> tuple[str, Published]:
    """Return the full name of a GPU and its data sheet, from its name or the beginning of one."""
    found = [full for full in GPUS if plain(full).startswith(plain(name))]
    exact = [full for full in found if plain(full) == plain(name)]
    if plain(name) and len(exact or found) == 1:
        (full,) = exact or found
        return full, GPUS[full]
    names = ", ".join(found if plain(name) and found else GPUS)
    raise InputError(
        f"{'more than one' if plain(name) and found else 'unknown'} gpu {name!r}: choose {names} "
        "or this, or give --memory, --bandwidth and --tflops alone"
    )


def plain(name: str) -> str:
    """Return a name without what people write in one way or another."""
    if not isinstance(name, str):
        raise InputError(f"gpu is {reprlib.repr(name)}; it must be a name such as T4, or {THIS}")
    return "".join(character for character in name.lower() if character.isalnum())


def peak(sheet: Published, dtype: str) -> float | None:
    """Return the published FLOP/s in a dtype, or None."""
    teraflops = {"float16": sheet.float16, "float32": sheet.float32}.get(dtype)
    return None if teraflops is None else TERA * teraflops


def positive(number, name, unit=1.0):
    """Return a number of a sane size in base units, or None when there is none, or refuse it."""
    if number is None:
        return None
    real = isinstance(number, (int, float, np.integer, np.floating)) and type(number) is not bool
    if not (real and LEAST <= number <= MOST):
        raise InputError(
            f"{name} is {reprlib.repr(number)}; it must be a number above 0 and finite, from "
            f"{LEAST:f} to {MOST:,.0f}"
        )
    return unit * float(number)


def memory_bytes() -> int:
    """Return the memory of this machine, or what a group of processes is allowed of it."""
    if not hasattr(os, "sysconf"):
        raise InputError("this system does not tell how much memory it has; give --memory")
    whole_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return whole_machine
    return min(whole_machine, int(allowed)) if allowed.isdecimal() else whole_machine


def measure_bandwidth(config: Config, dtype: str) -> float:
    """Return how many bytes of matrices this machine reads in a second, one row at a time.

    The matrices have the shapes of the model's, and are as many as it has layers for, up to
    256 MiB: those of a small model stay in the processor's cache, here as in the model.
    """
    layer_bytes = layer_matrices(config) * np.dtype(dtype).itemsize
    layers = min(config.n_layers, max(1, -(-MEASURED_BYTES // layer_bytes)))
    matrices = [matrix for _ in range(layers) for matrix in layer_of(config, dtype)]
    return layers * layer_bytes / products_seconds(config, matrices, 1)


def measure_flops(config: Config, rows: int, dtype: str) -> float:
    """Return the FLOP/s of this machine in products of so many rows with a layer's matrices."""
    rows = min(rows, MOST_ROWS)
    seconds = products_seconds(config, layer_of(config, dtype), rows)
    return 2 * rows * layer_matrices(config) / seconds


def layer_of(config: Config, dtype: str) -> list:
    """Return matrices in the shapes of one layer's."""
    if dtype == "float16":
        raise InputError(
            "float16 needs a GPU: BLAS, which multiplies matrices on a CPU, has no float16; "
            "choose --dtype float32, or name a --gpu"
        )
    width, inner = config.width, config.inner
    shapes = [(width, width)] * 4 + [(inner, width), (width, inner)]
    return [np.full(shape, 0.01, dtype) for shape in shapes]  # pages that are really there


def products_seconds(config: Config, matrices: list, rows: int) -> float:
    """Return the median time of products with these, on as many cores as a pass would take."""
    products = Products(matrices, rows)
    with choose("cpu").threads(config):
        products.seconds(matrices)  # warm up
        samples = [products.seconds(matrices)]
        while len(samples) < REPEATS and sum(samples) < BUDGET_SECONDS:
            samples.append(products.seconds(matrices))
    return median(samples)
