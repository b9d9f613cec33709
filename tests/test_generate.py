import numpy as np
import pytest
from small import random_ids, random_model, run

from minineo import InputError, KVCache, Recompute, Trace, generate, load
from minineo.generation import greedy

PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_each_token_is_the_best_after_all_before_it(model, path):
    ids = list(PROMPT)
    for step in generate(model, PROMPT, path=path, max_new_tokens=20, stop_at_end=False):
        logits = run(model, np.array([ids]), Recompute())[0, -1]
        np.testing.assert_allclose(step.logits, logits, atol=1e-10)
        assert step.token == logits.argmax()
        ids.append(step.token)
    assert len(ids) == 26


def test_the_cached_path_is_fed_the_prompt_and_then_one_token_a_step(model):
    steps = list(generate(model, PROMPT, max_new_tokens=4))
    assert [step.fed for step in steps] == [6, 1, 1, 1]
    assert [step.phase for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert [step.index for step in steps] == [0, 1, 2, 3]
    assert [step.length for step in steps] == [6, 7, 8, 9]
    assert [step.cache_bytes for step in steps] == [n * 2 * 4 * 32 * 8 for n in (6, 7, 8, 9)]


def test_the_naive_path_is_fed_everything_every_time(model):
    steps = list(generate(model, PROMPT, path="naive", max_new_tokens=4))
    assert [step.fed for step in steps] == [6, 7, 8, 9]
    assert {step.cache_bytes for step in steps} == {0}


@pytest.mark.parametrize("path", ["cached", "naive"])
@pytest.mark.parametrize("length", [30, 31, 32])
def test_the_last_position_yields_a_token_and_then_the_context_is_full(model, path, length):
    prompt = random_ids(model.config, length)
    steps = list(generate(model, prompt, path=path, max_new_tokens=99, stop_at_end=False))
    assert len(steps) == 33 - length
    assert [step.finish for step in steps] == [None] * (32 - length) + ["length"]


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_a_prompt_over_the_context_is_refused_before_any_step(model, path):
    with pytest.raises(InputError, match="33 tokens; this model reads 32 at most"):
        generate(model, [1] * 33, path=path)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_so_many_tokens_come_as_asked_for(model, count):
    steps = list(generate(model, PROMPT, max_new_tokens=count, stop_at_end=False))
    assert len(steps) == count
    assert [step.finish for step in steps] == [None, None, None, None, "length"][-count:][:count]


def test_the_end_of_text_token_ends_the_text_unless_told_otherwise(model):
    tokens = iter([5, model.config.end_token, 7, 8])
    steps = list(generate(model, PROMPT, choose=lambda logits: next(tokens), max_new_tokens=4))
    assert [step.finish for step in steps] == [None, "stop"]
    tokens = iter([5, model.config.end_token, 7, 8])
    steps = list(
        generate(
            model, PROMPT, choose=lambda logits: next(tokens), max_new_tokens=4, stop_at_end=False
        )
    )
    assert [step.token for step in steps] == [5, model.config.end_token, 7, 8]


def test_end_of_text_inside_the_prompt_is_a_token_like_others(model):
    end = model.config.end_token
    (step,) = generate(model, [end, 3, end], max_new_tokens=1)
    want = run(model, np.array([[end, 3, end]]), Recompute())[0, -1]
    np.testing.assert_allclose(step.logits, want, atol=1e-10)


def test_the_chosen_token_is_fed_next(model):
    steps = list(generate(model, PROMPT, choose=lambda logits: 42, max_new_tokens=2))
    want = run(model, np.array([[*PROMPT, 42]]), Recompute())[0, -1]
    np.testing.assert_allclose(steps[1].logits, want, atol=1e-10)


def test_a_second_prompt_is_not_touched_by_the_first_nor_by_an_abandoned_one(model):
    want = [step.token for step in generate(model, PROMPT, max_new_tokens=8)]
    abandoned = generate(model, [7, 7, 7, 7, 7, 7, 7, 7], max_new_tokens=8)
    next(abandoned)
    other = generate(model, [8] * 12, max_new_tokens=8)
    mixed = [(next(other), step.token)[1] for step in generate(model, PROMPT, max_new_tokens=8)]
    assert mixed == want


def test_a_trace_follows_the_steps(model):
    trace = Trace(["queries"])
    shapes = []
    for _ in generate(model, PROMPT, max_new_tokens=3, trace=trace):
        shapes.append(trace["block0.queries"].shape)
    assert shapes == [(1, 4, 6, 8), (1, 4, 1, 8), (1, 4, 1, 8)]


def test_of_equal_logits_the_smallest_id_is_chosen():
    assert greedy(np.array([0.0, 2, 1, 2])) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad):
    with pytest.raises(InputError, match="not finite"):
        greedy(np.array([0.0, bad, 1]))


@pytest.mark.parametrize("count", [-1, 1.0, "3", True, None])
def test_a_number_of_tokens_that_is_none_is_refused_at_once(model, count):
    with pytest.raises(InputError, match="max_new_tokens is"):
        generate(model, PROMPT, max_new_tokens=count)


def test_an_unknown_path_is_refused_at_once(model):
    with pytest.raises(InputError, match="unknown path 'fast'"):
        generate(model, PROMPT, path="fast")


def test_the_cache_is_no_larger_than_the_context(monkeypatch):
    made = []
    init = KVCache.__init__
    monkeypatch.setattr(
        KVCache,
        "__init__",
        lambda self, *args, **kw: (made.append(args), init(self, *args, **kw))[1],
    )
    list(generate(load("tiny"), "Once upon a time", max_new_tokens=1000, choose=lambda _: 0))
    assert [capacity for _, _, capacity in made] == [512]


def test_whole_numbers_of_numpy_will_do(model):
    assert len(list(generate(model, PROMPT, max_new_tokens=np.int64(2)))) == 2
