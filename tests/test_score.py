import json
import math
import tracemalloc
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from small import random_ids, random_model, run

from minineo import InputError, Model, Recompute, load
from minineo.checkpoints.find import find
from minineo.study import score as study
from minineo.study.score import score

STORY = "One day, a boy named Tim found a big red box in the park. He wanted to open it."


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def embedded():
    return load("tiny", device="cpu")


def expected(model, ids, start, end):
    """The log-probabilities of the tokens behind start .. end - 1, in one pass from start on."""
    logits = run(model, np.array([ids[start:end]]), Recompute(), last_only=False)[0]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.log(shares[np.arange(end - start), ids[start + 1 : end + 1]])


# Values


def test_it_equals_the_loss_of_transformers(embedded):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        find("tiny"), dtype=torch.float32
    ).eval()
    result = score(embedded, STORY)
    tokens = torch.tensor([result.ids])
    with torch.inference_mode():
        said = reference(tokens, labels=tokens)
    assert result.loss == pytest.approx(said.loss.item(), abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(said.loss.item()), rel=1e-4)
    by_token = torch.log_softmax(said.logits[0, :-1].double(), -1)
    want = by_token[torch.arange(len(result.ids) - 1), tokens[0, 1:]]
    np.testing.assert_allclose(result.log_probabilities, want.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [2, 3, 31, 32, 33])
def test_up_to_a_context_and_one_token_every_token_sees_all_before_it(length, dtype):
    model = random_model(dtype)
    ids = random_ids(model.config, length).tolist()
    result = score(model, ids)
    assert result.ids == ids
    assert result.log_probabilities.dtype == "float64"
    close = 1e-4 if dtype == "float32" else 1e-10
    want = expected(model, ids, 0, length - 1)
    np.testing.assert_allclose(result.log_probabilities, want, rtol=0, atol=close)


@pytest.mark.parametrize("length", [34, 48, 49, 50, 65, 100])
def test_a_longer_text_is_scored_in_windows_that_overlap_by_half(model, length):
    ids = random_ids(model.config, length).tolist()
    want = [expected(model, ids, 0, 32)]
    for start in range(16, length, 16):
        end = min(start + 32, length - 1)
        if end > start + 16:
            want.append(expected(model, ids, start, end)[16:])
    got = score(model, ids).log_probabilities
    assert got.shape == (length - 1,)
    np.testing.assert_allclose(got, np.concatenate(want), rtol=0, atol=1e-10)


@pytest.mark.parametrize("context", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("fed", [1, 2, 7, 8, 9, 20])
def test_windows_predict_from_every_position_once_with_half_a_context_before_it(fed, context):
    found = list(study.windows(fed, context))
    positions = [p for _, done, end in found for p in range(done, end)]
    assert positions == list(range(fed))
    for start, done, end in found:
        assert end - start <= context
        assert start == 0 or done - start >= context // 2
    assert len(found) == 1 or fed > context


@pytest.mark.parametrize(("fed", "rows"), [(1, 1), (5, 2), (16, 32), (99, 7)])
def test_the_pieces_in_which_it_is_fed_change_nothing(model, monkeypatch, fed, rows):
    ids = random_ids(model.config, 75).tolist()
    want = score(model, ids).log_probabilities
    monkeypatch.setattr(study, "FED", fed)
    monkeypatch.setattr(study, "ROWS", rows)
    np.testing.assert_allclose(score(model, ids).log_probabilities, want, rtol=0, atol=1e-10)


def test_the_probabilities_of_all_next_tokens_add_up_to_1(model):
    ids = random_ids(model.config, 9).tolist()
    found = [score(model, [*ids, token]) for token in range(model.config.vocab)]
    last = [result.log_probabilities[-1] for result in found]
    assert math.fsum(math.exp(value) for value in last) == pytest.approx(1, abs=1e-12)


def test_a_model_that_knows_nothing_is_as_unsure_as_among_all_tokens(model):
    blank = replace(model, weights=model.weights._replace(unembedding=np.zeros((101, 32))))
    result = score(blank, [1, 2, 3, 4])
    assert result.total == pytest.approx(-3 * math.log(101))
    assert result.loss == pytest.approx(math.log(101))
    assert result.perplexity == pytest.approx(101)


def test_bits_per_byte_are_the_bits_of_the_text_through_its_bytes(embedded):
    text = "Tim saw a café ☃."
    result = score(embedded, text)
    assert result.n_bytes == len(text.encode()) == 20
    assert result.bits_per_byte == pytest.approx(-result.total / math.log(2) / 20)
    by_ids = score(embedded, result.ids)
    assert by_ids.total == result.total
    assert by_ids.bits_per_byte is None
    assert by_ids.n_bytes is None


def test_a_likely_text_scores_above_the_same_words_in_another_order(embedded):
    words = STORY.split()
    shuffled = " ".join(np.random.default_rng(0).permutation(words))
    assert score(embedded, STORY).perplexity < score(embedded, shuffled).perplexity


# Numbers


def test_logits_of_any_size_give_finite_log_probabilities():
    logits = np.array([[1e30, 0, -1e30], [-1e30, -1e30, -1e30], [300, 300, 0]], "float32")
    got = study.pick(logits, [0, 1, 2])
    np.testing.assert_allclose(got, [0, -math.log(3), -300 - math.log(2)])
    assert study.pick(logits, [2, 1, 2])[0] == pytest.approx(-2e30)


def test_float32_logits_are_summed_in_float64():
    logits = np.zeros((1, 200_000), "float32")
    logits[0, 0] = 30
    want = -math.log1p(199_999 * math.exp(-30))
    assert study.pick(logits, [0])[0] == pytest.approx(want, rel=1e-9)


def test_a_perplexity_above_all_numbers_stays_out_of_the_json():
    result = study.Score([0, 1], np.array([-1e4]), None)
    assert result.perplexity == math.inf
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["perplexity"] is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(model, value):
    unembedding = model.weights.unembedding.copy()
    unembedding[7, 0] = value
    broken = replace(model, weights=model.weights._replace(unembedding=unembedding))
    with pytest.raises(InputError, match="not finite numbers; check the model's weights"):
        score(broken, [1, 2, 3])


def test_memory_stays_far_below_the_logits_of_the_text():
    model = random_model(
        "float32", vocab_size=50257, max_position_embeddings=800, hidden_size=4, num_heads=1,
        num_layers=1, attention_types=[[["global"], 1]],
    )  # fmt: skip
    ids = random_ids(model.config, 800)
    tracemalloc.start()
    try:
        score(model, ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 800 * 50257 * 4 / 2


# Results and refusals


def test_the_numbers_are_those_of_the_result(model):
    result = score(model, [3, 1, 4, 1, 5])
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["ids"] == [3, 1, 4, 1, 5]
    assert data["log_probabilities"] == result.log_probabilities.tolist()
    assert data["total"] == pytest.approx(sum(data["log_probabilities"]))
    assert data["loss"] == pytest.approx(-data["total"] / 4)
    assert data["perplexity"] == pytest.approx(math.exp(data["loss"]))
    assert data["bytes"] is None
    assert data["bits_per_byte"] is None
    with pytest.raises(FrozenInstanceError):
        result.ids = []


def test_special_tokens_in_text_are_taken_for_what_they_are_or_spelled_out(embedded):
    text = "Tim ran.<|endoftext|>Lily sat."
    token = embedded.config.end_token
    assert token in score(embedded, text).ids
    assert token not in score(embedded, text, special=False).ids


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([], "0 tokens cannot be scored: .* give 2 or more"),
        ([5], "1 token cannot be scored: .* give 2 or more"),
        ([1, 101], "101 is no token of this model"),
        ([1, -1], "-1 is no token of this model"),
        ([1.0, 2.0], "must be whole numbers"),
        ([True, False], "must be whole numbers"),
        ([[1, 2], [3, 4]], "text or a list of token ids"),
        ([[1, 2], [3]], "rows of one length"),
        ("some text", "no tokenizer"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(model, ids, complaint):
    with pytest.raises(InputError, match=complaint) as refusal:
        score(model, ids)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "a"])
def test_text_of_less_than_two_tokens_is_refused(embedded, text):
    with pytest.raises(InputError, match="cannot be scored"):
        score(embedded, text)


def test_every_token_is_fed_in_order_and_the_last_is_not(model, monkeypatch):
    fed = []
    forward = Model.forward

    def spy(model, tokens, cache, **options):
        fed.extend(tokens[0].tolist())
        return forward(model, tokens, cache, **options)

    monkeypatch.setattr(Model, "forward", spy)
    monkeypatch.setattr(study, "FED", 5)
    ids = random_ids(model.config, 20).tolist()
    score(model, ids)
    assert fed == ids[:-1]
    assert all(a <= b for a, b in pairwise(study.pieces(3, 8, 21)))
