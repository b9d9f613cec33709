"""`minineo batch`: what queued requests gain by sharing forward passes, and what they wait for it."""

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoints import load
from ..study.serving import (
    MEASURES,
    PERCENTILES,
    POLICIES,
    Experiment,
    Load,
    burst,
    experiment,
    read_arrivals,
)
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PlotOption,
    Screen,
    app,
    check_picture,
    check_writable,
    progress_bar,
    real_path,
    write_json,
    write_picture,
)

NAMES = {"one": "one by one", "dynamic": "dynamic", "continuous": "continuous"}
LABELS = {
    "queue": "wait in the queue",
    "prefill": "prefill",
    "first_token": "time to first token",
    "per_token": "time per token after",
    "latency": "whole request",
}


@app.command("batch", epilog="Example: minineo batch --plot batch.png")
def batch_command(
    policy: Annotated[
        Literal["one", "dynamic", "continuous", "all"], typer.Option(help="Who shares a pass.")
    ] = "all",
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second; may be given several times.  [default: a sweep]"),
    ] = None,
    at_once: Annotated[bool, typer.Option("--burst", help="All requests come at once.")] = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help='Read the requests from a file of lines {"seconds": 0.5, "prompt": "One day"}.'
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests at each rate.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens for each, a quarter less or more.")] = 24,
    rows: Annotated[int, typer.Option(help="How many requests may share a pass.")] = 8,
    wait_ms: Annotated[
        float, typer.Option(help="How long dynamic lets a request wait for others.")
    ] = 50,
    budget_mib: Annotated[
        float | None, typer.Option(help="Memory for keys and values: it bounds the rows.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one draws other requests and gaps.")] = 0,
    model: ModelOption = "tiny",
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
):
    """Serve queued requests one by one, in dynamic batches, and in a continuous batch.

    The model makes every pass. Its measured times move a virtual clock: idle hours take no time.
    """
    check_writable(json_file)
    check_picture(plot_file)
    if json_file and plot_file and real_path(json_file) == real_path(plot_file):
        raise InputError(f"--json and --plot both name {plot_file}; give two files")
    if sum((bool(rate), at_once, arrivals is not None)) > 1:
        raise InputError("--rate, --burst and --arrivals exclude each other; give one of them")
    given = None
    if at_once:
        given = burst(requests, new_tokens=new_tokens, seed=seed)
    if arrivals is not None:
        given = read_arrivals(arrivals, new_tokens=new_tokens)
    loaded = load(model, device=device)
    with progress_bar("batch", "requests") as progress:
        result = experiment(
            loaded,
            given,
            policies=POLICIES if policy == "all" else (policy,),
            rates=rate or (),
            requests=requests,
            new_tokens=new_tokens,
            seed=seed,
            rows=rows,
            wait_ms=wait_ms,
            budget_mib=budget_mib,
            progress=progress,
        )
    if json_file != "-":
        print_experiment(result, Screen(highlight=False))
    if json_file is not None:
        write_json(result.to_json(), json_file)
    if plot_file is not None:
        from ..study.figures import plot_experiment

        write_picture(plot_experiment(result), plot_file)
    return 0


def print_experiment(result: Experiment, console: Console):
    """Print what was served, the figures of the lightest and the heaviest load, and the sense."""
    first = next(iter(result.loads[0].services.values()))
    largest = max(first.served, key=lambda request: request.prompt_tokens)
    console.print(
        Text.assemble(
            (result.model.name, "bold"),
            f" on {result.model.device.name}, {result.model.dtype}: {len(first.served)} requests, "
            f"prompts of up to {largest.prompt_tokens} tokens. A mean one takes "
            f"{1000 * result.alone_seconds:.0f} ms alone: one by one can serve "
            f"{result.capacity:,.3g} a second. Dynamic waits for others up to "
            f"{1000 * result.wait_seconds:g} ms.",
        )
    )
    if first.refused:
        refused = first.refused[0]
        console.print(
            Text(f"{len(first.refused)} refused; number {refused.number + 1}: {refused.reason}."),
            style="bold",
        )
    for warning in result.warnings:
        console.print(Text(f"Do not trust these figures: {warning}.", style="bold red"))
    console.print()
    ends = [result.loads[0]] if len(result.loads) == 1 else [result.loads[0], result.loads[-1]]
    for load_ in ends:
        console.print(Text(f"{title(load_, result)}", style="bold"))
        console.print(totals(load_))
        console.print(times(load_))
        console.print()
    for sentence in sense(result):
        console.print(sentence)


def title(load_: Load, result: Experiment) -> str:
    """Return what a load is."""
    if load_.rate is None:
        return "As they arrive"
    return f"{load_.rate:,.3g} requests a second, {load_.rate / result.capacity:.2g} x that"


def totals(load_: Load) -> Table:
    """Return what each policy got done, and what it held for that."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=0)
    table.add_column("", width=23)
    for name in load_.services:
        table.add_column(NAMES[name], justify="right", width=18)
    for label, figure in (
        ("tokens per second", lambda service: f"{service.throughput:,.0f}"),
        ("rows in a pass, mean", lambda service: f"{service.mean_batch:.1f}"),
        ("cache set aside, KiB", lambda service: f"{service.reserved_bytes / 1024:,.0f}"),
        ("cache in use at most", lambda service: f"{service.peak_bytes / 1024:,.0f}"),
    ):
        table.add_row(label, *map(figure, load_.services.values()))
    return table


def times(load_: Load) -> Table:
    """Return the percentiles of each time under each policy, in a unit that leaves them short."""
    services = load_.services.values()
    longest = max(service.percentile("latency", 100) for service in services)
    factor, unit = (1000, "ms") if longest < 99 else (1, "s")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=0)
    table.add_column(f"times in {unit}", width=23)
    for _ in services:
        for percent in PERCENTILES:
            table.add_column(f"p{percent}", justify="right", width=6)
    for measure in MEASURES:
        values = [s.percentile(measure, percent) for s in services for percent in PERCENTILES]
        cells = ["-" if value is None else short(factor * value) for value in values]
        table.add_row(LABELS[measure], *cells)
    return table


def short(number):
    """Return a number with one decimal where there is room for it."""
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def sense(result: Experiment):
    """Yield in sentences what batching buys, what it costs and where it turns."""
    light, heavy = result.loads[0], result.loads[-1]
    if not {"one", "dynamic"} <= heavy.services.keys():
        return
    several = light is not heavy

    def median(load_, policy, measure):
        return f"{short(1000 * load_.services[policy].percentile(measure, 50))} ms"

    yield Text.assemble(
        ("What it buys: ", "bold"),
        f"{heavy.gain('dynamic'):.1f} x the tokens per second of one by one"
        f"{' under the heaviest load' if several else ''}, as up to "
        f"{heavy.services['dynamic'].rows} rows share a pass.",
    )
