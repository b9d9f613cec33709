"""What flows through one head: the numbers of the trace, told apart by where they come from."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from small import random_ids, random_model
from test_cli import STORY

from minineo import InputError, KVCache, Recompute, Trace, generate, load
from minineo.study.figures import plot_flow, plot_pattern
from minineo.study.flow import NAMES, OneHead, flow

WINDOW = 4  # of the small model's odd layers
GLOBAL, LOCAL = 2, 3


@pytest.fixture(scope="module")
def small():
    return random_model()


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


def prompt(model, length, seed=0):
    return random_ids(model.config, length, seed=seed).tolist()


def whole_trace(model, ids, cache):
    """The trace of all values of all layers of one pass."""
    trace = Trace()
    model.forward([ids], cache, trace=trace)
    return trace


def assert_is_traced(seen, trace, layer, head):
    for name in NAMES:
        np.testing.assert_array_equal(
            getattr(seen, name), trace[f"block{layer}.{name}"][0, head], err_msg=name
        )


# The numbers


@pytest.mark.parametrize("layer", [GLOBAL, LOCAL])
@pytest.mark.parametrize("chunk", [None, 3])
def test_every_number_is_that_of_the_whole_trace_of_both_paths(small, layer, chunk):
    walk = flow(small, prompt(small, 7), layer=layer, head=1, max_new_tokens=5, prefill_chunk=chunk)
    cache = KVCache(small.config, 1, 20, like=small.weights.token_embedding)
    for step in walk:
        new_ids = step.ids[cache.length :]
        assert_is_traced(step.cached, whole_trace(small, new_ids, cache), layer, 1)
        assert_is_traced(step.naive, whole_trace(small, step.ids, Recompute()), layer, 1)


def test_the_tokens_are_those_that_generate_writes(tiny):
    walk = flow(tiny, STORY, max_new_tokens=6)
    steps = list(generate(tiny, STORY, max_new_tokens=6))
    assert walk.ids == walk[5].ids, "the last token is never fed"
    assert [step.candidates[0][0] for step in walk] == [step.token for step in steps]
    assert [step.phase for step in walk] == [step.phase for step in steps]
    assert [step.cached.made for step in walk] == [step.fed for step in steps]
    for seen, step in zip(walk, steps, strict=True):
        for (token, text, probability), (same, logprob) in zip(
            seen.candidates, step.top(5), strict=True
        ):
            assert (token, text) == (same, tiny.decode([token]))
            assert probability == pytest.approx(np.exp(logprob))


def test_a_step_can_be_looked_at_again_in_any_order(small):
    walk = flow(small, prompt(small, 5), layer=LOCAL, max_new_tokens=4)
    first = [walk[index] for index in range(4)]
    for index in (3, 0, 2, 2, 1, -1):
        for name in NAMES:
            for path in ("cached", "naive"):
                np.testing.assert_array_equal(
                    getattr(getattr(walk[index], path), name),
                    getattr(getattr(first[index], path), name),
                )


@pytest.mark.parametrize("layer", [GLOBAL, LOCAL])
def test_every_row_of_a_pattern_is_made_of_shares_of_what_is_seen(small, layer):
    for step in flow(small, prompt(small, 9), layer=layer, max_new_tokens=4):
        for path in (step.cached, step.naive):
            np.testing.assert_allclose(path.pattern.sum(axis=1), 1)
            assert (path.pattern[path.hidden] == 0).all()
            assert (path.pattern >= 0).all()


def test_scores_pattern_and_mixed_follow_from_queries_keys_and_values(small):
    for step in flow(small, prompt(small, 9), layer=LOCAL, max_new_tokens=3, prefill_chunk=4):
        for path in (step.cached, step.naive):
            products = path.queries @ path.keys.T
            np.testing.assert_allclose(path.scores[~path.hidden], products[~path.hidden])
            np.testing.assert_allclose(path.mixed, path.pattern @ path.values, atol=1e-12)


def test_both_paths_say_the_same(small):
    for step in flow(small, prompt(small, 9), layer=LOCAL, max_new_tokens=9, prefill_chunk=4):
        assert set(step.differences) == set(NAMES)
        assert max(step.differences.values()) < 1e-12


def test_a_difference_is_seen_in_what_both_paths_have(small):
    step = flow(small, prompt(small, 9), layer=LOCAL, max_new_tokens=2)[1]
    for name in NAMES:
        array = getattr(step.cached, name)
        array[-1, -1] += 0.5
        assert step.differences[name] == pytest.approx(0.5), name


# What is hidden, and what comes from the cache


@pytest.mark.parametrize("layer", [GLOBAL, LOCAL])
def test_a_query_sees_its_own_slot_and_those_before_it_in_the_window(small, layer):
    window = small.config.windows[layer]
    assert window == (WINDOW if layer == LOCAL else small.config.context)
    for step in flow(small, prompt(small, 9), layer=layer, max_new_tokens=3, prefill_chunk=4):
        assert step.window == window
        assert step.kind == ("local" if layer == LOCAL else "global")
        for path in (step.cached, step.naive):
            positions = range(path.held, len(step.ids))
            assert path.hidden.tolist() == [
                [not 0 <= position - slot < window for slot in range(len(step.ids))]
                for position in positions
            ]
            lowest = np.finfo(path.scores.dtype).min
            np.testing.assert_array_equal(path.hidden, path.scores == lowest)


def test_the_window_reaches_just_past_the_far_side(small):
    step = flow(small, prompt(small, WINDOW + 1), layer=LOCAL, max_new_tokens=1)[0]
    assert step.naive.hidden[-1].tolist() == [True, *[False] * WINDOW]


@pytest.mark.parametrize(
    ("chunk", "held", "fed"),
    [
        (None, [0, 7, 8], [7, 1, 1]),
        (3, [0, 3, 6, 7, 8], [3, 3, 1, 1, 1]),
        (7, [0, 7, 8], [7, 1, 1]),
        (100, [0, 7, 8], [7, 1, 1]),
        (1, [0, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 9),
    ],
)
def test_what_comes_from_the_cache_is_what_was_made_before(small, chunk, held, fed):
    walk = flow(small, prompt(small, 7), max_new_tokens=3, prefill_chunk=chunk)
    assert [step.cached.held for step in walk] == held
    assert [step.cached.made for step in walk] == fed
    assert [step.naive.held for step in walk] == [0] * len(walk)
    assert [step.naive.made for step in walk] == [h + f for h, f in zip(held, fed, strict=True)]
    assert [step.phase for step in walk] == ["prefill"] * (len(walk) - 2) + ["decode"] * 2
    assert [len(step.candidates) for step in walk] == [0] * (len(walk) - 3) + [5] * 3
    before = None
    for step in walk:
        if before is not None:
            np.testing.assert_array_equal(step.cached.keys[: step.cached.held], before)
        before = step.cached.keys


def test_the_last_position_of_the_context_is_used_and_no_further_one(small):
    walk = flow(small, prompt(small, 30), max_new_tokens=50)
    assert [len(step.ids) for step in walk] == [30, 31, 32]
    full = flow(small, prompt(small, 32), max_new_tokens=1)
    assert [len(step.ids) for step in full] == [32]


# Other layers and heads


def test_another_layer_and_head_are_those_of_a_walk_of_their_own(small):
    walk = flow(small, prompt(small, 6), max_new_tokens=3)
    other, own = walk.at(LOCAL, 3), flow(small, prompt(small, 6), layer=LOCAL, head=3)
    np.testing.assert_array_equal(other[2].cached.mixed, own[2].cached.mixed)
    assert (walk.at(head=2).layer, walk.at(head=2).head) == (0, 2)
    assert (other.at(layer=1).layer, other.at(layer=1).head) == (1, 3)


def test_only_one_head_of_one_layer_is_kept(small):
    trace = OneHead(LOCAL, 2)
    small.forward([prompt(small, 6)], Recompute(), trace=trace)
    assert set(trace.kept) == set(NAMES)
    assert all(value.shape[:2] == (1, 1) for value in trace.kept.values())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"layer": 4}, "layer is 4; choose one of 0 to 3"),
        ({"layer": -1}, "layer is -1; choose one of 0 to 3"),
        ({"layer": True}, "layer is True; choose one of 0 to 3"),
        ({"layer": 1.0}, "layer is 1.0; choose one of 0 to 3"),
        ({"head": 4}, "head is 4; choose one of 0 to 3"),
        ({"head": "1"}, "head is '1'; choose one of 0 to 3"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -2}, "max_new_tokens is -2"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_what_cannot_be_used_is_refused(small, options, complaint):
    with pytest.raises(InputError, match=complaint.replace("(", r"\(")):
        flow(small, [1, 2], **options)


def test_the_same_is_refused_of_a_walk_that_looks_elsewhere(small):
    walk = flow(small, [1, 2])
    with pytest.raises(InputError, match="layer is 4"):
        walk.at(layer=4)
    with pytest.raises(InputError, match="head is -1"):
        walk.at(head=-1)
    with pytest.raises(IndexError):
        walk[8]


# JSON


def test_json_holds_the_numbers_of_the_newest_query(tiny):
    walk = flow(tiny, "a" + " a" * 70, layer=1, head=2, max_new_tokens=2)
    data = json.loads(json.dumps(walk.to_json(walk), allow_nan=False))
    assert (data["model"], data["layer"], data["head"]) == ("tiny", 1, 2)
    assert data["prompt_tokens"] == 71
    for step, plain in zip(walk, data["steps"], strict=True):
        assert plain["ids"] == step.ids
        assert plain["token"] == step.candidates[0][0]
        for path in ("cached", "naive"):
            seen, told = getattr(step, path), plain[path]
            assert (told["tokens_fed"], told["keys_from_cache"]) == (seen.made, seen.held)
            np.testing.assert_array_equal(np.float32(told["keys"]), seen.keys)
            np.testing.assert_array_equal(np.float32(told["values"]), seen.values)
            np.testing.assert_array_equal(np.float32(told["query"]), seen.queries[-1])
            np.testing.assert_array_equal(np.float32(told["pattern"]), seen.pattern[-1])
            np.testing.assert_array_equal(np.float32(told["mixed"]), seen.mixed[-1])
            hidden = seen.hidden[-1]
            assert told["hidden"] == hidden.tolist()
            assert [score is None for score in told["scores"]] == hidden.tolist()
            shown = [score for score in told["scores"] if score is not None]
            np.testing.assert_array_equal(np.float32(shown), seen.scores[-1][~hidden])
    assert sum(data["steps"][1]["cached"]["hidden"]) == 72 - 64


# Figures


def drawn(figure, tmp_path, kind="png"):
    file = tmp_path / f"figure.{kind}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(file)
    return file.stat().st_size


def panels(figure):
    """The shape of each matrix that is drawn, by the first line of its title."""
    return [
        (axes.get_title().splitlines()[0], axes.get_images()[0].get_array().shape)
        for axes in figure.axes
    ]


@pytest.mark.parametrize("layer", [GLOBAL, LOCAL])
def test_the_flow_is_drawn_in_the_shapes_of_the_matrices(small, layer, tmp_path):
    walk = flow(small, prompt(small, 9), layer=layer, max_new_tokens=2, prefill_chunk=5)
    for step, made in zip(walk, (5, 4, 1), strict=True):
        figure, count = plot_flow(step), len(step.ids)
        assert panels(figure) == [
            (title, shape)
            for new in (made, count)
            for title, shape in (
                ("queries Q", (new, 8)),
                ("keys Kᵀ", (8, count)),
                ("scores", (new, count)),
                ("pattern", (new, count)),
                ("values V", (count, 8)),
                ("mixed", (new, 8)),
            )
        ]
        assert drawn(figure, tmp_path)


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_the_flow_is_drawn_in_any_kind_of_file(small, kind, tmp_path):
    step = flow(small, prompt(small, 9), layer=LOCAL, max_new_tokens=2)[1]
    assert drawn(plot_flow(step), tmp_path, kind)


def said(figure):
    return " ".join(text.get_text() for text in figure.texts)


def test_the_figure_says_where_keys_and_values_come_from(tiny):
    walk = flow(tiny, STORY, layer=1, max_new_tokens=2)
    prefill, decode = (said(plot_flow(step)) for step in walk)
    assert "cached path: fed 4 of 4 tokens; nothing is in the cache yet" in prefill
    assert "naive path: fed 4 of 4 tokens; the same work" in prefill
    assert "cached path: fed 1 of 5 tokens; the keys and values of 4 come from the cache" in decode
    assert "naive path: fed 5 of 5 tokens; the keys and values of 4 are made again" in decode


def test_what_comes_from_the_cache_is_hatched_and_what_is_new_is_framed(tiny):
    figure = plot_flow(flow(tiny, STORY, max_new_tokens=2)[1])
    patches = {
        axes.get_title().splitlines()[0]: [
            (patch.get_hatch(), *np.round(patch.get_bbox().bounds, 1).tolist())
            for patch in axes.patches
        ]
        for axes in figure.axes[:6]
    }
    assert patches["keys Kᵀ"] == [("///", -0.5, -0.5, 4, 32), (None, 3.5, -0.5, 1, 32)]
    assert patches["values V"] == [("///", -0.5, -0.5, 32, 4), (None, -0.5, 3.5, 32, 1)]
    assert patches["queries Q"] == [(None, -0.5, -0.5, 32, 1)]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_short_and_long_texts_are_drawn_inside_the_figure(tiny, length, tmp_path):
    step = flow(tiny, "a" + " a" * (length - 1), layer=1, max_new_tokens=1)[0]
    assert len(step.ids) == length
    figure = plot_flow(step)
    assert drawn(figure, tmp_path)
    for axes in figure.axes:
        box = axes.get_position()
        assert 0 <= box.x0 < box.x1 <= 1
        assert 0 <= box.y0 < box.y1 <= 1


def test_tokens_of_any_text_are_drawn(tiny, tmp_path):
    step = flow(tiny, STORY, max_new_tokens=1)[0]
    texts = ["$x$y", "日本", "\n\x1b[0m", "a rather long token"]
    figure = plot_flow(replace(step, texts=texts))
    assert drawn(figure, tmp_path)
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == [r"'\$x\$y'", "'□□'", r"'\n\x1b[…", "'a rathe…"]


def test_patterns_are_drawn_with_the_edge_of_the_window(tiny, tmp_path):
    walk = flow(tiny, "a" + " a" * 79, max_new_tokens=1)
    figure = plot_pattern([walk.at(layer, head)[0] for layer in (0, 1) for head in (0, 2, 3)])
    assert drawn(figure, tmp_path)
    maps = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == [
        f"layer {layer}, head {head}".replace(",", f" ({kind}),")
        for layer, kind in ((0, "global"), (1, "local, window 64"))
        for head in (0, 2, 3)
    ]
    assert [len(axes.lines) for axes in maps] == [0, 0, 0, 1, 1, 1]
    x, y = maps[3].lines[0].get_data()
    assert (y - x == 64).all()
    assert y[-1] == 79.5


def test_patterns_of_one_token_are_drawn(tiny, tmp_path):
    assert drawn(plot_pattern([flow(tiny, "a", max_new_tokens=1)[0]]), tmp_path)
