"""Results as text for a terminal, 80 columns wide."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .checkpoints import KnownModel
from .study import hardware
from .study.bench import Benchmark
from .study.compare import Comparison
from .study.verify import PATHS, Parity, Verification


def print_comparison(comparison: Comparison, console: Console):
    """Print the ledger, the verdict and the text."""
    model, config = comparison.model, comparison.model.config
    local = [window for window in config.windows if window < config.context]
    shape = (
        f": {config.n_layers} layers of width {config.width}, {config.n_heads} heads, context "
        f"{config.context}{f', local window {local[0]}' if local else ''}; "
        f"{model.device.name}, {model.dtype}"
    )
    console.print(Text.assemble((model.name, "bold"), shape))
    if model.device.why:
        console.print(Text(model.device.why, style="dim"))
    console.print()
    console.print(ledger(comparison))
    console.print()
    console.print(verdict(comparison))
    console.print()
    if comparison.pairs:
        console.print(times(comparison))
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
        wrong = not pair.difference <= comparison.tolerance
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


def token_text(model, token):
    """Return a token as a short piece of quoted text."""
    if model.tokenizer is None:
        return Text(str(token))
    text = repr(model.decode([token]))
    return Text(text if len(text) <= 9 else f"{text[:8]}…")


def milliseconds(seconds):
    """Return a time in milliseconds, with two decimals where they mean something."""
    return f"{1000 * seconds:.2f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def verdict(comparison: Comparison) -> Text:
    """Return the verdict in a sentence."""
    steps, difference = len(comparison.pairs), comparison.max_difference
    if comparison.agree:
        return Text.assemble(
            ("Both paths say the same: ", "bold green"),
            f"{comparison.same_tokens} of {steps} tokens equal, logits differ by {difference:.1e} "
            f"at most, which is rounding (up to {comparison.tolerance:.0e} is).",
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


def printable(text):
    """Return a text without the characters that steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


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
    console.print(
        "Medians of "
        f"{benchmark.rounds} process{'es' if benchmark.rounds > 1 else ''} each, after a warm-up. "
        "MBU and MFU are shares of the limits above. A ratio below 1 is in minineo's favour."
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


def mebibytes(count):
    """Return a number of bytes in MiB."""
    return "unknown" if count is None else f"{count / 2**20:,.0f} MiB"


def print_verification(verification: Verification, console: Console):
    """Print what was run, a row for every layer, and the verdict."""
    model, versions = verification.model, verification.versions
    console.print(
        Text.assemble(
            (model.name, "bold"),
            f" against transformers {versions['transformers']}, torch {versions['torch']}; "
            f"{model.device.name}, {model.dtype}",
        )
    )
    lengths = ", ".join(map(str, verification.lengths))
    console.print(f"Tokens: {lengths}; each fed {', '.join(PATHS)}.")
    console.print()
    console.print(parity_table(verification))
    console.print()
    console.print(parity_verdict(verification))


def parity_table(verification: Verification) -> Table:
    """Return a table of differences with a row for every layer."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("pattern\ndiffers", "\nallowed", "residual\ndiffers", "\nallowed"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    table.add_column("nearest to what is allowed\npath, position of length", no_wrap=True)
    rows: dict[str, list[Parity]] = {}
    for parity in verification.values:
        label = parity.value if parity.layer is None else f"layer {parity.layer}"
        rows.setdefault(label, []).append(parity)
    for label, parities in rows.items():
        cells = [cell for parity in parities for cell in parity_cells(parity)]
        worst = next((p for p in parities if not p.agrees), None) or max(
            parities, key=lambda parity: parity.difference / (parity.tolerance or 1)
        )
        place = f"{worst.path}, {worst.position} of {worst.length}" if worst.difference else "equal"
        table.add_row(label, *[""] * (4 - len(cells)), *cells, place)
    return table


def parity_cells(parity: Parity) -> tuple[Text, Text]:
    """Return a difference and what is allowed."""
    style = "" if parity.agrees else "bold red"
    return Text(f"{parity.difference:.1e}", style), Text(f"{parity.tolerance:.1e}", "dim")


def parity_verdict(verification: Verification) -> Text:
    """Return the verdict in a sentence."""
    count, logits = len(verification.values), verification.values[-1]
    first = verification.first_difference
    if first is None:
        return Text.assemble(
            ("minineo says what transformers says: ", "bold green"),
            f"{count} of {count} values agree at every position, on both paths; logits differ by "
            f"{logits.difference:.1e} at most, which is rounding (up to {logits.tolerance:.0e} is).",
        )
    agreeing = sum(parity.agrees for parity in verification.values)
    return Text.assemble(
        ("minineo does not say what transformers says, ", "bold red"),
        f"first in {first}: it differs by {first.difference:.1e}, and rounding explains "
        f"{first.tolerance:.0e}. {agreeing} of {count} values agree.",
    )


def model_table(models: list[KnownModel]) -> Table:
    """Return a table with a row for every model."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("float32", justify="right")
    table.add_column("where")
    for model in models:
        here = model.place in ("embedded", "here")
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:,.1f} M",
            f"{model.float32_bytes / 1e6:,.0f} MB",
            model.place if model.repo is None else f"{model.place}: {model.repo}",
            style=None if here else "dim",
        )
    return table
