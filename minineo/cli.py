"""The command `minineo`: parse, call, print."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from . import __version__
from .checkpoints import load
from .study import Comparison, compare
from .transformer import InputError

PROMPT = (
    "Once upon a time, there was a little girl named Lily. She had a small red ball that she "
    "loved very much. One day, Lily and her mom went to the park. Lily wanted to play with her "
    "ball, but"
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A GPT-Neo in NumPy and CuPy: with and without a key-value cache, step by step.",
)


def main():
    """Run the command line and exit: 0 fine, 1 the check failed, 2 bad usage or input."""
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        status = fail(error.format_message())
    except (InputError, OSError, MemoryError) as error:
        status = fail(str(error) or "there is not enough memory")
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


def fail(message):
    """Print one line and return the exit status."""
    print(f"minineo: {' '.join(message.split())}", file=sys.stderr)
    return 2


def print_version(wanted: bool):
    """Print the version and stop."""
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, help="Show the version.")
    ] = False,
):
    """Take the options that stand before a command."""


@app.command("compare", epilog='Example: minineo compare "Once upon a time" --new-tokens 64')
def compare_command(
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")] = PROMPT,
    model: Annotated[
        str, typer.Option(help="'tiny', the embedded model, or a model's folder.")
    ] = "tiny",
    new_tokens: Annotated[int, typer.Option(help="Number of steps, 1 or more.")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        Literal["float32", "float64"], typer.Option(help="float64 tells rounding from a fault.")
    ] = "float32",
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all numbers to a file, or to -.")
    ] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", help="Draw the times to a file (png, svg, pdf).")
    ] = None,
):
    """Run a prompt down the cached and the naive path, and hold them against each other.

    Exit status 1 means that the paths differ by more than rounding.
    """
    check_writable(json_file)
    check_picture(plot_file)
    loaded = load(model, device=device, dtype=dtype)
    with progress_bar("both paths") as progress:
        comparison = compare(loaded, prompt, max_new_tokens=new_tokens, progress=progress)
    if json_file != "-":
        print_comparison(comparison, Console(highlight=False))
    if json_file is not None:
        write_json(comparison.to_json(), json_file)
    if plot_file is not None:
        from .study.figures import plot_comparison

        write_picture(plot_comparison(comparison), plot_file)
    return 0 if comparison.agree else 1


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
        ("step", 4), ("phase", 7), ("token", 11), ("keys\nseen", 4),
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
    return Text(text if len(text) <= 11 else f"{text[:10]}…")


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
    return Text.assemble(
        ("The paths differ, ", "bold red"),
        f"first at {comparison.first_divergence}. {comparison.same_tokens} of {steps} tokens are "
        f"equal; logits differ by {difference:.1e} at most, and rounding explains "
        f"{comparison.tolerance:.0e}.",
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
    return Text.assemble((prompt, "dim"), (whole[len(prompt) :], "bold"))


@contextlib.contextmanager
def progress_bar(label):
    """Show a bar on the standard error while a terminal is there to see it."""
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def check_writable(file):
    """Refuse a file that cannot be written, before any work is done."""
    if file is None or file == "-":
        return
    path = Path(file).expanduser()
    if path.is_dir():
        raise InputError(f"{file} is a folder; give a file's name")
    if not path.parent.is_dir():
        raise InputError(
            f"{path.parent} does not exist; make it first, or write {path.name} elsewhere"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from None
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"cannot write {file}: it is read-only")


def check_picture(file):
    """Refuse a picture's file that cannot be written, or of a kind that cannot be drawn."""
    if file is None:
        return
    if Path(file).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"cannot draw {file}: end its name in .png, .svg or .pdf")
    check_writable(file)


@contextlib.contextmanager
def whole_file(file):
    """Yield a path beside `file` that takes its place once all is written."""
    path = Path(file).expanduser()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".minineo-") as folder:
        draft = Path(folder) / path.name
        yield draft
        os.replace(draft, path)


def write_json(data, file):
    """Write data as JSON to a file, or to the standard output for "-"."""
    text = json.dumps(data, indent=1, allow_nan=False)
    if file == "-":
        print(text)
    else:
        with whole_file(file) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def write_picture(figure, file):
    """Write a figure to a file whose name tells its kind."""
    with whole_file(file) as draft:
        figure.savefig(draft)


if __name__ == "__main__":
    main()
