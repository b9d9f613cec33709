"""`minineo faults` and `minineo compare --fault`: real bugs of caches, and what finds them."""

from collections.abc import Iterator
from math import isnan

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoints import Model, load
from ..study.faults import FAULTS, Fault, FaultRun, find_fault, run_fault
from ..study.lockstep import HIDDEN, ROUNDING, Divergence
from .app import (
    JsonOption,
    Screen,
    app,
    check_writable,
    progress_bar,
    show,
    write_json,
)
from .text import computed_by, printable


@app.command("faults", epilog="Example: minineo faults")
def faults_command(
    json_file: JsonOption = None,
):
    """List bugs that caches really had, with where they were and how they come to show.

    `minineo compare --fault NAME` puts one of them into the cached path and finds it.
    """
    check_writable(json_file)
    if json_file != "-":
        print_faults(Screen(highlight=False))
    if json_file is not None:
        faults = [fault.to_json() for fault in FAULTS.values()]
        write_json({"schema": 1, "faults": faults}, json_file)
    return 0


def print_faults(console: Console):
    """Print what every fault is, and how to put it in."""
    for fault in FAULTS.values():
        console.print(Text(fault.name, style="bold"))
        describe(fault, console)
        console.print()
    console.print("Put one into the cached path, and see it found: minineo compare --fault NAME")


def describe(fault: Fault, console: Console):
    """Print what goes wrong, in which scenario, and who had it."""
    table = labelled()
    table.add_row("what", fault.what)
    table.add_row("how", fault.scenario.what)
    if fault.needs:
        table.add_row("needs", fault.needs)
    console.print(table)
    console.print(Text(f"had by  {fault.reference}"), soft_wrap=True)  # never cut


def labelled() -> Table:
    """Return an empty table of two columns: labels, and what they stand for."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=6)
    table.add_column(overflow="fold")
    return table


def compare_with_fault(name, prompt, new_tokens, model, device, dtype, json_file) -> int:
    """Put a fault into the cached path, print what comes of it, and return the exit status."""
    find_fault(name)
    loaded = load(model, device=device, dtype=dtype)
    with progress_bar("both paths", "steps") as progress:
        run = run_fault(loaded, name, prompt, max_new_tokens=new_tokens, progress=progress)
    show(print_fault_run, run, json_file)
    return 0 if run.found is None and run.as_expected else 1


def print_fault_run(run: FaultRun, console: Console):
    """Print what is wrong, where it shows, and what becomes of the text."""
    model = run.model
    on = f" with the fault {run.fault.name}; {computed_by(model)}"
    console.print(Text.assemble((model.name, "bold"), on))
    if model.device.why:
        console.print(Text(model.device.why, style="dim"))
    describe(run.fault, console)
    console.print()
    for sentence in (*where(run), Text(), what_becomes_of_the_text(run), Text()):
        console.print(sentence)
    console.print(texts(run))


def where(run: FaultRun) -> Iterator[Text]:
    """Yield where the fault shows first, how far it differs there, and whether it must be there."""
    found, expected = run.found, run.expected
    if found is None:
        yield Text.assemble(
            ("Nothing differs: ", "bold green" if expected is None else "bold red"),
            f"{run.lockstep.values:,} values of all layers equal their twins but for rounding.",
        )
        if expected is None:
            yield Text(hidden(run))
    else:
        yield Text.assemble(("Found at ", "bold red"), (str(found), "bold"), ".")
        yield Text(f"{how_far(found, run.model.dtype)} {before(run)}".strip())
    if not run.as_expected:
        must = "not show in this text" if expected is None else f"show first at {expected}"
        yield Text(f"By what the fault does, it must {must}.", style="bold red")
    elif found is not None:
        yield Text("By what the fault does, it must show first just there.")


def hidden(run: FaultRun) -> str:
    """Return why a fault does not show, and what would show it."""
    why = f"This text leaves the fault hidden, as it must: it takes {run.fault.needs}"
    if run.needed is None:
        return f"{why}. No text has that in this model."
    tokens = len(run.prompt_ids) + run.needed - 1
    return f"{why}. It shows with --new-tokens {run.needed}, or in a prompt of {tokens} tokens."


def how_far(found: Divergence, dtype: str) -> str:
    """Return how far a value differs, and what rounding would do there."""
    difference, exact = found.difference, found.exact_difference
    if difference is None:
        return "" if "path" in found.value else "Its shapes or dtypes differ."
    if isnan(difference):
        return "It is not a number."
    if difference > HIDDEN:
        return "It is seen on one path and hidden on the other."
    by = f"It differs by {difference:.2g} of its size; rounding explains {ROUNDING[dtype]:.0e}."
    if dtype == "float64":
        return by
    return by + (
        " In float64 it is no number."
        if exact is None or isnan(exact)
        else f" In float64, where rounding all but vanishes, it differs by {exact:.2g}."
    )


def before(run: FaultRun) -> str:
    """Return how far the values before the first wrong one differ."""
    count, most = run.lockstep.values - 1, run.lockstep.largest_difference
    by = f"differ by {most:.0e} at most" if most else "do not differ at all"
    return f"The {count:,} values before it {by}." if count else ""


def what_becomes_of_the_text(run: FaultRun) -> Text:
    """Return whether the fault changes what is written."""
    wrong, count = run.first_wrong, len(run.right_ids)
    if wrong is not None:
        number = f"new token {wrong + 1} of {count}"
        if wrong == len(run.wrong_ids):
            return Text(f"It ruins the text: the cached path breaks down before {number}.")
        return Text(f"It ruins the text from {number} on, which stands between >> and <<.")
    same = f"It does not change these {count} new tokens"
    if run.found is None:
        return Text(f"{same}.")
    return Text(f"{same}: a fault may take its time. That is why values are compared, not texts.")


def texts(run: FaultRun) -> Table:
    """Return the prompt, and below each other the right text and the ruined one."""
    table = labelled()
    table.add_row("prompt", Text(spelled(run.model, run.prompt_ids), style="dim"))
    table.add_row("right", marked(run.model, run.right_ids, run.first_wrong))
    if run.first_wrong is not None:
        table.add_row("wrong", marked(run.model, run.wrong_ids, run.first_wrong))
    return table


def marked(model: Model, ids, place) -> Text:
    """Return the text of these ids, with the one at a place, if any, marked."""
    if place is None or place >= len(ids):
        return Text(spelled(model, ids).strip(" "))
    first, here, rest = (
        spelled(model, part) for part in (ids[:place], ids[place : place + 1], ids[place + 1 :])
    )
    return Text.assemble(first.lstrip(" "), (f">>{here}<<", "bold red"), rest)


def spelled(model: Model, ids) -> str:
    """Return ids as text that cannot steer a terminal, or as they are if there is no tokenizer."""
    if model.tokenizer is None:
        return " ".join(map(str, ids))
    return printable(model.decode(ids))
