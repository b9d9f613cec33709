"""What a user gets who installs the built package alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A virtual environment far from the checkout that holds the wheel and what it needs."""
    place = tmp_path_factory.mktemp("far away")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", place, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("minineo-*.whl")
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    pip = [place / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel]
    subprocess.run(pip, check=True)
    return place


def run(place, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [place / "venv/bin" / arguments[0], *arguments[1:]],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_installed_wheel_runs_the_main_job(place):
    run(place, "minineo", "compare", "--new-tokens", "8", "--json", "out.json", "--plot", "out.png")
    data = json.loads((place / "out.json").read_text())
    assert data["model"] == "tiny"
    assert data["summary"]["agree"] is True
    assert (place / "out.png").stat().st_size > 10_000


def test_the_installed_wheel_needs_no_torch(place):
    code = "import importlib.util as u, minineo; print(u.find_spec('torch'), minineo.__file__)"
    found, file = run(place, "python", "-c", code).split(maxsplit=1)
    assert found == "None"
    assert file.startswith(str(place))


def test_the_installed_wheel_writes_the_page(place):
    run(place, "minineo", "explore", "Tom", "--new-tokens", "2", "--out", "page.html")
    assert (place / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
