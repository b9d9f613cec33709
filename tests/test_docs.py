"""What the documentation quotes, shows and claims."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minineo import Trace, generate, load

ROOT = Path(__file__).parent.parent
WALK = (ROOT / "docs/debugger-walk.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", WALK, re.DOTALL)
PROGRAMS = [block for block in BLOCKS if "import" in block]
QUOTED = [line for block in BLOCKS if block not in PROGRAMS for line in block.splitlines()]


@pytest.mark.parametrize("line", QUOTED)
def test_each_line_to_stop_at_stands_once_in_the_code_it_is_said_to_be_in(line):
    files = [ROOT / name for name in re.findall(r"`(minineo/\S+\.py)`", WALK)]
    assert sum(path.read_text(encoding="utf-8").count(line) for path in set(files)) == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_of_the_walk_runs(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "decode" in done.stdout


def test_what_the_walk_says_is_fed():
    rows = re.findall(r"\| (\d), \w+ \| (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \|", WALK)
    assert len(rows) == 3
    model = load("tiny")
    for column, path in ((2, "cached"), (4, "naive")):
        steps = generate(model, "Once upon a time, there was", path=path, max_new_tokens=3)
        for row, step in zip(rows, steps, strict=True):
            assert [int(row[0]), int(row[1])] == [step.index, step.length]
            assert [int(row[column]), int(row[column + 1])] == [step.length - step.fed, step.fed]


def test_the_shapes_that_the_walk_shows():
    rows = re.findall(r"\| `(\w+)` \| (\[.*?\]) \| (\[.*?\]) \| (\[.*?\]) \|", WALK)
    assert len(rows) == 9
    model = load("tiny")
    for column, path in ((1, "cached"), (2, "naive")):
        trace = Trace()
        steps = generate(
            model, "Once upon a time, there was", path=path, max_new_tokens=2, trace=trace
        )
        for step in steps:
            for name, *shapes in rows:
                value = trace[name if name == "logits" else f"block0.{name}"]
                assert str(list(value.shape)) == shapes[column if step.index else 0]
