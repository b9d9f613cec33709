"""The notebooks are whole, run from scratch, and break when a fault of the lab is put in."""

import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from math import isclose
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pytest
from fault_plugin import CONTROL, put_in
from nbclient import NotebookClient

from minineo import InputError, load
from minineo.study.faults import FAULTS

FOLDER = Path(__file__).parent.parent / "notebooks"
NUMBERED = sorted(FOLDER.glob("*.ipynb"))
EXERCISES = sorted(FOLDER.glob("exercises/**/*.ipynb"))
BROKEN = FOLDER / "04-decode.ipynb"  # every fault must break it; it takes a second
MOST_BYTES = 500_000


def name(path):
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    """What a cell has written, and the text of what it has shown."""
    texts = [
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in cell.outputs
    ]
    return "\n".join(texts)


every_notebook = pytest.mark.parametrize("path", [*NUMBERED, *EXERCISES], ids=name)
numbered = pytest.mark.parametrize("path", NUMBERED, ids=name)


# As committed


@every_notebook
def test_a_notebook_is_valid_small_and_free_of_what_a_machine_adds(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        assert (cell.id, cell.metadata) == (f"cell-{number:02d}", {})


@every_notebook
def test_a_notebook_was_run_in_order_without_error_or_warning(path):
    cells = code(read(path))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text


@every_notebook
def test_a_notebook_names_no_place_of_a_machine(path):
    for cell in read(path).cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts += [text for kind, text in output.get("data", {}).items() if "text" in kind]
        for text in texts:
            assert not re.search(r"(?<![\w.:/])/(home|root|work|tmp|opt|usr|mnt|Users)/", text)
            assert not re.search(r"\b[A-Z]:\\|\b0x[0-9a-f]{6,}", text)


@every_notebook
def test_links_of_a_notebook_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|#", target):
            assert (path.parent / target.split("#")[0]).exists(), target


def test_notebooks_are_numbered_without_a_gap_and_lead_from_one_to_the_next():
    for number, path in enumerate(NUMBERED, 1):
        assert path.name.startswith(f"{number:02d}-")
        cells = read(path).cells
        assert cells[0].source.startswith(f"# {number}. ")
        for following in NUMBERED[number : number + 1]:
            assert f"]({following.name})" in cells[-1].source


@numbered
def test_a_notebook_asserts_what_it_claims(path):
    claims = [
        cell for cell in code(read(path)) if re.search("^ *assert |assert_", cell.source, re.M)
    ]
    assert len(claims) >= 3


# From scratch

NO_NETWORK = """
import socket

def refuse(*args, **options):
    raise OSError("notebooks use no network")

socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = refuse
"""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
CLOCK = re.compile(
    r"\b(ns|µs|μs|ms|seconds?|minutes?|measured)\b|\d s\b|/s\b|\bper second\b|\bbusy\b"
)
CLOCK_READ = re.compile(r"seconds|perf_counter|process_time|timeit|measure|speedup|pays_from")


def measured(cell):
    """Whether what a cell prints depends on a clock: by a unit of time, or by its code."""
    return CLOCK.search(printed(cell)) or CLOCK_READ.search(cell.source)


def same_number(ours, theirs):
    """Whether two numbers are the same, but for rounding where they are no whole ones."""
    one, other = (float(each.replace(",", "")) for each in (ours, theirs))
    if "e" in ours:  # the size of a rounding error: another machine sums in another order
        return max(one, other) < 1e-4 or 0.1 < one / (other or 1e-9) < 10
    return one == other or ("." in ours and isclose(one, other, rel_tol=0.01, abs_tol=1e-4))


def same_text(ours, theirs):
    """Whether two outputs are the same, but for blanks and rounding."""
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (ours, theirs)]
    numbers = zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=False)
    return words[0] == words[1] and all(same_number(*pair) for pair in numbers)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """A folder for matplotlib, where it has its list of fonts, so that it need not say it waits."""
    folder = tmp_path_factory.mktemp("fonts")
    program = [sys.executable, "-c", "import matplotlib.font_manager"]
    subprocess.run(program, env=os.environ | {"MPLCONFIGDIR": str(folder)}, check=True)
    return folder


@pytest.mark.slow
@numbered
def test_a_notebook_runs_from_scratch_without_a_network_and_prints_what_it_shows(
    path, tmp_path, fonts
):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path),
        "JUPYTER_DATA_DIR": str(tmp_path),  # no kernel of the user's own
        "MPLCONFIGDIR": str(fonts),  # no list of fonts either, which may be out of date
        "PYTHONPATH": str(tmp_path),
    }
    notebook = read(path)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment)
    for cell in code(notebook):
        assert [each.text for each in cell.outputs if each.get("name") == "stderr"] == []
    if load("tiny").device.name != "cpu":
        return  # what is shown was made on a CPU
    for ours, theirs in zip(code(notebook), code(read(path)), strict=True):
        if not measured(theirs):
            assert same_text(printed(ours), printed(theirs)), ours.source


# With a fault


def outcome(path, fault):
    """Run the code of a notebook in a process that has a fault put in; return what came of it.

    Returns
    -------
    str
        The kind of error that ended it and the number of the cell; empty if there was none.
    """
    import matplotlib

    matplotlib.use("template")  # draws nothing
    put_in(CONTROL if fault == CONTROL.name else FAULTS[fault])
    scope = {"__name__": "__main__", "display": lambda *shown: None}
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        for number, cell in enumerate(code(read(path)), 1):
            plain = re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE)  # no magic here
            try:
                exec(compile(plain, f"{path.name}, cell {number}", "exec"), scope)
            except (AssertionError, InputError) as error:
                return f"{type(error).__name__} in cell {number}"
    return ""


def in_a_process(path, fault):
    """Run `outcome` in a fresh process: forked, so that nothing is imported again for each."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["matplotlib.pyplot", "minineo.study.figures", "minineo.study.flow", "nbclient", "pytest"]
    )
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(outcome, path, fault).result()


@pytest.mark.slow
def test_a_notebook_passes_with_a_control_put_in_that_changes_nothing():
    assert in_a_process(BROKEN, CONTROL.name) == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_the_lab_breaks_a_notebook(fault):
    assert in_a_process(BROKEN, fault)
