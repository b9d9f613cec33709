"""`minineo bench`: this machine against its own limits, and against transformers."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..study import hardware
from ..study.bench import Benchmark, bench
from .app import (
    JsonOption,
    ModelOption,
    app,
    check_writable,
    complain,
    progress_bar,
    show,
)
from .text import mebibytes


@app.command("bench", epilog="Example: minineo bench --shape 125m --against transformers")
def bench_command(
    model: ModelOption | None = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights of a public model's shape, such as 125m or 1.3b."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Measure 'transformers' too, and print ratios.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Number of processes that time each contestant, 1 or more.")
    ] = 3,
    json_file: JsonOption = None,
):
    """Measure this machine's prefill and decode against its own limits, and transformers.

    It measures the CPU; on a GPU, tests/gpu_check.py does. Give it a machine that does nothing
    else: it warns when others keep cores busy.
    """
    check_writable(json_file)

    with progress_bar("bench", "measures") as progress:
        benchmark = bench(
            model, shape=shape, against=against, rounds=rounds, progress=progress, warn=complain
        )
    show(print_benchmark, benchmark, json_file)
    return 0


def print_benchmark(benchmark: Benchmark, console: Console):
    """Print the warnings, the machine's limits and all figures."""
    config = benchmark.config
    shape = (
        f": {config.n_layers} layers of width {config.width}, {config.n_heads} heads, context "
        f"{config.context}{', random weights' if benchmark.random_weights else ''}; "
        f"cpu, {hardware.cores()} cores, float32"
    )
    console.print(Text.assemble((benchmark.name, "bold"), shape))
    for warning in benchmark.warnings:
        text = f"Do not trust these figures: {warning}."
        console.print(Text(text, style="bold red"), soft_wrap=True)
    console.print()
    console.print(limits(benchmark))
    console.print()
    console.print(figures(benchmark))
    console.print()
    console.print(needs(benchmark))
    console.print()
    console.print(
        "Medians of "
        f"{benchmark.rounds} process{'es' if benchmark.rounds > 1 else ''} each, after a warm-up. "
        "MBU and MFU are shares of the limits above. A ratio below 1 is in minineo's favour. Calls "
        "are of operations on arrays; a GPU would launch as many kernels."
    )


def limits(benchmark: Benchmark) -> Table:
    """Return what this machine can do at most."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_row(
        "matrix-vector product, the model's matrices",
        f"{benchmark.bytes_per_second / 1e9:,.1f} GB/s",
    )
    for rows in benchmark.plan.lengths:
        rate = benchmark.flops_per_second(rows)
        table.add_row(f"matmul of {rows} rows, the layers' matrices", f"{rate / 1e9:,.0f} GFLOP/s")
    return table


def needs(benchmark: Benchmark) -> Table:
    """Return what passes of minineo compute, move and call."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("what minineo does in a pass")
    for name in ("MFLOP", "MiB moved", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for measure, label in (
        ("prefill", "prefill of {}"),
        ("decode", "decode at depth {}"),
        ("naive", "naive step of {}"),
    ):
        for size in benchmark.sizes(measure):
            needed = benchmark.needs(measure, size)
            cells = (needed["flops"] / 1e6, needed["bytes"] / 2**20)
            row = (label.format(size), *(f"{cell:,.1f}" for cell in cells))
            table.add_row(*row, f"{needed['launches']:,}")
    return table


def figures(benchmark: Benchmark) -> Table:
    """Return a table with a row for every figure."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("")
    for who in benchmark.contestants:
        table.add_column(who, justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    if len(benchmark.contestants) > 1:
        table.add_column("ratio", justify="right", no_wrap=True)
    plan = benchmark.plan
    first, longest = plan.lengths[0], plan.lengths[-1]

    def row(label, value, note=lambda who: "", ratio=None):
        cells = [cell for who in benchmark.contestants for cell in (value(who), note(who))]
        table.add_row(label, *cells, *([] if ratio is None else [f"{ratio:.2f}"]))

    def timed(label, measure, size=0, note=lambda who: ""):
        row(
            label,
            lambda who: f"{1000 * benchmark.seconds(who, measure, size):,.2f} ms",
            note,
            benchmark.ratio(measure, size),
        )

    for n in plan.lengths:
        timed(f"prefill of {n}", "prefill", n, lambda who, n=n: f"{benchmark.mfu(who, n):.0%} MFU")
    for n in plan.depths:
        timed(
            f"decode at depth {n}", "decode", n, lambda who, n=n: f"{benchmark.mbu(who, n):.0%} MBU"
        )
    for n in plan.batches:
        timed(
            f"decode of {n} row{'s' if n > 1 else ''}",
            "batch",
            n,
            lambda who, n=n: f"{n / benchmark.seconds(who, 'batch', n):,.0f} tok/s",
        )
    for n in plan.naive_lengths:
        timed(f"naive step of {n}", "naive", n)
    timed(f"first pass, {first} tokens", "cold", first)
    timed("load", "load")
    for label, figure, ratio in (
        (f"memory, prefill of {longest}", benchmark.peak_bytes, benchmark.ratio("peak", longest)),
        ("  on top of the weights", benchmark.extra_bytes, benchmark.extra_ratio),
    ):
        row(label, lambda who, figure=figure: mebibytes(figure(who)), ratio=ratio)
    return table
