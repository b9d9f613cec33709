from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from small import random_ids, random_model, run

from minineo import InputError, KVCache, Recompute, Trace, generate, load
from minineo.generation import Batch, Request

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
    assert [step.finish for step in steps] == [None] * (32 - length) + ["context"]


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
    steps = list(generate(model, PROMPT, choose=lambda logits, ids: next(tokens), max_new_tokens=4))
    assert [step.finish for step in steps] == [None, "end"]
    tokens = iter([5, model.config.end_token, 7, 8])
    steps = list(
        generate(
            model,
            PROMPT,
            choose=lambda logits, ids: next(tokens),
            max_new_tokens=4,
            stop_at_end=False,
        )
    )
    assert [step.token for step in steps] == [5, model.config.end_token, 7, 8]


def test_end_of_text_inside_the_prompt_is_a_token_like_others(model):
    end = model.config.end_token
    (step,) = generate(model, [end, 3, end], max_new_tokens=1)
    want = run(model, np.array([[end, 3, end]]), Recompute())[0, -1]
    np.testing.assert_allclose(step.logits, want, atol=1e-10)


def test_the_chosen_token_is_fed_next(model):
    steps = list(generate(model, PROMPT, choose=lambda logits, ids: 42, max_new_tokens=2))
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
    list(
        generate(
            load("tiny"), "Once upon a time", max_new_tokens=1000, choose=lambda logits, ids: 0
        )
    )
    assert [capacity for _, _, capacity in made] == [512]


def test_whole_numbers_of_numpy_will_do(model):
    assert len(list(generate(model, PROMPT, max_new_tokens=np.int64(2)))) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"path": "fast"},
        {"prefill_chunk": 0},
        {"stop": "x"},
        {"stop": 3},
    ],
)
def test_options_are_checked_at_once_even_when_no_token_is_asked_for(model, options):
    for tokens in (0, 1):
        with pytest.raises(InputError):
            generate(model, PROMPT, max_new_tokens=tokens, **options)


def test_the_choice_is_told_all_tokens_so_far(model):
    told = []

    def choose(logits, ids):
        told.append(list(ids))
        return 40 + len(told)

    list(generate(model, PROMPT, choose=choose, max_new_tokens=3))
    assert told == [PROMPT, [*PROMPT, 41], [*PROMPT, 41, 42]]


@pytest.mark.parametrize("token", [101, -1, 1.0, None, True, "a"])
def test_a_choice_that_is_no_token_is_refused(model, token):
    steps = generate(model, PROMPT, choose=lambda logits, ids: token)
    with pytest.raises(InputError, match=r"no token of this model|must be whole numbers"):
        next(steps)


def test_a_choice_may_be_a_number_of_numpy(model):
    (step,) = generate(model, PROMPT, choose=lambda logits, ids: logits.argmax(), max_new_tokens=1)
    assert type(step.token) is int


def test_what_the_choice_raises_ends_the_text(model):
    def choose(logits, ids):
        raise KeyboardInterrupt

    steps = generate(model, PROMPT, choose=choose)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert list(steps) == []


# Why it ends


@pytest.mark.parametrize(
    ("length", "count", "tokens", "want"),
    [
        (6, 3, [5, 6, 7], [None, None, "length"]),
        (6, 3, [5, 100], [None, "end"]),
        (6, 2, [5, 100], [None, "end"]),
        (30, 9, [5, 6, 7], [None, None, "context"]),
        (30, 3, [5, 6, 7], [None, None, "length"]),
        (30, 9, [5, 6, 100], [None, None, "end"]),
        (32, 9, [5], ["context"]),
        (32, 1, [5], ["length"]),
        (32, 1, [100], ["end"]),
    ],
)
@pytest.mark.parametrize("path", ["cached", "naive"])
def test_the_last_step_says_why(model, path, length, count, tokens, want):
    following = iter(tokens)
    steps = generate(
        model,
        [1] * length,
        path=path,
        max_new_tokens=count,
        choose=lambda logits, ids: next(following),
    )
    assert [step.finish for step in steps] == want


# Prompts in chunks


def cache_behind(model, prompt, **options):
    """The first step of a batch of one row, and the cache behind it."""
    batch = Batch(model, 1, model.config.context, **options)
    batch.join(Request(prompt, max_new_tokens=2, stop_at_end=False))
    steps = []
    while not steps:
        steps = batch.step()
    return steps[0], batch.cache.copy()


@pytest.mark.parametrize("length", [1, 2, 7, 16, 31])
def test_a_prompt_in_chunks_gives_the_logits_and_the_cache_of_one_pass(model, length):
    prompt = random_ids(model.config, length).tolist()
    want, cache = cache_behind(model, prompt)
    for chunk in range(1, length + 2):
        got, chunked = cache_behind(model, prompt, prefill_chunk=chunk)
        np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1e-12)
        assert chunked.lengths.tolist() == cache.lengths.tolist() == [length]
        for ours, theirs in zip(
            chunked.keys + chunked.values, cache.keys + cache.values, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_the_steps_after_a_prompt_in_chunks_are_those_after_one_pass(model):
    want = list(generate(model, PROMPT, max_new_tokens=20))
    for chunk in (1, 4, np.int64(5)):
        got = list(generate(model, PROMPT, max_new_tokens=20, prefill_chunk=chunk))
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-12)
            for name in ("index", "phase", "fed", "length", "token", "cache_bytes", "finish"):
                assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(("chunk", "passes"), [(None, 1), (1, 6), (2, 3), (4, 2), (6, 1), (9, 1)])
def test_the_first_step_adds_up_the_passes_over_its_prompt(model, monkeypatch, chunk, passes):
    seconds = count()
    monkeypatch.setattr("minineo.generation.batch.perf_counter", lambda: next(seconds))
    steps = list(generate(model, PROMPT, max_new_tokens=3, prefill_chunk=chunk))
    assert [step.seconds for step in steps] == [passes, 1, 1]
    assert [step.fed for step in steps] == [6, 1, 1]


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True, "2"])
def test_a_chunk_that_is_no_number_from_1_is_refused_at_once(model, chunk):
    with pytest.raises(InputError, match=r"prefill_chunk is .*; it must be a whole number from 1"):
        generate(model, PROMPT, prefill_chunk=chunk)


def test_chunks_on_the_naive_path_are_refused_at_once(model):
    with pytest.raises(InputError, match="the naive path forgets every chunk"):
        generate(model, PROMPT, path="naive", prefill_chunk=3)


# Text


@pytest.fixture(scope="module")
def embedded():
    return load("tiny", device="cpu")


def say(*tokens):
    """A choice of these tokens, one after the other."""
    following = iter(tokens)
    return lambda logits, ids: next(following)


def test_the_pieces_of_text_are_the_text_of_the_tokens(embedded):
    prompt = "Once upon a time"
    steps = list(generate(embedded, prompt, max_new_tokens=60))
    ids = embedded.encode(prompt)
    assert prompt + "".join(step.text for step in steps) == embedded.decode(
        ids + [step.token for step in steps]
    )


def test_the_end_of_text_token_adds_no_text_unless_it_is_one_like_others(embedded):
    tokens = [*embedded.encode(" The end."), embedded.config.end_token]
    options = {"choose": say(*tokens), "max_new_tokens": len(tokens)}
    steps = list(generate(embedded, "Hi", **options))
    assert "".join(step.text for step in steps) == " The end."
    assert (steps[-1].text, steps[-1].finish) == ("", "end")
    options["choose"] = say(*tokens)
    steps = list(generate(embedded, "Hi", stop_at_end=False, **options))
    assert "".join(step.text for step in steps) == " The end.<|endoftext|>"


def test_a_stop_string_across_tokens_ends_the_text_before_it(embedded):
    tokens = embedded.encode(" He ran.\nThe dog")
    steps = list(generate(embedded, "Hi", choose=say(*tokens), stop=[".\nThe"]))
    assert "".join(step.text for step in steps) == " He ran"
    assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["stop"]
    assert len(steps) < len(tokens)


def test_what_was_held_back_for_a_stop_string_comes_with_the_last_step(embedded):
    tokens = embedded.encode(" He ran.\nThe")
    options = {"stop": ".\nThe dog", "max_new_tokens": len(tokens)}
    *steps, last = generate(embedded, "Hi", choose=say(*tokens), **options)
    assert "".join(step.text for step in steps) == " He ran"
    assert (last.text, last.finish) == (".\nThe", "length")
    tokens.append(embedded.config.end_token)
    options["max_new_tokens"] = 99
    *_, last = generate(embedded, "Hi", choose=say(*tokens), **options)
    assert (last.text, last.finish) == (".\nThe", "end")


def test_a_stop_string_in_the_prompt_stops_nothing(embedded):
    steps = list(
        generate(embedded, "Stop. Stop.", choose=say(5, 6, 7), stop="Stop", max_new_tokens=3)
    )
    assert steps[-1].finish == "length"


def test_a_character_comes_whole_and_at_the_end_in_part(embedded):
    tokens = embedded.encode("😀")
    assert len(tokens) > 1
    steps = list(generate(embedded, "Hi", choose=say(*tokens), max_new_tokens=len(tokens)))
    assert [step.text for step in steps] == [""] * (len(tokens) - 1) + ["😀"]
    steps = list(generate(embedded, "Hi", choose=say(*tokens), max_new_tokens=len(tokens) - 1))
    whole = embedded.decode(embedded.encode("Hi") + tokens[:-1])
    assert "Hi" + "".join(step.text for step in steps) == whole
    assert "\ufffd" in steps[-1].text


def test_a_character_that_the_prompt_begins_comes_whole(embedded):
    *prompt, last = embedded.encode("Hi 😀")
    (step,) = generate(embedded, prompt, choose=say(last), max_new_tokens=1)
    assert step.text == "😀"


def test_without_a_tokenizer_there_is_no_text_and_nothing_to_stop_at(model):
    assert {step.text for step in generate(model, PROMPT, max_new_tokens=3)} == {""}
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        generate(model, PROMPT, stop=["."])


def test_white_space_is_a_prompt(embedded):
    (step,) = generate(embedded, " ", max_new_tokens=1)
    assert step.length == 1


# What a step tells


def test_the_log_probability_is_that_of_the_chosen_token(model):
    (step,) = generate(model, PROMPT, choose=lambda logits, ids: 42, max_new_tokens=1)
    shares = np.exp(step.logits - step.logits.max())
    assert step.logprob == pytest.approx(np.log(shares[42] / shares.sum()), abs=1e-12)


def test_the_likeliest_tokens_come_first_and_of_equals_the_smaller_id(model):
    (step,) = generate(model, PROMPT, max_new_tokens=1)
    best = step.top(5)
    order = sorted(range(101), key=lambda token: -step.logits[token])
    assert [token for token, _ in best] == order[:5]
    assert best[0] == (step.token, step.logprob)
    everything = step.top(999)
    assert len(everything) == 101
    assert sum(np.exp(logprob) for _, logprob in everything) == pytest.approx(1)
    assert step.top(0) == []
    tied = replace(step, logits=np.array([0.0, 2, 1, 2]))
    assert [token for token, _ in tied.top(3)] == [1, 3, 2]
    assert {type(token) for token, _ in best} == {int}
    assert {type(logprob) for _, logprob in best} == {float}


@pytest.mark.parametrize("n", [-1, 1.5, None])
def test_a_number_of_likeliest_tokens_that_is_none_is_refused(model, n):
    (step,) = generate(model, PROMPT, max_new_tokens=1)
    with pytest.raises(InputError, match=r"n is .*; it must be a whole number from 0"):
        step.top(n)


def test_the_row_of_a_single_prompt_is_0(model):
    assert {step.row for step in generate(model, PROMPT, max_new_tokens=3)} == {0}
