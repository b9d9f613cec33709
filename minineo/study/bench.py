"""How fast this machine runs a model, against its own limits and against transformers."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE, Popen
from time import perf_counter

import numpy as np

from ..checkpoints.find import find
from ..checkpoints.read import read_config
from ..transformer import Config, InputError
from . import costs, hardware
from .plain import number
from .shapes import shape_fields, write_random_model

LENGTHS = (64, 256, 512, 1024, 2000)
DEPTHS = (64, 256, 512, 1024)
BATCHES = (1, 2, 4, 8)
MOST_ROWS = 256
LONGEST_NAIVE = 1024
PACKAGES = {"minineo": ("minineo", "numpy"), "transformers": ("transformers", "torch")}
TIMED = ("prefill", "decode", "batch", "naive")
SIZE_NAMES = {"prefill": "tokens", "decode": "depth", "batch": "batch", "naive": "tokens"}
SAME_LOGITS = 1e-3  # as a share of the largest: rounding stays far below, another model far above


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes
    ----------
    lengths, depths, batches, naive_lengths : tuple of int
        Tokens of a prefill, tokens in the cache of a decode step, rows of one, and tokens of a
        naive step.
    """

    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    batches: tuple[int, ...] = BATCHES

    @property
    def naive_lengths(self) -> tuple[int, ...]:
        """The lengths at which a naive step is timed: it costs what a prefill does."""
        return tuple(n for n in self.lengths if n <= LONGEST_NAIVE) or self.lengths[:1]

    def timing(self, contestant) -> list[tuple]:
        """Return the measures of one process of a contestant, in order.

        The machine's limits are measured right beside what is held against them.
        """
        ours = contestant == "minineo"
        first = self.lengths[0]
        measures: list[tuple] = [("load",), ("cold", first), ("logits", first)]
        if ours:
            measures.append(("granted",))
        for length in self.lengths:
            measures += [("matmul", length)] * ours + [("prefill", length)]
        for depth in self.depths:
            measures += [("matvec",)] * ours + [("decode", depth)]
        measures += [("batch", rows, self.depths[0]) for rows in self.batches]
        return measures + [("naive", length) for length in self.naive_lengths]

    def weighing(self) -> list[tuple]:
        """Return the measures of the process that shows how much memory a prefill takes."""
        return [("loaded",), ("peak", self.lengths[-1])]


@dataclass(frozen=True)
class Run:
    """One process of a contestant.

    Attributes
    ----------
    contestant : str
    pid : int
        The number of the process.
    started, ended : float
        Seconds since the benchmark began.
    busy_cores : float or None
        How many cores others kept busy meanwhile; None where the machine does not tell.
    """

    contestant: str
    pid: int
    started: float
    ended: float
    busy_cores: float | None


@dataclass(frozen=True)
class Benchmark:
    """What was measured, and what follows from it. A figure is the median of its samples.

    Attributes
    ----------
    name : str
        The model or the shape.
    random_weights : bool
        Whether the weights are random ones of a shape.
    config : Config
    plan : Plan
    rounds : int
        How many processes timed each contestant.
    samples : dict of (contestant, measure, size) to list of float
        Everything measured, all rounds together.
    runs : list of Run
        In the order in which they ran.
    """

    name: str
    random_weights: bool
    config: Config
    plan: Plan
    rounds: int
    samples: dict[tuple[str, str, int], list[float]]
    runs: list[Run]

    @property
    def contestants(self) -> list[str]:
        """Who was measured."""
        return list(dict.fromkeys(run.contestant for run in self.runs))

    def seconds(self, contestant, measure, size=0) -> float:
        """Return the median of all samples of what was timed."""
        return median(self.samples[contestant, measure, size])

    def ratio(self, measure, size=0) -> float | None:
        """Return minineo's median divided by that of transformers: below 1 is better."""
        ours = self.samples["minineo", measure, size]
        theirs = self.samples.get(("transformers", measure, size))
        return median(ours) / median(theirs) if ours and theirs else None

    def sizes(self, measure) -> tuple[int, ...]:
        """Return the sizes at which prefill, decode, batch or naive was timed."""
        plan = self.plan
        return {
            "prefill": plan.lengths,
            "decode": plan.depths,
            "batch": plan.batches,
            "naive": plan.naive_lengths,
        }[measure]

    @property
    def bytes_per_second(self) -> float:
        """The limit of decode: memory read in a product of one row with the same weights."""
        return 4 * costs.matrices(self.config) / self.seconds("minineo", "matvec")

    def flops_per_second(self, rows) -> float:
        """Return the limit of prefill: operations in products of so many rows with a layer."""
        flops = 2 * rows * costs.layer_matrices(self.config)
        return flops / self.seconds("minineo", "matmul", rows)

    def mbu(self, contestant, depth) -> float:
        """Return the share of the measured bandwidth that a decode step makes use of.

        The step's bytes, weights and the keys and values it sees, per second of its median.
        """
        read = costs.weight_bytes(self.config) + costs.cache_bytes_read(self.config, depth)
        return read / self.seconds(contestant, "decode", depth) / self.bytes_per_second

    def mfu(self, contestant, length) -> float:
        """Return the share of the measured matmul rate that a prefill makes use of."""
        flops = costs.prefill_flops(self.config, length)
        return flops / self.seconds(contestant, "prefill", length) / self.flops_per_second(length)

    def peak_bytes(self, contestant) -> float | None:
        """Return the most memory in use during the longest prefill."""
        samples = self.samples[contestant, "peak", self.plan.lengths[-1]]
        return median(samples) if samples else None

    def extra_bytes(self, contestant) -> float | None:
        """Return how much of that came on top of the loaded weights and libraries."""
        peak, loaded = self.peak_bytes(contestant), self.samples[contestant, "loaded", 0]
        return peak - median(loaded) if peak is not None and loaded else None

    @property
    def extra_ratio(self) -> float | None:
        """Return minineo's extra bytes divided by those of transformers."""
        if "transformers" not in self.contestants:
            return None
        ours, theirs = self.extra_bytes("minineo"), self.extra_bytes("transformers")
        return ours / theirs if ours is not None and theirs else None

    @property
    def granted_share(self) -> float:
        """The share of the processor time asked for that minineo was given, in the worst run."""
        return min(self.samples["minineo", "granted", 0])

    @property
    def busy_cores(self) -> float | None:
        """How many cores others kept busy during the worst run, or None where nothing tells."""
        return max((r.busy_cores for r in self.runs if r.busy_cores is not None), default=None)

    @property
    def logit_difference(self) -> float | None:
        """The largest difference between the contestants' logits, as a share of the largest."""
        first = self.plan.lengths[0]
        ours = self.samples["minineo", "logits", first]
        theirs = self.samples.get(("transformers", "logits", first))
        if not theirs:
            return None
        return float(np.abs(np.subtract(ours, theirs)).max() / np.abs(theirs).max())

    def needs(self, measure, size) -> dict:
        """Return what minineo does in a pass that was timed: arithmetic, bytes, calls."""
        fed, held = {
            "prefill": ([size], [0]),
            "decode": ([1], [size]),
            "batch": ([1] * size, [self.plan.depths[0]] * size),
            "naive": ([size], None),
        }[measure]
        cost = costs.total(costs.pass_costs(self.config, fed, held))
        needed = {SIZE_NAMES[measure]: size, "flops": cost.flops, "bytes": cost.bytes}
        if len(fed) == 1:
            needed["launches"] = costs.launches(self.config, fed[0], cached=held is not None)
        return needed

    @property
    def warnings(self) -> list[str]:
        """Why the figures are worthless; empty when nothing speaks against them."""
        found = hardware.busy_warnings(self.busy_cores)
        if self.granted_share < hardware.GRANTED:
            found.append(f"threads got {self.granted_share:.0%} of the processor time they wanted")
        if self.logit_difference is not None and not self.logit_difference <= SAME_LOGITS:
            found.append(f"the contestants' logits differ by {self.logit_difference:.1e}")
        return found

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds and bytes."""
        config = self.config
        return {
            "schema": 1,
            "model": self.name,
            "random_weights": self.random_weights,
            "shape": {**vars(config), "windows": list(config.windows)},
            "device": "cpu",
            "dtype": "float32",
            "cores": hardware.cores(),
            "rounds": self.rounds,
            "warnings": self.warnings,
            "busy_cores": self.busy_cores,
            "granted_share": self.granted_share,
            "weight_bytes_per_step": costs.weight_bytes(config),
            "hardware": {
                "matvec_bytes_per_second": self.bytes_per_second,
                "matmul_flops_per_second": [
                    {"rows": rows, "flops_per_second": self.flops_per_second(rows)}
                    for rows in self.plan.lengths
                ],
            },
            "needs": {
                measure: [self.needs(measure, size) for size in self.sizes(measure)]
                for measure in TIMED
            },
            "contestants": {name: self._figures(name) for name in self.contestants},
            "ratios": self._ratios() if "transformers" in self.contestants else None,
            "runs": [vars(run) for run in self.runs],
        }

    def _figures(self, contestant):
        timed = {
            measure: [self._figure(contestant, measure, size) for size in self.sizes(measure)]
            for measure in TIMED
        }
        for row in timed["prefill"]:
            row["tokens_per_second"] = row["tokens"] / row["seconds"]
            row["mfu"] = self.mfu(contestant, row["tokens"])
        for row in timed["decode"]:
            row["mbu"] = self.mbu(contestant, row["depth"])
        for row in timed["batch"]:
            row["depth"] = self.plan.depths[0]
            row["tokens_per_second"] = row["batch"] / row["seconds"]
        first, longest = self.plan.lengths[0], self.plan.lengths[-1]
        return {
            "versions": {package: version(package) for package in PACKAGES[contestant]},
            "load_seconds": self.seconds(contestant, "load"),
            "first_pass": {
                "tokens": first,
                "seconds": self.seconds(contestant, "cold", first),
                "samples": self.samples[contestant, "cold", first],
            },
            **timed,
            "memory": {
                "tokens": longest,
                "peak_bytes": self.peak_bytes(contestant),
                "extra_bytes": self.extra_bytes(contestant),
            },
        }

    def _figure(self, contestant, measure, size):
        return {
            SIZE_NAMES[measure]: size,
            "seconds": self.seconds(contestant, measure, size),
            "samples": self.samples[contestant, measure, size],
        }

    def _ratios(self):
        return {
            "load_seconds": self.ratio("load"),
            "first_pass": self.ratio("cold", self.plan.lengths[0]),
            **{
                measure: [
                    {SIZE_NAMES[measure]: size, "ratio": self.ratio(measure, size)}
                    for size in self.sizes(measure)
                ]
                for measure in TIMED
            },
            "peak_bytes": self.ratio("peak", self.plan.lengths[-1]),
            "extra_bytes": self.extra_ratio,
            "max_logit_difference": number(self.logit_difference),
        }


def bench(
    model: str | None = None,
    *,
    shape: str | None = None,
    against: str | None = None,
    rounds: int = 3,
    lengths: tuple[int, ...] | None = None,
    depths: tuple[int, ...] | None = None,
    batches: tuple[int, ...] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Measure a model on this machine's processor, in processes that run one at a time.

    Every round starts a new process for each contestant in turn, and this process sleeps while
    it runs: the threads of two contestants in one process would wait for each other. The samples
    of all rounds are put together. One more process for each contestant shows how much memory
    the longest prefill takes.

    Parameters
    ----------
    model : str, optional
        "tiny", which is the default, or a model's folder.
    shape : str, optional
        In place of a model: random weights in the shape of a public one, such as "125m". Both
        contestants get the same ones.
    against : "transformers", optional
        Who is measured besides minineo.
    rounds : int, optional
        Number of processes that time each contestant.
    lengths : tuple of int, optional
        Tokens of a prefill, and of a naive step where they are not above 1024. By default 64,
        256, 512, 1024 and 2000, as far as they fit into the context.
    depths : tuple of int, optional
        Tokens in the cache of a decode step. By default 64, 256, 512 and 1024, as far as there
        is a position left for the step's own.
    batches : tuple of int, optional
        Rows of a decode step at the first of the depths. By default 1, 2, 4 and 8.
    progress : function, optional
        Called as ``progress(done, total)`` after each measure.
    warn : function, optional
        Called with a sentence before anything is measured when others keep the machine busy.

    Returns
    -------
    Benchmark

    Raises
    ------
    InputError
        If the model, shape, opponent or a size is not usable, transformers is not installed, or
        a process breaks down.

    Examples
    --------
    >>> benchmark = bench(shape="tinystories-1m", rounds=1)
    >>> benchmark.seconds("minineo", "decode", 64), benchmark.mbu("minineo", 64)
    """
    if model is not None and shape is not None:
        raise InputError("give a model or a shape, not both")
    if type(rounds) is not int or rounds < 1:
        raise InputError(f"rounds is {rounds!r}; it must be a whole number from 1")
    contestants = check_opponent(against)
    name = shape or model or "tiny"
    with folder_of(model, shape) as folder:
        config = read_config(folder)
        plan = Plan(
            check_sizes(lengths, LENGTHS, config.context, "lengths"),
            check_sizes(depths, DEPTHS, config.context - 1, "depths"),
            check_sizes(batches, BATCHES, MOST_ROWS, "batches"),
        )
        jobs = [(who, plan.timing(who)) for _ in range(rounds) for who in contestants]
        jobs += [(who, plan.weighing()) for who in contestants]
        busy = hardware.busy_cores()
        if busy is not None and busy > hardware.BUSY_CORES:
            warn(f"others keep {busy:.1f} cores busy now: figures will be worthless")
        samples, runs = run_all(jobs, folder, progress)
    return Benchmark(name, shape is not None, config, plan, rounds, samples, runs)


def check_opponent(against):
    """Return the names of all contestants, or say what is missing for them."""
    if against is None:
        return ["minineo"]
    if against != "transformers":
        raise InputError(f"cannot measure against {against!r}: only 'transformers' is known")
    missing = [package for package in PACKAGES["transformers"] if find_spec(package) is None]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} cannot be found; run `pip install torch transformers`, "
            "or leave out --against"
        )
    return ["minineo", "transformers"]


def check_sizes(sizes, defaults, most, name):
    """Return sizes in rising order: those asked for, or the defaults that are not above `most`."""
    if sizes is None:
        return tuple(size for size in defaults if size <= most) or (most,)
    if not sizes or not all(type(size) is int and 1 <= size <= most for size in sizes):
        raise InputError(f"{name} are {list(sizes)}; give whole numbers from 1 to {most}")
    return tuple(sorted(set(sizes)))


@contextmanager
def folder_of(model, shape):
    """Yield the folder of a model, or for a shape one that is there for as long as needed."""
    if shape is None:
        yield find(model or "tiny")
        return
    fields = shape_fields(shape)
    with tempfile.TemporaryDirectory(prefix="minineo-bench-") as folder:
        write_random_model(folder, fields)
        yield Path(folder)


def run_all(jobs, folder, progress):
    """Run one job after the other and return all samples and the runs."""
    samples, runs = {}, []
    begin = perf_counter()
    done, total = 0, sum(len(measures) for _, measures in jobs)

    def keep(contestant, answer):
        nonlocal done
        size = answer["sizes"][0] if answer["sizes"] else 0
        samples.setdefault((contestant, answer["measure"], size), []).extend(answer["samples"])
        done += 1
        progress(done, total)

    for contestant, measures in jobs:
        started, before = perf_counter() - begin, hardware.CpuTimes.now()
        pid = run(contestant, folder, measures, keep)
        ended, busy = perf_counter() - begin, hardware.busy_since(before)
        runs.append(Run(contestant, pid, started, ended, busy))
    return samples, runs


def run(contestant, folder, measures, keep):
    """Have a new process do some measures, call `keep` for each, and return its number.

    Raises
    ------
    InputError
        If the process breaks down, with the last line that it wrote.
    """
    job = json.dumps({"contestant": contestant, "folder": str(folder), "measures": measures})
    # -P: what lies in the current folder must not stand in for an installed package
    command = [sys.executable, "-P", "-m", "minineo.study.contestants", job]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile("w+") as errors:
        process = Popen(
            command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=errors, text=True
        )
        try:
            for line in process.stdout or ():
                keep(contestant, json.loads(line))
            status = process.wait()
        finally:  # interrupted: it must not go on alone
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if status:
        reason = said[-1] if said else f"status {status}; is there enough memory?"
        raise InputError(f"the process that measures {contestant} broke down: {reason}")
    return process.pid
