"""Pictures of what was measured. Readable in grey: every line has its own stroke and its name."""

from itertools import accumulate

from matplotlib.figure import Figure  # not pyplot, which wants a display or a notebook

from .compare import Comparison

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
