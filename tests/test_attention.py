import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minineo.transformer import attention, silent
from minineo.transformer.attention import QUERY_ROWS, attend, merge_heads, split_heads
from minineo.transformer.trace import Trace


def by_loops(queries, keys, values, positions, window):
    """Attention with one Python number at a time."""
    mixed = np.zeros_like(queries)
    for b, h, i in np.ndindex(queries.shape[:3]):
        seen = [s for s in range(keys.shape[2]) if 0 <= positions[b, i] - s < window]
        scores = [float(queries[b, h, i] @ keys[b, h, s]) for s in seen]
        shares = [math.exp(score - max(scores)) for score in scores]
        for s, share in zip(seen, shares, strict=True):
            mixed[b, h, i] += share / sum(shares) * values[b, h, s]
    return mixed


@st.composite
def cases(draw):
    batch, heads, new = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    starts = draw(st.lists(st.integers(0, 11), min_size=batch, max_size=batch))
    positions = np.array(starts)[:, None] + np.arange(new)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    head_dim, slots = draw(st.sampled_from([1, 4, 7])), int(positions.max()) + 1
    queries = rng.normal(size=(batch, heads, new, head_dim))
    keys, values = rng.normal(size=(2, batch, heads, slots, head_dim))
    return queries, keys, values, positions, draw(st.integers(1, 25))


@given(cases(), st.integers(1, 10))
def test_attend_is_attention_by_loops_whatever_the_starts_window_and_rows_at_once(case, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_ROWS", rows)
        np.testing.assert_allclose(attend(*case), by_loops(*case), atol=1e-12)


def test_a_prompt_of_several_blocks_is_attention_by_loops():
    new = 2 * QUERY_ROWS + 5
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 1, 1, new, 4))
    positions = np.arange(new)[None]
    for window in (1, 3, QUERY_ROWS, QUERY_ROWS + 1, new):
        got = attend(queries, keys, values, positions, window)
        np.testing.assert_allclose(got, by_loops(queries, keys, values, positions, window))


def test_scores_are_not_divided_by_anything():
    trace = Trace()
    ones = np.ones((1, 1, 1, 64))
    attend(ones, ones, ones, np.array([[0]]), 4, trace)
    assert trace["scores"].item() == 64


def test_slots_behind_the_window_or_in_the_future_are_not_even_read():
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 1, 2, 10, 4))
    keys[:, :, :3] = values[:, :, :3] = np.nan
    keys[:, :, 9:] = values[:, :, 9:] = np.nan
    mixed = attend(queries[:, :, 6:9], keys, values, np.array([[6, 7, 8]]), window=4)
    assert np.isfinite(mixed).all()


def test_a_trace_sees_the_pattern_of_all_slots_with_zeros_where_a_query_may_not_look():
    new, window = QUERY_ROWS + 6, 5
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 2, 2, new, 4))
    trace = Trace()
    attend(queries, keys, values, np.arange(new)[None].repeat(2, 0), window, trace)
    distance = np.arange(new)[:, None] - np.arange(new)
    seen = (distance >= 0) & (distance < window)
    assert trace["pattern"].shape == trace["scores"].shape == (2, 2, new, new)
    np.testing.assert_array_equal(trace["pattern"] > 0, np.broadcast_to(seen, (2, 2, new, new)))
    np.testing.assert_allclose(trace["pattern"].sum(-1), 1)
    assert (trace["scores"][:, :, ~seen] == np.finfo("float64").min).all()
    np.testing.assert_allclose(
        trace["scores"][:, :, seen], (queries @ keys.swapaxes(-1, -2))[:, :, seen]
    )


def test_scores_of_one_head_do_not_touch_another():
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 1, 3, 6, 4))
    positions = np.arange(6)[None]
    whole = attend(queries, keys, values, positions, 6, silent)
    for head in range(3):
        one = slice(head, head + 1)
        alone = attend(queries[:, one], keys[:, one], values[:, one], positions, 6)
        np.testing.assert_array_equal(whole[:, one], alone)


def test_heads_are_consecutive_parts_of_the_width_and_merge_back():
    x = np.arange(24).reshape(1, 2, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (1, 3, 2, 4)
    np.testing.assert_array_equal(heads[0, 1], [[4, 5, 6, 7], [16, 17, 18, 19]])
    np.testing.assert_array_equal(merge_heads(heads), x)
