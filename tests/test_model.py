import numpy as np
import pytest
from small import random_ids, random_model, run

from minineo import InputError, KVCache, Recompute, Trace


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_the_last_position_alone_is_the_last_of_all(model):
    tokens = random_ids(model.config, 2, 9)
    alone = run(model, tokens, Recompute())
    assert alone.shape == (2, 1, 101)
    np.testing.assert_allclose(alone, run(model, tokens, Recompute(), last_only=False)[:, -1:])


def test_each_row_ends_at_its_own_last_real_token(model):
    tokens = random_ids(model.config, 3, 9)
    every = run(model, tokens, Recompute(), last_only=False)
    last = run(model, tokens, Recompute(), counts=[9, 1, 4])
    np.testing.assert_allclose(last[:, 0], every[[0, 1, 2], [8, 0, 3]], atol=1e-12)


def test_no_token_sees_a_later_one(model):
    tokens = random_ids(model.config, 1, 12)
    changed = tokens.copy()
    changed[0, 7:] = (changed[0, 7:] + 1) % 101
    before = run(model, tokens, Recompute(), last_only=False)
    after = run(model, changed, Recompute(), last_only=False)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(axis=-1).all()


def test_the_whole_context_is_usable_and_one_more_token_is_refused(model):
    assert np.isfinite(run(model, random_ids(model.config, 1, 32), Recompute())).all()
    with pytest.raises(InputError, match="33 positions are needed; this model has 32"):
        run(model, random_ids(model.config, 1, 33), Recompute())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_value_has_the_dtype_of_the_weights(dtype):
    model, trace = random_model(dtype), Trace()
    cache = KVCache(model.config, 2, 32, like=model.weights.token_embedding)
    for fed in (6, 1):
        logits = run(model, random_ids(model.config, 2, fed), cache, trace=trace)
        assert logits.dtype == dtype
        assert {name: value.dtype for name, value in trace.items()} == dict.fromkeys(trace, dtype)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64"])
def test_ids_of_every_integer_type_mean_the_same(model, kind):
    tokens = random_ids(model.config, 1, 6)
    got = run(model, tokens.astype(kind), Recompute())
    np.testing.assert_array_equal(got, run(model, tokens, Recompute()))


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([[1, 101]], "101 is no token"),
        ([[1, -1]], "-1 is no token"),
        ([[-100, 1]], "-100 is no token"),
        ([[2**70]], "whole numbers"),
        ([[1.0, 2.0]], "whole numbers; these are float64"),
        ([[True]], "whole numbers; these are bool"),
        ([["a"]], "whole numbers"),
        ([[1, 2], [3]], "rows of one length"),
        ([1, 2], r"shape \(2,\)"),
        ([[]], r"shape \(1, 0\)"),
        (np.zeros((0, 3), int), r"shape \(0, 3\)"),
    ],
)
def test_tokens_that_are_none_are_refused_by_name(model, tokens, complaint):
    with pytest.raises(InputError, match=complaint):
        run(model, tokens, Recompute())


@pytest.mark.parametrize(
    "counts", [[0, 1], [1, 4], [-1, 2], [1], [1.0, 2.0], [[1, 2]], [[1], [1, 2]]]
)
def test_counts_that_cannot_be_are_refused(model, counts):
    with pytest.raises(InputError, match="counts"):
        run(model, random_ids(model.config, 2, 3), Recompute(), counts=counts)


def test_a_trace_changes_nothing(model):
    tokens = random_ids(model.config, 2, 9)
    untraced = run(model, tokens, Recompute())
    np.testing.assert_array_equal(run(model, tokens, Recompute(), trace=Trace()), untraced)


def test_a_trace_names_every_value_in_the_order_of_the_computation(model):
    trace = Trace()
    run(model, random_ids(model.config, 2, 5), Recompute(), trace=trace)
    inside = [
        "before",
        "normed_1",
        "queries",
        "new_keys",
        "new_values",
        "keys",
        "values",
        "scores",
        "pattern",
        "mixed",
        "middle",
        "normed_2",
        "after",
    ]
    want = [f"block{layer}.{name}" for layer in range(4) for name in inside]
    assert list(trace) == [*want, "final", "logits"]
    shapes = {name: trace[f"block1.{name}"].shape for name in inside}
    assert shapes == {
        **dict.fromkeys(("before", "normed_1", "middle", "normed_2", "after"), (2, 5, 32)),
        **dict.fromkeys(("queries", "new_keys", "new_values", "keys", "values"), (2, 4, 5, 8)),
        **dict.fromkeys(("scores", "pattern"), (2, 4, 5, 5)),
        "mixed": (2, 4, 5, 8),
    }


def test_a_trace_keeps_copies(model):
    trace = Trace()
    cache = KVCache(model.config, 1, 32, like=model.weights.token_embedding)
    run(model, random_ids(model.config, 1, 5), cache, trace=trace)
    kept = trace["block0.keys"].copy()
    cache.keys[0][:] = 0
    np.testing.assert_array_equal(trace["block0.keys"], kept)


def test_a_trace_can_be_asked_for_few_values(model):
    trace = Trace(["pattern", "logits"])
    run(model, random_ids(model.config, 1, 5), Recompute(), trace=trace)
    assert list(trace) == [*(f"block{layer}.pattern" for layer in range(4)), "logits"]
    assert len(trace) == 5


def test_counts_of_any_integer_type_keep_the_lengths_whole(model):
    cache = KVCache(model.config, 1, 32, like=model.weights.token_embedding)
    run(model, random_ids(model.config, 1, 2), cache, counts=np.array([2], "uint64"))
    assert cache.lengths.dtype.kind == "i"
    assert np.isfinite(run(model, random_ids(model.config, 1, 1), cache)).all()


def test_a_trace_can_be_asked_for_one_value_of_one_block(model):
    trace = Trace("block2.pattern")
    run(model, random_ids(model.config, 1, 5), Recompute(), trace=trace)
    assert list(trace) == ["block2.pattern"]


@pytest.mark.parametrize("ids", [[[1, True, 3]], [[np.True_, 2]], ((1, False),)])
def test_a_bool_among_ids_is_no_id(ids):
    model = random_model()
    with pytest.raises(InputError, match="whole numbers; these are"):
        run(model, ids, Recompute())
