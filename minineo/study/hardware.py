"""What this machine can do, measured: its limits, its memory in use, and whether it is quiet."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import perf_counter, process_time, sleep

import numpy as np

# Cores kept busy by others from which on figures are worthless. It takes little: the threads of a
# product wait for the slowest of them.
BUSY_CORES = 0.15
GRANTED = 0.9  # share of the processor time asked for, below which the figures are worthless


def cores():
    """Return how many cores this process may use."""
    return len(allowed_cores() or range(os.cpu_count() or 1))


def allowed_cores():
    """Return the numbers of the cores that this process may use; empty where they are not told."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def matrices_by_layer(weights):
    """Return the matrices of each layer, in the order in which a token meets them.

    Parameters
    ----------
    weights : Weights

    Returns
    -------
    list of list of array [out, in]
    """
    return [[*block.attention[:4], block.mlp.up, block.mlp.down] for block in weights.blocks]


def matvec_seconds(weights, repeats=16):
    """Time products of one row with every matrix of a model: as fast as a decode step can be.

    Parameters
    ----------
    weights : Weights
    repeats : int, optional

    Returns
    -------
    list of float
        The seconds of each time through all matrices.
    """
    in_order = [m for layer in matrices_by_layer(weights) for m in layer] + [weights.unembedding]
    products = Products(in_order, rows=1)
    products.seconds(in_order)  # warm up
    return [products.seconds(in_order) for _ in range(repeats)]


def matmul_seconds(weights, rows):
    """Time products of many rows with every matrix of a layer, one layer after the other.

    Parameters
    ----------
    weights : Weights
    rows : int

    Returns
    -------
    list of float
        The seconds of each layer.
    """
    layers = matrices_by_layer(weights)
    products = Products(layers[0], rows)
    products.seconds(layers[0])  # warm up
    return [products.seconds(layer) for layer in layers]


class Products:
    """Products of so many rows with matrices, and nothing beside: results go where others were.

    Parameters
    ----------
    matrices : list of array [out, in]
        Some with each of the shapes there will be.
    rows : int
    """

    def __init__(self, matrices, rows):
        like = matrices[0]
        inputs, outputs = {m.shape[1] for m in matrices}, {m.shape[0] for m in matrices}
        self.rows = {n: np.full_like(like, 0.5, shape=(rows, n)) for n in inputs}
        self.results = {n: np.empty_like(like, shape=(rows, n)) for n in outputs}

    def seconds(self, matrices):
        """Return the time that the products with these matrices take."""
        start = perf_counter()
        for matrix in matrices:
            out, width = matrix.shape
            np.matmul(self.rows[width], matrix.T, out=self.results[out])
        return perf_counter() - start


def granted_share(seconds=0.3):
    """Return how much processor time this process was given, as a share of what it asked for.

    It keeps one thread per core busy, and compares the processor time with the clock. On a quiet
    machine the share is close to 1.

    Parameters
    ----------
    seconds : float, optional
        How long to try.
    """

    def work(end):
        numbers = np.full(2**20, 0.5, dtype=np.float32)
        while perf_counter() < end:
            np.exp(numbers, out=numbers)  # long enough that threads seldom wait for Python's lock
            np.minimum(numbers, 0.5, out=numbers)

    start, start_processor = perf_counter(), process_time()
    threads = [Thread(target=work, args=(start + seconds,)) for _ in range(cores())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (process_time() - start_processor) / (perf_counter() - start) / len(threads)


@dataclass(frozen=True)
class CpuTimes:
    """How much the cores that this process may use have worked so far, and for whom.

    Attributes
    ----------
    clock : float
        The time, in seconds.
    machine : float
        Seconds of work of these cores, for whomever.
    own : float
        Seconds of work for this process and for those that it started and saw end.
    """

    clock: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """Read the times; None where the machine does not tell them."""
        machine = machine_seconds()
        return None if machine is None else cls(perf_counter(), machine, sum(os.times()[:4]))

    def others(self, later: "CpuTimes") -> float:
        """Return how many cores others kept busy between this time and a later one."""
        work = (later.machine - self.machine) - (later.own - self.own)
        return max(0.0, work / (later.clock - self.clock))


def busy_cores(seconds=0.5):
    """Return how many cores others keep busy just now, or None where nothing tells."""
    before = CpuTimes.now()
    sleep(seconds)
    return busy_since(before)


def busy_since(before: CpuTimes | None) -> float | None:
    """Return how many cores others have kept busy since then, or None where nothing tells."""
    after = CpuTimes.now()
    return before.others(after) if before and after else None


def busy_warnings(busy: float | None) -> list[str]:
    """Return the warning that so many cores kept busy by others deserve, or none."""
    if busy is None or busy <= BUSY_CORES:
        return []
    return [f"others kept {busy:.1f} cores busy meanwhile"]


def machine_seconds(stat=Path("/proc/stat")):
    """Return for how many seconds the allowed cores have worked, or None where no file tells."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return None
    wanted = {f"cpu{number}" for number in allowed_cores()}
    ticks = 0
    for name, *fields in lines:
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes():
    """Return the memory that this process has in use, or None where no file tells."""
    return _status("VmRSS")


def peak_bytes():
    """Return the most memory that this process had in use since `reset_peak`, or None."""
    return _status("VmHWM")


def reset_peak():
    """Let the peak start again from the memory in use now."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _status(name):
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)
