"""float16, which only a GPU computes in fast: the same code, with sums in float32, on NumPy here."""

from dataclasses import replace

import numpy as np
import pytest
from small import random_ids, random_model, run

from minineo import KVCache, compare, generate, load, score
from minineo.transformer import Recompute, attention
from minineo.transformer.attention import attend
from minineo.transformer.functions import gelu_new, layer_norm

EPS = float(np.finfo("float16").eps)


def narrow(model):
    """The same model in float16."""

    def convert(part):
        if isinstance(part, tuple):
            return getattr(type(part), "_make", tuple)(convert(each) for each in part)
        return part.astype("float16")

    return replace(model, weights=convert(model.weights))


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu"), narrow(load("tiny", device="cpu"))


def test_logits_lie_within_the_rounding_of_float16_from_those_in_float64(tiny):
    """The bound that `tests/gpu_check.py` holds a GPU to as well."""
    text = "Once upon a time, there was a little girl named Lily. " * 12
    exact, half = load("tiny", device="cpu", dtype="float64"), tiny[1]
    tokens = np.array([exact.encode(text)])
    want, got = (run(each, tokens, Recompute(), last_only=False) for each in (exact, half))
    assert got.dtype == np.float16
    assert np.abs(got - want).max() <= 32 * EPS * np.abs(want).max()


@pytest.mark.parametrize("rows", [3, 64])
def test_both_paths_agree_in_float16(rows, monkeypatch, tiny):
    monkeypatch.setattr(attention, "QUERY_ROWS", rows)
    comparison = compare(tiny[1], "Once upon a time", max_new_tokens=6)
    assert comparison.agree
    assert 0 < comparison.lockstep.largest_difference < 0.01  # it is rounding, and there is some


def test_text_and_score_are_those_of_float32(tiny):
    prompt = "Once upon a time, there was a"
    texts = [
        "".join(step.text for step in generate(each, prompt, max_new_tokens=12)) for each in tiny
    ]
    assert texts[0] == texts[1]
    perplexities = [score(each, prompt).perplexity for each in tiny]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01)


@pytest.mark.parametrize("new", [1, 5])
def test_scores_beyond_float16(new):
    """64 products of 32 and 32 are 65,536, and float16 ends at 65,504."""
    queries, keys = np.full((1, 1, new, 64), 32.0), np.full((1, 1, 5, 64), 32.0)
    keys += np.arange(5)[:, None] / 32
    values = np.random.default_rng(0).normal(size=(1, 1, 5, 64))
    positions = np.arange(5 - new, 5)[None]
    want = attend(queries, keys, values, positions, 5)
    got = attend(*(each.astype("float16") for each in (queries, keys, values)), positions, 5)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want, atol=4 * EPS)


def test_a_norm_of_large_numbers():
    """The squares of 300 are 90,000, beyond float16."""
    vectors = np.float16([[300, -300] * 400])
    got = layer_norm(vectors, np.ones(800, "float16"), np.zeros(800, "float16"), 1e-5)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.sign(vectors))


def test_the_activation_has_its_limits_at_both_ends():
    x = np.float16([-6e4, -300, -11, 0, 11, 300, 6e4])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(gelu_new(x), np.float16([0, 0, 0, 0, 11, 300, 6e4]))


def test_hidden_slots_of_a_warm_cache_stay_finite():
    model = random_model("float16")
    cache = KVCache(model.config, 2, 32, like=model.weights.token_embedding)
    for fed in ([9, 2], [1, 1], [4, 7]):
        logits = run(model, random_ids(model.config, 2, max(fed)), cache, counts=fed)
        assert np.isfinite(logits).all()
