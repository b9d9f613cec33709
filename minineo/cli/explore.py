"""`minineo explore`: the attention flow as one page that opens from disk."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..checkpoints import load
from ..study.explore import Exploration, explore
from ..study.faults import find_fault
from ..study.lockstep import Place
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    Screen,
    app,
    check_writable,
    progress_bar,
    real_path,
    whole_file,
    write_json,
)
from .compare import PROMPT

ENDINGS = (".html", ".htm")


@app.command("explore", epilog='Example: minineo explore "Once upon a time" --out explore.html')
def explore_command(
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")] = PROMPT,
    out: Annotated[str, typer.Option(help="The page's file.")] = "explore.html",
    model: ModelOption = "tiny",
    new_tokens: Annotated[int, typer.Option(help="Number of tokens, 1 or more: a step each.")] = 32,
    device: DeviceOption = "auto",
    fault: Annotated[
        str | None,
        typer.Option(help="Put a real bug into the cached path; `minineo faults` lists them."),
    ] = None,
    json_file: JsonOption = None,
):
    """Write a page that walks through (Q × Kᵀ) × V of both paths, step by step.

    It is one file, needs no network, and shows numbers of this run alone.

    Exit status 1 means that the paths differ by more than rounding.
    """
    check_page(out)
    check_writable(json_file)
    if json_file and real_path(json_file) == real_path(out):
        raise InputError(f"--json and --out both name {out}; give two files")
    if fault is not None:
        find_fault(fault)
    loaded = load(model, device=device)
    with progress_bar("both paths", "steps") as progress:
        exploration = explore(
            loaded, prompt, max_new_tokens=new_tokens, fault=fault, progress=progress
        )
    with whole_file(out) as draft:
        exploration.save(draft)
    if json_file is not None:
        write_json(exploration.to_json(), json_file)
    if json_file != "-":
        print_exploration(exploration, out, Screen(highlight=False))
    return 0 if exploration.agree else 1


def check_page(file):
    """Refuse a page's file that cannot be written, or does not say by its name that it is one."""
    if Path(file).suffix.lower() not in ENDINGS:
        raise InputError(f"cannot write a page to {file}: end its name in .html")
    check_writable(file)


def print_exploration(exploration: Exploration, file, console: Console):
    """Print what was found, and where the page is."""
    facts = exploration.facts
    steps, fault = facts["steps"], facts["fault"]
    if fault is not None:
        console.print(Text.assemble((f"{fault['fault']}: ", "bold"), fault["what"]))
    if exploration.agree:
        console.print(
            Text.assemble(
                ("Both paths say the same", "bold green"),
                f" in {len(steps)} steps: {facts['values_compared']:,} values differ by "
                f"{facts['largest_difference']:.0e} of their size at most.",
            )
        )
        if fault is not None:
            needed = fault["new_tokens_needed"]
            shows = f"; it would show with --new-tokens {needed}" if needed else ""
            console.print(f"The fault stays hidden in this text{shows}.")
    else:
        found = facts["found"]
        place = Place(found["step"], found["layer"], found["value"])
        console.print(Text.assemble(("The paths differ", "bold red"), f", first at {place}."))
    size = real_path(file).stat().st_size / 1e6
    console.print(Text(f"{file}, {size:.1f} MB: open it in a browser."), soft_wrap=True)
