"""The page's data equal a trace of both paths, and nothing from outside can break the page."""

import json
import re
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from small import random_ids, random_model
from test_cli import call

from minineo import InputError, KVCache, Recompute, Trace, explore, generate, load
from minineo.cli.compare import PROMPT
from minineo.study import explore as module
from minineo.study.costs import run_costs
from minineo.study.faults import FAULTS, run_fault
from minineo.study.flow import NAMES
from minineo.study.lockstep import HIDDEN

STORY = "Once upon a time"
TEXT = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page):
    """The facts and arrays of a page, read as its script reads them."""
    (text,) = TEXT.findall(page)
    data = json.loads(text)
    raw = {name: b64decode(packed["bytes"]) for name, packed in data["arrays"].items()}
    kinds = {name: packed["kind"] for name, packed in data["arrays"].items()}
    arrays = {
        name: np.frombuffer(raw[name], f"<{np.dtype(kind).str[1:]}")
        for name, kind in kinds.items()
        if kind != "differences"
    }
    for name, kind in kinds.items():
        if kind == "differences":
            base = arrays["pool" if name == "naive.pool" else name.replace("naive", "cached")]
            arrays[name] = added(raw[name], base)
    return data["facts"], arrays


def added(coded, base):
    """Add coded differences to the bits of numbers, one byte after the other."""
    bits, found, value, shift = base.view(np.uint32).tolist(), [], 0, 0
    for byte in coded:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            apart = (value >> 1) ^ -(value & 1)
            found.append((bits[len(found)] + apart) % 2**32)
            value = shift = 0
    return np.array(found, np.uint32).view(np.float32)


class Reader:
    """Finds numbers in a page's arrays."""

    def __init__(self, page):
        self.facts, self.arrays = data_of(page)
        steps = self.facts["steps"]
        self.layers, self.heads = len(self.facts["windows"]), self.facts["heads"]
        self.dim, self.tokens = self.facts["head_dim"], steps[-1]["end"]

    def rows(self, path, name):
        shape = self.layers, self.heads, self.tokens, self.dim
        return self.arrays[f"{path}.{name}"].reshape(shape)

    def cells(self, path, name, index):
        """Scores or pattern of the rows that a step has fed [layers, heads, new, all]."""
        steps = self.facts["steps"]
        lengths = [step["slots" if path == "cached" else "end"] for step in steps]
        sizes = [
            self.layers * self.heads * (step["end"] - step["start"]) * length
            for step, length in zip(steps, lengths, strict=True)
        ]
        start = sum(sizes[:index])
        part = self.arrays[f"{path}.{name}"][start : start + sizes[index]]
        return part.reshape(self.layers, self.heads, -1, lengths[index])

    def in_slots(self, index):
        """What the slots of the cache hold at a step [layers, slots, heads, key and value]."""
        steps = self.facts["steps"]
        sizes = [self.layers * step["slots"] for step in steps]
        start = sum(sizes[:index])
        places = self.arrays["index"][start : start + sizes[index]].reshape(self.layers, -1)
        pool = self.arrays["pool"].reshape(-1, self.heads, 2 * self.dim)
        return pool[places], places

    def apart(self, index):
        """How far rows lie apart, coded [layers, heads, names, tokens]."""
        sizes = [self.layers * self.heads * len(NAMES) * s["end"] for s in self.facts["steps"]]
        start = sum(sizes[:index])
        part = self.arrays["apart"][start : start + sizes[index]]
        return part.reshape(self.layers, self.heads, len(NAMES), -1)


def traced(model, ids, start, end, cache):
    trace = Trace()
    model.forward([ids[start:end]], cache, trace=trace)
    return trace


def stacked(trace, name, layers):
    return np.stack([trace[f"block{layer}.{name}"][0] for layer in range(layers)])


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


def check_against_traces(model, prompt, new):
    page = explore(model, prompt, max_new_tokens=new).page
    read = Reader(page)
    ids = [token["id"] for token in read.facts["tokens"]]
    assert ids == [
        *model.encode(prompt),
        *(s.token for s in generate(model, prompt, max_new_tokens=new, stop_at_end=False)),
    ]
    cache = KVCache(model.config, 1, len(ids), like=model.weights.token_embedding)
    for index, step in enumerate(read.facts["steps"]):
        start, end = step["start"], step["end"]
        ours = traced(model, ids, start, end, cache)
        theirs = traced(model, ids, 0, end, Recompute())
        layers = read.layers

        def equal(found, expected):
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(found, expected.astype(np.float32))

        for name in ("queries", "mixed"):
            rows = read.rows("cached", name)[:, :, start:end]
            equal(rows, stacked(ours, name, layers))
            rows = read.rows("naive", name)[:, :, start:end]
            equal(rows, stacked(theirs, name, layers)[:, :, start:])
        held, _ = read.in_slots(index)
        both = np.concatenate([stacked(ours, n, layers) for n in ("keys", "values")], axis=-1)
        equal(held, both.swapaxes(1, 2))
        both = np.concatenate([stacked(theirs, n, layers) for n in ("keys", "values")], axis=-1)
        made = read.arrays["naive.pool"].reshape(-1, layers, read.heads, 2 * read.dim)
        equal(made[start:end], both[:, :, start:].transpose(2, 0, 1, 3))
        for name in ("scores", "pattern"):
            equal(read.cells("cached", name, index), stacked(ours, name, layers))
            whole = stacked(theirs, name, layers)
            equal(read.cells("naive", name, index), whole[:, :, start:])

        apart = read.apart(index)
        for place, name in enumerate(("keys", "values"), 1):
            difference = np.abs(stacked(ours, name, layers) - stacked(theirs, name, layers))
            most = difference.max(axis=-1)
            code = apart[:, :, place].astype(float)
            bound = np.where(code == 0, 0, 2 ** ((code - module.UNIT) / module.PER_DOUBLING))
            assert (most <= bound * (1 + 1e-12)).all()
            assert (most >= bound * 2 ** (-1 / module.PER_DOUBLING) * (1 - 1e-9) - 2e-15).all()
    return read


def test_every_number_equals_that_of_a_trace(tiny):
    check_against_traces(tiny, STORY, 4)


def test_numbers_past_the_window_and_without_a_tokenizer_equal_a_trace():
    model = random_model()  # float64: what is kept is rounded to float32 once
    prompt = random_ids(model.config, 6).tolist()
    read = check_against_traces(model, prompt, 5)
    hidden = read.cells("cached", "scores", 0)[1, 0] < -HIDDEN
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    np.testing.assert_array_equal(hidden, (distance < 0) | (distance >= 4))


def test_the_cache_holds_what_was_made_and_nothing_else(tiny):
    read = Reader(explore(tiny, STORY, max_new_tokens=5).page)
    assert read.arrays["pool"].size == read.tokens * read.layers * read.heads * 2 * read.dim
    for index, step in enumerate(read.facts["steps"]):
        _, places = read.in_slots(index)
        made = np.arange(step["end"]) * read.layers + np.arange(read.layers)[:, None]
        np.testing.assert_array_equal(places, made)


def test_costs_and_totals_are_those_of_the_shapes(tiny):
    facts = explore(tiny, STORY, max_new_tokens=6).facts
    prompt = facts["prompt_tokens"]
    for path in ("cached", "naive"):
        expected = run_costs(tiny.config, prompt, 6, path)
        for step, cost in zip(facts["steps"], expected, strict=True):
            assert step["costs"][path]["flops"] == cost.cost.flops
            assert step["costs"][path]["bytes"] == cost.cost.bytes
            inside = sum(layer["flops"] for layer in step["costs"][path]["layers"])
            assert 0 < inside < cost.cost.flops
    remade = sum(step["start"] for step in facts["steps"])
    assert remade == run_costs(tiny.config, prompt, 6, "naive")[-1].remade_so_far
    for step, made in zip(
        facts["steps"],
        generate(tiny, STORY, max_new_tokens=6, stop_at_end=False),
        strict=True,
    ):
        assert step["cache_bytes"] == made.cache_bytes
        assert step["seconds"]["cached"] > 0
        best = step["candidates"][0]
        assert best["id"] == made.token
        assert best["cached"] == pytest.approx(np.exp(made.logprob), rel=1e-4)
        assert best["naive"] == pytest.approx(best["cached"], rel=1e-3)


def test_48_steps_of_the_embedded_model_take_less_than_5_megabytes(tiny):
    exploration = explore(tiny, PROMPT, max_new_tokens=48)
    size = len(exploration.page.encode())
    assert len(exploration.facts["steps"]) == 48
    assert size < 5_000_000
    assert module.page_size(tiny.config, 46, 48) == pytest.approx(size, rel=0.1)


def test_the_page_is_one_file_that_asks_for_nothing(tiny, tmp_path):
    exploration = explore(tiny, STORY, max_new_tokens=2)
    exploration.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == exploration.page
    assert "default-src 'none'" in page
    outside = TEXT.sub("", page)
    assert not re.search(r"https?:|\bsrc=|@import|url\(|\bfetch\(|<link(?! rel=\"icon\")", outside)
    assert page.count("<script") == page.count("</script>") == len(module.SCRIPTS) + 1


NASTY = [
    "</script><script>alert(1)</script>",
    "<!-- <script> ]]> &amp; \\u003c",
    "'\"`${1}` \\",
    "__proto__ constructor toString",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "a smile \U0001f600, a family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "lines\n\n\ttabs\r\n\u2028\u2029\x00\x1b[31m",
    "<!-- data --> /* style */ <!-- scripts -->",
]


@pytest.mark.parametrize("prompt", NASTY)
def test_no_text_breaks_out_of_its_place(tiny, prompt):
    exploration = explore(tiny, prompt, max_new_tokens=2)
    page = exploration.page
    assert page.count("<script") == page.count("</script>") == len(module.SCRIPTS) + 1
    facts, _ = data_of(page)
    assert facts == json.loads(json.dumps(exploration.facts))
    pieces = "".join(token["piece"] for token in facts["tokens"])
    assert pieces.startswith(tiny.decode(tiny.encode(prompt)).rstrip("\ufffd"))
    frame = exploration._repr_html_()
    assert frame.count("<") == 2, "the page is an attribute of its frame"
    assert frame.count('"') == 6


def test_no_name_of_a_model_breaks_out_of_its_place(tiny):
    for name in NASTY:
        page = explore(replace(tiny, name=name), STORY, max_new_tokens=1).page
        assert page.count("<script") == page.count("</script>") == len(module.SCRIPTS) + 1
        assert data_of(page)[0]["model"] == name


def test_a_model_without_a_tokenizer_shows_ids():
    model = random_model("float32")
    exploration = explore(model, [1, 2, 3], max_new_tokens=2)
    assert [token["text"] for token in exploration.facts["tokens"][:3]] == ["1", "2", "3"]
    assert exploration.agree


@pytest.mark.parametrize("new", [1, 40])
def test_one_step_and_a_full_context_are_fine(new):
    model = random_model("float32")
    exploration = explore(model, [5], max_new_tokens=new)
    assert len(exploration.facts["steps"]) == min(new, model.config.context)
    assert Reader(exploration.page).tokens == min(new, model.config.context)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_marked_where_the_fault_lab_finds_it(name):
    model = random_model("float32", seed=3)
    prompt = random_ids(model.config, 7, seed=1).tolist()
    lab = run_fault(model, name, prompt, max_new_tokens=6)
    exploration = explore(model, prompt, max_new_tokens=6, fault=name)
    facts, read = exploration.facts, Reader(exploration.page)
    assert not exploration.agree
    assert facts["found"] == lab.found.to_json()
    fault = facts["fault"]
    assert fault["fault"] == name
    assert fault["first_wrong_token"] == lab.first_wrong
    if lab.first_wrong is not None:
        step = facts["steps"][fault["wrong_step"]]
        assert step["best"][0] != step["best"][1], "here the paths prefer different tokens"
        earlier = [s for s in facts["steps"][: fault["wrong_step"]] if s["yields"]]
        assert all(step["best"][0] == step["best"][1] for step in earlier)
    step, layer, value = (facts["found"][key] for key in ("step", "layer", "value"))
    cell = facts["cell"]
    if value in NAMES:
        place = NAMES.index(value)
        limits = read.arrays["limits"].reshape(-1, read.layers, len(NAMES))
        apart = read.apart(step)
        assert apart[layer, cell["head"], place, cell["row"]] > limits[step, layer, place]
        assert not (apart[:layer] > limits[step, :layer, None, :, None]).any()
        for before in range(step):
            assert not (read.apart(before) > limits[before, :, None, :, None]).any()
    else:
        assert cell is None


@pytest.mark.parametrize("name", ["first-position", "stale-cache", "padding-counted"])
def test_a_token_is_held_against_its_twin_in_whatever_slot_it_lies(name):
    model = random_model("float32", seed=3)
    prompt = random_ids(model.config, 7, seed=1).tolist()
    read = Reader(explore(model, prompt, max_new_tokens=4, fault=name).page)
    naive = read.arrays["naive.pool"].reshape(-1, read.layers, read.heads, 2 * read.dim)
    moved = False
    for index, step in enumerate(read.facts["steps"]):
        start, end, held = step["start"], step["end"], step["held"]
        moved |= held != start
        ours, _ = read.in_slots(index)  # [layers, slots, heads, key and value]
        twins = ours[:, held : held + end - start].transpose(1, 0, 2, 3)
        apart = np.abs(twins - naive[start:end])[..., : read.dim].max(axis=-1)
        code = read.apart(index)[:, :, NAMES.index("keys"), start:].transpose(2, 0, 1)
        np.testing.assert_array_equal(code, module.coded(apart))
    assert moved


def test_a_fault_that_a_text_hides_is_said_to_be_hidden(tiny):
    exploration = explore(tiny, STORY, max_new_tokens=3, fault="window-too-wide")
    assert exploration.agree
    assert exploration.facts["fault"]["new_tokens_needed"] > 3


def test_a_path_that_breaks_down_is_shown_up_to_there(tiny, monkeypatch):
    class Breaks(KVCache):
        most = 5

        def extend(self, layer, new_keys, new_values):
            if self.length > self.most and layer == 2:
                raise RuntimeError("out of <slots>")
            return super().extend(layer, new_keys, new_values)

    monkeypatch.setitem(FAULTS, "breaks", replace(FAULTS["slot-zero"], name="breaks", cache=Breaks))
    assert len(tiny.encode(STORY)) == 4
    exploration = explore(tiny, STORY, max_new_tokens=6, fault="breaks")
    facts = exploration.facts
    assert [step["end"] for step in facts["steps"]] == [4, 5, 6]
    assert len(facts["tokens"]) == 7
    assert facts["breakdown"] == "out of <slots>"
    assert facts["found"]["value"] == "the cached path broke down: out of <slots>"
    assert facts["fault"]["wrong_step"] == 3
    assert Reader(exploration.page).tokens == 6
    Breaks.most = -1
    with pytest.raises(InputError, match="the first pass breaks down: out of <slots>"):
        explore(tiny, STORY, max_new_tokens=6, fault="breaks")


def test_passes_of_a_prompt_in_parts_are_steps_that_write_nothing(tiny):
    facts = explore(tiny, STORY, max_new_tokens=2, fault="mask-not-offset").facts
    assert [step["yields"] for step in facts["steps"]] == [False, False, True, True]
    assert all(a["end"] == b["start"] for a, b in pairwise(facts["steps"]))
    assert facts["prompt_tokens"] == len(tiny.encode(STORY))


@pytest.mark.parametrize(
    "values", [[0.0, 1.5, -0.0, np.inf, np.nan, 3e38], [1e-45, -1.0, 7, 0, 1, 2]]
)
def test_numbers_come_back_exactly_from_their_differences(values):
    values = np.array(values, np.float32)
    base = np.array([0.0, 1.5000001, 0.0, 1, 2, -3e38], np.float32)
    back = added(module.differences(values, base).tobytes(), base)
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_a_code_bounds_its_difference_closely():
    apart = np.concatenate([[0, np.nan, np.inf], 10 ** np.linspace(-14, 3, 400)])
    code = module.coded(apart).astype(int)
    assert code[0] == 0
    assert (code[1:3] == module.NO_NUMBER).all()
    bound = 2 ** ((code[3:] - module.UNIT) / module.PER_DOUBLING)
    assert (apart[3:] <= bound * (1 + 1e-12)).all()
    assert (bound < 1.2 * apart[3:]).all()


def test_what_cannot_be_used_is_refused(tiny):
    for options in ({"max_new_tokens": 0}, {"max_new_tokens": True}, {"fault": "window-too-wid"}):
        with pytest.raises(InputError):
            explore(tiny, STORY, **options)
    with pytest.raises(InputError, match="the page would take"):
        explore(tiny, STORY, max_new_tokens=500)


# The command


def test_the_command_writes_the_page_and_says_where(capsys, tmp_path):
    page, numbers = tmp_path / "my page.html", tmp_path / "numbers.json"
    arguments = ("explore", STORY, "--new-tokens", "3", "--out", str(page), "--device", "cpu")
    status, out, err = call(capsys, *arguments, "--json", str(numbers))
    assert (status, err) == (0, "")
    assert f"{page}, 0." in out
    assert "Both paths say the same in 3 steps" in " ".join(out.split())
    facts, _ = data_of(page.read_text(encoding="utf-8"))
    assert json.loads(numbers.read_text()) == facts
    assert [p.name for p in sorted(tmp_path.iterdir())] == [page.name, numbers.name]


def test_a_page_that_is_there_is_written_over_and_kept_where_all_fails(capsys, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    page.chmod(0o640)
    arguments = ("explore", STORY, "--out", str(page), "--device", "cpu", "--new-tokens")
    assert call(capsys, *arguments, "0")[0] == 2
    assert page.read_text() == "mine"
    assert call(capsys, *arguments, "2")[0] == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert page.stat().st_mode & 0o777 == 0o640


def test_a_fault_gives_status_1_and_its_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    status, out, _ = call(
        capsys, "explore", STORY, "--new-tokens", "3", "--out", str(page),
        "--fault", "keys-values-swapped", "--device", "cpu",
    )  # fmt: skip
    assert status == 1
    assert "The paths differ, first at step 0, layer 0, keys." in " ".join(out.split())
    assert data_of(page.read_text(encoding="utf-8"))[0]["cell"] == {
        "head": 0,
        "row": 0,
        "column": 0,
    }


def test_a_fault_that_stays_hidden_gives_status_0_and_says_what_would_show_it(capsys, tmp_path):
    arguments = [STORY, "--new-tokens", "3", "--device", "cpu", "--fault", "window-too-wide"]
    status, out, _ = call(capsys, "explore", *arguments, "--out", str(tmp_path / "page.html"))
    assert status == 0
    (needed,) = re.findall(r"it would show with --new-tokens (\d+)\.", " ".join(out.split()))
    assert int(needed) > 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "page.txt"], "end its name in .html"),
        (["--out", "-"], "end its name in .html"),
        (["--out", "missing/page.html"], "does not exist"),
        (["--out", "folder.html"], "is a folder"),
        (["--json", "explore.html"], "both name"),
        (["--fault", "slot-zer"], "did you mean slot-zero"),
        (["--new-tokens", "0"], "max_new_tokens is 0"),
        (["--new-tokens", "500"], "the page would take"),
        (["--model", "nothing/here/at/all"], "nothing/here/at/all"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    status, out, err = call(capsys, "explore", STORY, "--device", "cpu", *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "explore.html").exists()
