"""The cached path equals the naive one: whatever the chunks, rows and windows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model, run

from minineo import KVCache, Recompute

MODELS = {
    "tiny": {},
    "window 1": {"window_size": 1},
    "window 3": {"window_size": 3},
    "window as long as the context": {"window_size": 32},
    "window above the context": {"window_size": 99},
    "all local": {"attention_types": [[["local"], 4]]},
    "all global": {"attention_types": [[["global"], 4]]},
    "local first, then two global": {
        "num_layers": 3,
        "attention_types": [[["local"], 1], [["global"], 2]],
    },
    "odd sizes": {"hidden_size": 21, "num_heads": 3, "intermediate_size": 35},
    "untied": {"tie_word_embeddings": False},
}
models = st.sampled_from(list(MODELS)).map(lambda name: random_model(**MODELS[name]))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def new_cache(model, batch=1):
    return KVCache(model.config, batch, model.config.context, like=model.weights.token_embedding)


def in_chunks(model, tokens, cuts, cache):
    """Feed tokens in pieces that end at the cuts; return the logits of all positions."""
    edges = sorted({0, *cuts, tokens.shape[1]})
    return np.concatenate(
        [run(model, tokens[:, a:b], cache, last_only=False) for a, b in pairwise(edges)],
        axis=1,
    )


@settings(max_examples=60, deadline=None)
@given(models, st.integers(1, 32), st.sets(st.integers(1, 31), max_size=8), st.integers(0, 9))
def test_any_chunking_of_a_prompt_gives_the_logits_of_one_pass(model, length, cuts, seed):
    tokens = random_ids(model.config, 1, length, seed=seed)
    cuts = {cut for cut in cuts if cut < length}
    got = in_chunks(model, tokens, cuts, new_cache(model))
    close(got, run(model, tokens, Recompute(), last_only=False))


@pytest.mark.parametrize("name", MODELS)
def test_one_token_at_a_time_gives_the_logits_of_one_pass(name):
    model = random_model(**MODELS[name])
    tokens = random_ids(model.config, 2, 32)
    got = in_chunks(model, tokens, range(32), new_cache(model, batch=2))
    close(got, run(model, tokens, Recompute(), last_only=False))


@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_the_rows_attended_for_at_once_change_nothing(rows_at_once, monkeypatch):
    model = random_model()
    tokens = random_ids(model.config, 1, 32)
    want = run(model, tokens, Recompute(), last_only=False)
    monkeypatch.setattr("minineo.transformer.attention.QUERY_ROWS", rows_at_once)
    close(run(model, tokens, Recompute(), last_only=False), want)
    close(in_chunks(model, tokens, {3, 20}, new_cache(model)), want)


@st.composite
def ragged_runs(draw):
    """Rows of different lengths, fed together in passes of which each brings what is left."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    first = [draw(st.integers(1, length)) for length in lengths]
    return lengths, first, draw(st.integers(1, 8)), draw(st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(models, ragged_runs())
def test_a_row_in_a_ragged_batch_equals_the_row_alone(model, ragged):
    lengths, first, decoded, seed = ragged
    batch = len(lengths)
    tokens = random_ids(model.config, batch, max(lengths) + decoded, seed=seed)
    padding = np.random.default_rng(seed + 1)

    def padded(starts, counts):
        """The next tokens of each row, with noise for padding."""
        fed = padding.integers(0, model.config.vocab, (batch, max(counts)))
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            fed[row, :count] = tokens[row, start : start + count]
        return fed

    cache = new_cache(model, batch)
    fed = [0] * batch
    rest = [length - begun for length, begun in zip(lengths, first, strict=True)]
    passes = [first] + ([[max(1, count) for count in rest]] if any(rest) else [])
    passes += [[1] * batch] * (decoded - 1)
    for counts in passes:
        got = run(model, padded(fed, counts), cache, counts=counts)
        fed = [begun + count for begun, count in zip(fed, counts, strict=True)]
        assert cache.lengths.tolist() == fed
        together = run(model, padded([0] * batch, fed), Recompute(), counts=fed)
        for row in range(batch):
            alone = run(model, tokens[row : row + 1, : fed[row]], Recompute())[0]
            close(got[row], alone)
            close(together[row], alone)


def test_padding_may_reach_past_the_last_position():
    model = random_model()
    tokens = random_ids(model.config, 2, 32)
    cache = new_cache(model, batch=2)
    run(model, tokens[:, :28], cache, counts=[28, 4])
    fed = np.zeros((2, 20), int)
    fed[0, :4], fed[1] = tokens[0, 28:], tokens[1, 4:24]
    got = run(model, fed, cache, counts=[4, 20])
    close(got[0], run(model, tokens[:1], Recompute())[0])
    close(got[1], run(model, tokens[1:, :24], Recompute())[0])


def test_what_lies_behind_a_short_row_is_never_seen():
    model = random_model()
    tokens = random_ids(model.config, 2, 20)
    cache = new_cache(model, batch=2)
    run(model, tokens[:, :12], cache, counts=[12, 3])
    for array in (*cache.keys, *cache.values):
        array[0, :, 12:] = array[1, :, 3:] = 1e4
    for step in range(6):
        fed = np.array([[tokens[0, 12 + step]], [tokens[1, 3 + step]]])
        got = run(model, fed, cache)
        close(got[0], run(model, tokens[:1, : 13 + step], Recompute())[0])
        close(got[1], run(model, tokens[1:, : 4 + step], Recompute())[0])


def test_float32_differs_by_rounding_alone():
    model = random_model("float32")
    tokens = random_ids(model.config, 1, 32)
    got = in_chunks(model, tokens, range(5, 32), new_cache(model))
    want = run(model, tokens, Recompute(), last_only=False)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
