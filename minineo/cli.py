"""The command `minineo`: parse, call, print."""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from . import __version__
from .checkpoints import known_models, load
from .study import compare
from .study.bench import bench
from .study.verify import verify
from .tables import model_table, print_benchmark, print_comparison, print_verification
from .transformer import InputError

PROMPT = (
    "Once upon a time, there was a little girl named Lily. She had a small red ball that she "
    "loved very much. One day, Lily and her mom went to the park. Lily wanted to play with her "
    "ball, but"
)

MODEL_HELP = "'tiny', a public model's name, owner/name on the hub, or a model's folder."


class ReaderGoneError(Exception):
    """Whoever read the output, such as `head`, has seen enough."""


class Screen(Console):
    """A console that leaves a broken pipe to `main`."""

    def on_broken_pipe(self):
        """Stop printing."""
        raise ReaderGoneError


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A GPT-Neo in NumPy and CuPy: with and without a key-value cache, step by step.",
)


def main():
    """Run the command line and exit: 0 fine, 1 the check failed, 2 bad usage or input."""
    warnings.showwarning = lambda message, *_: complain(str(message))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal can show every character
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False)
    except ReaderGoneError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except typer.TyperException as error:
        status = fail(error.format_message()) if error.format_message() else 2  # help was shown
    except (InputError, OSError, MemoryError) as error:
        status = fail(str(error) or "there is not enough memory")
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


def fail(message):
    """Print one line and return the exit status."""
    complain(message)
    return 2


def complain(message):
    """Print one line to the standard error."""
    print(f"minineo: {' '.join(message.split())}", file=sys.stderr)


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
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
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
    if json_file and plot_file and real_path(json_file) == real_path(plot_file):
        raise InputError(f"--json and --plot both name {plot_file}; give two files")
    loaded = load(model, device=device, dtype=dtype)
    with progress_bar("both paths", "steps") as progress:
        comparison = compare(loaded, prompt, max_new_tokens=new_tokens, progress=progress)
    if json_file != "-":
        print_comparison(comparison, Screen(highlight=False))
    if json_file is not None:
        write_json(comparison.to_json(), json_file)
    if plot_file is not None:
        from .study.figures import plot_comparison

        write_picture(plot_comparison(comparison), plot_file)
    return 0 if comparison.agree else 1


@app.command("bench", epilog="Example: minineo bench --shape 125m --against transformers")
def bench_command(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
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
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all numbers to a file, or to -.")
    ] = None,
):
    """Measure this machine's prefill and decode against its own limits, and transformers.

    Give it a machine that does nothing else: it warns when others keep cores busy.
    """
    check_writable(json_file)

    with progress_bar("bench", "measures") as progress:
        benchmark = bench(
            model, shape=shape, against=against, rounds=rounds, progress=progress, warn=complain
        )
    if json_file != "-":
        print_benchmark(benchmark, Screen(highlight=False))
    if json_file is not None:
        write_json(benchmark.to_json(), json_file)
    return 0


@app.command("verify", epilog="Example: minineo verify --model gpt-neo-125m --json parity.json")
def verify_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
    length: Annotated[
        list[int] | None,
        typer.Option(help="A length to try, in tokens; may be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where minineo runs.")] = "auto",
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all numbers to a file, or to -.")
    ] = None,
):
    """Run transformers on the same weights and hold every layer against it, on both paths.

    Exit status 1 means that a value differs by more than rounding.
    """
    check_writable(json_file)
    with progress_bar("verify", "passes") as progress:
        verification = verify(model, device=device, lengths=length or None, progress=progress)
    if json_file != "-":
        print_verification(verification, Screen(highlight=False))
    if json_file is not None:
        write_json(verification.to_json(), json_file)
    return 0 if verification.passed else 1


@app.command("models", epilog="Example: minineo models --json -")
def models_command(
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write all numbers to a file, or to -.")
    ] = None,
):
    """List the models that can be loaded by name, and which of them are on this machine.

    A folder with config.json and weights, or owner/name of any GPT-Neo on the hub, does as well.
    """
    check_writable(json_file)
    models = known_models()
    if json_file != "-":
        Screen(highlight=False).print(model_table(models))
    if json_file is not None:
        write_json({"schema": 1, "models": [asdict(model) for model in models]}, json_file)
    return 0


@contextlib.contextmanager
def progress_bar(label, unit):
    """Show a bar on the standard error while a terminal is there to see it.

    It is drawn between the steps: a thread of its own would take time from those that are timed.
    """
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    options = {"transient": True, "auto_refresh": False, "disable": not console.is_terminal}
    with Progress(*columns, console=console, **options) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


def real_path(file):
    """Return the path of a file, with `~` and links followed."""
    return Path(os.path.realpath(os.path.expanduser(file)))


def check_writable(file):
    """Refuse a file that cannot be written, before any work is done."""
    if file is None or file == "-":
        return
    path = real_path(file)
    if path.is_dir():
        raise InputError(f"{file} is a folder; give a file's name")
    if path.exists() and not path.is_file():
        raise InputError(f"{file} is a device or a pipe; give a file's name, or - to print")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} does not exist; make it first, or write elsewhere")
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
    path = real_path(file)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".minineo-") as folder:
        draft = Path(folder) / path.name
        yield draft
        if path.exists():
            shutil.copymode(path, draft)
        os.replace(draft, path)


def write_json(data, file):
    """Write data as JSON to a file, or to the standard output for "-"."""
    text = json.dumps(data, indent=1, allow_nan=False)
    if file == "-":
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise ReaderGoneError from None
    else:
        with whole_file(file) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def write_picture(figure, file):
    """Write a figure to a file whose name tells its kind."""
    with whole_file(file) as draft:
        figure.savefig(draft)


if __name__ == "__main__":
    main()
