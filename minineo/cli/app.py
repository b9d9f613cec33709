"""What all commands share: the way in and out, options, errors, files."""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import __version__
from ..checkpoints import load
from ..transformer import InputError

ModelOption = Annotated[
    str, typer.Option(help="'tiny', a public model's name, owner/name on the hub, or a folder.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:1 for GPU 1.")]
NoKernelsOption = Annotated[
    bool,
    typer.Option("--no-kernels", help="On a GPU, run the plain operations, not fused kernels."),
]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write all numbers to a file, or to -.")
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", help="Draw a picture to a file (png, svg, pdf).")
]


COLUMNS = 80  # that every table fits into


class ReaderGoneError(Exception):
    """Whoever read the output, such as `head`, has seen enough."""


class Screen(Console):
    """A console that leaves a broken pipe to `main`, and is never narrower than a table.

    What a narrow terminal wraps can still be read; what is cut to its width is lost.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.width = max(self.width, COLUMNS)

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


def load_with(model, device, dtype, no_kernels):
    """Load a model for a command that can leave out the kernels of a GPU."""
    loaded = load(model, device=device, dtype=dtype, use_kernels=not no_kernels)
    if no_kernels and loaded.device.cupy is None:
        complain(f"--no-kernels changes nothing on {loaded.device.name}: it has none")
    return loaded


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


def check_outputs(json_file, plot_file):
    """Refuse files that cannot be written, or are one and the same, before any work is done."""
    check_writable(json_file)
    check_picture(plot_file)
    if json_file and plot_file and real_path(json_file) == real_path(plot_file):
        raise InputError(f"--json and --plot both name {plot_file}; give two files")


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


def show(print_result, result, json_file):
    """Write a result's numbers and, unless these go to the standard output, print it for people."""
    if json_file is not None:  # first, as whoever reads the output may leave
        write_json(result.to_json(), json_file)
    if json_file != "-":
        print_result(result, Screen(highlight=False))


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
