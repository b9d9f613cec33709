"""Pictures of what was measured. Readable in grey: every line has its own stroke and its name."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure  # not pyplot, which wants a display or a notebook
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle

from . import costs
from .compare import Comparison
from .flow import FlowStep
from .gpus import GIGA, GPUS, MEGA
from .latency import Latency
from .plan import Plan, bytes_text, seconds_text
from .serving import Experiment

STYLE = {
    "cached": {"color": "#1f5fa8", "linestyle": "-"},
    "naive": {"color": "#d1661c", "linestyle": "--"},
}
NAMES = {
    "cached": "cached: feeds only the newest token",
    "naive": "naive: feeds the whole sequence again",
}


def plot_comparison(comparison: Comparison):
    """Draw the time of each step, and the time so far, on both paths.

    Parameters
    ----------
    comparison : Comparison

    Returns
    -------
    matplotlib.figure.Figure
        Save it with ``figure.savefig(file)``.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    per_step, so_far = figure.subplots(1, 2)
    for path in ("naive", "cached"):
        milliseconds = [1000 * s for s in comparison.seconds(path)]
        steps = range(len(milliseconds))
        marker = "o" if len(milliseconds) == 1 else None
        per_step.plot(steps, milliseconds, **STYLE[path], linewidth=1.8, marker=marker)
        totals = list(accumulate(milliseconds))
        so_far.plot(steps, totals, **STYLE[path], linewidth=2.2, marker=marker, label=NAMES[path])
        so_far.annotate(
            f" {totals[-1]:,.0f} ms",
            (len(totals) - 1, totals[-1]),
            color=STYLE[path]["color"],
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )

    prompt, model = len(comparison.prompt_ids), comparison.model
    per_step.set(title="Time of each step", ylabel="milliseconds", ylim=(0, _top(comparison)))
    so_far.set(title="Time so far", ylabel="milliseconds", ylim=(0, None))
    for axes in (per_step, so_far):
        axes.set_xlabel(f"step (0 is the prefill of {prompt} tokens, then one token a step)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
    so_far.legend(loc="upper left", frameon=False)
    verdict = (
        "Same tokens" if comparison.agree else f"Paths differ at {comparison.first_divergence}"
    )
    speedup = f", {comparison.speedup:.1f} x the speed with the cache" if comparison.speedup else ""
    figure.suptitle(
        f"{verdict}{speedup}   ({model.name}, {model.device.name}, {model.dtype})",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _top(comparison):
    """End the axis above the times of most steps: one hiccup must not flatten the picture."""
    times = sorted(1000 * s for path in ("cached", "naive") for s in comparison.seconds(path))
    usual = times[int(0.98 * (len(times) - 1))]
    return 1.15 * (times[-1] if times[-1] < 2 * usual else usual)


POLICY_STYLE = {
    "one": {"color": "#d1661c", "linestyle": "--", "marker": "s"},
    "dynamic": {"color": "#1f5fa8", "linestyle": "-", "marker": "o"},
    "continuous": {"color": "#3a8a4d", "linestyle": "-.", "marker": "^"},
}
POLICY_NAMES = {
    "one": "one by one",
    "dynamic": "dynamic: waits for others",
    "continuous": "continuous: joins at once",
}
STAGES = (  # of a request: from when to when, and how dark
    ("in the queue", "arrived", "admitted", "#e8d5bb"),
    ("prefill", "admitted", "first_token_at", "#000000"),
    ("writes", "first_token_at", "finished", "#5b8fc9"),
)


def plot_serving(experiment: Experiment):
    """Draw throughput and waiting over the load or, for one load, what becomes of each request.

    Parameters
    ----------
    experiment : Experiment

    Returns
    -------
    matplotlib.figure.Figure
    """
    draw = _requests if len(experiment.loads) == 1 else _loads
    figure = draw(experiment)
    heavy, model = experiment.loads[-1], experiment.model
    gain = "Queued requests   "
    if {"one", "dynamic"} <= heavy.services.keys():
        rows, price = heavy.services["dynamic"].rows, heavy.ratio("per_token", "dynamic")
        gain = (
            f"Dynamic batches of {rows}: {heavy.gain('dynamic'):.1f} x the throughput of one by one"
            f"{f', {price:.1f} x the time per token' if price else ''}   "
        )
    figure.suptitle(
        f"{gain}({model.name}, {model.device.name}, {model.dtype})", fontsize=13, fontweight="bold"
    )
    return figure


def _loads(experiment):
    figure = Figure(figsize=(13, 4.8), layout="constrained", dpi=150)
    throughput, first_token, per_token = figure.subplots(1, 3)
    loads = experiment.loads
    rates = [load.rate for load in loads]
    for policy in loads[0].services:
        services = [load.services[policy] for load in loads]
        style = POLICY_STYLE[policy] | {"linewidth": 1.8, "markersize": 5}
        label = POLICY_NAMES[policy]
        throughput.plot(rates, [each.throughput for each in services], **style, label=label)
        for axes, measure in ((first_token, "first_token"), (per_token, "per_token")):
            seconds = [each.percentile(measure, 50) for each in services]
            axes.plot(rates, [1000 * s if s else np.nan for s in seconds], **style)

    throughput.set(title="Throughput", ylabel="tokens per second", ylim=(0, None))
    first_token.set(title="Time to first token (p50)", ylabel="milliseconds", yscale="log")
    per_token.set(title="Time per token after it (p50)", ylabel="milliseconds", ylim=(0, None))
    for axes in (throughput, first_token, per_token):
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:,.3g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("load: requests per second")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.axvline(
            experiment.capacity, color="0.6", linestyle=":", label="what one by one can serve"
        )
    first_token.yaxis.set_major_formatter("{x:g}")
    turn = experiment.turns_at("dynamic")
    if turn:
        times = [load.services["dynamic"].percentile("first_token", 50) for load in loads]
        height = 1000 * np.exp(np.interp(np.log(turn), np.log(rates), np.log(times)))
        ring = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "color": "black"}
        first_token.plot(turn, height, **ring, linestyle="", label="here waiting begins to pay")
    lines = [line for axes in (throughput, first_token) for line in axes.get_lines()]
    by_name = {line.get_label(): line for line in lines if line.get_label()[0] != "_"}
    figure.legend(by_name.values(), by_name, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _requests(experiment):
    (load,) = experiment.loads
    figure = Figure(figsize=(13, 4.8), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(load.services), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (policy, service) in zip(panels, load.services.items(), strict=True):
        requests = sorted(service.served, key=lambda request: request.arrived)
        for label, start, stop, color in STAGES:
            starts = np.array([getattr(request, start) for request in requests])
            stops = np.array([getattr(request, stop) for request in requests])
            places = range(1, len(requests) + 1)
            axes.barh(places, stops - starts, left=starts, height=0.8, color=color, label=label)
        axes.set(
            title=f"{POLICY_NAMES[policy]}\n{service.throughput:,.0f} tokens per second, first "
            f"token after {1000 * service.percentile('first_token', 50):,.0f} ms (p50)",
            xlabel="seconds",
        )
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="request, as they arrive", ylim=(len(service.served) + 0.7, 0.3))
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


PREDICTED = {"color": "black", "linestyle": ":", "linewidth": 1.8}
PARTS = {  # of a prediction: in words, with a shade and a hatching
    "launches": ("calls of operations", "#9a9a9a", ""),
    "weights": ("bytes of weights", "#1f5fa8", "//"),
    "cache": ("bytes of the cache", "#8fc1e8", ".."),
    "products": ("products beyond their bytes", "#d1661c", "\\\\"),
    "numbers": ("softmax, GELU, norms, sums", "#f2c894", "xx"),
}
CAPACITIES = ("T4", "RTX-4090", "A100-80", "H200")


def plot_latency(latency: Latency):
    """Draw the time of each step with its fit and its prediction, and what the fit leaves over.

    Parameters
    ----------
    latency : Latency

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(11, 7), layout="constrained", dpi=150)
    panels = figure.subplots(2, 2, sharex=True, height_ratios=(2, 1))
    lengths = np.array(latency.lengths)
    some = lengths[np.unique(np.linspace(0, len(lengths) - 1, 40, dtype=int))]
    for (above, below), path in zip(panels.T, ("cached", "naive"), strict=True):
        from_step = 1 if path == "cached" else 0  # its prefill is no step like the others
        measured = 1000 * np.array(latency.seconds[path])[from_step:]
        fitted = 1000 * np.array(latency.fitted(path))[from_step:]
        predicted = [1000 * latency.predicted(path, int(length)).seconds for length in some]
        steps = lengths[from_step:]
        color = STYLE[path]["color"]
        above.plot(steps, measured, ".", color="0.6", markersize=4, label="measured")
        above.plot(steps, fitted, **STYLE[path], linewidth=2.2, label=_formula(latency, path))
        above.plot(some, predicted, **PREDICTED, label="predicted from its costs")
        top = np.quantile(measured, 0.98)
        above.set(title=f"{path}: time of a step", ylim=(0, 1.35 * max(top, *predicted)))
        above.legend(loc="upper left", frameon=False, fontsize=9)

        residuals = measured - fitted
        spread = 1000 * latency.curves[path].spread
        below.axhspan(-spread, spread, color="0.88", label="half of all steps")
        below.axhline(0, color=color, linestyle=STYLE[path]["linestyle"])
        below.plot(steps, residuals, ".", color="0.45", markersize=4)
        reach = 1.3 * max(np.quantile(np.abs(residuals), 0.98), spread, 1e-6)
        below.set(
            title=f"what the fit leaves over: half of all steps lie within ± {spread:.2g} ms",
            ylim=(-reach, reach),
            xlabel="tokens that the step looks at",
        )
        below.title.set_fontsize(10)
    for axes in panels.flat:
        axes.set_ylabel("milliseconds")
        _tidy(axes)
    first, last = latency.simple_off
    figure.suptitle(
        f"From the first to the last, a decode step changes by {latency.growth:+.0%}; the mean of "
        f"all is off by {first:+.0%} and {last:+.0%} there",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _formula(latency, path):
    """Return a fit in words and numbers."""
    units = ("", " t", " t²")
    terms = zip(latency.curves[path].coefficients, units, strict=False)
    text = " ".join(f"{1000 * value:+.3g}{unit}" for value, unit in terms)
    return f"fit: {text.removeprefix('+').replace(' +', ' + ').replace(' -', ' - ')} ms"


def plot_break_even(latency: Latency, others: dict | None = None):
    """Draw the time so far with the step from which the cache pays, and the ratio of the paths.

    Parameters
    ----------
    latency : Latency
    others : dict of str to Rates, optional
        More processors to predict the ratio for, by name.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    so_far, ratio = figure.subplots(1, 2)
    for path in ("naive", "cached"):
        totals = [1000 * total for total in accumulate(latency.seconds[path])]
        so_far.plot(totals, **STYLE[path], linewidth=2.2, label=NAMES[path])
    fitted = [1000 * total for total in accumulate(latency.fitted("cached"))]
    so_far.plot(fitted, **PREDICTED, label="prefill + Σ decode(t), as fitted")
    pays = latency.pays_from
    title = "Time so far: the cache does not pay"
    if pays is not None:
        so_far.axvline(
            pays, color="0.4", linewidth=1, linestyle="-.", label="here it begins to pay"
        )
        title = f"Time so far: the cache pays from step {pays} on"
    so_far.set(title=title, ylabel="milliseconds", xlabel="step (0 is the prefill)", ylim=(0, None))
    so_far.legend(loc="upper left", frameon=False, fontsize=9)

    lengths = np.array(latency.lengths)[1:]
    naive, cached = (np.array(latency.seconds[path])[1:] for path in ("naive", "cached"))
    ratio.plot(lengths, naive / cached, ".", color="0.6", markersize=4, label="measured")
    some = np.unique(np.geomspace(1, latency.config.context, 60).astype(int))
    ratio.plot(
        some, [latency.ratio_predicted(int(n)) for n in some], **PREDICTED, label="predicted"
    )
    for (name, rates), style in zip((others or {}).items(), ("--", "-."), strict=False):
        values = [latency.ratio_predicted(int(n), rates) for n in some]
        ratio.plot(some, values, linestyle=style, color="#3a8a4d", label=f"{name}, predicted")
    ratio.axhline(1, color="0.4", linewidth=1)
    ratio.text(some[-1], 0.96, "at 1 both take as long", ha="right", va="top", fontsize=9)
    ratio.set(
        title="A naive step takes so many times as long as a cached one",
        xscale="log",
        yscale="log",
        xlabel="tokens that the step looks at",
    )
    ratio.set_ylim(bottom=0.5)
    ratio.xaxis.set_major_formatter("{x:g}")
    ratio.yaxis.set_major_formatter("{x:g}")
    ratio.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (so_far, ratio):
        _tidy(axes)
    return figure


def plot_prediction(latency: Latency):
    """Draw what steps are predicted to spend their time on, as a share of what they took.

    Parameters
    ----------
    latency : Latency

    Returns
    -------
    matplotlib.figure.Figure
    """
    steps = [(path, length) for length in latency.places for path in ("cached", "naive")]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(steps)), layout="constrained", dpi=150)
    axes = figure.subplots()
    left = np.zeros(len(steps))
    measured = np.array([latency.curves[path].at(length) for path, length in steps])
    for name, (label, color, hatch) in PARTS.items():
        parts = np.array([latency.predicted(*step).parts[name] for step in steps])
        shares = 100 * parts / measured
        axes.barh(
            range(len(steps)),
            shares,
            left=left,
            height=0.62,
            label=label,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
        )
        left += shares
    for place, (end, seconds, step) in enumerate(zip(left, measured, steps, strict=True)):
        took, said = seconds_text(seconds), seconds_text(latency.predicted(*step).seconds)
        axes.annotate(
            f"  measured {took}, predicted {said}", (max(end, 100), place), va="center", fontsize=9
        )
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(
        range(len(steps)), [f"{path}, {length:,} tokens" for path, length in steps], fontsize=10
    )
    axes.invert_yaxis()
    axes.set(
        xlabel="predicted, as a share of what was measured (fitted), in %",
        xlim=(0, 1.5 * max(100, left.max())),
        title="What a step spends its time on",
    )
    _tidy(axes, grid="x")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def plot_roofline(latency: Latency):
    """Draw what this machine allows at each arithmetic intensity, and what the passes reached.

    Parameters
    ----------
    latency : Latency

    Returns
    -------
    matplotlib.figure.Figure
    """
    rates, config, size = latency.rates, latency.config, latency.itemsize
    peak, bandwidth = rates.peak_flops_per_second, rates.weight_bytes_per_second
    middle = latency.places[len(latency.places) // 2]
    points = []
    for label, marker, path, fed, held, seconds in (
        ("prefill", "D", "cached", latency.prompt, [0], latency.prefill_seconds),
        ("decode", "o", "cached", 1, [middle - 1], latency.curves["cached"].at(middle)),
        ("naive", "s", "naive", middle, None, latency.curves["naive"].at(middle)),
    ):
        cost = costs.total(costs.pass_costs(config, [fed], held, itemsize=size))
        points.append((label, marker, path, fed, cost.intensity, cost.flops / seconds))

    figure = Figure(figsize=(8, 5.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    ridge = peak / bandwidth
    right = 10 ** np.ceil(np.log10(3 * max(ridge, *(point[4] for point in points))))
    roof = np.geomspace(0.1, right, 200)
    axes.plot(roof, np.minimum(peak, bandwidth * roof) / GIGA, color="black", linewidth=2)
    axes.axvline(ridge, color="0.7", linestyle=":")
    for label, marker, path, fed, intensity, speed in points:
        roof_here = min(peak, bandwidth * intensity)
        axes.plot([intensity] * 2, [speed / GIGA, roof_here / GIGA], color="0.6", linestyle=":")
        axes.plot(intensity, speed / GIGA, marker, color=STYLE[path]["color"], markersize=9)
        axes.annotate(
            f"{label} of {fed:,} token{'s' if fed > 1 else ''}\n{speed / roof_here:.0%} of the roof",
            (intensity, speed / GIGA),
            xytext=(9, {"naive": 8, "prefill": -28}.get(label, -14)),  # these two lie close
            textcoords="offset points",
            fontsize=9,
        )
    middle_of_slope = np.sqrt(0.1 * ridge)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(0.1, right),
        xlabel="arithmetic intensity: floating-point operations per byte",
        ylabel="GFLOP/s",
        title=f"Roofline, measured: {bytes_text(bandwidth)}/s of weights, "
        f"{peak / GIGA:,.3g} GFLOP/s in products",
    )
    axes.text(middle_of_slope, 1.3 * bandwidth * middle_of_slope / GIGA, "memory is the limit",
              ha="right", fontsize=9)  # fmt: skip
    axes.text(1.15 * ridge, 1.12 * peak / GIGA, "arithmetic is the limit", fontsize=9)
    axes.set_ylim(0.4 * min(point[5] for point in points) / GIGA, 2.5 * peak / GIGA)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    _tidy(axes, grid="both")
    return figure


def plot_cache_growth(plan: Plan, gpus: tuple[str, ...] = CAPACITIES):
    """Draw how the cache grows with the length, and how many rows fit into memory.

    Parameters
    ----------
    plan : Plan
    gpus : tuple of str, optional
        Other GPUs whose memory is shown, by their names in `GPUS`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
    growth, capacity = figure.subplots(1, 2)
    context, row = plan.config.context, replace(plan, batch=1)
    lengths = np.unique(np.linspace(max(1, context // 64), context, 128, dtype=int)).tolist()
    rows = [
        replace(row, prompt=min(length, plan.prompt), new=max(0, length - plan.prompt))
        for length in lengths
    ]
    color = STYLE["cached"]["color"]
    for size, stroke, label in (
        ("cache_bytes", "-", "all layers keep all tokens"),
        ("cache_bytes_windowed", "--", "local layers keep their window"),
    ):
        megabytes = [getattr(each, size) / MEGA for each in rows]
        growth.plot(lengths, megabytes, stroke, color=color, linewidth=2, label=label)
    growth.plot(plan.length, row.cache_bytes / MEGA, "o", color="black")
    growth.set(
        title=f"Cache of a row: {bytes_text(row.cache_bytes_per_token)} for each token,\n"
        f"{bytes_text(row.cache_bytes)} for {plan.length:,}",
        ylabel="MB",
        ylim=(0, 1.25 * rows[-1].cache_bytes / MEGA),
    )

    memories = {plan.processor.name: plan.processor.memory_bytes}
    memories |= {gpu: int(GIGA * GPUS[gpu].memory) for gpu in gpus if gpu not in memories}
    strokes = cycle(("-", "--", "-.", ":"))
    for (name, memory), stroke in zip(memories.items(), strokes, strict=False):
        own = name == plan.processor.name
        processors = [replace(each.processor, memory_bytes=memory) for each in rows]
        fit = [replace(r, processor=p).max_batch for r, p in zip(rows, processors, strict=True)]
        capacity.plot(
            lengths,
            [count or np.nan for count in fit],
            linestyle=stroke,
            color=color if own else "0.35",
            linewidth=2.4 if own else 1.4,
            label=f"{name}, {bytes_text(memory)}{'' if any(fit) else ': no row fits'}",
        )
    if plan.max_batch:
        capacity.plot(plan.length, plan.max_batch, "o", color="black")
    capacity.set(
        title=f"Rows that fit beside the weights:\n{plan.max_batch:,} of {plan.length:,} tokens, "
        f"{plan.processor.name}",
        ylabel="rows",
        yscale="log",
    )
    capacity.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (growth, capacity):
        axes.set(xlabel="tokens of a row, prompt and new", xlim=(0, None))
        axes.title.set_fontsize(11)
        axes.legend(loc="upper left" if axes is growth else "upper right", frameon=False)
        _tidy(axes)
    figure.suptitle(
        f"{plan.name} in {plan.dtype}: {bytes_text(plan.weight_bytes)} of weights",
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _tidy(axes, grid="y"):
    """Take away what a picture does not need, and put a quiet grid behind it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)


# Readable in grey: each kind of cell has a hatch or a frame of its own.
MARKS: dict[str, dict[str, Any]] = {
    "from the cache": {
        "hatch": "///",
        "edgecolor": "#1f5fa8",
        "facecolor": "#1f5fa82a",
        "linewidth": 0,
    },
    "made again": {
        "fill": False,
        "edgecolor": "#d1661c",
        "linestyle": (0, (3, 1)),
        "linewidth": 1.2,
    },
    "made for the first time": {"fill": False, "edgecolor": "black", "linewidth": 1.2},
    "hidden from the query": {
        "hatch": "xxxx",
        "edgecolor": "0.82",
        "facecolor": "white",
        "linewidth": 0,
    },
    "darker: larger (pattern: square-root scale)": {"facecolor": "0.35"},
}
MATRICES = {  # the title, and what stands between it and the next
    "queries": ("queries Q", "×"),
    "keys": ("keys Kᵀ", "="),
    "scores": ("scores", "soft-\nmax\n→"),
    "pattern": ("pattern", "×"),
    "values": ("values V", "="),
    "mixed": ("mixed", ""),
}
ROOM, GAP, MARGIN = 12.3, 0.95, 0.8  # inches
TEXT_CELL, FEW = 0.17, 16  # so few tokens are shown large, with their texts
LEAST_SIDES = (0.13, 0.45)


def plot_flow(step: FlowStep):
    """Draw (Q × Kᵀ) × V of one pass: every matrix in its shape, on both paths.

    Parameters
    ----------
    step : FlowStep

    Returns
    -------
    matplotlib.figure.Figure
    """
    tokens, head_dim = step.naive.keys.shape
    room = (ROOM - 5 * GAP) / 3
    least = LEAST_SIDES[1]
    cell = min(room / (tokens + head_dim), (room - least) / tokens, 3 / tokens)
    cell = TEXT_CELL if tokens <= FEW else cell
    number = min(cell, (room - max(tokens * cell, least)) / head_dim)  # a cell along a vector
    tallest = max(tokens * cell, head_dim * number)
    width, height = ROOM + MARGIN + 0.25, 2 * (tallest + 1.5) + 0.95
    figure = Figure(figsize=(width, height), dpi=150)
    for path, top in (("cached", height - 0.5), ("naive", height - 2 - tallest)):
        said = figure.text(0.15 / width, top / height, _account(step, path), va="top")
        said.set(color=STYLE[path]["color"], fontweight="bold")
        left, middle = MARGIN, top - 0.75 - tallest / 2
        for name, (title, sign) in MATRICES.items():
            matrix = getattr(getattr(step, path), name)
            if name == "keys":
                matrix, sides = matrix.T, (number, cell)
            else:
                sides = (cell, cell if name in ("scores", "pattern") else number)
            high, wide = np.maximum(np.multiply(matrix.shape, sides), LEAST_SIDES)
            place = (left / width, (middle - high / 2) / height, wide / width, high / height)
            axes = figure.add_axes(place)
            _matrix(axes, step, path, name, matrix)
            axes.set_title(f"{title}\n{matrix.shape[0]} × {matrix.shape[1]}", fontsize=9)
            left += wide + GAP
            figure.text((left - 0.65) / width, middle / height, sign, ha="center", va="center")
    handles = [Rectangle((0, 0), 1, 1, **style) for style in MARKS.values()]
    figure.legend(handles, MARKS, loc="lower center", ncols=len(MARKS), frameon=False)
    _flow_title(figure, f"Step {step.index}, {step.phase}: {_place(step)}", step.model)
    return figure


def plot_pattern(steps: Sequence[FlowStep]):
    """Draw where every query looks: a row of heat maps for each layer, a column for each head.

    Parameters
    ----------
    steps : sequence of FlowStep
        The same pass, seen through the layers and heads that are wanted:
        ``walk.at(layer, head)[0]``.

    Returns
    -------
    matplotlib.figure.Figure
    """
    layers, heads = sorted({step.layer for step in steps}), sorted({step.head for step in steps})
    side = min(3.2, 10 / len(heads))
    across, down = side + 0.75, side + 1.0
    width, height = len(heads) * across + 1.1, len(layers) * down + 0.95
    figure = Figure(figsize=(width, height), dpi=150)
    for step in steps:
        flow, tokens = step.naive, len(step.ids)
        left = 0.7 + heads.index(step.head) * across
        bottom = height + 0.2 - (layers.index(step.layer) + 1) * down
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        shares = np.ma.array(flow.pattern, mask=flow.hidden)
        image = axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.5, 0, 1), aspect="auto")
        _hide(axes, flow)
        if step.window < tokens:
            queries = np.array([step.window, tokens]) - 0.5
            label = f"edge of the window: a query sees {step.window} keys, its own included"
            axes.plot(queries - step.window, queries, color="#d1661c", linestyle="--", label=label)
        axes.set_title(_place(step), fontsize=9)
        _label(axes.yaxis, step, "queries", 0)
        _label(axes.xaxis, step, "keys", 0)
    bar = figure.add_axes((1 - 0.85 / width, 0.25, 0.12 / width, 0.5))
    figure.colorbar(image, cax=bar).set_label("share (square-root scale)")
    handles = {label: each for axes in figure.axes for each, label in _labelled(axes)}
    hidden = "hidden from the query"
    handles[hidden] = Rectangle((0, 0), 1, 1, **MARKS[hidden])
    figure.legend(handles.values(), handles, loc="lower center", ncols=2, frameon=False)
    _flow_title(figure, "Where each query looks", steps[0].model)
    return figure


def _labelled(axes):
    """Return the labelled lines of axes, each with its label."""
    return zip(*axes.get_legend_handles_labels(), strict=True)


def _matrix(axes, step, path, name, matrix):
    """Draw one matrix: its numbers in grey, where they come from, and what is hidden."""
    flow, whole = getattr(step, path), getattr(step.naive, name)
    square = name in ("scores", "pattern")
    if square:
        matrix = np.ma.array(np.where(flow.hidden, 0, matrix), mask=flow.hidden)
        whole = whole[~step.naive.hidden]
    low, high = (0, whole.max()) if name == "pattern" else (whole.min(), whole.max())
    norm = PowerNorm(0.5 if name == "pattern" else 1, low, high)
    axes.imshow(matrix, cmap="Greys", norm=norm, aspect="auto")
    if square:
        _hide(axes, flow)
    axes.spines[:].set_visible(False)

    across = name == "keys"  # its tokens lie side by side; those of the others, below each other
    first = 0 if name in ("keys", "values") else flow.held
    old = max(step.cached.held - first, 0)
    for mark, start, stop in (
        ("from the cache" if path == "cached" else "made again", 0, old),
        ("made for the first time", old, len(flow.keys) - first),
    ):
        if start < stop:
            corner, size = (-0.5, start - 0.5), (matrix.shape[1], stop - start)
            if across:
                corner, size = (start - 0.5, -0.5), (stop - start, matrix.shape[0])
            axes.add_patch(Rectangle(corner, *size, **MARKS[mark], clip_on=False))
    numbers = f"{flow.keys.shape[1]} numbers"
    rows = numbers if across else "tokens" if name == "values" else "queries"
    columns = "tokens" if across else "keys" if square else numbers
    _label(axes.yaxis, step, rows, first)
    _label(axes.xaxis, step, columns, 0)


def _hide(axes, flow):
    """Hatch the slots behind each query's position, and those before its window."""
    tokens = len(flow.keys)
    edges = np.arange(flow.made + 1) - 0.5
    newest = np.minimum(np.arange(flow.held, tokens + 1), tokens - 1) + 0.5
    style = MARKS["hidden from the query"]
    axes.fill_betweenx(edges, newest, tokens - 0.5, step="post", **style)
    axes.fill_betweenx(edges, -0.5, np.maximum(newest - flow.window, -0.5), step="post", **style)


def _label(axis, step, label, first):
    """Label an axis: one of tokens with the first's and the newest's position, or all texts."""
    tokens, few = len(step.ids), len(step.ids) <= FEW
    axis.set_tick_params(length=0, labelsize=7)
    if label.endswith("numbers"):
        places, names = [], []
    elif few:
        places = [*range(first, tokens)]
        names = [_quoted(text) for text in step.texts[first:]]
    else:
        places = sorted({first, tokens - 1})
        names = [str(place) for place in places]
    axis.set_ticks([place - first for place in places], names)
    if few and axis.axis_name == "x":
        axis.set_tick_params(rotation=90)
    if not (few and places and axis.axis_name == "y"):  # texts take the label's room
        axis.set_label_text(label, fontsize=8)


def _quoted(text):
    """Return a token in quotes and short, in characters that the font has."""
    known = get_font(findfont(FontProperties())).get_charmap()
    quoted = "".join(each if ord(each) in known else "□" for each in repr(text))
    short = quoted if len(quoted) <= 9 else f"{quoted[:8]}…"
    return short.replace("$", r"\$")  # a dollar would begin a formula


def _account(step, path):
    """Return what a path was fed, and where its keys and values come from."""
    made, held = getattr(step, path).made, step.cached.held
    fed = f"{path} path: fed {made} of {len(step.ids)} tokens"
    if held:
        come = "come from the cache" if path == "cached" else "are made again"
        return f"{fed}; the keys and values of {held} {come}"
    return f"{fed}; {'nothing is in the cache yet' if path == 'cached' else 'the same work'}"


def _place(step):
    kind = f"local, window {step.window}" if step.kind == "local" else "global"
    return f"layer {step.layer} ({kind}), head {step.head}"


def _flow_title(figure, what, model):
    title = f"{what}   ({model.name}, {model.device.name}, {model.dtype})"
    top = 1 - 0.12 / figure.get_figheight()
    figure.suptitle(title, fontsize=13, fontweight="bold", y=top, va="top")
