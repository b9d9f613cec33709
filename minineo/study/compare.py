"""The main job: the cached and the naive path side by side, step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import numpy as np

from ..checkpoints import Model
from ..generation import Step, generate
from ..transformer import Trace
from ..transformer.cache import whole

# Rounding allowed between the paths, as a share of the largest logit, but of 20 at least: 1e-4 and
# 1e-10 for the logits that small models have.
ROUNDING = {"float32": 5e-6, "float64": 5e-12}
HIDDEN = 1e30  # scores this low are hidden, not measured


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
class Divergence:
    """Where the cached path first differs from the naive one by more than rounding.

    Attributes
    ----------
    step : int
    layer : int or None
        None for what lies outside the blocks.
    value : str
        The name of the value, as in a trace, or what went wrong in its place.
    """

    step: int
    layer: int | None
    value: str

    def __str__(self):
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"step {self.step}, {layer}{self.value}"


@dataclass(frozen=True)
class Comparison:
    """Both paths over the same tokens.

    Attributes
    ----------
    model : Model
    prompt_ids : list of int
    pairs : list of StepPair
        One for each step.
    tolerance : float
        The largest difference in logits that counts as rounding.
    first_divergence : Divergence or None
        None when the paths agree.
    """

    model: Model
    prompt_ids: list[int]
    pairs: list[StepPair]
    tolerance: float
    first_divergence: Divergence | None

    @property
    def agree(self) -> bool:
        """Whether the paths differ by no more than rounding."""
        return self.first_divergence is None

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
        config = self.model.config
        return 2 * config.n_layers * config.width * self.model.weights.token_embedding.itemsize

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

    def pays_from(self) -> int | None:
        """Return the first step from which the cached path stays ahead in cumulated time."""
        cached, naive = (list(accumulate(self.seconds(p))) for p in ("cached", "naive"))
        behind = [i for i, (c, n) in enumerate(zip(cached, naive, strict=True)) if c >= n]
        first = behind[-1] + 1 if behind else 0
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
            "dtype": self.model.dtype,
            "prompt_tokens": len(self.prompt_ids),
            "new_tokens": len(self.pairs),
            "prompt_ids": self.prompt_ids,
            "new_ids": self.new_ids,
            "finish": self.pairs[-1].cached.finish if self.pairs else None,
            "steps": [_step_to_json(pair) for pair in self.pairs],
            "summary": {
                "agree": self.agree,
                "same_tokens": self.same_tokens == len(self.pairs),
                "max_abs_logit_diff": number(self.max_difference),
                "tolerance": self.tolerance,
                "speedup": self.speedup,
                "pays_from_step": self.pays_from(),
                "cache_bytes_per_token": self.bytes_per_token,
                "first_divergence": None if divergence is None else vars(divergence),
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
    steps as asked for, or as the context has room for. Nothing is traced while the clock runs.
    When the logits differ by more than rounding, or a path breaks down, both run once more,
    traced, to find the first value that differs.

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
    total = 2 * min(max_new_tokens, model.config.context - len(ids) + 1)

    def run(path, count, choose=best):
        return generate(
            model, ids, path=path, max_new_tokens=count, stop_at_end=False, choose=choose
        )

    cached: list[Step] = []
    pairs: list[StepPair] = []
    error = None
    try:
        for path in ("cached", "naive"):  # warm up: first passes allocate and wake threads
            list(run(path, 2))
        for step in run("cached", max_new_tokens):
            cached.append(step)
            progress(len(cached), total)
        for twin in run("naive", max_new_tokens, replay(cached)):
            pairs.append(pair_up(cached[twin.index], twin))
            progress(len(cached) + len(pairs), total)
    except Exception as caught:  # a path that breaks down is a finding, not the end
        error = caught

    largest = max((float(np.abs(pair.naive.logits).max()) for pair in pairs), default=0)
    tolerance = ROUNDING[model.dtype] * max(20, largest)
    divergence = None
    if error or not all(pair.difference <= tolerance for pair in pairs):
        divergence = locate(model, ids, max_new_tokens)
        if divergence is None and error:
            raise error
    return Comparison(model, ids, pairs, tolerance, divergence)


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


def locate(model, ids, max_new_tokens):
    """Run both paths in step, traced, and find the first value that differs.

    Returns
    -------
    Divergence or None
    """
    tolerance = ROUNDING[model.dtype] * 20
    traces = {"cached": Trace(), "naive": Trace()}
    chosen: list[int] = []
    options = {"max_new_tokens": max_new_tokens, "stop_at_end": False}
    cached_steps = generate(
        model, ids, path="cached", trace=traces["cached"], choose=best, **options
    )
    naive_steps = generate(
        model,
        ids,
        path="naive",
        trace=traces["naive"],
        choose=lambda logits, ids: chosen[-1],
        **options,
    )
    for index in range(max_new_tokens):
        for path, steps in (("cached", cached_steps), ("naive", naive_steps)):
            try:
                step = next(steps)
            except StopIteration:
                return None
            except Exception as error:
                return Divergence(index, None, f"the {path} path broke down: {error}")
            if path == "cached":
                chosen.append(step.token)
        name = first_difference(traces["cached"], traces["naive"], tolerance)
        if name is not None:
            block, _, value = name.rpartition(".")
            return Divergence(index, int(block.removeprefix("block")) if block else None, value)
    return None


def first_difference(cached, naive, tolerance):
    """Return the name of the first value that differs between two traces of the same step.

    Values are aligned by position: both paths end with the newest token, so the last rows of
    each belong together. `tolerance` is a share of the value's size.
    """
    for name in cached:
        ours, theirs = cached[name], naive[name]
        if not name.endswith(("keys", "values")) or name.endswith(("new_keys", "new_values")):
            fed = min(ours.shape[-2], theirs.shape[-2])
            ours, theirs = ours[..., -fed:, :], theirs[..., -fed:, :]
        if ours.shape != theirs.shape:
            return name
        seen = np.abs(theirs) < HIDDEN
        size = float(np.abs(np.where(seen, theirs, 0)).max())
        with np.errstate(over="ignore", invalid="ignore"):
            difference = float(np.where(ours == theirs, 0, np.abs(ours - theirs)).max())
        if not difference <= tolerance * max(1, size):
            return name
    return None


def _step_to_json(pair):
    return {
        "index": pair.cached.index,
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
            }
            for path, step in (("cached", pair.cached), ("naive", pair.naive))
        },
    }


def number(value):
    """Return a number for JSON: None when there is none or it is not finite."""
    return value if value is not None and np.isfinite(value) else None
