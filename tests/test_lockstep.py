"""Two runs held against each other: what is compared, what is reported, and what is left behind."""

import os
import signal
import threading
import tracemalloc
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model, random_weights, run

from minineo import Config, InputError, KVCache, Model, Recompute, Trace, load
from minineo.device import choose
from minineo.study.lockstep import (
    ROUNDING,
    Pass,
    Place,
    Runs,
    first_fault,
    in_float64,
    lockstep,
)
from minineo.study.shapes import shape_fields
from minineo.transformer.attention import attend
from minineo.transformer.functions import gelu_new, layer_norm, linear
from minineo.transformer.replaceable import replaced
from minineo.transformer.trace import Silent

DTYPES = ["float32", "float64"]
CONTEXT = 32
MODELS = {dtype: random_model(dtype) for dtype in DTYPES}


def model_of(dtype, window=4, kinds=("global", "local", "global", "local"), **changes):
    attention_types = [[[kind], 1] for kind in kinds]
    shape = {"num_layers": len(kinds), "attention_types": attention_types, "window_size": window}
    return random_model(dtype, **shape, **changes)


def passes_of(config, *counts, seed=0):
    """Passes that feed rows so many random tokens each."""
    random = np.random.default_rng(seed)
    return [
        Pass.of(*(random.integers(0, config.vocab, count).tolist() for count in each))
        for each in counts
    ]


@st.composite
def feeds(draw):
    """How many tokens each pass feeds each row: chunks, single tokens, ragged batches."""
    rows, passes = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(st.integers(1, CONTEXT // passes), min_size=passes, max_size=passes)
    return list(zip(*draw(st.lists(row, min_size=rows, max_size=rows)), strict=True))


kinds = st.lists(st.sampled_from(["global", "local"]), min_size=1, max_size=4)


# Without a fault


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(feeds(), st.integers(1, CONTEXT + 4), kinds, st.integers(0, 99))
def test_without_a_fault_nothing_is_reported(dtype, feed, window, kinds, seed):
    model = model_of(dtype, window, kinds, seed=seed)
    found = lockstep(model, passes_of(model.config, *feed, seed=seed))
    assert found.agree, found.divergence
    assert found.steps == len(feed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "feed",
    [
        [(60,)] + [(1,)] * 10,  # token by token across the edge of the window
        [(50,), (30,), (1,), (40,), (1,)],
        [(70, 3, 64, 1), (1, 1, 1, 1), (1, 70, 20, 2), (1, 1, 1, 1)],
    ],
)
def test_the_embedded_model_agrees_past_its_window(dtype, feed):
    model = load("tiny", device="cpu", dtype=dtype)
    assert min(model.config.windows) == 64
    found = lockstep(model, passes_of(model.config, *feed))
    assert found.agree, found.divergence


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feed", [[(254,), (1,), (1,), (1,), (1,)], [(200, 90), (60, 3), (1, 1)]])
def test_a_model_of_125_million_parameters_agrees_past_its_window(dtype, feed):
    config = Config.from_dict(shape_fields("125m"))
    model = Model("125m", config, random_weights(config, dtype), None, choose("cpu"))
    found = lockstep(model, passes_of(config, *feed))
    assert found.agree, found.divergence


def test_every_named_value_of_every_layer_is_held_at_every_step():
    model, trace = MODELS["float64"], Trace()
    run(model, random_ids(model.config, 1, 3), Recompute(), trace=trace)
    found = lockstep(model, passes_of(model.config, (9,), (1,), (3,)))
    assert found.values == 3 * len(trace)
    assert set(found.largest) == {name.split(".")[-1] for name in trace}


def test_progress_is_told_after_each_step():
    done = []
    lockstep(
        MODELS["float64"], passes_of(MODELS["float64"].config, (3,), (1,)), progress=done.append
    )
    assert done == [1, 2]


# With one


class Spoiled(KVCache):
    """Returns keys or values in which one number is wrong, in one pass and layer."""

    length_before = layer = row = slot = 0
    by = 0.01
    what = "keys"

    def extend(self, layer, new_keys, new_values):
        held = dict(
            zip(("keys", "values"), super().extend(layer, new_keys, new_values), strict=True)
        )
        if layer == self.layer and self.lengths[0] == self.length_before:
            held[self.what] = held[self.what].copy()
            held[self.what][self.row, 1, self.slot, 2] += self.by
        return held["keys"], held["values"]


def spoiled(**where):
    return type("Spoiled", (Spoiled,), where)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(st.data(), feeds(), kinds)
def test_one_wrong_number_of_one_row_is_found_and_placed(dtype, data, feed, kinds):
    model = model_of(dtype, kinds=kinds)
    step = data.draw(st.integers(0, len(feed) - 1), "step")
    layer = data.draw(st.integers(0, len(kinds) - 1), "layer")
    row = data.draw(st.integers(0, len(feed[0]) - 1), "row")
    ends = np.cumsum(feed, axis=0)
    slot = data.draw(st.integers(0, ends[step, row] - 1), "slot")
    what = data.draw(st.sampled_from(["keys", "values"]), "what")
    before = ends[step, 0] - feed[step][0]
    cache = spoiled(length_before=before, layer=layer, row=row, slot=slot, what=what)
    found = lockstep(model, passes_of(model.config, *feed), cache=cache)
    assert found.divergence.place == Place(step, layer, what)
    assert found.divergence.exact_difference == pytest.approx(found.divergence.difference, rel=1e-2)
    assert 0 < found.divergence.difference <= 0.0101


def test_what_is_wrong_behind_the_end_of_a_row_where_nothing_looks_is_no_difference():
    model = MODELS["float64"]
    cache = spoiled(row=1, slot=5, by=1e4, what="values")
    assert lockstep(model, passes_of(model.config, (9, 3), (1, 1)), cache=cache).agree


RIGHT = {f.__name__: f.__wrapped__ for f in (attend, gelu_new, layer_norm, linear)}
MAKES = {  # the value that the calls of a function in one block, and behind the last, first show in
    "linear": (["queries", "new_keys", "new_values", "middle", "after", "after"], "logits"),
    "layer_norm": (["normed_1", "normed_2"], "final"),
    "attend": (["mixed"], None),
    "gelu_new": (["after"], None),
}


@st.composite
def cells(draw, feed, places):
    """A step, one of the places in it, a row, and a new token of that row."""
    step = draw(st.integers(0, len(feed) - 1))
    place = draw(st.integers(0, len(places) - 1))
    row = draw(st.integers(0, len(feed[0]) - 1))
    return step, place, row, draw(st.integers(0, feed[step][row] - 1))


@pytest.mark.parametrize("name", RIGHT)
@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), feeds(), kinds)
def test_a_function_that_goes_wrong_once_is_named_by_what_it_makes(name, data, dtype, feed, kinds):
    model = model_of(dtype, kinds=kinds)
    in_block, last = MAKES[name]
    places = [(layer, value) for layer in range(len(kinds)) for value in in_block]
    places += [(None, last)] if last else []
    step, place, row, position = data.draw(cells(feed, places))
    begun = Counter()  # passes, in float32 and float64

    @contextmanager
    def change():
        calls = []

        def wrong(*args, **options):
            right = RIGHT[name](*args, **options)
            if not calls:
                begun[right.dtype] += 1
            calls.append(name)
            if begun[right.dtype] == step + 1 and len(calls) == place + 1:
                where = min(position, right.shape[-2] - 1)  # final and logits are of one position
                right[row, ..., where, :] *= 1.01
            return right

        with replaced(**{name: wrong}):
            yield

    found = lockstep(model, passes_of(model.config, *feed), change=change).divergence
    assert found.place == Place(step, *places[place])


@pytest.mark.parametrize("name", ["scores", "pattern"])
@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), feeds(), kinds)
def test_one_wrong_score_or_share_is_found_and_placed(name, data, dtype, feed, kinds):
    model = model_of(dtype, kinds=kinds)
    step, layer, row, position = data.draw(cells(feed, kinds))
    slot = sum(each[row] for each in feed[:step]) + position  # that of the token itself
    begun = Counter()

    class Wrong(Silent):
        """Passes a tile on in which one number is wrong."""

        def __init__(self, trace):
            self.trace = trace

        def tile(self, rows, slots, whole, **values):
            values[name][row, 1, position, slot - slots.start] += 0.01
            self.trace.tile(rows, slots, whole, **values)

    @contextmanager
    def change():
        calls = []

        def wrong(queries, *inputs):
            begun[queries.dtype] += not calls
            calls.append(name)
            *inputs, trace = inputs
            here = begun[queries.dtype] == step + 1 and len(calls) == layer + 1
            return RIGHT["attend"](queries, *inputs, Wrong(trace) if here else trace)

        with replaced(attend=wrong):
            yield

    found = lockstep(model, passes_of(model.config, *feed), change=change).divergence
    assert found.place == Place(step, layer, name)


def test_a_change_is_made_in_the_cached_run_alone_and_in_every_pass():
    model, made = MODELS["float64"], []

    def counting(x):
        made.append(threading.current_thread())
        return RIGHT["gelu_new"](x)

    passes = passes_of(model.config, (5,), (1,), (1,))
    assert lockstep(model, passes, change=lambda: replaced(gelu_new=counting)).agree
    assert len(made) == len(passes) * model.config.n_layers
    assert threading.current_thread() not in made
    found = lockstep(model, passes, change=lambda: replaced(gelu_new=lambda x: x))
    assert found.divergence.place == Place(0, 0, "after")


def test_what_is_prepared_is_done_to_the_cached_run_before_the_first_pass():
    model = MODELS["float32"]

    def prepare(model, cache):
        run(model, random_ids(model.config, 1, 3), cache)

    passes = passes_of(model.config, (5,), (1,))
    found = lockstep(model, passes, prepare=prepare, spare=3)
    assert found.divergence.place == Place(0, 0, "before"), "positions go on from what was there"

    def prepare_and_forget(model, cache):
        prepare(model, cache)
        cache.crop(0)

    assert lockstep(model, passes, prepare=prepare_and_forget).agree


def test_nothing_is_made_after_the_first_difference():
    model, made, done = MODELS["float64"], [], []

    @contextmanager
    def change():
        made.append(None)
        yield

    found = lockstep(
        model,
        passes_of(model.config, (5,), *[(1,)] * 9),
        cache=spoiled(length_before=7, layer=1),
        change=change,
        progress=done.append,
    )
    assert found.divergence.place == Place(3, 1, "keys")
    assert found.steps == len(done) == 3
    assert len(made) == 4


# Rounding and faults of its size


def loud(model):
    """The same model, but attention adds a large number to all, and layer norm what is left."""
    blocks = tuple(
        block._replace(
            attention=block.attention._replace(output=block.attention.output + np.float32(300))
        )
        for block in model.weights.blocks
    )
    return replace(model, weights=model.weights._replace(blocks=blocks))


LOUD = loud(MODELS["float32"])


def values_times(factor):
    class Times(KVCache):
        def extend(self, layer, new_keys, new_values):
            keys, values = super().extend(layer, new_keys, new_values)
            return keys, values * factor if layer == 1 else values

    return Times


def test_rounding_that_exceeds_the_bound_is_not_reported_for_float64_shows_what_it_is():
    found = lockstep(LOUD, passes_of(LOUD.config, (20,), *[(1,)] * 8))
    assert found.agree, found.divergence
    assert found.largest_difference > 5 * ROUNDING["float32"]


def test_a_fault_of_the_size_of_that_rounding_is_reported():
    passes = passes_of(LOUD.config, (20,), *[(1,)] * 8)
    by = lockstep(LOUD, passes).largest_difference
    found = lockstep(LOUD, passes, cache=values_times(1 + by)).divergence
    assert found.place == Place(0, 1, "values")
    assert found.exact_difference == pytest.approx(by, rel=0.1)


def test_a_fault_below_the_bound_is_placed_where_float64_shows_it_first():
    passes = passes_of(LOUD.config, (20,))
    by = ROUNDING["float32"] / 5
    found = lockstep(LOUD, passes, cache=values_times(1 + by)).divergence
    assert found.place == Place(0, 1, "values")
    assert found.difference < ROUNDING["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_difference_ten_times_the_bound_is_reported(dtype):
    model = MODELS[dtype]
    passes = passes_of(model.config, (9,), (1,))
    for times, agree in ((10, False), (0.01, True)):
        cache = values_times(1 + times * ROUNDING[dtype])
        assert lockstep(model, passes, cache=cache).agree == agree


def test_a_difference_shrinks_a_millionfold_in_float64_or_is_no_rounding():
    place, other = Place(0, 1, "keys"), Place(0, 1, "values")
    for difference, exact, rounding in (
        (1e-3, 1e-11, True),
        (1e-3, 1e-8, False),
        (0.05, 4e-8, True),
        (0.05, 6e-8, False),
        (0.5, 0.0, False),
        (np.nan, 0.0, False),
        (np.inf, 0.0, False),
        (1e-3, np.nan, False),
        (None, 0.0, False),
        (1e-3, None, False),
    ):
        found = first_fault({other: 0.0, place: difference}, {other: 0.0, place: exact})
        assert (found is None) == rounding
        assert rounding or found.place == place
    assert first_fault({place: 1e-3}, {other: 0.0}).place == place, "float64 did not get there"


# No numbers, no values


def test_not_a_number_is_a_difference_even_where_both_paths_have_it():
    model = MODELS["float32"]
    blocks = list(model.weights.blocks)
    output = blocks[2].attention.output.copy()
    output[3, 3] = np.nan
    blocks[2] = blocks[2]._replace(attention=blocks[2].attention._replace(output=output))
    broken = replace(model, weights=model.weights._replace(blocks=tuple(blocks)))
    for each in (broken, in_float64(broken)):
        found = lockstep(each, passes_of(model.config, (5,))).divergence
        assert found.place == Place(0, 2, "middle")
        assert np.isnan(found.difference)
        assert found.to_json()["difference"] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_in_one_row_of_one_path_is_found(dtype):
    model = MODELS[dtype]
    for what in ("keys", "values"):
        cache = spoiled(row=1, slot=1, by=np.nan, layer=3, what=what)
        found = lockstep(model, passes_of(model.config, (9, 2)), cache=cache).divergence
        assert found.place == Place(0, 3, what)


class BreaksDown(KVCache):
    error = ValueError("shapes do not fit")

    def extend(self, layer, new_keys, new_values):
        if layer == 2 and self.length == 6:
            raise self.error
        return super().extend(layer, new_keys, new_values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("shapes do not fit"), "shapes do not fit"),
        (MemoryError(), "MemoryError"),
        (SystemExit(3), "3"),
    ],
)
def test_a_path_that_breaks_down_is_named_with_the_reason(dtype, error, reason):
    cache = type("BreaksDown", (BreaksDown,), {"error": error})
    model = MODELS[dtype]
    found = lockstep(model, passes_of(model.config, (5,), (1,), (1,), (1,)), cache=cache)
    assert found.divergence.place == Place(2, None, f"the cached path broke down: {reason}")
    assert (found.divergence.difference, found.steps) == (None, 2)


def test_a_naive_path_that_breaks_down_is_named_as_well(monkeypatch):
    def fail(self, layer, new_keys, new_values):
        raise ValueError("no more")

    monkeypatch.setattr(Recompute, "extend", fail)
    found = lockstep(MODELS["float64"], passes_of(MODELS["float64"].config, (5,))).divergence
    assert found.value == "the naive path broke down: no more"


def test_a_value_that_one_path_alone_hands_over_is_a_difference():
    def untraced(queries, keys, values, positions, window, trace):
        return RIGHT["attend"](queries, keys, values, positions, window)

    for dtype, model in MODELS.items():
        found = lockstep(
            model,
            passes_of(model.config, (5,), (1,)),
            change=lambda: replaced(attend=untraced),
        ).divergence
        assert (found.step, found.layer, found.difference) == (0, 0, None), dtype
        assert found.value == "scores, which one path alone makes"


def test_values_of_other_shapes_differ():
    class Short(KVCache):
        def extend(self, layer, new_keys, new_values):
            keys, values = super().extend(layer, new_keys, new_values)
            return (keys[:, :, 1:], values) if layer == 1 else (keys, values)

    model = MODELS["float32"]
    found = lockstep(model, passes_of(model.config, (5,)), cache=Short).divergence
    assert (found.place, found.difference) == (Place(0, 1, "keys"), None)


# What is left behind


@contextmanager
def no_threads_left():
    before = threading.enumerate()
    yield
    assert set(threading.enumerate()) <= set(before)


def interrupted(done):
    raise KeyboardInterrupt


FEED = [(9,), (1,), (1,), (1,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": spoiled()},
        {"cache": spoiled(length_before=10, layer=3, what="values")},
        {"cache": BreaksDown},
        {"cache": values_times(np.nan)},
    ],
)
def test_no_thread_is_left_after_the_end(dtype, options):
    with no_threads_left():
        lockstep(MODELS[dtype], passes_of(MODELS[dtype].config, *FEED), **options)


def test_no_thread_is_left_after_an_exception():
    def refuse(model, cache):
        raise ValueError

    passes = passes_of(MODELS["float32"].config, *FEED)
    for options in ({"progress": interrupted}, {"prepare": refuse}):
        with no_threads_left(), suppress(ValueError, KeyboardInterrupt):
            lockstep(MODELS["float32"], passes, **options)
            pytest.fail("nothing was raised")


def test_no_thread_is_left_where_one_cannot_be_started(monkeypatch):
    begin = threading.Thread.start
    started = []

    def start(thread):
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with no_threads_left(), pytest.raises(RuntimeError, match="can't start"):
        lockstep(MODELS["float32"], passes_of(MODELS["float32"].config, *FEED))


@pytest.fixture
def interruptible():
    """Let SIGINT be KeyboardInterrupt, even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_middle_of_a_pass_leaves_no_thread():
    class Interrupts(KVCache):
        def extend(self, layer, new_keys, new_values):
            if (layer, self.length) == (2, 10):
                os.kill(os.getpid(), signal.SIGINT)
            return super().extend(layer, new_keys, new_values)

    with no_threads_left(), pytest.raises(KeyboardInterrupt):
        lockstep(MODELS["float32"], passes_of(MODELS["float32"].config, *FEED), cache=Interrupts)


@pytest.mark.parametrize("taken", [1, 20])
def test_whoever_stops_taking_values_leaves_no_thread_and_makes_both_runs_stop(taken):
    model, made = model_of("float32", kinds=["global"] * 30), []

    def counting(x):
        made.append(None)
        return RIGHT["gelu_new"](x)

    def change():
        return replaced(gelu_new=counting)

    passes = passes_of(model.config, *FEED)
    with no_threads_left():
        pairs = Runs(model, passes, KVCache, change, lambda *_: None, 0).hold(0)
        for _ in range(taken):
            next(pairs)
        pairs.close()
    assert len(made) <= 3, "layers that were made"


def peak_of(model, *feed):
    passes = passes_of(model.config, *feed)
    tracemalloc.start()
    try:
        assert lockstep(model, passes).agree
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_a_few_values_whatever_the_layers_and_steps():
    """The scores of one layer are large here: what matters is how many are there at once."""
    tokens, shape = 300, {"max_position_embeddings": 320, "hidden_size": 8, "num_heads": 4}
    matrix = 4 * tokens * tokens * 4  # bytes
    shallow, deep = (
        model_of("float32", window=50, kinds=["global", "local"] * pairs, **shape)
        for pairs in (2, 20)
    )
    peak = peak_of(deep, (tokens,), (1,), (1,))
    assert peak < 12 * matrix < 40 * matrix / 3
    assert peak < 1.4 * peak_of(shallow, (tokens,), (1,), (1,))
    assert peak_of(shallow, (tokens,), *[(1,)] * 12) < 1.4 * peak_of(shallow, (tokens,), (1,))


def test_what_is_replaced_for_the_caller_is_replaced_in_both_runs():
    def spoiled(x):
        return gelu_new.__wrapped__(x) + 1

    seen = []
    with replaced(gelu_new=lambda x: (seen.append(threading.current_thread().name), spoiled(x))[1]):
        assert lockstep(MODELS["float64"], [Pass.of([1, 2, 3])]).agree
    assert len(set(seen)) == 2


def test_a_fault_of_float32_alone_is_no_rounding():
    class Only32(KVCache):
        def extend(self, layer, new_keys, new_values):
            keys, values = super().extend(layer, new_keys, new_values)
            return (keys * np.float32(1.5) if keys.dtype == np.float32 else keys), values

    found = lockstep(MODELS["float32"], [Pass.of([1, 2, 3])], cache=Only32).divergence
    assert found.place == Place(0, 0, "keys")
    assert found.difference > 0.1 > found.exact_difference


def test_another_dtype_on_one_path_is_a_difference():
    class Wide(KVCache):
        def extend(self, layer, new_keys, new_values):
            keys, values = super().extend(layer, new_keys, new_values)
            return keys.astype(np.float64), values

    found = lockstep(MODELS["float32"], [Pass.of([1, 2, 3])], cache=Wide).divergence
    assert found.place == Place(0, 0, "keys")


@pytest.mark.parametrize("passes", [[], [Pass.of([1, 2]), Pass.of([1], [2])]])
def test_passes_that_do_not_fit_each_other_are_refused(passes):
    with pytest.raises(InputError, match="the same number of rows"):
        lockstep(MODELS["float64"], passes)
