"""A comparison as a folder: all pictures, all numbers, and a page that says what they show."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from ..transformer import InputError
from .compare import Comparison
from .gpus import Processor, memory_bytes, processor
from .hardware import BUSY_CORES, busy_cores
from .latency import FEWEST, Latency, fit_latency
from .plan import Plan, Times, bytes_text, seconds_text
from .prediction import Rates, gpu_rates, measure_rates, naive_pays_up_to, predict

PAGE, NUMBERS = "report.md", "report.json"
FEW = 16  # steps; in fewer, growth cannot be told from noise
GPU = "T4"  # for which the page says why the cache may not pay there


def check_folder(folder):
    """Return the path of a folder to write to, or refuse what cannot be one, before any work.

    Parameters
    ----------
    folder : str or Path
        It is made when the report is written, with the folders above it.

    Raises
    ------
    InputError
        If it is a file, or cannot be written.
    """
    path = Path(os.path.expanduser(folder))
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not above.is_dir():
        raise InputError(f"{above} is no folder; name a folder for the report")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into {above}; name another folder for the report")
    return path


def write_report(comparison: Comparison, folder, rates: Rates | None = None) -> Path:
    """Write every figure of a comparison, its numbers, and a short page in Markdown.

    What the machine does in a second is measured for it, which takes seconds. Files of these
    names that are there already are written over, others left alone.

    Parameters
    ----------
    comparison : Comparison
    folder : str or Path
    rates : Rates, optional
        What the machine does, where that has been measured.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    from . import figures  # it needs matplotlib, which takes its time to load

    path, model, prompt = check_folder(folder), comparison.model, len(comparison.prompt_ids)
    page, drawn, numbers = heading(comparison), {}, comparison.to_json()
    busy = busy_cores()
    if busy is not None and busy > BUSY_CORES:
        page.append(f"**Others keep {busy:.1f} cores busy just now: do not trust the times.**")
    if comparison.pairs:
        drawn["steps"] = figures.plot_comparison(comparison)
        page.append(picture("steps", "Time of each step, and time so far"))
    if len(comparison.pairs) < FEWEST:
        rates = rates or measure_rates(model, [prompt])
        page.append(f"For the parts on latency, ask for {FEWEST} steps or more.")
    else:
        latency = fit_latency(comparison, rates)
        rates, gpu = latency.rates, gpu_of(latency, model.dtype)
        numbers["latency"] = latency.to_json()
        drawn["latency"] = figures.plot_latency(latency)
        drawn["break-even"] = figures.plot_break_even(latency, {GPU: gpu})
        drawn["prediction"] = figures.plot_prediction(latency)
        drawn["roofline"] = figures.plot_roofline(latency)
        page += latency_page(latency, gpu)
    sizes = plan_of(comparison, rates)
    numbers["plan"] = sizes.to_json()
    drawn["cache"] = figures.plot_cache_growth(sizes)
    page += cache_page(sizes)

    path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path, prefix=".minineo-") as drafts:  # all files, or none
        for name, figure in drawn.items():
            figure.savefig(Path(drafts, f"{name}.png"))
        Path(drafts, NUMBERS).write_text(
            json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        Path(drafts, PAGE).write_text("\n\n".join(page) + "\n", encoding="utf-8")
        for draft in sorted(Path(drafts).iterdir()):
            os.replace(draft, path / draft.name)
    return path / PAGE


def plan_of(comparison: Comparison, rates: Rates) -> Plan:
    """Return the plan of a comparison on this machine, with its times as the measured ones."""
    model, steps = comparison.model, len(comparison.pairs)
    config, memory = model.config, model.device.memory()
    flops = rates.peak_flops_per_second
    limits = Processor(
        f"this machine ({model.device.name})",
        memory.total if memory else memory_bytes(),
        rates.weight_bytes_per_second,
        flops,
        "measured",
    )
    prompt, new = len(comparison.prompt_ids), max(1, steps)
    measured = None
    prefill, decode = comparison.ttft_seconds("cached"), comparison.decode_seconds("cached")
    if prefill and decode:
        measured = Times(prefill, decode, new)
    return Plan(model.name, config, limits, model.dtype, prompt, new, measured=measured)


def gpu_of(latency: Latency, dtype: str) -> Rates:
    """Return what a GPU would do at its peaks; none is published for float64."""
    own = None if dtype in ("float16", "float32") else 1
    return gpu_rates(processor(GPU, latency.config, 1, dtype, tflops=own))


def picture(name, says):
    """Return a line that shows a picture."""
    return f"![{says}]({name}.png)"


def heading(comparison: Comparison) -> list[str]:
    """Return what was compared, and the verdict."""
    model, steps = comparison.model, len(comparison.pairs)
    verdict = (
        f"Both paths say the same: {comparison.same_tokens} of {steps} tokens are equal, and "
        f"logits differ by {comparison.max_difference:.1e} at most."
        if comparison.agree
        else f"The paths differ, first at {comparison.first_divergence}."
    )
    speedup = comparison.speedup
    faster = f" With the cache it is {speedup:.1f} x as fast." if speedup else ""
    return [
        "# Cached and naive, compared",
        f"{model.name} on {model.device.name} in {model.dtype}: a prompt of "
        f"{len(comparison.prompt_ids)} tokens, and {steps} steps. {verdict}{faster}",
    ]


def latency_page(latency: Latency, gpu: Rates) -> list[str]:
    """Return the sections about time."""
    once = seconds_text(latency.simple_seconds - latency.total_seconds)
    pays = latency.pays_from
    when = "does not pay in so few steps" if pays is None else f"pays from step {pays} on"
    rows = [
        f"| {length:,} | {path} | {seconds_text(latency.curves[path].at(length))} "
        f"| {seconds_text(latency.predicted(path, length).seconds)} | "
        + " | ".join(seconds_text(part) for part in latency.predicted(path, length).parts.values())
        + " |"
        for length in latency.places
        for path in ("cached", "naive")
    ]
    ratios = ", ".join(
        f"{latency.ratio_predicted(n):.1f} against {latency.ratio_fitted(n):.1f} at {n:,} tokens"
        for n in latency.places
    )
    naive_first = latency.naive_pays_up_to
    return [
        "## Latency",
        f"total = prefill(P) + Σ decode(t): {seconds_text(latency.prefill_seconds)} for the "
        f"prefill, and {decode_text(latency)}",
        f"The simple formula, prefill + n x mean decode, says "
        f"{seconds_text(latency.simple_seconds)} where {seconds_text(latency.total_seconds)} were "
        f"measured: {once} too many, one decode step, as the prefill already yields the first "
        f"token.{mean_text(latency)}",
        picture("latency", "Each step, its fit, its prediction, and what is left over"),
        "## From when the cache pays",
        f"Measured, it {when}. Predicted, a naive step is no slower "
        + (
            f"up to {naive_first:,} tokens."
            if naive_first
            else "at no length: the cache pays from the first token on."
        ),
        picture("break-even", "Time so far, and the ratio of the paths"),
        *on_gpu(latency, gpu),
        "## Predicted against measured",
        "A step is predicted from its costs: what it reads and computes, divided by what this "
        "machine was measured to read and compute in a second.",
        "| tokens | path | measured | predicted | calls | weights | cache | products | numbers |\n"
        "|--:|:--|--:|--:|--:|--:|--:|--:|--:|\n" + "\n".join(rows),
        f"The ratio naive / cached, predicted against measured: {ratios}. At the last step "
        f"{latency.predicted('naive', latency.places[-1]).repeated:.1%} of what the naive path "
        "computes was computed before.",
        picture("prediction", "What a step spends its time on"),
        picture("roofline", "What the machine allows, and what was reached"),
    ]


def grows(latency: Latency) -> bool:
    """Return whether a fit tells that longer steps take longer."""
    return latency.new >= FEW and latency.curves["cached"].coefficients[1] > 0


def decode_text(latency: Latency) -> str:
    """Return what a decode step takes, as a line over its length if it is known to grow."""
    cached = latency.curves["cached"]
    if not grows(latency):
        few = latency.new < FEW
        why = f"too few steps for a fit; ask for {FEW} or more" if few else "no growth to be seen"
        return f"{seconds_text(latency.mean_decode_seconds)} for a decode step on average: {why}."
    base, slope = cached.coefficients
    return (
        f"{seconds_text(base)} + t x {signed(slope)} for a decode step that looks at t tokens. "
        f"From the first to the last it changes by {latency.growth:+.0%}. Half of all steps lie "
        f"within {seconds_text(cached.spread)} of that; the first one lies "
        f"{signed(latency.warm_up('cached'))} off: its warm-up."
    )


def mean_text(latency: Latency) -> str:
    """Return how far the mean is off at both ends, if the steps are known to grow."""
    if not grows(latency):
        return ""
    first, last = latency.simple_off
    return (
        f" At the first decode step its mean is off by {first:+.0%}, at the last by {last:+.0%}. "
        f"With the fit the sum is {seconds_text(latency.fitted_seconds)}."
    )


def on_gpu(latency: Latency, gpu: Rates) -> list[str]:
    """Return why the cache may not pay on a GPU, in numbers."""
    last, size = latency.places[-1], latency.itemsize
    up_to = naive_pays_up_to(latency.config, gpu, itemsize=size)
    rows = []
    for path in ("cached", "naive"):
        step = predict(latency.config, last, path, gpu, itemsize=size)
        parts = (step.seconds, step.launches, step.weights, step.cache, step.products)
        rows.append(f"| {path} | {' | '.join(map(seconds_text, parts))} |")
    return [
        f"On a GPU it may not pay so soon. This is predicted, not measured: a step at {last:,} "
        f"tokens at the published peaks of a {GPU}, with {seconds_text(gpu.launch_seconds)} for "
        "each kernel launched.",
        "| path | in all | waiting for launches | weights | cache | arithmetic beyond |\n"
        "|:--|--:|--:|--:|--:|--:|\n" + "\n".join(rows),
        "A GPU that waits for launches, or reads the same weights anyway, has time left for the "
        f"tokens that the naive path feeds again: up to {up_to:,} of them would cost nothing.",
    ]


def cache_page(sizes: Plan) -> list[str]:
    """Return the section about memory."""
    return [
        "## What the cache costs",
        f"{bytes_text(sizes.cache_bytes_per_token)} for each token: "
        f"{bytes_text(sizes.cache_bytes)} for {sizes.length:,} tokens, beside "
        f"{bytes_text(sizes.weight_bytes)} of weights. If local layers kept no more than their "
        f"window it would be {bytes_text(sizes.cache_bytes_windowed)}.",
        picture("cache", "How the cache grows, and how many rows fit"),
        f"Every number is in [{NUMBERS}]({NUMBERS}).",
    ]


def signed(seconds) -> str:
    """Return a time with its sign."""
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"
