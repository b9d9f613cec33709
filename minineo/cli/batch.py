"""`minineo batch`: what queued requests gain by sharing forward passes, and what they wait for it."""

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..study.plan import seconds_text
from ..study.serving import (
    MEASURES,
    PERCENTILES,
    POLICIES,
    Experiment,
    Load,
    burst,
    check_limits,
    experiment,
    poisson,
    read_arrivals,
)
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    NoKernelsOption,
    PlotOption,
    app,
    check_outputs,
    load_with,
    progress_bar,
    real_path,
    show,
    write_picture,
)
from .text import computed_by

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
    context: typer.Context,
    policy: Annotated[
        Literal["one", "dynamic", "continuous", "all"], typer.Option(help="Who shares a pass.")
    ] = "all",
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second; give several, or none for a sweep of loads."),
    ] = None,
    at_once: Annotated[bool, typer.Option("--burst", help="All requests come at once.")] = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help='Read the requests from a file of lines {"seconds": 0.5, "prompt": "One day", '
            '"new_tokens": 24}; new_tokens may be left out.'
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 32,
    new_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens for each, up to a quarter less or more by chance; with --arrivals, exactly "
            "so many for lines without new_tokens."
        ),
    ] = 24,
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
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="float16 needs a GPU.")
    ] = "float32",
    no_kernels: NoKernelsOption = False,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
):
    """Serve queued requests one by one, in dynamic batches, and in a continuous batch.

    The model makes every pass. Its measured times move a virtual clock: idle hours take no time.
    """
    check_outputs(json_file, plot_file)
    if sum((bool(rate), at_once, arrivals is not None)) > 1:
        raise InputError("--rate, --burst and --arrivals exclude each other; give one of them")
    check_useful(context, ("requests", "seed"), "--arrivals" if arrivals is not None else None)
    check_useful(
        context, ("wait_ms",), None if policy in ("all", "dynamic") else f"--policy {policy}"
    )
    check_limits(rows, wait_ms, budget_mib)
    if arrivals is None:
        given = burst(requests, new_tokens=new_tokens, seed=seed)
        for each in rate or ():  # a rate of no use is refused before a model is loaded for it
            poisson(each, requests, new_tokens=new_tokens, seed=seed)
    else:
        for option, file in (("--json", json_file), ("--plot", plot_file)):
            if file not in (None, "-") and real_path(file) == real_path(arrivals):
                raise InputError(f"{option} would write over {arrivals}; give another file")
        given = read_arrivals(arrivals, new_tokens=new_tokens)
    loaded = load_with(model, device, dtype, no_kernels)
    with progress_bar("batch", "requests") as progress:
        result = experiment(
            loaded,
            given if at_once or arrivals is not None else None,
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
    if plot_file is not None:  # before anything is printed, as whoever reads it may leave
        from ..study.figures import plot_serving

        write_picture(plot_serving(result), plot_file)
    show(print_experiment, result, json_file)
    return 0


def check_useful(context, names, beside):
    """Refuse options that were given but would do nothing beside another one."""
    given = [name for name in names if context.get_parameter_source(name).name == "COMMANDLINE"]
    if beside and given:
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InputError(f"{options} would do nothing with {beside}; leave that out")


def print_experiment(result: Experiment, console: Console):
    """Print what was served, the figures of the lightest and the heaviest load, and the sense."""
    first = next(iter(result.loads[0].services.values()))
    prompts = [request.prompt_tokens for request in first.served]
    lengths = " to ".join(map(str, sorted({min(prompts), max(prompts)})))
    console.print(
        Text.assemble(
            (result.model.name, "bold"),
            f": {len(prompts)} {'request' if len(prompts) == 1 else 'requests'} of {lengths} tokens, "
            f"{first.tokens / len(prompts):,.1f} new ones on average; "
            f"{computed_by(result.model)}",
        )
    )
    if result.model.device.why:
        console.print(Text(result.model.device.why, style="dim"))
    console.print(
        f"Alone, a request takes {seconds_text(result.alone_seconds)}: one by one can serve "
        f"{figure(result.capacity)} a second."
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
        console.print(Text(title(load_, result), style="bold"))
        console.print(totals(load_))
        console.print(times(load_))
        console.print()
    for sentence in sense(result):
        console.print(sentence)


def title(load_: Load, result: Experiment) -> str:
    """Return what a load is."""
    if load_.rate is None:
        return "The requests as they come"
    multiple = load_.rate / result.capacity
    return f"{figure(load_.rate)} requests a second: {figure(multiple)} x what one by one can serve"


def figure(number):
    """Return a number with three digits, and with more where it is above 1,000."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def totals(load_: Load) -> Table:
    """Return what each policy got done, and what it held for that."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=0)
    table.add_column("", width=22)
    for name in load_.services:
        table.add_column(NAMES[name], justify="right", width=19)
    for label, figure in (
        ("tokens per second", lambda service: f"{service.throughput:,.0f}"),
        ("rows in a pass, mean", lambda service: f"{service.mean_batch:.1f}"),
        ("passes", lambda service: f"{len(service.passes):,}"),
        ("MiB moved per token", lambda service: f"{service.bytes_per_token / 2**20:,.1f}"),
        ("MFLOP per token", lambda service: f"{service.flops_per_token / 1e6:,.1f}"),
        ("cache set aside, KiB", lambda service: f"{service.reserved_bytes / 1024:,.0f}"),
        ("of it used at most", lambda service: f"{service.peak_bytes / 1024:,.0f}"),
    ):
        table.add_row(label, *map(figure, load_.services.values()))
    return table


def times(load_: Load) -> Table:
    """Return the percentiles of each time under each policy, in a unit that leaves them short."""
    services = load_.services.values()
    longest = max(request.latency for service in services for request in service.served)
    factor, unit = (1000, "ms") if longest < 99 else (1, "s")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=0)
    table.add_column(f"times in {unit}", width=22)
    for _ in services:
        for percent, width in zip(PERCENTILES, (7, 6, 6), strict=True):
            table.add_column(f"p{percent}", justify="right", width=width)
    for measure in MEASURES:
        values = [s.percentile(measure, percent) for s in services for percent in PERCENTILES]
        cells = ["-" if value is None else short(factor * value) for value in values]
        table.add_row(LABELS[measure], *cells)
    return table


def short(number):
    """Return a number with one decimal where there is room for it."""
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def sense(result: Experiment):
    """Yield in sentences what sharing passes buys, what it costs and where it turns."""
    light, heavy = result.loads[0], result.loads[-1]
    several = light is not heavy

    def half(load_, policy, measure):
        return load_.services[policy].percentile(measure, 50)

    def spread(measure):
        values = [half(heavy, policy, measure) for policy in heavy.services]
        return max(values) - min(values)

    if spread("queue") > spread("prefill"):
        yield Text.assemble(
            ("Look first ", "bold"),
            "at the time to first token: the wait in the queue is what sets the policies apart.",
        )
    if not {"one", "dynamic"} <= heavy.services.keys():
        return
    gain = f"{heavy.gain('dynamic'):.1f}"
    shared = max(each.rows for each in heavy.services["dynamic"].passes)
    yield Text.assemble(
        (f"Dynamic buys {'' if float(gain) > 1 else 'nothing: '}", "bold"),
        f"{gain} x the tokens per second of one by one"
        f"{' under the heaviest load' if several else ''}; rows in a pass: {shared} at most.",
    )
    costs = []
    for load_, measure, name in (
        (heavy, "per_token", f"each further token{' there' if several else ''}"),
        (light, "first_token", f"the first token{' under the lightest load' if several else ''}"),
    ):
        if (load_.ratio(measure, "dynamic") or 0) >= 1.05:  # a smaller difference may be chance
            ours, theirs = (seconds_text(half(load_, p, measure)) for p in ("dynamic", "one"))
            costs.append(f"{name} takes {ours} instead of {theirs}")
    if costs:
        yield Text.assemble(("It costs: ", "bold"), "; ".join(costs), " (p50).")
    if several:
        turn = result.turns_at("dynamic")
        sooner = sum(load_.ratio("first_token", "dynamic") < 1 for load_ in result.loads)
        yield Text.assemble(
            ("It turns ", "bold"),
            f"at about {figure(turn)} requests a second. Below, waiting for others costs more than "
            "it saves; above, the queue one by one is worse."
            if turn
            else "at no one rate: first tokens come sooner than one by one under "
            f"{sooner} of {len(result.loads)} loads (p50).",
        )
    if "continuous" in heavy.services:
        yield Text.assemble(
            ("Continuous ", "bold"),
            f"makes {heavy.gain('continuous'):.1f} x the tokens per second of one by one"
            f"{' there' if several else ''}, and a free row is taken at once: the first token takes "
            f"{seconds_text(half(light, 'continuous', 'first_token'))}"
            f"{' under the lightest load' if several else ''} (p50).",
        )
