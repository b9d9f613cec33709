"""The fault lab: every fault is found where it must show, and turns the suite red."""

import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fault_plugin import CONTROL
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model
from test_cli import call
from test_faults import SMALL

from minineo import InputError, Trace, cli, generate, load
from minineo.study import faults
from minineo.study.faults import (
    FAULTS,
    OTHER_PROMPT,
    attend_where,
    exact_gelu,
    in_window,
    run_fault,
)
from minineo.study.lockstep import Place
from minineo.transformer.attention import QUERY_ROWS, attend
from minineo.transformer.functions import layer_norm

ROOT = Path(__file__).parent.parent
DTYPES = ["float32", "float64"]
CONTEXT = 32
MOST = CONTEXT - OTHER_PROMPT  # tokens of a prompt and its new ones


def calm(model):
    """The same model with smaller scores: a share of attention that is lost in rounding is none."""
    blocks = tuple(
        block._replace(
            attention=block.attention._replace(query=block.attention.query / np.float32(4))
        )
        for block in model.weights.blocks
    )
    return replace(model, weights=model.weights._replace(blocks=blocks))


def model_of(dtype, seed=0, **changes):
    return calm(random_model(dtype, seed, **changes))


@st.composite
def shapes(draw):
    """Layers of any kind, in any order; windows up to the context and above."""
    kinds = draw(st.lists(st.sampled_from(["global", "local"]), min_size=1, max_size=4))
    return {
        "num_layers": len(kinds),
        "attention_types": [[[kind], 1] for kind in kinds],
        "window_size": draw(st.integers(1, CONTEXT + 4)),
        "num_heads": draw(st.sampled_from([2, 4, 32])),
    }


@st.composite
def texts(draw):
    """The length of a prompt and the number of new tokens."""
    length = draw(st.integers(2, MOST - 2))
    return length, draw(st.integers(2, min(9, MOST - length)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
@settings(max_examples=25, deadline=None)
@given(shapes(), texts(), st.integers(0, 99))
def test_a_fault_is_found_where_it_must_show(name, dtype, shape, text, seed):
    model, (length, new) = model_of(dtype, seed, **shape), text
    ids = random_ids(model.config, length, seed=seed).tolist()
    run = run_fault(model, name, ids, max_new_tokens=new)
    assert (run.found and run.found.place) == run.expected
    assert run.as_expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_embedded_model_is_found_where_it_must_show(name, dtype):
    model = load("tiny", device="cpu", dtype=dtype)
    run = run_fault(model, name, cli.compare.PROMPT)
    assert run.found is not None
    assert run.found.place == run.expected


def test_places_past_the_window_are_those_of_the_first_query_that_has_it_behind_itself():
    """Three cases by hand, which what is derived must agree with."""
    for window, length, kinds, expected in (
        (4, 3, ["global", "local"], Place(2, 1, "scores")),  # 3, 4, 5 tokens
        (4, 5, ["local", "global"], Place(0, 0, "scores")),
        (32, 9, ["local", "local"], None),
    ):
        changes = {"num_layers": 2, "attention_types": [[[k], 1] for k in kinds]}
        model = model_of("float64", window_size=window, **changes)
        run = run_fault(model, "window-too-wide", [1] * length, max_new_tokens=5)
        assert run.expected == expected
        assert (run.found and run.found.place) == expected


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(FAULTS)), shapes(), texts())
def test_a_hidden_fault_shows_with_as_many_new_tokens_as_are_said_to_be_needed(name, shape, text):
    model, (length, new) = model_of("float64", **shape), text
    ids = random_ids(model.config, length).tolist()
    hidden = run_fault(model, name, ids, max_new_tokens=new)
    if hidden.expected is not None:
        assert hidden.needed is None
    elif hidden.needed is None:
        assert run_fault(model, name, ids, max_new_tokens=MOST).found is None
    else:
        assert new < hidden.needed <= MOST - length
        assert run_fault(model, name, ids, max_new_tokens=hidden.needed).found is not None
        assert run_fault(model, name, ids, max_new_tokens=hidden.needed - 1).found is None


def test_the_right_text_is_what_is_written_without_a_fault_and_the_wrong_one_goes_wrong_once():
    model = load("tiny", device="cpu")
    prompt = cli.compare.PROMPT
    run = run_fault(model, "no-causal-mask", prompt, max_new_tokens=20)
    steps = generate(model, prompt, max_new_tokens=20, stop_at_end=False)
    assert run.right_ids == [step.token for step in steps]
    assert run.prompt_ids == model.encode(prompt)
    wrong = run.first_wrong
    assert run.wrong_ids[:wrong] == run.right_ids[:wrong]
    assert run.wrong_ids[wrong] != run.right_ids[wrong]


def test_progress_is_told_step_by_step_up_to_the_fault():
    model, calls = model_of("float64"), []
    run = run_fault(
        model,
        "window-too-wide",
        [1, 2],
        max_new_tokens=9,
        progress=lambda *call: calls.append(call),
    )
    assert run.found.step == 3
    assert calls == [(done, 9) for done in (1, 2, 3)]


def test_of_a_batch_the_row_is_shown_whose_text_goes_wrong_first():
    model = load("tiny", device="cpu")
    run = run_fault(model, "padding-counted", cli.compare.PROMPT)
    ids = model.encode(cli.compare.PROMPT)
    assert run.prompt_ids == ids[: len(run.prompt_ids)]
    assert len(run.prompt_ids) == len(ids) // 2, "the shorter row is the one that is padded"
    steps = generate(model, run.prompt_ids, max_new_tokens=32, stop_at_end=False)
    assert run.right_ids == [step.token for step in steps]


# What stands in differs in the fault alone


@st.composite
def queries_keys_values(draw):
    batch, new, window = draw(st.integers(1, 3)), draw(st.integers(1, 80)), draw(st.integers(1, 99))
    starts = draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    positions = np.array(starts)[:, None] + np.arange(new)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    queries = random.normal(size=(batch, 2, new, 3))
    keys, values = random.normal(size=(2, batch, 2, int(positions.max()) + 1, 3))
    return queries, keys, values, positions, window


@settings(max_examples=50, deadline=None)
@given(queries_keys_values())
def test_what_looks_where_it_should_is_attention(case):
    ours, theirs = Trace(), Trace()
    np.testing.assert_allclose(attend_where(in_window)(*case, ours), attend(*case, theirs))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name])


def test_what_looks_where_it_should_reads_nothing_else_and_needs_no_trace():
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 1, 2, QUERY_ROWS + 9, 4))
    values[:, :, :3] = np.nan
    positions = np.arange(QUERY_ROWS + 9)[None]
    mixed = attend_where(in_window)(queries[:, :, 6:], keys, values, positions[:, 6:], 4)
    assert np.isfinite(mixed).all()


def test_the_exact_gelu_is_x_times_the_share_of_a_normal_distribution_below_x():
    x = np.linspace(-9, 9, 101)
    want = [each * (1 + math.erf(each / math.sqrt(2))) / 2 for each in x]
    np.testing.assert_allclose(exact_gelu(x), want, rtol=0, atol=1e-6)
    assert exact_gelu(x.astype("float32")).dtype == "float32"


def test_the_norm_of_a_sample_is_layer_norm_but_for_the_divisor():
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    wide = faults.sample_variance_norm(x, 1, 0, 0)
    np.testing.assert_allclose(wide / np.sqrt(7 / 8), layer_norm(x, 1, 0, 0))


# The list


def test_every_fault_has_a_name_of_its_own_and_says_what_it_does_and_who_had_it():
    assert inspect.getsource(faults).count(" Fault(\n") == len(FAULTS)
    for told in ("what", "reference"):
        assert len({getattr(fault, told) for fault in FAULTS.values()}) == len(FAULTS)
    for name, fault in FAULTS.items():
        assert name == fault.name == name.lower().replace(" ", "-")
        assert fault.what.endswith(".")
        assert fault.reference.startswith("https://github.com/")
        assert fault.reference.rsplit("/", 2)[1] in ("issues", "pull")


def test_faults_lists_all_in_80_columns_and_cuts_no_reference(capsys):
    status, out, err = call(capsys, "faults")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in FAULTS] == list(FAULTS)
    said = " ".join(out.split())
    for fault in FAULTS.values():
        assert f"had by {fault.reference}" in [" ".join(line.split()) for line in lines]
        assert fault.what in said
        assert fault.scenario.what in said


def test_a_narrow_terminal_cuts_no_reference(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = call(capsys, "faults")
    for fault in FAULTS.values():
        assert fault.reference in out


def test_faults_as_json(capsys):
    status, out, err = call(capsys, "faults", "--json", "-")
    assert (status, err) == (0, "")
    listed = json.loads(out)["faults"]
    assert [fault["fault"] for fault in listed] == list(FAULTS)
    assert {"fault", "what", "scenario", "needs", "reference"} == listed[0].keys()


# compare --fault


def flat(out):
    return " ".join(out.split())


@pytest.mark.parametrize("name", FAULTS)
def test_compare_with_a_fault_says_what_where_and_what_becomes_of_the_text(capsys, name):
    status, out, err = call(capsys, "compare", "--fault", name, "--device", "cpu")
    assert (status, err) == (1, "")
    assert max(map(len, out.splitlines())) <= 80
    model, fault, said = load("tiny", device="cpu"), FAULTS[name], flat(out)
    run = run_fault(model, name, cli.compare.PROMPT)
    for part in (
        f"tiny with the fault {name}; cpu, float32",
        fault.what,
        fault.scenario.what,
        fault.reference,
        f"Found at {run.expected}.",
        "it must show first just there.",
    ):
        assert part in said
    for ids in (run.right_ids, run.wrong_ids):
        assert flat(model.decode(ids)) in said.replace(">>", "").replace("<<", "")
    if run.first_wrong is None:
        assert "It does not change these 32 new tokens" in said
        assert ">>" not in out
    else:
        assert f"from new token {run.first_wrong + 1} of 32 on" in said
        for ids in (run.right_ids, run.wrong_ids):
            assert f">>{model.decode([ids[run.first_wrong]])}<<" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("window-too-wide", "It is seen on one path and hidden on the other."),
        ("newest-dropped", "Its shapes or dtypes differ."),
        ("first-position", "It differs by 0.067 of its size; rounding explains 1e-05."),
        ("first-position", "In float64, where rounding all but vanishes, it differs by 0.067."),
        ("first-position", "The 80 values before it do not differ at all."),
    ],
)
def test_how_far_a_value_differs_is_said_in_words(capsys, name, words):
    _, out, _ = call(capsys, "compare", "--fault", name)
    assert words in flat(out)


def test_in_float64_rounding_explains_less(capsys):
    _, out, _ = call(capsys, "compare", "--fault", "first-position", "--dtype", "float64")
    assert "It differs by 0.067 of its size; rounding explains 1e-10." in flat(out)
    assert "In float64" not in out


def test_a_fault_that_this_text_leaves_hidden_gives_status_0_and_says_what_would_show_it(capsys):
    prompt = "Once upon a time"
    tokens = len(load("tiny").encode(prompt))
    status, out, err = call(capsys, "compare", prompt, "--fault", "window-ignored")
    needed = 65 - tokens + 1
    assert (status, err) == (0, "")
    said = flat(out)
    assert "Nothing differs: " in said
    assert "it takes a text that is longer than the window of a local layer." in said
    assert f"It shows with --new-tokens {needed}, or in a prompt of 65 tokens." in said
    assert "It does not change these 32 new tokens." in said
    for count, want in ((needed - 1, 0), (needed, 1)):
        options = ["--fault", "window-ignored", "--new-tokens", str(count)]
        assert call(capsys, "compare", prompt, *options)[0] == want


def test_a_fault_that_no_text_can_show_says_so(capsys, monkeypatch):
    model = load("tiny", device="cpu")
    everywhere = replace(model.config, windows=(512,) * 6)
    monkeypatch.setattr(
        cli.faults, "load", lambda *args, **options: replace(model, config=everywhere)
    )
    status, out, _ = call(capsys, "compare", "--fault", "window-too-wide")
    assert status == 0
    assert "No text has that in this model." in flat(out)


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("slot-zero", Place(1, 2, "mixed"), "must show first at step 1, layer 2, mixed."),
        ("slot-zero", None, "must not show in this text."),
        ("window-too-wide", Place(0, 1, "scores"), "must show first at step 0, layer 1, scores."),
    ],
)
def test_a_fault_that_shows_elsewhere_or_nowhere_gives_status_1_and_says_so(
    capsys, monkeypatch, name, place, words
):
    moved = replace(FAULTS[name], place=lambda config, passes: place)
    monkeypatch.setitem(FAULTS, name, moved)
    status, out, _ = call(capsys, "compare", "Once upon a time", "--fault", name)
    assert status == 1
    assert f"By what the fault does, it {words}" in flat(out)
    assert "just there" not in out
    assert ("Nothing differs" in out) == (name == "window-too-wide")


class BreaksDown(faults.KVCache):
    def extend(self, layer, new_keys, new_values):
        if self.length == 48:
            raise ValueError("no room")
        return super().extend(layer, new_keys, new_values)


def test_a_fault_that_breaks_the_cached_path_down_says_when(capsys, monkeypatch):
    monkeypatch.setitem(FAULTS, "slot-zero", replace(FAULTS["slot-zero"], cache=BreaksDown))
    status, out, _ = call(capsys, "compare", "--fault", "slot-zero")
    assert status == 1
    assert "Found at step 3, the cached path broke down: no room." in flat(out)
    assert "the cached path breaks down before new token 4 of 32." in flat(out)


@pytest.mark.parametrize("name", ["window-too-wide", "padding-counted", "no-causal-mask"])
def test_compare_with_a_fault_as_json(capsys, name, tmp_path):
    status, out, err = call(capsys, "compare", "--fault", name, "--json", "-")
    assert (status, err) == (1, "")
    data = json.loads(out)
    model = load("tiny")
    assert (data["schema"], data["model"], data["fault"]) == (1, "tiny", name)
    assert data["reference"] == FAULTS[name].reference
    place = {key: data["first_divergence"][key] for key in ("step", "layer", "value")}
    assert place == data["expected"]
    assert data["as_expected"] is True
    assert data["right_text"] == model.decode(data["right_ids"])
    assert data["wrong_text"] == model.decode(data["wrong_ids"])
    file = tmp_path / "out.json"
    _, out, _ = call(capsys, "compare", "--fault", name, "--json", str(file))
    assert json.loads(file.read_text()) == data
    assert "Found at" in out


def test_a_model_without_a_tokenizer_shows_ids(capsys, monkeypatch):
    model = random_model("float32")
    monkeypatch.setattr(cli.faults, "load", lambda *args, **options: model)
    monkeypatch.setattr(type(model), "encode", lambda self, prompt: [3, 1, 4, 1, 5, 9])
    status, out, _ = call(capsys, "compare", "--fault", "default-scale", "--new-tokens", "6")
    run = run_fault(model, "default-scale", [3, 1, 4, 1, 5, 9], max_new_tokens=6)
    assert status == 1
    assert "prompt 3 1 4 1 5 9" in flat(out)
    assert f">>{run.wrong_ids[run.first_wrong]}<<" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--fault", "window-to-wide"], "unknown fault 'window-to-wide'; did you mean window-too-"),
        (["--fault", "xyz"], "unknown fault 'xyz'; `minineo faults` lists all"),
        (
            ["--fault", "slot-zero", "--plot", "a.png"],
            "--plot and --report show times, and --fault takes none",
        ),
        (["--fault", "slot-zero", "--new-tokens", "1"], "2 new ones to show; these are"),
        (["--fault", "slot-zero", "--new-tokens", "-1"], "max_new_tokens is -1"),
        (["a", "--fault", "slot-zero"], "a prompt of 2 to 505 tokens"),
        (["a b " * 253, "--fault", "slot-zero"], "a prompt of 2 to 505 tokens"),
        (["", "--fault", "slot-zero"], "the prompt is empty"),
        (["--fault", "slot-zero", "--json", "no/such/f.json"], "no/such does not exist"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(capsys, arguments, complaint):
    status, out, err = call(capsys, "compare", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err


def test_an_unknown_fault_is_refused_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(cli.faults, "load", None)
    assert call(capsys, "compare", "--fault", "xyz")[0] == 2


def test_a_text_of_the_whole_context_is_room_enough():
    model = random_model("float64")
    for name in FAULTS:
        run = run_fault(model, name, [1] * (MOST - 2), max_new_tokens=99)
        assert len(run.right_ids) == 2
        assert run.as_expected
    with pytest.raises(InputError, match="a prompt of 2 to 25 tokens"):
        run_fault(model, "slot-zero", [1] * (MOST - 1))


# The mutation test of the small suite


def suite(name=None):
    """Run the small suite with a fault in the whole process."""
    files = [f"tests/test_{each}.py" for each in SMALL]
    fault = ["-p", "fault_plugin", "--fault", name] if name else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault, *files],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, CONTROL.name])
def test_without_a_fault_the_suite_is_green(name):
    done = suite(name)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_the_suite_red(name):
    done = suite(name)
    assert done.returncode == 1, done.stdout
    assert " failed" in done.stdout


def test_a_context_too_short_for_any_fault_is_refused():
    with pytest.raises(InputError, match="a context of 9 or more; this is 8"):
        run_fault(random_model(max_position_embeddings=8), "slot-zero", [1, 2, 3])
