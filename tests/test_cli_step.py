"""`minineo step`: what a screen says, how the walk is steered, and what is refused."""

import io
import json
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from small import random_model
from test_cli import STORY, call, minineo

from minineo import cli, load
from minineo.cli.compare import PROMPT
from minineo.study.flow import flow

command = cli.step


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(autouse=True)
def loaded_once(tiny, monkeypatch):
    """Every command of this file has the same model, and no terminal."""
    monkeypatch.setattr(command, "load", lambda name, **options: tiny)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def printed(step):
    """The lines of a step's screen."""
    return [line.plain for line in command.screen(step)]


def screens(out):
    """The numbers of the steps that were shown."""
    return [int(number) for number in re.findall(r"── Step (\d+), ", out)]


# What a screen says


def test_without_a_terminal_all_steps_are_printed(capsys):
    status, out, err = call(capsys, "step", STORY, "--layer", "1", "--head", "2")
    assert (status, err) == (0, "")
    assert screens(out) == [0, 1, 2, 3, 4, 5]
    assert "\x1b" not in out
    assert max(map(cell_len, out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in out.splitlines())
    assert out.startswith("tiny: steps 0 to 5, layers 0 to 5, heads 0 to 3; cpu, float32\n")
    text = " ".join(out.split())
    assert "Step 0, prefill: layer 1 (local, window 64), head 2" in text
    assert "Nothing is in the cache yet: both paths were fed 4 tokens and did the same work" in text
    assert (
        "The cached path made the key and value of 1 token and found those of 8 in its cache; "
        "the naive path was fed all 9 and made those of 8 again."
    ) in text
    assert "which is rounding" in text


def test_the_prompt_is_that_of_compare(capsys, tiny):
    _, out, _ = call(capsys, "step", "--step", "0")
    assert f"fed {len(tiny.encode(PROMPT))} tokens" in " ".join(out.split())


def test_one_step_can_be_shown_alone(capsys):
    _, out, _ = call(capsys, "step", STORY, "--step", "3")
    assert screens(out) == [3]


def test_both_paths_stand_side_by_side_and_old_and_new_are_told_apart(tiny):
    lines = printed(flow(tiny, STORY, max_new_tokens=3)[2])
    sections = {line[:8].strip(): index for index, line in enumerate(lines) if line[:8].strip()}

    def both(index):
        line = lines[index]
        return " ".join(line[8:43].split()), " ".join(line[45:].split())

    assert both(1) == ("CACHED", "NAIVE")
    assert both(sections["Q"]) == ("1 × 32: all new", "6 × 32: 5 made again")
    assert both(sections["Kᵀ"]) == ("32 × 6: 5 from the cache", "32 × 6: 5 made again")
    assert both(sections["Kᵀ"] + 2) == ("from cache cache cache new", "from again again again new")
    assert both(sections["scores"] + 1) == ("from cccccn", "from aaaaan")
    assert both(sections["mask"]) == ("0 of 6 cells hidden", "15 of 36 cells hidden")
    for offset, start in ((1, ("4 cache", "4 again")), (2, ("5 new", "5 new"))):
        cached, naive = both(sections["V"] + offset)
        assert (cached.startswith(start[0]), naive.startswith(start[1])) == (True, True)


def test_the_numbers_are_those_of_the_step(tiny):
    step = flow(tiny, STORY, layer=1, head=3, max_new_tokens=3)[2]
    lines = printed(step)
    vectors = {
        "Q": step.cached.queries[-1],
        "V": step.cached.values[-1],
        "mixed": step.cached.mixed[-1],
    }
    for label, vector in vectors.items():
        start = next(index for index, line in enumerate(lines) if line.startswith(f"{label:8}"))
        numbers = "".join(f"{number:7.2f}" for number in vector[:3])
        assert f"   5 new  {numbers} …" in lines[start + 2]
    start = next(index for index, line in enumerate(lines) if line.startswith("Kᵀ"))
    for row in range(3):
        numbers = "".join(f"{number:7.2f}" for number in step.cached.keys[2:, row])
        assert lines[start + 3 + row].count(f"dim {row} {numbers}") == 2
    table = [line.split() for line in lines if line[:5].strip().isdigit()]
    assert [int(row[0]) for row in table] == [0, 1, 2, 3, 4, 5]
    for line in lines:
        if line[:5].strip().isdigit():
            slot = int(line[:5])
            score, share = step.cached.scores[-1, slot], step.cached.pattern[-1, slot]
            assert line.count(f"{score:7.2f}{share:7.3f}") == 2, "on both paths"


def test_a_long_text_shows_what_is_attended_to_most_and_says_what_is_left_out(tiny):
    step = flow(tiny, PROMPT, layer=1, max_new_tokens=40)[39]
    lines, shares = printed(step), step.cached.pattern[-1]
    assert max(map(cell_len, lines)) <= 80
    assert len(lines) <= 44
    slots = [int(line[:5]) for line in lines if line[:5].strip().isdigit()]
    assert {84, *np.argsort(-shares)[:5].tolist()} < set(slots)
    assert 20 in slots, "the last slot before the window stands for those that are hidden"
    hidden = next(line for line in lines if line.startswith("  20 "))
    assert hidden.split()[-3:] == ["hidden", "again", "hidden"]
    others = 64 - (len(slots) - 1)
    left = next(line for line in lines if line.startswith("Left out: "))
    assert f"{others} other slots share" in left
    assert "21 slots before the window of 64 hidden" in left
    assert any("57 on" in line for line in lines), "the strips show the newest 28 slots"


def test_a_part_of_a_prompt_yields_no_token(tiny):
    step = flow(tiny, STORY, prefill_chunk=3)[0]
    assert printed(step)[-1] == "No next token yet: more of the prompt is to come."


def test_in_a_prefill_everything_is_new_on_both_paths(tiny):
    lines = printed(flow(tiny, STORY, max_new_tokens=1)[0])
    assert sum(line.count(": all new") for line in lines) == 2 * 4
    assert not any("again" in line or "from the cache" in line for line in lines)


def test_the_scale_of_a_strip_is_that_of_what_is_seen(tiny):
    step = flow(tiny, STORY, layer=1, max_new_tokens=1)[0]
    seen = step.naive.scores[2:][~step.naive.hidden[2:]]
    assert f"4 × 4, ▁ {seen.min():.2g} to █ {seen.max():.2g} " in "\n".join(printed(step))


def test_wide_characters_take_two_columns(tiny, monkeypatch):
    monkeypatch.setattr(command, "token_text", lambda model, token: Text("'日本語日本語…"))
    lines = printed(flow(tiny, STORY, max_new_tokens=3)[2])
    assert max(map(cell_len, lines)) <= 80
    rows = [line for line in lines if line[:5].strip().isdigit()]
    assert {cell_len(row) for row in rows} == {cell_len(rows[0])}


def test_a_hidden_cell_has_a_mark_of_its_own(tiny):
    lines = printed(flow(tiny, STORY, max_new_tokens=1)[0])
    strips = [line for line in lines if line[45:].startswith("   2  ")]
    assert len(strips) == 2, "scores and pattern"
    assert all(line.endswith("·") and line.count("·") == 2 for line in strips)


def test_a_difference_above_rounding_is_no_rounding(tiny):
    step = flow(tiny, STORY, max_new_tokens=2)[1]
    step.cached.mixed[-1, 0] += 1
    assert "which is no rounding" in " ".join(printed(step))


def test_tokens_without_text_are_shown_by_their_ids():
    model = random_model("float32")
    for step in flow(model, [5, 7, 99], layer=1, max_new_tokens=4):
        lines = printed(step)
        assert max(map(cell_len, lines)) <= 80
        assert any(line.startswith("   2 99 ") for line in lines)


@pytest.mark.parametrize("prompt", ["a", "日本語 😀\n\t\x1b[31m", "é" * 30])
def test_any_text_fits_into_80_columns(capsys, prompt):
    status, out, _ = call(capsys, "step", prompt, "--new-tokens", "2")
    assert status == 0
    assert max(map(cell_len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_an_output_without_blocks_gets_other_marks(capsys, tiny):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    walk = flow(tiny, PROMPT, layer=1, max_new_tokens=30)
    command.print_legend(walk, console)
    command.show(walk[0], console)
    command.show(walk[29], console)
    file.flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "_.:-=+#@ is low to high, x hidden" in text
    assert "?" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_it_runs_as_a_program_whose_output_is_ascii(tmp_path):
    done = minineo(
        "step", "é", "--new-tokens", "2", env=os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "-- Step 1, decode" in done.stdout


def test_the_device_is_explained_where_it_was_chosen(capsys, tiny, monkeypatch):
    device = replace(tiny.device, why="no CUDA GPU in use: none here")
    monkeypatch.setattr(command, "load", lambda name, **options: replace(tiny, device=device))
    _, out, _ = call(capsys, "step", STORY, "--step", "0")
    assert "\nno CUDA GPU in use: none here\n" in out


# The walk


def walked(capsys, monkeypatch, typed, *arguments):
    """Walk with these lines typed; return what was printed."""
    monkeypatch.setattr(command, "has_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    status, out, err = call(capsys, "step", STORY, *arguments)
    assert (status, err) == (0, "")
    return out


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("", [0]),
        ("q\nn\n", [0]),
        ("n\n\nnext\nb\nback\n", [0, 1, 2, 3, 2, 1]),
        ("j 3\nN\nJUMP 0\nquit\nn\n", [0, 3, 4, 0]),
        ("b\nn\nn\nn\nn\nn\nn\nb\n", [0, 1, 2, 3, 4, 5, 4]),
        ("x\nj\nj x\nj 6\nj -1\nn n\nn\n", [0, 1]),
    ],
)
def test_typed_lines_lead_through_the_steps(capsys, monkeypatch, typed, shown):
    assert screens(walked(capsys, monkeypatch, typed)) == shown


def test_a_line_that_means_nothing_is_answered_in_a_line(capsys, monkeypatch):
    out = walked(capsys, monkeypatch, "x\nj 6\nl 6\nh -1\nj one\nb\n")
    answers = [line for line in out.splitlines() if line.startswith("step 0 > ")]
    assert answers == [
        f"step 0 > {command.HELP}",
        "step 0 > step is 6; choose one of 0 to 5",
        "step 0 > layer is 6; choose one of 0 to 5",
        "step 0 > head is -1; choose one of 0 to 3",
        "step 0 > step is 'one'; choose one of 0 to 5",
        "step 0 > step is -1; choose one of 0 to 5",
        "step 0 > ",
    ]


def test_another_layer_and_head_can_be_looked_at_on_the_way(capsys, monkeypatch):
    out = walked(capsys, monkeypatch, "n\nl 1\nhead 3\nl 9\nb\n")
    headings = [title.strip("─ ") for title in re.findall("── (Step .*)", out)]
    assert headings == [
        "Step 0, prefill: layer 0 (global), head 0",
        "Step 1, decode: layer 0 (global), head 0",
        "Step 1, decode: layer 1 (local, window 64), head 0",
        "Step 1, decode: layer 1 (local, window 64), head 3",
        "Step 0, prefill: layer 1 (local, window 64), head 3",
    ]


def test_it_begins_at_the_step_asked_for_and_says_what_can_be_typed(capsys, monkeypatch):
    out = walked(capsys, monkeypatch, "b\n", "--step", "4")
    assert screens(out) == [4, 3]
    assert out.count(command.HELP) == 1


def test_an_interrupt_ends_it_quietly(capsys, monkeypatch):
    class Interrupted(io.StringIO):
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "has_terminal", lambda: True)
    monkeypatch.setattr(sys, "stdin", Interrupted())
    status, out, err = call(capsys, "step", STORY)
    assert (status, err) == (0, "")
    assert screens(out) == [0]


def test_plain_and_a_pipe_wait_for_nobody(capsys, monkeypatch):
    out = walked(capsys, monkeypatch, "q\n", "--plain", "--new-tokens", "2")
    assert screens(out) == [0, 1]
    assert command.HELP not in out


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (False, False)])
def test_a_terminal_is_needed_on_both_sides(monkeypatch, here, there):
    class Stream(io.StringIO):
        def __init__(self, terminal):
            super().__init__()
            self.isatty = lambda: terminal

    monkeypatch.setattr(sys, "stdin", Stream(here))
    monkeypatch.setattr(sys, "stdout", Stream(there))
    assert not command.has_terminal()
    monkeypatch.setattr(sys, "stdin", None)
    assert not command.has_terminal()


def test_plain_is_uncoloured_where_colours_are_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in call(capsys, "step", STORY, "--step", "1")[1]
    assert "\x1b" not in call(capsys, "step", STORY, "--step", "1", "--plain")[1]


# Files


def test_json_holds_the_steps_that_are_shown(capsys, tmp_path):
    file = tmp_path / "numbers.json"
    _, out, err = call(capsys, "step", STORY, "--new-tokens", "3", "--json", str(file))
    assert screens(out) == [0, 1, 2]
    everything = json.loads(file.read_text())
    assert [step["index"] for step in everything["steps"]] == [0, 1, 2]
    status, out, err = call(
        capsys, "step", STORY, "--new-tokens", "3", "--step", "2", "--json", "-"
    )
    assert (status, err) == (0, "")
    one = json.loads(out)
    assert one["steps"] == everything["steps"][2:]
    assert (one["schema"], one["model"], one["prompt_tokens"]) == (1, "tiny", 4)


def test_json_to_the_standard_output_waits_for_nobody(capsys, monkeypatch):
    out = walked(capsys, monkeypatch, "", "--new-tokens", "1", "--json", "-")
    assert len(json.loads(out)["steps"]) == 1


@pytest.mark.parametrize(("arguments", "index"), [([], 5), (["--step", "2"], 2)])
def test_the_picture_is_of_the_step_asked_for_or_the_last(
    capsys, tmp_path, monkeypatch, arguments, index
):
    from minineo.study import figures

    drawn, draw = [], figures.plot_flow
    monkeypatch.setattr(figures, "plot_flow", lambda step: drawn.append(step) or draw(step))
    file = tmp_path / "my flow.png"
    call(capsys, "step", STORY, *arguments, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [step.index for step in drawn] == [index]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--layer", "6"], "layer is 6; choose one of 0 to 5"),
        (["--layer", "-1"], "layer is -1; choose one of 0 to 5"),
        (["--head", "4"], "head is 4; choose one of 0 to 3"),
        (["--head=-1"], "head is -1; choose one of 0 to 3"),
        (["--step", "6"], "step is 6; choose one of 0 to 5"),
        (["--step", "-1"], "step is -1; choose one of 0 to 5"),
        (["--new-tokens", "0"], "max_new_tokens is 0"),
        (["--new-tokens", "-4"], "max_new_tokens is -4"),
        (["--prefill-chunk", "0"], "prefill_chunk is 0"),
        (["--layer", "one"], "--layer"),
        (["--plot", "flow.bmp"], ".png, .svg or .pdf"),
        (["--json", "a.png", "--plot", "a.png"], "--json and --plot both name a.png"),
        (["--json", "no/such/folder/a.json"], "no/such/folder does not exist"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(capsys, arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "step", STORY, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt_is_refused(capsys):
    status, out, err = call(capsys, "step", "")
    assert (status, out) == (2, "")
    assert "the prompt is empty" in err
