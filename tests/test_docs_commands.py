"""Every command of README and docs, run as written, its output held against what is shown.

A page's fenced blocks say what is done with them:

- ``sh``: run, line after line, in a folder of the page's own, where ``.venv/bin`` is as well.
- ``python``: run, one block after the other, as one program for each page.
- ``text``: the output of the block right above it, or of the commands in it that follow a ``$``.
  A line ``...`` stands for whatever is left out there.

A block that cannot be run here says why, in a comment right above it, ``<!-- not run: why -->``: its
commands and options must exist all the same, as those in the text around must. A block of code out
of a file says so: ``<!-- quoted: minineo/transformer/attention.py -->``.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import typer

from minineo.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINKED = ("weights", "notebooks", "tests")  # what commands find beside them, as in a checkout

FENCE = re.compile(
    r"(?:^ *<!-- (not run|quoted): ([^>]+?) -->\n+)?"
    r"^( *)(`{3,}|~{3,})([^`\n]*)\n(.*?)^\3\4 *$",
    re.MULTILINE | re.DOTALL,
)
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:[^`\n]|\n(?!\n))+)\1(?!`)")
DIRECTIVE = re.compile(r"\{(?!code)")  # of Sphinx: a list of pages, a formula, a remark
SLOW = re.compile(  # commands and programs that take longer than a few seconds
    r"minineo (batch|bench|explore|verify)|--report|--new-tokens [1-9]\d\d\b"
    r"|-m minineo\.study|import .*(GPTNeo|torch|transformers)"
)


class Block(NamedTuple):
    """A fenced block, and what a comment above it says."""

    page: str
    line: int
    language: str
    text: str
    note: str | None
    detail: str | None
    follows: bool  # right after another block

    @property
    def name(self):
        return f"{self.page}:{self.line}"


def blocks_of(page):
    text, end = page.read_text(encoding="utf-8"), None
    for found in FENCE.finditer(text):
        note, detail, indent, _, language, body = found.groups()
        yield Block(
            page.relative_to(ROOT).as_posix(),
            text.count("\n", 0, found.start(4)) + 1,
            language.strip(),
            dedent(body) if indent else body,
            note,
            detail,
            end is not None and not text[end : found.start()].strip(),
        )
        end = found.end()


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]


class Run(NamedTuple):
    """A piece of a page that is run, and the output that it shows, if any."""

    block: Block
    code: str
    shown: str | None


def runs_of(blocks):
    """Return what is run, and the blocks of output that belong to nothing that is."""
    runs, stray = [], []
    for before, block in pairwise([None, *blocks]):
        if block.note:
            continue
        if block.language in ("sh", "python"):
            runs.append(Run(block, block.text, None))
        elif block.text.startswith("$ "):
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command = re.match(r"(?:.*\\\n)*.*\n", part)[0]  # goes on after a backslash
                runs.append(Run(block, command, part[len(command) :]))
        elif block.language in ("text", "") and runs and block.follows and before == runs[-1].block:
            runs[-1] = runs[-1]._replace(shown=block.text)
        elif not is_directive(block.language, block.text):
            stray.append(block)
    return runs, stray


def is_directive(language, text):
    """Whether a block is a directive of Sphinx, in which nothing but directives are fenced."""
    inside = (found.group(5, 6) for found in FENCE.finditer(text))
    return bool(DIRECTIVE.match(language)) and all(is_directive(*each) for each in inside)


RUNS, STRAY = runs_of(BLOCKS)


def named(values, slow=lambda value: False):
    return [
        pytest.param(value, id=name, marks=[pytest.mark.slow] if slow(value) else [])
        for name, value in values
    ]


COMMANDS = [(run.block.name, run) for run in RUNS if run.block.language != "python"]
PROGRAMS = {
    page: [run for run in RUNS if (run.block.page, run.block.language) == (page, "python")]
    for page in dict.fromkeys(block.page for block in BLOCKS)
}


def test_every_block_is_run_or_says_why_not():
    assert [f"{block.name} {block.language}" for block in STRAY] == []


# Running


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder that a page's commands are run in."""
    folders = {}

    def folder(page):
        if page not in folders:
            folders[page] = tmp_path_factory.mktemp("page")
            (folders[page] / ".venv").symlink_to(sys.prefix)
            for name in LINKED:
                if (ROOT / name).exists():
                    (folders[page] / name).symlink_to(ROOT / name)
        return folders[page]

    return folder


def environment(folder):
    """What commands are run with: this Python's programs, an empty hub, no GPU, 80 columns."""
    programs = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OPENBLAS_NUM_THREADS": "1",  # several wait for each other where other programs run
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }


@pytest.mark.parametrize("run", named(COMMANDS, slow=lambda run: bool(SLOW.search(run.code))))
def test_commands_run_and_print_what_is_shown(run, folder_of):
    folder, printed = folder_of(run.block.page), ""
    for command in re.findall(r"(?:.*\\\n)*.+\n", run.code):  # goes on after a backslash
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        found = 1 if "--fault" in command else 0  # a fault that is found is told by status 1
        assert done.returncode in (0, found), command + done.stdout + done.stderr
        printed += done.stdout
    if run.shown is not None:
        assert_same(run.shown, printed, computed=bool(COMPUTED.search(run.code)))


@pytest.mark.parametrize(
    "runs",
    named(
        ((page, runs) for page, runs in PROGRAMS.items() if runs),
        slow=lambda runs: any(SLOW.search(run.code) for run in runs),
    ),
)
def test_programs_run_and_print_what_is_shown(runs, folder_of, monkeypatch):
    monkeypatch.chdir(folder_of(runs[0].block.page))
    names = {"__name__": "__main__"}
    for run in runs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(run.code, run.block.name, "exec"), names)
        if run.shown is not None:
            assert_same(run.shown, printed.getvalue(), computed=bool(COMPUTED.search(run.code)))


# What is not run


@pytest.mark.parametrize(
    "block", named((block.name, block) for block in BLOCKS if block.note == "quoted")
)
def test_quoted_code_stands_where_it_is_said_to(block):
    code = (ROOT / block.detail).read_text(encoding="utf-8")
    lines = [line.strip() for line in code.splitlines()]
    assert [line for line in block.text.splitlines() if line.strip() not in lines] == []


@pytest.mark.parametrize(
    "block", named((block.name, block) for block in BLOCKS if block.note == "not run")
)
def test_what_is_not_run_could_be(block):
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "sh":
        check_commands(block.text)
    else:
        check_commands("\n".join(re.findall(r"^\$ (.*)", block.text, re.MULTILINE)))


@pytest.mark.parametrize("page", named((p.relative_to(ROOT).as_posix(), p) for p in PAGES))
def test_commands_in_the_text_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in SPAN.finditer(text):
        span = " ".join(found[2].split())
        if re.match(r"(\S* )*(\S*/)?(minineo|python) ", span):
            check_commands(span)


def check_commands(script):
    """Refuse lines of a shell with a minineo command, an option or a script that does not exist."""
    for command in simple_commands(script):
        check_command(command)


def simple_commands(script):
    """Yield the words of every command in lines of a shell, cut at pipes and the like."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;<>()"):
                yield command
                command = []
            else:
                command.append(word)


def check_command(words):
    """Refuse the words of one command if what they name does not exist."""
    words = [word.lstrip("!").rpartition(".venv/bin/")[2] for word in words]
    for word in words:
        if re.fullmatch(r"(tests|weights)/\w+\.py", word):
            assert (ROOT / word).exists(), f"there is no {word}"
    if "minineo" not in words:
        return
    arguments = words[words.index("minineo") + 1 :]  # behind nsys, a variable, or nothing
    if not arguments or arguments[0].isupper():
        return
    name, *options = ["1" if word.isupper() else word for word in arguments]  # what stands for any
    command = typer.main.get_command(app)
    if name.startswith("--"):
        assert name in {option for each in command.params for option in each.opts} | {"--help"}
        return
    assert name in command.commands, f"there is no minineo {name}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(typer.Exit):
        command.commands[name].make_context(name, options)  # raises where an option does not fit


# Comparing

COMPUTED = re.compile(  # a plan for a GPU: its times are no measured ones
    r"minineo plan\b[^|]* --gpu (?!this\b)|minineo\.plan\([^)]*\bgpu=\"(?!this\")"
)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"{NUMBER}(?: to {NUMBER})?(?= ?(?:ms|µs|s|x|%|[kMG]B/s|[GT]FLOP/s|tok/s|tokens/s)(?!\w))"
)
ROUNDING = re.compile(r"\d(?:\.\d+)?e[-+]\d\d")
COLUMN = re.compile(r"(?<!\S)(?:ms|differ)(?!\S)")
OF_THE_MACHINE = (  # what a sentence says depends on a time, or on how sums are rounded
    (r"The cache (?:pays from step \d+ on|does not pay in so few steps)", "The cache #"),
    (r"The mixed rows are the same (?:to the last bit|but for #, which is rounding)", "Same #"),
)


def words_of(output, computed=False):
    """The words of an output, with # where it is a measured figure, or rounding.

    A figure is measured if the unit of a time or speed follows it, or stands above it, at the head
    of its column, unless all are computed. All else must be the same everywhere: counts, tokens,
    text.
    """
    lines, columns = [], set()
    for line in output.splitlines():
        if line.startswith(("no CUDA GPU in use:", "Do not trust these ")):
            continue
        heads = set() if computed else {found.end() for found in COLUMN.finditer(line)}
        columns = heads or (columns if line.strip() else set())
        if not heads:
            line = re.sub(
                rf"(?<!\S)({NUMBER}|{ROUNDING.pattern})(?!\S)",
                lambda found: "#" if found.end() in columns else found[0],  # noqa: B023
                line,
            )
        lines.append(line)
    text = "\n".join(lines)
    if not computed:
        text = FIGURE.sub("#", text)
    text = " ".join(ROUNDING.sub("#", text).split())
    for pattern, same in OF_THE_MACHINE:
        text = re.sub(pattern, same, text)
    return text.split()


def assert_same(shown, output, computed=False):
    """Hold an output against what is shown of it, but for measured figures."""
    parts = re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)
    if len(parts) == 1:
        assert words_of(output, computed) == words_of(shown, computed)
        return
    text = " ".join(words_of(output, computed))
    pieces = [" ".join(words_of(part, computed)) for part in parts]
    pattern = r"(?:.*(?<!\S))?".join(re.escape(piece) + r"(?: |$)" for piece in pieces if piece)
    before, after = ("" if pieces[0] else ".*"), ("" if pieces[-1] else ".*")
    assert re.fullmatch(f"{before}{pattern}{after}", text), f"{pieces}\nare not all in\n{text}"


LEDGER = """\
                       keys cached              naive         logits  best
step phase   token     seen    fed     ms   KiB   fed     ms  differ  lead same
   0 prefill ' she'      46     46   5.95   276    46   5.69 0.0e+00  0.92  yes
   1 decode  ' didn'     47      1   1.94   282    47   5.94 2.9e-06  1.10  yes

total  22.58 ms  59.55 ms  2.6 x
The cache pays from step 1 on. It costs 6.0 KiB of
memory for each token.
"""


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("  5.95", " 12.10"),
        ("  5.94 2.9e-06", "   127 1.0e-05"),
        ("22.58 ms", "1,022.58 ms"),
        ("from step 1 on. It costs 6.0 KiB of\n", "from step 3 on. It costs\n6.0 KiB of "),
        ("2.6 x\n", "3.1 x\nDo not trust these times: others kept 1.3 cores busy.\n"),
    ],
)
def test_measured_figures_may_differ(said, instead):
    assert said in LEDGER
    assert_same(LEDGER, LEDGER.replace(said, instead))


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("  276 ", "  275 "),
        ("   1   1.94", "   2   1.94"),
        ("  0.92  ", "  0.93  "),
        ("' didn'", "' did' "),
        ("6.0 KiB", "6.1 KiB"),
        ("  yes\n", "  tie\n"),
        ("total", "whole"),
        ("2.6 x", "2.6 s"),
        ("memory for each token.", "memory."),
    ],
)
def test_counts_and_words_may_not(said, instead):
    assert said in LEDGER
    with pytest.raises(AssertionError):
        assert_same(LEDGER, LEDGER.replace(said, instead))


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("one\n...\nfour\n", True),
        ("...\ntwo three\n...\n", True),
        ("one\n...\n", True),
        ("...\nfour\n", True),
        ("one\n...\nthree\n", False),
        ("...\nfou\n", False),
        ("two\n...\n", False),
        ("...\nthree\n...\ntwo\n...\n", False),
    ],
)
def test_what_is_left_out_is_said(shown, same):
    with contextlib.nullcontext() if same else pytest.raises(AssertionError):
        assert_same(shown, "one\ntwo three\nfour\n")


@pytest.mark.parametrize("shown", ["23.5 ms", "rows   ms\n   1 23.5"])
def test_computed_times_are_held_to_the_digit(shown):
    other = shown.replace("23.5", "23.6")
    assert_same(shown, other)
    with pytest.raises(AssertionError):
        assert_same(shown, other, computed=True)


@pytest.mark.parametrize(
    ("code", "computed"),
    [
        ("minineo plan --prompt 3 \\\n    --gpu T4 | head -n 3", True),
        ("minineo plan --gpu this", False),
        ("minineo plan", False),
        ('minineo.plan(name, gpu="T4", prompt=300)', True),
        ('minineo.plan(\n    "gpt-neo-2.7b",\n    gpu="T4",\n)', True),
        ('minineo.plan(name, gpu="this")', False),
        ("minineo.plan(name)", False),
    ],
)
def test_what_is_planned_for_a_gpu_is_computed(code, computed):
    assert bool(COMPUTED.search(code)) == computed


@pytest.mark.parametrize(
    "command",
    ["minineo compare --no-such-option", "minineo no-such-command", "python tests/no_such.py"],
)
def test_a_command_that_does_not_exist_is_found(command):
    with pytest.raises((AssertionError, typer.TyperException)):
        check_commands(command)
