"""`minineo plan`: what a model needs and how fast it can be, without its weights."""

import math
from dataclasses import replace
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..study.gpus import GPUS, THIS
from ..study.plan import Plan, Times, bytes_text, plan, seconds_text
from .app import (
    JsonOption,
    ModelOption,
    PlotOption,
    app,
    check_outputs,
    show,
    write_picture,
)

BAR = 60  # characters
RESERVE = 10**9  # bytes set aside for what is not counted: a round figure, not a measured one


@app.command(
    "plan",
    epilog="Example: minineo plan --model gpt-neo-2.7b --gpu T4 --prefill-ms 50 --decode-ms 36",
)
def plan_command(
    model: ModelOption = "tiny",
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(GPUS)}; or '{THIS}', the default: this machine's, measured."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float16", "float32", "float64"] | None,
        typer.Option(help="By default float32 on this machine and float16 on others."),
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of the prompt, 1 or more.")] = None,
    new: Annotated[int | None, typer.Option(help="New tokens, 1 or more.")] = None,
    batch: Annotated[int, typer.Option(help="Number of rows, 1 or more.")] = 1,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of the peaks to expect, such as 0.5.")
    ] = None,
    prefill_ms: Annotated[
        float | None, typer.Option(help="The prefill as measured, in milliseconds.")
    ] = None,
    decode_ms: Annotated[
        float | None, typer.Option(help="One decode step as measured, in milliseconds.")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="Own figure of memory, in GB.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Own bandwidth, in GB/s.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Own peak, in TFLOP/s.")] = None,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
):
    """Say what a model needs, and how fast it can be at best, from its shape alone.

    Peaks of GPUs are published dense ones in decimal units; put your own in place.
    A model that does not fit is an answer too: exit status 0.
    """
    check_outputs(json_file, plot_file)
    result = plan(
        model,
        gpu=gpu,
        dtype=dtype,
        prompt=prompt,
        new=new,
        batch=batch,
        efficiency=efficiency,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        memory=memory,
        bandwidth=bandwidth,
        tflops=tflops,
    )
    if plot_file is not None:
        from ..study.figures import plot_cache_growth

        write_picture(plot_cache_growth(result), plot_file)
    show(print_plan, result, json_file)
    return 0


def print_plan(result: Plan, console: Console):
    """Print what fills the memory, the floors as formulas, and what was measured beside them."""
    config, limits = result.config, result.processor
    local = [window for window in config.windows if window < config.context]
    console.print(
        Text.assemble(
            (result.name, "bold"),
            f": {config.n_layers} layers of width {config.width}, {config.n_heads} heads, context "
            f"{config.context}{f', local window {local[0]}' if local else ''}; "
            f"{result.parameters:,} parameters, {result.dtype}",
        )
    )
    console.print(
        Text.assemble(
            (limits.name, "bold"),
            f": {bytes_text(limits.memory_bytes)}, {bytes_text(limits.bytes_per_second)}/s, "
            f"{rate_text(limits.flops_per_second)} ({limits.source})",
        )
    )
    console.print()
    rows = "1 row" if result.batch == 1 else f"{result.batch:,} rows"
    console.print(
        Text.assemble(
            ("Memory ", "bold"),
            f"for {rows} of prompt {result.prompt:,} + new {result.new:,}: "
            f"{bytes_text(result.needed_bytes)}",
        )
    )
    used = result.prompt + result.new - 1
    console.print(
        f"Room for {result.length:,} tokens{'' if result.batch == 1 else ' a row'}; the last new "
        f"one is never fed, so {used:,} {'is' if used == 1 else 'are'} used."
    )
    console.print(bar(result), markup=False)
    console.print(memory_table(result))
    console.print(capacity(result))
    if limits.name in GPUS and result.max_batch:
        console.print(with_reserve(result))
    console.print()
    console.print(
        Text.assemble(
            ("Floors: ", "bold"), "nothing is faster at these rates; the longer of two lines counts"
        )
    )
    for line in floors(result):
        console.print(line)
    console.print()
    console.print(times_table(result))
    for line in explained(result):
        console.print(line)


def bar(result: Plan) -> str:
    """Return what fills the memory, as a line of letters; what does not fit runs past its end."""
    limit = result.processor.memory_bytes
    whole = max(limit, result.needed_bytes)
    ends, filled = "", 0
    for mark, size in (
        ("W", result.weight_bytes),
        ("C", result.cache_bytes),
        ("A", result.activation_bytes + result.logits_bytes),
    ):
        filled += size
        ends += mark * (round(BAR * filled / whole) - len(ends))
    memory = round(BAR * limit / whole)
    ends = ends.ljust(memory, ".")
    return f"[{ends[:memory]}]{ends[memory:]}"


def memory_table(result: Plan) -> Table:
    """Return what each part of the memory is and where its size comes from."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column("", style="bold")
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    tokens = f"room for {result.batch * result.length:,} tokens"
    free = result.processor.memory_bytes - result.needed_bytes
    for row in (
        (
            "W",
            "weights",
            bytes_text(result.weight_bytes),
            f"exact: {result.parameters:,} x {result.itemsize} bytes",
        ),
        (
            "C",
            "cache",
            bytes_text(result.cache_bytes),
            f"exact: {tokens} x {result.cache_bytes_per_token:,} bytes",
        ),
        (
            "",
            "",
            bytes_text(result.cache_bytes_windowed),
            "if local layers kept no more than their window",
        ),
        (
            "A",
            "activations",
            bytes_text(result.activation_bytes),
            "estimated: the widest moment of the prefill",
        ),
        (
            "",
            "logits",
            bytes_text(result.logits_bytes),
            f"exact: of one position, {result.config.vocab:,} x {result.itemsize} bytes a row",
        ),
        (".", "free", bytes_text(free), "")
        if free >= 0
        else ("", "missing", bytes_text(-free), ""),
    ):
        table.add_row(*row)
    return table


def capacity(result: Plan) -> Text:
    """Return whether it fits, and how many rows and tokens would."""
    limit = bytes_text(result.processor.memory_bytes)
    rest = result.activation_bytes + result.logits_bytes
    verdict = [("It fits. ", "bold green")]
    if not result.fits:
        verdict = [
            ("It does not fit: ", "bold red"),
            (
                f"{bytes_text(result.weight_bytes)} + {bytes_text(result.cache_bytes)} + "
                f"{bytes_text(rest)} = {bytes_text(result.needed_bytes)} are more than "
                f"{limit}. ",
                "",
            ),
        ]
    most, longest = result.max_batch, result.max_length
    if most == longest == 0:
        return Text.assemble(*verdict, "There is no room for any row.")
    each = "a row" if result.batch == 1 else f"each of {result.batch:,} rows"
    context = ", which is the context" if longest == result.config.context else ""
    return Text.assemble(
        *verdict,
        f"There is room for {rows_text(most)} of {result.length:,} tokens, or for "
        f"{f'{longest:,}' if longest else 'no'} tokens in {each}{context}.",
    )


def with_reserve(result: Plan) -> str:
    """Return what else a GPU's memory holds, and how many rows a reserve for it leaves."""
    memory = result.processor.memory_bytes - RESERVE
    most = replace(result, processor=replace(result.processor, memory_bytes=memory)).max_batch
    return (
        "The CUDA context, libraries and the allocator are not counted: with "
        f"{bytes_text(RESERVE)} set aside for them, there is room for {rows_text(most)}."
    )


def rows_text(most) -> str:
    """Return a number of rows, or that there is no row."""
    return f"{f'{most:,}' if most else 'no'} row{'' if most == 1 else 's'}"


def floors(result: Plan):
    """Yield the floors as formulas with their numbers."""
    limits, prefill, decode = result.processor, result.prefill_floor, result.decode_floor
    peak, bandwidth = rate_text(limits.flops_per_second), bytes_text(limits.bytes_per_second) + "/s"
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    for name, floor in (("prefill", prefill), ("decode", decode)):
        weights, cache = bytes_text(floor.weight_bytes), bytes_text(floor.cache_bytes)
        for bound, label, formula, seconds in (
            (
                "arithmetic",
                name,
                f"{operations_text(floor.flops)} / {peak}",
                floor.arithmetic_seconds,
            ),
            (
                "memory",
                "",
                f"({weights} weights + {cache} cache) / {bandwidth}",
                floor.memory_seconds,
            ),
        ):
            limit = bound == floor.bound
            mark, style = ("the limit", None) if limit else ("", "dim")
            table.add_row(label, formula, seconds_text(seconds), mark, style=style)
    yield table
    alone = decode.weight_bytes / limits.bytes_per_second
    full = result.decode_floor_at(result.mean_depth, windowed=False).memory_seconds
    sees = f"its query sees {result.mean_depth + 1:,} tokens"
    steps = len(result.decode_depths)
    if not steps:
        which = (
            f"No decode step is needed: the prefill yields the one new token. In this one {sees}."
        )
    elif steps == 1:
        which = f"There is one decode step: {sees}."
    else:
        which = f"This decode step is one in the middle: {sees}. The floor below is the mean "
        which += f"of all {steps:,}."
    yield (
        f"{which} Weights alone take {seconds_text(alone)}; reading all that the cache holds, in "
        f"local layers too, {seconds_text(full)}."
    )


def times_table(result: Plan) -> Table:
    """Return the floors, and beside them what was measured or is expected and the share reached."""
    floor, times, share = result.floor, result.measured or result.expected, result.efficiency
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("floor", justify="right", no_wrap=True)
    if times:
        table.add_column("measured" if result.measured else "expected", justify="right")
    table.add_column("")
    for label, name, note in (
        ("time to first token", "ttft_seconds", reached(result.prefill_floor, share, "prefill")),
        (
            "time per output token",
            "decode_seconds_per_token",
            reached(result.decode_floor, share, "decode"),
        ),
        ("total", "exact_total_seconds", f"prefill + {result.new - 1:,} x decode"),
        ("total by the usual formula", "total_seconds", f"prefill + {result.new:,} x decode"),
    ):
        cells = [seconds_text(getattr(each, name)) for each in (floor, times) if each]
        table.add_row(label, *cells, note)
    return table


def reached(floor, share, key) -> str:
    """Return which limit the floor comes from, and the share of it that is reached."""
    limit = "the arithmetic peak" if floor.bound == "arithmetic" else "the bandwidth"
    return f"{share[key]:.0%} of {limit}" if share else f"from {limit}"


def explained(result: Plan):
    """Yield the total by either formula in a line each, and what is wrong with the figures."""
    times = result.measured or result.expected or result.floor
    reasons = ("a decode step for every new token.", "the prefill yields the first token.")
    for label, formula, why in zip(("Usual", "Exact"), formulas(times), reasons, strict=True):
        yield Text.assemble((f"{label}: ", "bold"), f"{formula}: {why}")
    too_fast = [key for key, share in (result.efficiency or {}).items() if share > 1]
    if too_fast:
        yield Text(
            f"{' and '.join(too_fast).capitalize()} would be faster than the floor: this was "
            "another model, dtype, length or processor.",
            style="bold red",
        )


def rate_text(flops_per_second) -> str:
    """Return operations per second."""
    return operations_text(flops_per_second) + "/s"


def operations_text(flops) -> str:
    """Return a number of floating-point operations."""
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= size:
            return f"{flops / size:,.4g} {unit}"
    return f"{flops / 1e6:,.4g} MFLOP"


def formulas(times: Times) -> list[str]:
    """Return the usual and the exact total, with as few digits as make the sums come out."""
    size, unit = (1e3, "ms") if times.decode_seconds_per_token >= 1e-4 else (1e6, "µs")
    first, each = size * times.prefill_seconds, size * times.decode_seconds_per_token
    sums = {times.new: size * times.total_seconds, times.new - 1: size * times.exact_total_seconds}
    for digits in range(3, 17):
        a, b = (round(number, decimals(number, digits)) for number in (first, each))
        if all(number_text(a + steps * b) == number_text(total) for steps, total in sums.items()):
            break
    return [
        f"{number_text(first, digits)} + {steps:,} x {number_text(each, digits)} = "
        f"{number_text(total)} {unit}"
        for steps, total in sums.items()
    ]


def number_text(number, digits=4) -> str:
    """Return a number above 0 with so many digits, or all of those before the point."""
    text = f"{number:,.{decimals(number, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def decimals(number, digits) -> int:
    """Return how many digits behind the point belong to the first so many of a number above 0."""
    return max(0, digits - 1 - math.floor(math.log10(number)))
