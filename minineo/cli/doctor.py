"""`minineo doctor`: what works on this machine, and how to mend the rest."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..study.doctor import Finding, examine, healthy, summary, to_json
from .app import JsonOption, Screen, app, check_writable, write_json
from .text import printable

TITLES = {
    "CPU": "The CPU path",
    "extras": "What some commands need",
    "GPU": "The GPU path, which needs all of these",
}
STYLES = {"ok": "green", "missing": "yellow", "wrong": "bold red"}
NAME_WIDTH = 15


@app.command("doctor", epilog="Example: minineo doctor --json doctor.json")
def doctor_command(
    json_file: JsonOption = None,
):
    """Say what works on this machine, and how to mend the rest.

    Exit status 1 means that something is broken. What is missing is no failure.
    """
    check_writable(json_file)
    findings = examine()
    if json_file != "-":
        print_findings(findings, Screen(highlight=False))
    if json_file is not None:
        write_json(to_json(findings), json_file)
    return 0 if healthy(findings) else 1


def print_findings(findings: list[Finding], console: Console):
    """Print what was found, part by part, what to do about it, and what works."""
    for part, title in TITLES.items():
        console.print(Text(title, style="bold"))
        console.print(table([finding for finding in findings if finding.part == part]))
        console.print()
    console.print(Text(summary(findings), style="bold"))


def table(findings: list[Finding]) -> Table:
    """Return a row for every finding, and below it what to do about it."""
    rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    rows.add_column("", min_width=NAME_WIDTH, no_wrap=True)
    rows.add_column("", min_width=max(map(len, STYLES)), no_wrap=True)
    rows.add_column("", overflow="fold")
    for finding in findings:
        state = Text(finding.state, STYLES[finding.state])
        rows.add_row(f"  {finding.name}", state, Text(printable(finding.found)))
        if finding.cure:
            rows.add_row("", "", Text(f"-> {finding.cure}", "bold"))
    return rows
