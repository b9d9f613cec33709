"""`minineo compare`: the main job."""

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..generation.batch import PATHS
from ..study import compare
from ..study.compare import Comparison
from ..study.report import check_folder, write_report
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    NoKernelsOption,
    PlotOption,
    app,
    check_outputs,
    complain,
    load_with,
    progress_bar,
    show,
    write_picture,
)
from .text import computed_by, milliseconds, printable, token_text

PROMPT = (
    "Once upon a time, there was a little girl named Lily. She had a small red ball that she "
    "loved very much. One day, Lily and her mom went to the park. Lily wanted to play with her "
    "ball, but"
)


@app.command("compare", epilog='Example: minineo compare "Once upon a time" --new-tokens 64')
def compare_command(
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")] = PROMPT,
    model: ModelOption = "tiny",
    new_tokens: Annotated[int, typer.Option(help="Number of steps, 1 or more.")] = 32,
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["float32", "float64", "float16"],
        typer.Option(help="float64 tells rounding from a fault; float16 needs a GPU."),
    ] = "float32",
    no_kernels: NoKernelsOption = False,
    fault: Annotated[
        str | None,
        typer.Option(help="Put a real bug into the cached path; `minineo faults` lists them."),
    ] = None,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
    report_folder: Annotated[
        str | None,
        typer.Option("--report", help="Write all pictures and a page that reads them to a folder."),
    ] = None,
):
    """Run a prompt down the cached and the naive path, and hold them against each other.

    Exit status 1 means that the paths differ by more than rounding.
    """
    check_outputs(json_file, plot_file)
    if fault is not None:
        if plot_file is not None or report_folder is not None:
            raise InputError("--plot and --report show times, and --fault takes none; leave it out")
        from .faults import compare_with_fault  # or `faults` would stand first in the help

        return compare_with_fault(fault, prompt, new_tokens, model, device, dtype, json_file)
    if report_folder is not None:
        check_folder(report_folder)
    loaded = load_with(model, device, dtype, no_kernels)
    with progress_bar("both paths", "steps") as progress:
        comparison = compare(loaded, prompt, max_new_tokens=new_tokens, progress=progress)
    if plot_file is not None:
        from ..study.figures import plot_comparison

        write_picture(plot_comparison(comparison), plot_file)
    show(print_comparison, comparison, json_file)
    if report_folder is not None:
        complain(f"the report is {write_report(comparison, report_folder)}")
    return 0 if comparison.agree else 1


def print_comparison(comparison: Comparison, console: Console):
    """Print the ledger, the verdict and the text."""
    model, config = comparison.model, comparison.model.config
    local = [window for window in config.windows if window < config.context]
    shape = (
        f": {config.n_layers} layers of width {config.width}, {config.n_heads} heads, context "
        f"{config.context}{f', local window {local[0]}' if local else ''}; "
        f"{computed_by(model)}"
    )
    console.print(Text.assemble((model.name, "bold"), shape))
    if model.device.why:
        console.print(Text(model.device.why, style="dim"))
    for warning in comparison.warnings:
        console.print(Text(f"Do not trust these times: {warning}.", style="bold red"))
    console.print()
    console.print(ledger(comparison))
    console.print()
    console.print(verdict(comparison))
    console.print()
    if comparison.pairs:
        console.print(times(comparison))
        console.print()
        console.print(work(comparison))
        console.print()
        console.print(cost(comparison))
        console.print()
        console.print(written_text(comparison))


def ledger(comparison: Comparison) -> Table:
    """Return a table with a row for every step."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    columns = [
        ("step", 4), ("phase", 7), ("token", 9), ("keys\nseen", 4),
        ("cached\nfed", 6), ("\nms", 6), ("\nKiB", 5),
        ("naive\nfed", 5), ("\nms", 6), ("logits\ndiffer", 7), ("best\nlead", 5), ("same", 4),
    ]  # fmt: skip
    for name, width in columns:
        left = name in ("phase", "token")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, min_width=width)
    for pair in comparison.pairs:
        cached, naive = pair.cached, pair.naive
        if pair.same_token:
            same = Text("yes")
        else:  # between tokens closer than rounding, either choice is right
            same = Text("tie") if pair.gap <= 2 * comparison.tolerance else Text("NO", "bold red")
        wrong = not (comparison.agree or pair.difference <= comparison.tolerance)
        table.add_row(
            str(cached.index),
            cached.phase,
            token_text(comparison.model, cached.token),
            str(cached.length),
            str(cached.fed),
            milliseconds(cached.seconds),
            f"{cached.cache_bytes / 1024:,.0f}",
            str(naive.fed),
            milliseconds(naive.seconds),
            Text(f"{pair.difference:.1e}", style="bold red" if wrong else ""),
            f"{pair.gap:.2f}",
            same,
            style="bold" if cached.phase == "prefill" else None,
        )
    return table


def verdict(comparison: Comparison) -> Text:
    """Return the verdict in a sentence."""
    steps, difference = len(comparison.pairs), comparison.max_difference
    if comparison.agree:
        return Text.assemble(
            ("Both paths say the same: ", "bold green"),
            f"{comparison.same_tokens} of {steps} tokens equal. "
            f"{comparison.lockstep.values:,} values of all layers, held against their twins, "
            f"differ by {comparison.lockstep.largest_difference:.0e} of their size at most, the "
            f"logits by {difference:.1e}: rounding.",
        )
    counts = (
        f" {comparison.same_tokens} of {steps} tokens are equal; logits differ by "
        f"{difference:.1e} at most, and rounding explains {comparison.tolerance:.0e}."
    )
    return Text.assemble(
        ("The paths differ, ", "bold red"),
        f"first at {comparison.first_divergence}.",
        counts if steps else "",
    )


def times(comparison: Comparison) -> Table:
    """Return the times that matter, on both paths."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("")
    for name in ("cached", "naive", "naive / cached"):
        table.add_column(name, justify="right")
    for label, seconds in (
        ("time to first token", comparison.ttft_seconds),
        ("time per output token after it (median)", comparison.decode_seconds),
        ("total", comparison.total_seconds),
    ):
        cached, naive = seconds("cached"), seconds("naive")
        if cached and naive:
            row = (f"{1000 * cached:,.2f} ms", f"{1000 * naive:,.2f} ms", f"{naive / cached:.1f} x")
            table.add_row(label, *row, style="bold" if label == "total" else None)
    return table


def work(comparison: Comparison) -> Table:
    """Return what the last step computes, reads and calls, on both paths: what its time goes to."""
    last = len(comparison.pairs) - 1
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column(f"in step {last}")
    for name in ("cached", "naive", "naive / cached"):
        table.add_column(name, justify="right")
    costs = {path: comparison.cost(path, last) for path in PATHS}
    calls = "kernels launched" if comparison.model.device.cupy else "operations on arrays"
    for label, unit, value in (
        ("matrix products", "MFLOP", lambda path: costs[path].flops / 1e6),
        ("weights, keys and values read or written", "MiB", lambda path: costs[path].bytes / 2**20),
        (calls, "", lambda path: comparison.launches(path, last)),
    ):
        cached, naive = value("cached"), value("naive")
        cells = [f"{each:,.1f} {unit}" if unit else f"{each:,}" for each in (cached, naive)]
        table.add_row(label, *cells, f"{naive / cached:.1f} x")
    return table


def cost(comparison: Comparison) -> str:
    """Return from when on the cache pays, and what it costs."""
    pays, last = comparison.pays_from(), comparison.pairs[-1].cached
    when = (
        "The cache does not pay in so few steps"
        if pays is None
        else f"The cache pays from step {pays} on"
    )
    full = comparison.model.config.context * comparison.bytes_per_token
    text = (
        f"{when}. It costs {comparison.bytes_per_token / 1024:,.1f} KiB of memory for each token: "
        f"{last.cache_bytes / 1024:,.0f} KiB at the last step, {full / 1024:,.0f} KiB for a full "
        "context."
    )
    if last.length == comparison.model.config.context:
        text += " The context is full: no position is left for another step."
    return text


def written_text(comparison: Comparison) -> Text:
    """Return the prompt and what was written, told apart."""
    if comparison.model.tokenizer is None:
        return Text(f"{comparison.prompt_ids} → {comparison.new_ids}")
    prompt = comparison.model.decode(comparison.prompt_ids)
    whole = comparison.model.decode([*comparison.prompt_ids, *comparison.new_ids])
    return Text.assemble((printable(prompt), "dim"), (printable(whole[len(prompt) :]), "bold"))
