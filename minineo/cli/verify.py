"""`minineo verify`: every layer against transformers."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..study.verify import PATHS, Parity, Verification, verify
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    app,
    check_writable,
    progress_bar,
    show,
)
from .text import computed_by


@app.command("verify", epilog="Example: minineo verify --model gpt-neo-125m --json parity.json")
def verify_command(
    model: ModelOption = "tiny",
    length: Annotated[
        list[int] | None,
        typer.Option(help="A length to try, in tokens; may be given several times."),
    ] = None,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
):
    """Run transformers on the same weights and hold every layer against it, on both paths.

    Exit status 1 means that a value differs by more than rounding.
    """
    check_writable(json_file)
    with progress_bar("verify", "passes") as progress:
        verification = verify(model, device=device, lengths=length or None, progress=progress)
    show(print_verification, verification, json_file)
    return 0 if verification.passed else 1


def print_verification(verification: Verification, console: Console):
    """Print what was run, a row for every layer, and the verdict."""
    model, versions = verification.model, verification.versions
    console.print(
        Text.assemble(
            (model.name, "bold"),
            f" against transformers {versions['transformers']}, torch {versions['torch']}; "
            f"{computed_by(model)}",
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
