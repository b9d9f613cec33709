"""Sampling, against transformers and by its own rules."""

import warnings
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from math import inf, log, nan

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minineo import InputError
from minineo.generation.sampling import (
    Sampling,
    distribution,
    greedy,
    keep_top_k,
    keep_top_p,
    log_probabilities,
    penalize,
)

LOGITS = np.array([1.0, -2, 0.5, 3, -0.25, 2, 2.5, 0])
IDS = [3, 1, 3]
BROKEN = [[0, nan, 1], [0, inf, 1], [-inf, -inf, -inf], [nan, -inf, -inf]]


def of(probabilities):
    """Logits that give these probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, float))


def kept(scores):
    return np.flatnonzero(scores > -inf).tolist()


def reference(logits, ids, sampling):
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    scores = processors(torch.tensor([ids]), torch.tensor(np.array([logits], "float64")))
    return torch.softmax(scores, -1)[0].numpy()


# Values


@st.composite
def cases(draw):
    vocab = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits = rng.normal(0, draw(st.sampled_from([0.1, 1, 5, 30])), vocab)
    ids = rng.integers(0, vocab, draw(st.integers(1, 20)))
    return (
        logits.astype(draw(st.sampled_from(["float32", "float64"]))),
        ids.tolist(),
        Sampling(
            temperature=draw(st.floats(0.05, 20)),
            top_k=draw(st.integers(0, vocab + 2)),
            top_p=draw(st.floats(0, 1)),
            repetition_penalty=draw(st.floats(0.2, 5)),
        ),
    )


@given(cases())
@settings(max_examples=200, deadline=None)
@example((LOGITS, IDS, Sampling()))
@example((LOGITS, IDS, Sampling(top_p=0)))
@example((LOGITS, IDS, Sampling(top_p=1e-8, top_k=3)))
@example((LOGITS, IDS, Sampling(top_k=3, top_p=0.7, temperature=0.7, repetition_penalty=1.3)))
@example((LOGITS, IDS, Sampling(top_k=99, top_p=0.99, temperature=7, repetition_penalty=0.4)))
@example((LOGITS, IDS, Sampling(top_k=1, temperature=2)))
@example((np.array([-3.0]), [0], Sampling(top_p=0.5, top_k=1, repetition_penalty=2)))
def test_the_distribution_is_that_of_transformers(case):
    logits, ids, sampling = case
    scores = penalize(logits, ids, sampling.repetition_penalty) / sampling.temperature
    assume(np.all(np.diff(np.sort(scores)) > 1e-9))  # of equals transformers keeps just some
    before = distribution(logits, ids, replace(sampling, top_p=1.0))
    sums = np.cumsum(np.sort(before)[::-1])
    assume(sampling.top_p in (0, 1) or np.abs(sums - sampling.top_p).min() > 1e-5)
    mine = distribution(logits, ids, sampling)
    assert mine.dtype == "float64"
    assert mine.shape == logits.shape
    np.testing.assert_allclose(mine, reference(logits, ids, sampling), rtol=0, atol=1e-6)


def test_the_distribution_of_a_whole_vocabulary_is_that_of_transformers():
    logits = np.random.default_rng(0).normal(0, 3, 50257).astype("float32")
    ids = np.random.default_rng(1).integers(0, 50257, 2000).tolist()
    sampling = Sampling(temperature=0.8, top_k=1000, top_p=0.9, repetition_penalty=1.2)
    mine = distribution(logits, ids, sampling)
    np.testing.assert_allclose(mine, reference(logits, ids, sampling), rtol=0, atol=1e-9)
    assert 50 < np.count_nonzero(mine) < 1000


def test_the_penalty_comes_before_the_temperature_and_top_k_before_top_p():
    by_hand = of([0.4, 0.3, 0.2, 0.1]) + 2
    penalized = penalize(by_hand, [0], 3.0) / 0.5
    want = keep_top_p(keep_top_k(penalized, 2), 0.6)
    shares = np.exp(want) / np.exp(want).sum()
    sampling = Sampling(temperature=0.5, top_k=2, top_p=0.6, repetition_penalty=3.0)
    np.testing.assert_allclose(distribution(by_hand, [0], sampling), shares, atol=1e-15)


def test_top_p_counts_what_top_k_has_left():
    sampling = Sampling(top_k=2, top_p=0.55)
    got = distribution(of([0.4, 0.3, 0.2, 0.1]), [], sampling)  # .4 is 57 % of what is left
    np.testing.assert_allclose(got, [1, 0, 0, 0])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_log_probabilities_are_those_of_torch(logits):
    want = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).numpy()
    mine = log_probabilities(np.array(logits, "float32"))
    assert mine.dtype == "float64"
    np.testing.assert_allclose(mine, want, rtol=1e-12, atol=1e-12)


def test_one_logit_may_be_minus_infinity():
    logits = np.array([0, -inf, 0])
    np.testing.assert_allclose(log_probabilities(logits), [-log(2), -inf, -log(2)])
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.999, repetition_penalty=2)):
        np.testing.assert_allclose(distribution(logits, [1], sampling), [0.5, 0, 0.5])


# Penalty


def test_the_penalty_multiplies_negative_logits_and_divides_positive_ones_once():
    got = penalize(np.array([2.0, -2, 0, 2, -2]), [0, 1, 2, 0, 0], 4)
    assert got.tolist() == [0.5, -8, 0, 2, -2]


def test_the_penalty_leaves_the_logits_that_it_is_given():
    logits = LOGITS.copy()
    for change in (
        lambda: penalize(logits, IDS, 2.0),
        lambda: keep_top_k(logits, 2),
        lambda: keep_top_p(logits, 0.5),
        lambda: log_probabilities(logits),
        lambda: Sampling(temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=2)(logits, IDS),
    ):
        change()
        assert logits.tolist() == LOGITS.tolist()


def test_without_ids_nothing_is_penalized():
    assert penalize(LOGITS, [], 2.0).tolist() == LOGITS.tolist()
    assert penalize(LOGITS, np.array([3], "uint8"), 2.0)[3] == 1.5


@pytest.mark.parametrize("wrong", [-1, 8, -100])
def test_an_id_that_is_no_token_is_not_penalized_but_refused(wrong):
    with pytest.raises(InputError, match=f"^{wrong} is no token here; ids are 0 to 7$"):
        penalize(LOGITS, [3, wrong], 2.0)


def test_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(InputError, match="token ids must be whole numbers"):
        penalize(LOGITS, [1.5], 2.0)


@pytest.mark.parametrize(
    ("logits", "penalty"), [([1, 2], 5e-324), ([-10, -20], 1e308), ([-1, 10], 1e-308)]
)
def test_a_penalty_that_makes_the_logits_overflow_is_refused(logits, penalty):
    with pytest.raises(InputError, match=r"a repetition penalty of .* makes numbers"):
        distribution(np.array(logits, float), [0, 1], Sampling(repetition_penalty=penalty))
    with pytest.raises(InputError, match=r"a repetition penalty of .* makes numbers"):
        penalize(np.array(logits, float), [0, 1], penalty)


# Temperature


@pytest.mark.parametrize("temperature", [0, 0.0, np.float32(0), 1e-40, 5e-324, np.int64(0)])
def test_at_a_temperature_of_nearly_0_the_best_token_is_drawn(temperature):
    choose = Sampling(temperature=temperature)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distribution(LOGITS, IDS, choose).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert {choose(LOGITS, [0] * length) for length in range(1, 20)} == {3}


def test_at_temperature_0_the_smallest_id_of_equals_is_taken():
    choose = Sampling(temperature=0, seed=1)
    assert {choose(np.array([0.0, 2, 1, 2]), [0] * length) for length in range(1, 20)} == {1}


def test_at_temperature_0_the_penalty_still_counts():
    assert Sampling(temperature=0)(LOGITS, IDS) == 3
    assert Sampling(temperature=0, repetition_penalty=2)(LOGITS, IDS) == 6


def test_at_a_huge_temperature_all_tokens_are_alike():
    np.testing.assert_allclose(distribution(LOGITS, IDS, Sampling(temperature=1e308)), 1 / 8)


# Top-k and top-p


@pytest.mark.parametrize(
    ("k", "want"),
    [(0, [0, 1, 2, 3, 4]), (1, [1, 3]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3, 4]),
     (5, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4]), (10**9, [0, 1, 2, 3, 4])],
)  # fmt: skip
def test_top_k_keeps_all_that_are_as_good_as_the_last(k, want):
    logits = np.array([2.0, 3, 1, 3, 1])
    scores = keep_top_k(logits, k)
    assert kept(scores) == want
    assert scores[want].tolist() == logits[want].tolist()
    mine = distribution(logits, [0], Sampling(top_k=k))
    np.testing.assert_allclose(mine, reference(logits, [0], Sampling(top_k=k)), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shares", "p", "want"),
    [
        ([0.25, 0.125, 0.125, 0.5], 0.75, [0, 3]),
        ([0.25, 0.125, 0.125, 0.5], 0.7501, [0, 1, 3]),
        ([0.25, 0.125, 0.125, 0.5], 0.5, [3]),
        ([0.25, 0.125, 0.125, 0.5], 0.501, [0, 3]),
        ([0.25, 0.125, 0.125, 0.5], 0.874, [0, 1, 3]),
        ([0.25, 0.125, 0.125, 0.5], 0.875, [0, 1, 3]),
        ([0.25, 0.125, 0.125, 0.5], 0.876, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 0.9, [1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 0.7, [2, 3]),
        ([0.1] * 10, 0.3, [0, 1, 2]),
        ([0.1] * 10, 0.8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1 / 3] * 3, 2 / 3, [0, 1]),
        ([0.2, 0.3, 0.3, 0.2], 0.3, [1]),
        ([0.2, 0.3, 0.3, 0.2], 0.7, [0, 1, 2]),
        ([0.25, 0.5, 0, 0.25], 0.9999, [0, 1, 3]),
        ([0.5, 0.5], 0, [0]),
        ([0.2, 0.8], 0, [1]),
        ([0.2, 0.8], 1e-8, [1]),
        ([0.2, 0.8], 1, [0, 1]),
        ([1e-9, 1 - 1e-9], 1, [0, 1]),
        ([1], 0, [0]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(shares, p, want, dtype):
    scores = keep_top_p(of(shares).astype(dtype), p)
    assert kept(scores) == want


def test_equals_are_kept_from_the_smallest_id_on_in_a_large_vocabulary_too():
    scores = keep_top_p(np.tile([0, 9, 0], 10_000), 0.5)
    assert kept(scores) == list(range(1, 15_006, 3))
    assert kept(keep_top_p(np.zeros(50_000, "float32"), 0.5)) == list(range(25_000))


# Draws


@pytest.fixture
def random_number(monkeypatch):
    def set_to(number):
        class Generator:
            def random(self):
                return number

        monkeypatch.setattr(np.random, "default_rng", lambda key: Generator())

    return set_to


@pytest.mark.parametrize(
    ("number", "token"),
    [(0, 1), (0.24, 1), (0.25, 2), (0.49, 2), (0.5, 4), (0.99, 4), (1 - 2**-53, 4)],
)
def test_the_ids_share_the_range_from_0_to_1_in_rising_order(random_number, number, token):
    random_number(number)
    assert Sampling()(of([0, 0.25, 0.25, 0, 0.5, 0]), [0]) == token


@pytest.mark.parametrize("vocab", [3, 10, 49, 1000, 50_257])
def test_the_largest_random_number_is_no_token_beyond_the_last(random_number, vocab):
    rows = np.random.default_rng(0).normal(0, 1, [20, vocab])
    rows[:, -2:] = -inf
    random_number(1 - 2**-53)
    assert {Sampling()(logits, [0]) for logits in rows} == {vocab - 3}


def test_the_random_number_is_made_of_the_seed_and_the_number_of_tokens(monkeypatch):
    keys, real = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: (keys.append(key), real(key))[1])
    Sampling(seed=np.int64(5))(LOGITS, np.array([3, 1, 3]))
    assert keys == [(5, 3)]


def drawn(sampling, logits=LOGITS, steps=30):
    """Draw a text whose logits depend on the token before."""
    ids = [0]
    for _ in range(steps):
        ids.append(sampling(np.roll(logits, ids[-1]), ids))
    return ids[1:]


def test_a_seed_gives_its_text_whatever_is_drawn_beside_it():
    want = drawn(Sampling(seed=3))
    choose, other, abandoned = Sampling(seed=3), Sampling(seed=4), Sampling(seed=3)
    abandoned(LOGITS, [0])
    ids = [0]
    for _ in range(30):
        other(LOGITS, ids)
        choose(LOGITS, ids)
        ids.append(choose(np.roll(LOGITS, ids[-1]), ids))
        np.random.random()
    assert ids[1:] == want
    assert drawn(Sampling(seed=3)) == want


def test_other_seeds_give_other_texts():
    texts = {tuple(drawn(Sampling(seed=seed))) for seed in [*range(200), 2**32, 2**64, 2**200]}
    assert len(texts) == 203


def test_it_draws_in_the_frequencies_of_its_distribution():
    sampling = Sampling(temperature=1.5, top_k=6, top_p=0.9, repetition_penalty=1.5)
    shares = distribution(LOGITS, IDS, sampling)
    draws = 8000
    seen = Counter(replace(sampling, seed=seed)(LOGITS, IDS) for seed in range(draws))
    possible = np.flatnonzero(shares)
    assert len(possible) == 5
    assert set(seen) == set(possible.tolist())
    expected = shares[possible] * draws
    counts = np.array([seen[token] for token in possible.tolist()])
    assert ((counts - expected) ** 2 / expected).sum() < 20  # 4 degrees: 1 in 2000 is above


@pytest.mark.parametrize("follow", ["position", "seed"])
def test_draws_that_follow_one_another_have_nothing_in_common(follow):
    logits = np.zeros(1000)
    ids = [0] * 4001
    draws = np.array(
        [
            Sampling(seed=7)(logits, ids[:n])
            if follow == "position"
            else Sampling(seed=n)(logits, ids[:9])
            for n in range(1, 4001)
        ]
    )
    assert abs(draws.mean() - 499.5) < 5 * 289 / 4000**0.5
    for lag in (1, 2, 3, 10):
        correlation = np.corrcoef(draws[lag:], draws[:-lag])[0, 1]
        assert abs(correlation) < 5 / 4000**0.5
    assert np.unique(draws).size > 900


def test_float32_and_float64_logits_give_the_same_text():
    logits = np.random.default_rng(2).normal(0, 2, 500).astype("float32")
    sampling = Sampling(temperature=0.7, top_k=100, top_p=0.9, repetition_penalty=1.1, seed=5)
    assert drawn(sampling, logits) == drawn(sampling, logits.astype("float64"))
    one, other = (distribution(logits.astype(d), [1], sampling) for d in ("float32", "float64"))
    assert one.tolist() == other.tolist()


def test_float16_logits_are_computed_in_float64():
    logits = np.array([30000, 29984, -60000], "float16")
    got = distribution(logits, [0], Sampling(temperature=16))
    np.testing.assert_allclose(got, [0.7310586, 0.2689414, 0], atol=1e-7)
    assert penalize(logits, [0], 0.1)[0] == 300_000


# Values that are refused


@pytest.mark.parametrize("logits", BROKEN)
@pytest.mark.parametrize(
    "use",
    [
        greedy,
        log_probabilities,
        lambda logits: penalize(logits, [0], 2.0),
        lambda logits: keep_top_k(logits, 1),
        lambda logits: keep_top_p(logits, 0.5),
        lambda logits: distribution(logits, [0], Sampling()),
        lambda logits: Sampling()(logits, [0]),
        lambda logits: Sampling(temperature=0)(logits, [0]),
        lambda logits: Sampling(temperature=0, repetition_penalty=2)(logits, [0]),
    ],
)
def test_logits_that_are_no_numbers_are_refused(use, logits):
    with pytest.raises(InputError, match=r"^the logits are not finite numbers; check the model"):
        use(np.array(logits))


NO_NUMBERS = [
    True,
    np.True_,
    "1",
    None,
    nan,
    inf,
    -inf,
    np.float32(nan),
    -1,
    -0.5,
    1j,
    [1],
    10**400,
]


@pytest.mark.parametrize(
    ("name", "values", "range_"),
    [
        ("temperature", NO_NUMBERS, "a number from 0"),
        ("top_k", [*NO_NUMBERS[:-1], 1.0, 0.5, np.float64(2)], "a whole number from 0"),
        ("top_p", [*NO_NUMBERS, 1.0001, 2, -1e-9], "a number from 0 to 1"),
        ("repetition_penalty", [*NO_NUMBERS, 0, 0.0], "a number above 0"),
        ("seed", [*NO_NUMBERS[:-1], 1.0], "a whole number from 0"),
    ],
)
def test_a_value_that_is_none_or_out_of_range_is_refused(name, values, range_):
    for value in values:
        with pytest.raises(InputError, match=r"^[^\n]+$") as error:
            Sampling(**{name: value})
        assert str(error.value) == f"{name} is {value!r}; it must be {range_}"


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.float16, np.float32, Fraction])
def test_numbers_of_every_kind_will_do(kind):
    whole = kind if issubclass(kind, (int, np.integer)) else int
    sampling = Sampling(kind(2), whole(3), kind(1) / kind(2), kind(2), whole(4))
    want = Sampling(2.0, 3, 0.5, 2.0, 4)
    assert distribution(LOGITS, IDS, sampling).tolist() == distribution(LOGITS, IDS, want).tolist()
    assert distribution(LOGITS, IDS, sampling).dtype == "float64"
    assert sampling(LOGITS, IDS) == want(LOGITS, IDS)
    assert type(sampling(LOGITS, IDS)) is int


def test_it_is_a_value():
    assert Sampling(seed=1) == Sampling(seed=1) != Sampling(seed=2)
    assert len({Sampling(), Sampling(), Sampling(top_k=1)}) == 2
    with pytest.raises(FrozenInstanceError):
        Sampling().seed = 1


def test_by_default_nothing_is_changed():
    logits = np.array([0.0, 1, 2])
    want = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(distribution(logits, [0], Sampling()), want, atol=1e-15)


# Greedy


def test_of_equal_logits_greedy_takes_the_smallest_id():
    assert greedy(np.array([0.0, 2, 1, 2])) == 1
    assert greedy(np.array([0.0, 2, 1, 2]), [1, 1]) == 1
    assert type(greedy(np.array([0.0, 2]))) is int
