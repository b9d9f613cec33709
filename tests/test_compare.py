import json
from dataclasses import replace

import numpy as np
import pytest
from small import random_model

from minineo import InputError, KVCache, Recompute, compare, generate
from minineo.study.compare import replay
from minineo.study.costs import launches, pass_costs, total
from minineo.study.lockstep import Place, distance

PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(params=["float32", "float64"])
def either(request):
    return random_model(request.param)


def test_both_paths_agree_up_to_rounding(either):
    comparison = compare(either, PROMPT, max_new_tokens=26)
    assert comparison.agree
    assert comparison.same_tokens == 26
    assert comparison.max_difference < (1e-4 if either.dtype == "float32" else 1e-10)
    assert comparison.tolerance >= comparison.max_difference


def test_the_tokens_are_those_that_generate_chooses(model):
    comparison = compare(model, PROMPT, max_new_tokens=12)
    steps = generate(model, PROMPT, max_new_tokens=12, stop_at_end=False)
    assert comparison.new_ids == [step.token for step in steps]


def test_the_naive_path_is_fed_the_tokens_of_the_cached_one(model, monkeypatch):
    """A fault that changes the text must not change what the naive path is fed."""
    spoil(monkeypatch, "advance", lambda cache, counts: None)
    with_fault = compare(model, PROMPT, max_new_tokens=2)
    monkeypatch.undo()
    ids = [*PROMPT, with_fault.new_ids[0]]
    (want,) = generate(model, ids, path="naive", max_new_tokens=1)
    np.testing.assert_allclose(with_fault.pairs[1].naive.logits, want.logits, atol=1e-10)


def test_the_ledger_tells_what_each_path_is_fed_and_keeps(model):
    steps = compare(model, PROMPT, max_new_tokens=4).to_json()["steps"]
    assert [step["phase"] for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert [step["cached"]["tokens_fed"] for step in steps] == [6, 1, 1, 1]
    assert [step["naive"]["tokens_fed"] for step in steps] == [6, 7, 8, 9]
    for path in ("cached", "naive"):
        assert [step[path]["keys_attended"] for step in steps] == [6, 7, 8, 9]
        assert all(step[path]["seconds"] > 0 for step in steps)
    assert [step["cache_bytes"] for step in steps] == [n * 2048 for n in (6, 7, 8, 9)]


def test_the_summary_follows_from_the_steps(model):
    data = compare(model, PROMPT, max_new_tokens=6).to_json()
    assert data == json.loads(json.dumps(data, allow_nan=False))
    summary, steps = data["summary"], data["steps"]
    totals = {}
    for path in ("cached", "naive"):
        seconds = [step[path]["seconds"] for step in steps]
        totals[path] = sum(seconds)
        assert summary[path]["ttft_seconds"] == seconds[0]
        assert summary[path]["decode_seconds_per_token"] == sorted(seconds[1:])[2]
        assert summary[path]["total_seconds"] == pytest.approx(totals[path])
    assert summary["speedup"] == pytest.approx(totals["naive"] / totals["cached"])
    assert summary["max_abs_logit_diff"] == max(step["max_abs_logit_diff"] for step in steps)
    assert summary["same_tokens"] is True
    assert summary["first_divergence"] is None
    assert summary["cache_bytes_per_token"] == 2048
    assert data["prompt_tokens"] == 6
    assert data["new_tokens"] == 6
    assert data["prompt_ids"] == PROMPT
    assert data["new_ids"] == [step["token"] for step in steps]


def test_one_step_has_no_time_per_token(model):
    data = compare(model, PROMPT, max_new_tokens=1).to_json()
    assert data["summary"]["cached"]["decode_seconds_per_token"] is None


def test_it_ends_when_the_context_is_full(model):
    data = compare(model, [1] * 30, max_new_tokens=50).to_json()
    assert data["new_tokens"] == 3
    assert data["finish"] == "context"


def test_it_does_not_stop_at_the_end_of_text():
    model = random_model(eos_token_id=None)
    tokens = compare(model, PROMPT, max_new_tokens=10).new_ids
    model = random_model(eos_token_id=tokens[3])
    assert compare(model, PROMPT, max_new_tokens=10).new_ids == tokens


def test_progress_is_told_step_by_step(model):
    calls = []
    compare(model, PROMPT, max_new_tokens=3, progress=lambda *call: calls.append(call))
    assert calls == [(done, 9) for done in range(1, 10)]


def test_the_cache_pays_from_the_step_after_which_it_stays_ahead(model):
    comparison = compare(model, PROMPT, max_new_tokens=4)
    for cached, naive, want in (
        ([2, 1, 1, 1], [1, 1, 3, 3], 2),
        ([1, 1, 1, 1], [2, 2, 2, 2], 1),
        ([1, 9, 1, 1], [2, 2, 2, 9], 3),
        ([9, 9, 9, 9], [1, 1, 1, 1], None),
    ):
        for pair, *seconds in zip(comparison.pairs, cached, naive, strict=True):
            object.__setattr__(pair.cached, "seconds", seconds[0])
            object.__setattr__(pair.naive, "seconds", seconds[1])
        assert comparison.pays_from() == want


@pytest.mark.parametrize("count", [0, -1, 1.5, None])
def test_a_comparison_without_steps_is_refused(model, count):
    with pytest.raises(
        InputError, match=f"max_new_tokens is {count}; it must be a whole number from 1"
    ):
        compare(model, PROMPT, max_new_tokens=count)


# Faults in the cache


def spoil(monkeypatch, name, fault):
    monkeypatch.setattr(KVCache, name, fault)


extend, advance = KVCache.extend, KVCache.advance


def skip_write(cache, layer, new_keys, new_values):
    """The first decoded token's key and value of layer 2 are never written."""
    if layer == 2 and cache.length == len(PROMPT):
        all_slots = cache.length + 1
        return cache.keys[2][:, :, :all_slots], cache.values[2][:, :, :all_slots]
    return extend(cache, layer, new_keys, new_values)


def never_write_slot_0(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    keys[:, :, 0] = values[:, :, 0] = 0
    return keys, values


def drop_newest(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    return keys[:, :, :-1], values[:, :, :-1]


def drop_newest_key(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    return keys[:, :, :-1], values


def overwrite_with_values_of_another_layer(cache, layer, new_keys, new_values):
    keys, _ = extend(cache, layer, new_keys, new_values)
    return keys, cache.values[0][:, :, : keys.shape[2]]


def not_a_number(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    if layer == 1 and cache.length == len(PROMPT):
        values[:, :, 5] = np.nan
    return keys, values


FAULTS = [
    (skip_write, Place(1, 2, "keys")),
    (never_write_slot_0, Place(0, 0, "keys")),
    (drop_newest, Place(0, 0, "keys")),
    (drop_newest_key, Place(0, 0, "keys")),
    (overwrite_with_values_of_another_layer, Place(0, 1, "values")),
    (not_a_number, Place(1, 1, "values")),
]


@pytest.mark.parametrize(("fault", "place"), FAULTS)
def test_a_fault_in_the_cache_is_found_and_placed(either, monkeypatch, fault, place):
    spoil(monkeypatch, "extend", fault)
    comparison = compare(either, PROMPT, max_new_tokens=8)
    assert not comparison.agree
    assert comparison.first_divergence.place == place
    json.dumps(comparison.to_json(), allow_nan=False)


def test_a_path_that_breaks_down_is_a_finding(model, monkeypatch):
    spoil(monkeypatch, "advance", lambda cache, counts: advance(cache, counts + 1))
    comparison = compare(model, PROMPT, max_new_tokens=8)
    assert comparison.first_divergence.step == 1
    assert "the cached path broke down" in comparison.first_divergence.value


def test_a_fault_that_begins_late_is_placed_late(model, monkeypatch):
    def late(cache, layer, new_keys, new_values):
        keys, values = extend(cache, layer, new_keys, new_values)
        if cache.length == 12 and layer == 3:
            values[:, :, 11] += 1
        return keys, values

    spoil(monkeypatch, "extend", late)
    assert compare(model, PROMPT, max_new_tokens=20).first_divergence.place == Place(7, 3, "values")


def test_a_fault_of_the_naive_path_is_found_as_well(model, monkeypatch):
    monkeypatch.setattr(
        Recompute, "extend", lambda self, layer, keys, values: (keys, values * 1.01)
    )
    assert not compare(model, PROMPT, max_new_tokens=3).agree


def test_a_distance_is_a_share_of_the_largest_number_but_of_1_at_least():
    assert distance([np.array([1.0, 100])], [np.array([2.0, 100])]) == 0.01
    assert distance([np.array([0.25])], [np.array([0.5])]) == 0.25
    assert distance([np.zeros(3), np.ones(2)], [np.zeros(3), np.zeros(2)]) == 1
    assert distance([np.zeros(3)], [np.zeros(2)]) is None
    assert np.isnan(distance([np.ones(1), np.array([np.nan])], [np.zeros(1), np.ones(1)]))
    assert np.isnan(distance([np.array([np.nan]), np.ones(1)], [np.ones(1), np.zeros(1)]))


def test_a_distance_tells_hidden_scores_from_seen_ones():
    lowest = np.finfo("float64").min
    hidden, seen = [np.array([1.0, lowest])], [np.array([1.0, 2.0])]
    assert distance(hidden, hidden) == 0
    assert distance(hidden, seen) > 1e300
    assert distance(seen, hidden) > 1e300


def test_replay_chooses_the_same_tokens_again(model):
    steps = list(generate(model, PROMPT, max_new_tokens=3))
    choose = replay(steps)
    assert [choose(None, None) for _ in steps] == [step.token for step in steps]


def test_a_picture_shows_both_paths(model):
    from minineo.study.figures import plot_comparison

    for count in (1, 2, 8):
        comparison = compare(model, PROMPT, max_new_tokens=count)
        per_step, so_far = plot_comparison(comparison).axes
        for axes in (per_step, so_far):
            assert [len(line.get_xdata()) for line in axes.lines] == [count, count]
        ends = [line.get_ydata()[-1] for line in so_far.lines]
        want = [1000 * comparison.total_seconds(path) for path in ("naive", "cached")]
        np.testing.assert_allclose(ends, want)


def test_timed_runs_that_differ_are_not_said_to_agree(model, monkeypatch):
    found = compare(model, PROMPT, max_new_tokens=3)
    pair = found.pairs[1]
    for difference in (1.0, float("nan")):
        object.__setattr__(pair, "difference", difference)
        assert not found.agree
        assert found.first_divergence.place == Place(1, None, "logits of the timed runs")


@pytest.mark.parametrize("index", [0, 3])
def test_each_step_tells_its_arithmetic_its_bytes_and_its_calls(index):
    model = random_model("float32")
    step = compare(model, [1, 2, 3, 4, 5], max_new_tokens=4).to_json()["steps"][index]
    passes = {"cached": ([1], [4 + index]) if index else ([5], [0]), "naive": ([5 + index], None)}
    for path, (fed, held) in passes.items():
        cost = total(pass_costs(model.config, fed, held))
        calls = launches(model.config, fed[0], cached=path == "cached")
        told = {name: step[path][name] for name in ("flops", "bytes", "launches")}
        assert told == {"flops": cost.flops, "bytes": cost.bytes, "launches": calls}


def test_times_that_other_programs_spoil_are_told(model):
    quiet = replace(compare(model, PROMPT, max_new_tokens=2), busy_cores=0.0)
    assert quiet.warnings == []
    assert replace(quiet, busy_cores=None).warnings == []
    assert replace(quiet, busy_cores=1.25).to_json()["warnings"] == [
        "others kept 1.2 cores busy meanwhile"
    ]
