"""The main job: the cached and the naive path side by side, step by step."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import median

import numpy as np

from ..checkpoints import Model
from ..generation import Step, generate
from ..generation.batch import PATHS
from ..transformer.cache import whole
from . import hardware
from .costs import Operation, cache_bytes, launches, pass_costs, total
from .lockstep import ROUNDING, Divergence, Lockstep, Pass, lockstep
from .plain import number


@dataclass(frozen=True)
class StepPair:
    """One step on both paths.

    Attributes
    ----------
    cached, naive : Step
    difference : float
        The largest absolute difference between their logits.
    gap : float
        How far the best logit lies above the second best: a difference well below it cannot
        change the token.
    """

    cached: Step
    naive: Step
    difference: float
    gap: float

    @property
    def same_token(self) -> bool:
        """Whether both paths prefer the same token."""
        return self.cached.token == best(self.naive.logits)


@dataclass(frozen=True)
class Comparison:
    """Both paths over the same tokens.

    Attributes
    ----------
    model : Model
    prompt_ids : list of int
    pairs : list of StepPair
        One for each step.
    lockstep : Lockstep
        What came of holding every value of every layer against its twin.
    busy_cores : float, optional
        How many cores others kept busy while the clock ran, or None where nothing tells.
    """

    model: Model
    prompt_ids: list[int]
    pairs: list[StepPair]
    lockstep: Lockstep
    busy_cores: float | None = None

    @property
    def warnings(self) -> list[str]:
        """Why the times are worthless; empty when nothing speaks against them."""
        return hardware.busy_warnings(self.busy_cores)

    @property
    def agree(self) -> bool:
        """Whether the paths differ by no more than rounding."""
        return self.first_divergence is None

    @cached_property
    def first_divergence(self) -> Divergence | None:
        """The first value that differs by more than rounding.

        Should lockstep find none, the logits of the runs that were timed must agree as well.
        """
        if self.lockstep.divergence is not None:
            return self.lockstep.divergence
        for index, pair in enumerate(self.pairs):
            if not pair.difference <= self.tolerance:
                return Divergence(index, None, "logits of the timed runs")
        return None

    @cached_property
    def tolerance(self) -> float:
        """The largest difference in logits that counts as rounding.

        It is that of `lockstep`, or twice what was met there and judged.
        """
        largest = max((float(np.abs(pair.naive.logits).max()) for pair in self.pairs), default=0)
        share = max(ROUNDING[self.model.dtype], 2 * self.lockstep.largest.get("logits", 0))
        return share * max(1, largest)

    @property
    def new_ids(self) -> list[int]:
        """The tokens that the cached path chose, and both paths were fed."""
        return [pair.cached.token for pair in self.pairs]

    @property
    def same_tokens(self) -> int:
        """Number of steps at which both paths prefer the same token."""
        return sum(pair.same_token for pair in self.pairs)

    @property
    def max_difference(self) -> float:
        """The largest difference in logits; NaN if any is not a number."""
        return float(np.max([pair.difference for pair in self.pairs], initial=0))

    @property
    def speedup(self) -> float | None:
        """The naive path's total time divided by the cached one's."""
        cached, naive = self.total_seconds("cached"), self.total_seconds("naive")
        return naive / cached if cached else None

    @property
    def bytes_per_token(self) -> int:
        """What one more token costs in the cache: a key and a value in every layer."""
        return cache_bytes(self.model.config, 1, self.model.weights.token_embedding.itemsize)

    def seconds(self, path) -> list[float]:
        """Return the time of each step on the path "cached" or "naive"."""
        return [getattr(pair, path).seconds for pair in self.pairs]

    def total_seconds(self, path) -> float:
        """Return the time of all steps."""
        return sum(self.seconds(path))

    def ttft_seconds(self, path) -> float | None:
        """Return the time to the first token: that of step 0."""
        return self.seconds(path)[0] if self.pairs else None

    def decode_seconds(self, path) -> float | None:
        """Return the time per output token: the median of the steps after the first."""
        return median(self.seconds(path)[1:]) if len(self.pairs) > 1 else None

    def cost(self, path, index) -> Operation:
        """Return the operations in matrix products of a step, and the bytes it reads and writes."""
        step = getattr(self.pairs[index], path)
        held = [step.length - step.fed] if path == "cached" else None
        itemsize = self.model.weights.token_embedding.itemsize
        return total(pass_costs(self.model.config, [step.fed], held, itemsize=itemsize))

    def launches(self, path, index) -> int:
        """Return how many operations on arrays a step calls: kernels launched, on a GPU."""
        step, kernels = getattr(self.pairs[index], path), bool(self.model.device.kernels)
        return launches(self.model.config, step.fed, cached=path == "cached", kernels=kernels)

    def pays_from(self) -> int | None:
        """Return the first step from which the cached path stays ahead in cumulated time."""
        cached, naive = (list(accumulate(self.seconds(p))) for p in ("cached", "naive"))
        behind = [i for i, (c, n) in enumerate(zip(cached, naive, strict=True)) if c >= n]
        first = max(1, behind[-1] + 1 if behind else 0)  # step 0 is the same work on both
        return first if first < len(self.pairs) else None

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds and bytes.

        A difference that is not a number becomes None.
        """
        divergence = self.first_divergence
        return {
            "schema": 1,
            "model": self.model.name,
            "device": self.model.device.name,
            "kernels": bool(self.model.device.kernels),
            "dtype": self.model.dtype,
            "prompt_tokens": len(self.prompt_ids),
            "new_tokens": len(self.pairs),
            "prompt_ids": self.prompt_ids,
            "new_ids": self.new_ids,
            "busy_cores": self.busy_cores,
            "warnings": self.warnings,
            "finish": self.pairs[-1].cached.finish if self.pairs else None,
            "steps": [self._step_to_json(pair) for pair in self.pairs],
            "summary": {
                "agree": self.agree,
                "same_tokens": self.same_tokens == len(self.pairs),
                "max_abs_logit_diff": number(self.max_difference),
                "tolerance": self.tolerance,
                "speedup": self.speedup,
                "pays_from_step": self.pays_from(),
                "cache_bytes_per_token": self.bytes_per_token,
                "first_divergence": None if divergence is None else divergence.to_json(),
                "values_compared": self.lockstep.values,
                "largest_differences": {
                    name: number(value) for name, value in self.lockstep.largest.items()
                },
                **{
                    path: {
                        "ttft_seconds": self.ttft_seconds(path),
                        "decode_seconds_per_token": self.decode_seconds(path),
                        "total_seconds": self.total_seconds(path),
                    }
                    for path in ("cached", "naive")
                },
            },
        }

    def _step_to_json(self, pair):
        index = pair.cached.index
        costs = {path: self.cost(path, index) for path in PATHS}
        return {
            "index": index,
            "phase": pair.cached.phase,
            "token": pair.cached.token,
            "same_token": pair.same_token,
            "max_abs_logit_diff": number(pair.difference),
            "gap": number(pair.gap),
            "cache_bytes": pair.cached.cache_bytes,
            **{
                path: {
                    "tokens_fed": step.fed,
                    "keys_attended": step.length,
                    "seconds": step.seconds,
                    "flops": costs[path].flops,
                    "bytes": costs[path].bytes,
                    "launches": self.launches(path, index),
                }
                for path, step in (("cached", pair.cached), ("naive", pair.naive))
            },
        }


def compare(
    model: Model,
    prompt,
    *,
    max_new_tokens: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Run the same tokens down both paths and hold them against each other.

    The cached path chooses the tokens and the naive path is fed the same ones, so that one
    difference cannot grow into another text. Neither stops at the end of text: there are as many
    steps as asked for, or as the context has room for. Nothing is traced while the clock runs;
    then both run once more, and `lockstep` holds every value of every layer against its twin.

    Parameters
    ----------
    model : Model
    prompt : str or sequence of int
        Text or token ids.
    max_new_tokens : int, optional
        Number of steps, 1 or more.
    progress : function, optional
        Called as ``progress(done, total)`` after each step.

    Returns
    -------
    Comparison

    Raises
    ------
    InputError
        If the prompt is not usable or no step is asked for.

    Examples
    --------
    >>> comparison = compare(load("tiny"), "Once upon a time", max_new_tokens=8)
    >>> comparison.agree, comparison.speedup
    """
    ids = model.encode(prompt)
    max_new_tokens = whole(max_new_tokens, "max_new_tokens", 1)
    total = 3 * min(max_new_tokens, model.config.context - len(ids) + 1)

    def run(path, count, choose=best):
        return generate(
            model, ids, path=path, max_new_tokens=count, stop_at_end=False, choose=choose
        )

    cached: list[Step] = []
    pairs: list[StepPair] = []
    breakdown = None
    for path in PATHS:  # warm up: first passes allocate and wake threads
        with suppress(Exception):  # it will be met again
            list(run(path, 2))
    path, before = "cached", hardware.CpuTimes.now()
    try:
        for step in run(path, max_new_tokens):
            cached.append(step)
            progress(len(cached), total)
        path = "naive"
        for twin in run(path, max_new_tokens, replay(cached)):
            pairs.append(pair_up(cached[twin.index], twin))
            progress(len(cached) + len(pairs), total)
    except Exception as error:  # a path that breaks down is a finding, not the end
        step = len(cached) if path == "cached" else len(pairs)
        breakdown = Divergence(step, None, f"the {path} path broke down: {error}")

    busy = hardware.busy_since(before)
    fed = [ids, *([step.token] for step in cached)]
    found = lockstep(
        model,
        [Pass.of(row) for row in (fed if breakdown else fed[:-1])],
        progress=lambda done: progress(len(cached) + len(pairs) + done, total),
    )
    if breakdown and found.agree:
        found = replace(found, divergence=breakdown)
    return Comparison(model, ids, pairs, found, busy)


def best(logits, ids=()):
    """Choose the largest logit, or one that is not a number: a finding, not a reason to stop."""
    return int(np.argmax(logits))


def replay(steps):
    """Return a function that chooses the tokens of these steps again, one after the other."""
    tokens = iter([step.token for step in steps])
    return lambda logits, ids: next(tokens)


def pair_up(cached, naive):
    """Hold one step of both paths against each other."""
    second, best = np.partition(cached.logits, -2)[-2:] if cached.logits.size > 1 else (0, 0)
    difference = float(np.abs(cached.logits - naive.logits).max())
    return StepPair(cached, naive, difference, gap=float(best - second))
