"""Latency as an experiment: what the steps of both paths took, and what their costs predict.

A run's time is one prefill and then decode steps: total = prefill(P) + Σ decode(t). The time of a
step is fitted as a curve over its length t, and held against its prediction.

``python -m minineo.study.latency`` holds the prediction against passes of a public shape.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from ..checkpoints import Model
from ..generation.batch import PATHS
from ..transformer import Config, InputError
from ..transformer.cache import whole
from . import contestants
from .compare import Comparison
from .prediction import Prediction, Rates, measure_rates, naive_pays_up_to, predict
from .shapes import shape_fields, write_random_model

FEWEST = 4  # steps: a prefill, and three decode steps to lay a line through
CURVED_FROM = 32  # steps; in fewer, a bend cannot be told from noise
SWEEPS = 60
LENGTHS = (64, 256, 1024)


# the fit


class Curve(NamedTuple):
    """The seconds of a step over its length t: a sum of powers, the lowest first.

    Attributes
    ----------
    coefficients : tuple of float
        Of 1, t, t², ...
    spread : float
        Half of all steps lie within so many seconds of the curve.
    """

    coefficients: tuple[float, ...]
    spread: float

    def at(self, length) -> float:
        """Return the seconds at a length."""
        return sum(c * length**power for power, c in enumerate(self.coefficients))


def fit_curve(lengths: Sequence[float], seconds: Sequence[float], degree: int) -> Curve:
    """Lay a curve through steps so that a few slow ones do not bend it.

    The sum of the distances is made least, not that of their squares: as the median, which does
    that for a single number, it is not moved by how far off an outlier is. It is found by least
    squares again and again, in which each step has a weight of 1 / its last distance.

    Parameters
    ----------
    lengths, seconds : sequence of float
    degree : int
        The highest power of the length; there must be more steps than that.

    References
    ----------
    Schlossmacher (1973), An Iterative Technique for Absolute Deviations Curve Fitting, Journal
    of the American Statistical Association 68, for the weights.
    """
    x, y = np.asarray(lengths, float), np.asarray(seconds, float)
    scale = x.max()
    powers = (x[:, None] / scale) ** np.arange(degree + 1)
    least = 1e-9 * float(np.abs(y).max()) or 1.0  # a distance of 0 would weigh endlessly
    root = np.ones(len(x))
    for _ in range(SWEEPS):
        solution = np.linalg.lstsq(powers * root[:, None], y * root, rcond=None)[0]
        distances = np.abs(y - powers @ solution)
        root = 1 / np.sqrt(np.maximum(distances, least))
    coefficients = tuple(float(c) / scale**power for power, c in enumerate(solution))
    return Curve(coefficients, float(np.median(distances)))


# a comparison, fitted and predicted


@dataclass(frozen=True)
class Latency:
    """The steps of a comparison, their fit and their prediction.

    Attributes
    ----------
    config : Config
    itemsize : int
        Bytes of one number.
    prompt : int
        Number of tokens in the prompt.
    seconds : dict of path to list of float
        What each step took, on "cached" and "naive"; step i looks at prompt + i tokens.
    curves : dict of path to Curve
        Fitted to the decode steps of the cached path and to all steps of the naive one, whose
        prefill is a step like any other.
    pays_from : int or None
        The first step from which the cached path stays ahead in cumulated time.
    rates : Rates
    """

    config: Config
    itemsize: int
    prompt: int
    seconds: dict[str, list[float]]
    curves: dict[str, Curve]
    pays_from: int | None
    rates: Rates
    _predicted: dict[tuple[str, int], Prediction] = field(default_factory=dict, repr=False)

    @property
    def new(self) -> int:
        """Number of new tokens, and of steps."""
        return len(self.seconds["cached"])

    @property
    def lengths(self) -> range:
        """How many tokens each step looks at."""
        return range(self.prompt, self.prompt + self.new)

    @property
    def prefill_seconds(self) -> float:
        """What the pass over the prompt took on the cached path."""
        return self.seconds["cached"][0]

    def fitted(self, path) -> list[float]:
        """Return what the fit says of each step; the cached path's prefill is as measured."""
        values = [self.curves[path].at(length) for length in self.lengths]
        return [self.prefill_seconds, *values[1:]] if path == "cached" else values

    def residuals(self, path) -> list[float]:
        """Return how far each step lies above the fit."""
        return [s - f for s, f in zip(self.seconds[path], self.fitted(path), strict=True)]

    def predicted(self, path, length) -> Prediction:
        """Return what a step is predicted to take on the path "prefill", "cached" or "naive"."""
        key = path, length
        if key not in self._predicted:
            self._predicted[key] = predict(
                self.config, length, path, self.rates, itemsize=self.itemsize
            )
        return self._predicted[key]

    @property
    def growth(self) -> float:
        """How much longer the last decode step is than the first by the fit, as a share of it."""
        first, last = (self.curves["cached"].at(n) for n in (self.lengths[1], self.lengths[-1]))
        return (last - first) / first

    def warm_up(self, path) -> float:
        """Return how far the path's first step behind the prefill lies above the fit."""
        return self.residuals(path)[1]

    @property
    def mean_decode_seconds(self) -> float:
        """The mean time of a decode step on the cached path."""
        return mean(self.seconds["cached"][1:])

    @property
    def total_seconds(self) -> float:
        """What the cached path took in all."""
        return sum(self.seconds["cached"])

    @property
    def simple_seconds(self) -> float:
        """The usual estimate of that, prefill + new x mean decode: one step too many."""
        return self.prefill_seconds + self.new * self.mean_decode_seconds

    @property
    def fitted_seconds(self) -> float:
        """What the fit makes of it: prefill + Σ decode(t) over the steps there are."""
        return sum(self.fitted("cached"))

    @property
    def simple_off(self) -> tuple[float, float]:
        """How far the mean is off at the first and the last decode step, as a share of the fit."""
        first, last = (self.curves["cached"].at(n) for n in (self.lengths[1], self.lengths[-1]))
        average = self.mean_decode_seconds
        return average / first - 1, average / last - 1

    @cached_property
    def naive_pays_up_to(self) -> int:
        """Up to which length a naive step is predicted to be no slower."""
        return naive_pays_up_to(self.config, self.rates, itemsize=self.itemsize)

    @property
    def places(self) -> list[int]:
        """Lengths at which prediction and measurement are held against each other."""
        first, last = self.lengths[1], self.lengths[-1]
        return sorted({first, (first + last) // 2, last})

    def ratio_fitted(self, length) -> float:
        """Return the time of a naive step over that of a cached one, as fitted."""
        return self.curves["naive"].at(length) / self.curves["cached"].at(length)

    def ratio_predicted(self, length, rates: Rates | None = None) -> float:
        """Return the same as predicted, for this machine or another."""
        naive, cached = (
            self.predicted(path, length)
            if rates is None
            else predict(self.config, length, path, rates, itemsize=self.itemsize)
            for path in ("naive", "cached")
        )
        return naive.seconds / cached.seconds

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds."""
        return {
            "prefill_seconds": self.prefill_seconds,
            "fit": {
                path: {"coefficients": list(curve.coefficients), "spread_seconds": curve.spread}
                for path, curve in self.curves.items()
            },
            "decode_growth": self.growth,
            "warm_up_seconds": {path: self.warm_up(path) for path in PATHS},
            "total_seconds": self.total_seconds,
            "simple_total_seconds": self.simple_seconds,
            "fitted_total_seconds": self.fitted_seconds,
            "mean_off_at_first_and_last_step": list(self.simple_off),
            "pays_from_step": self.pays_from,
            "naive_pays_up_to_length": self.naive_pays_up_to,
            "rates": self.rates.to_json(),
            "predicted": [
                {
                    "length": length,
                    "ratio_predicted": self.ratio_predicted(length),
                    "ratio_measured": self.ratio_fitted(length),
                    **{
                        path: {
                            **self.predicted(path, length).to_json(),
                            "measured_seconds": self.curves[path].at(length),
                        }
                        for path in PATHS
                    },
                }
                for length in self.places
            ],
        }


def fit_latency(comparison: Comparison, rates: Rates | None = None) -> Latency:
    """Fit the steps of a comparison, and predict them.

    Parameters
    ----------
    comparison : Comparison
        Of four steps or more.
    rates : Rates, optional
        What this machine does in a second; by default it is measured, which takes seconds.

    Raises
    ------
    InputError
        If there are too few steps.

    Examples
    --------
    >>> latency = fit_latency(compare(load("tiny"), "Once upon a time", max_new_tokens=200))
    >>> latency.curves["cached"].coefficients, latency.growth
    """
    steps, model = len(comparison.pairs), comparison.model
    if steps < FEWEST:
        raise InputError(f"{steps} steps are too few to fit; ask for {FEWEST} or more")
    prompt = len(comparison.prompt_ids)
    seconds = {path: comparison.seconds(path) for path in PATHS}
    lengths = range(prompt, prompt + steps)
    curves = {
        "cached": fit_curve(lengths[1:], seconds["cached"][1:], 1),
        "naive": fit_curve(lengths, seconds["naive"], 2 if steps >= CURVED_FROM else 1),
    }
    if rates is None:
        rates = measure_rates(model, [prompt, (2 * prompt + steps) // 2, prompt + steps - 1])
    itemsize, pays_from = model.weights.token_embedding.itemsize, comparison.pays_from()
    return Latency(model.config, itemsize, prompt, seconds, curves, pays_from, rates)


# the prediction of a public shape


class Ratio(NamedTuple):
    """Both paths at one length: predicted and measured.

    Attributes
    ----------
    length : int
    predicted : dict of path to Prediction
    measured : dict of path to float
        Medians, in seconds.
    system : float
        Seconds of a naive pass that the operating system takes, most of them to hand out memory
        for new arrays. They are measured, and not predicted.
    """

    length: int
    predicted: dict[str, Prediction]
    measured: dict[str, float]
    system: float = 0.0

    @property
    def predicted_ratio(self) -> float:
        """The predicted time of a naive step over that of a cached one."""
        return self.predicted["naive"].seconds / self.predicted["cached"].seconds

    @property
    def measured_ratio(self) -> float:
        """The same, measured."""
        return self.measured["naive"] / self.measured["cached"]

    @property
    def off(self) -> float:
        """How far the prediction of the ratio is off, as a share of the measured one."""
        return self.predicted_ratio / self.measured_ratio - 1


def measure_ratios(
    shape: str = "125m",
    lengths: Sequence[int] = LENGTHS,
    rates: Callable[[Model, Sequence[int]], Rates] = measure_rates,
) -> list[Ratio]:
    """Hold the predicted time of a naive and of a cached step against passes really made.

    The weights are random, in the shape of a public model. What the machine can do is measured
    right before each pair of passes, in this process.

    Parameters
    ----------
    shape : str, optional
    lengths : sequence of int, optional
        How many tokens a step looks at, 2 or more.
    rates : function, optional
        From a model and lengths to what the machine does.
    """
    found = []
    lengths = [whole(length, "length", 2) for length in lengths]
    with TemporaryDirectory(prefix="minineo-latency-") as folder:
        write_random_model(folder, shape_fields(shape))
        contestant: Any = contestants.Minineo(folder)
        config = contestant.model.config
        for length in lengths:
            here = rates(contestant.model, [length])
            predicted = {path: predict(config, length, path, here) for path in PATHS}
            cached = contestants.time_decode(contestant, length - 1)
            before = os.times().system
            naive = contestants.time_naive(contestant, length)
            system = (os.times().system - before) / (1 + len(naive))  # one more warms up
            measured = {"cached": median(cached), "naive": median(naive)}
            found.append(Ratio(length, predicted, measured, system))
    return found


def print_ratios(ratios: Sequence[Ratio]):
    """Print a table of prediction and measurement, and of what the prediction is made of."""
    print("tokens  path     measured  predicted   launches   weights     cache  products   numbers")
    for ratio in ratios:
        for path in PATHS:
            predicted = ratio.predicted[path]
            parts = "".join(f"{1e3 * seconds:10.2f}" for seconds in predicted.parts.values())
            print(
                f"{ratio.length:6}  {path:6} {1e3 * ratio.measured[path]:10.2f} "
                f"{1e3 * predicted.seconds:10.2f} {parts}  ms"
            )
        print(
            f"        naive / cached: measured {ratio.measured_ratio:.2f}, predicted "
            f"{ratio.predicted_ratio:.2f}, off by {ratio.off:+.0%}"
        )
        memory = f"; {1e3 * ratio.system:.0f} ms go to the system for memory, not predicted"
        print(
            f"        naive repeats {ratio.predicted['naive'].repeated:.1%} of its work"
            f"{memory if ratio.system >= 1e-3 else ''}"
        )


def main():
    """Measure and print the ratios of a shape."""
    parser = argparse.ArgumentParser(
        prog="python -m minineo.study.latency",
        description="Naive over cached time of a step, predicted and measured on this machine. "
        "Give it a machine that does nothing else.",
    )
    parser.add_argument("--shape", default="125m", help="a public model's shape; 125m by default")
    parser.add_argument(
        "lengths", nargs="*", type=int, default=LENGTHS, help="tokens; 64, 256 and 1024 by default"
    )
    options = parser.parse_args()
    try:
        print_ratios(measure_ratios(options.shape, options.lengths))
    except InputError as error:
        sys.exit(f"minineo: {error}")


if __name__ == "__main__":
    main()
