"""Rows that share passes write what each would write alone."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model, run

from minineo import InputError, Model, Recompute, Trace, generate, load
from minineo.generation import Batch, Request, Sampling, generate_batch, greedy
from minineo.transformer.trace import Silent

MODEL = random_model()
CONTEXT, END = 32, 100
SAME = ("index", "phase", "fed", "length", "token", "text", "cache_bytes", "finish")


def alone(request, path="cached", model=MODEL):
    """The steps of a request in a batch of its own."""
    options = {name: value for name, value in vars(request).items() if name != "ids"}
    return list(generate(model, request.ids, path=path, **options))


def assert_same(got, want):
    """Steps are those of a row alone, but for its number and the time."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-10)
        for name in SAME:
            assert getattr(ours, name) == getattr(theirs, name), name


def prompt(length, seed=0):
    return random_ids(MODEL.config, length, seed=seed).tolist()


class Restless:
    """Draws tokens, and ends the text now and then: a function of seed and ids alone."""

    def __init__(self, seed):
        self.draw = Sampling(temperature=2, seed=seed)

    def __call__(self, logits, ids):
        token = self.draw(logits, ids)
        return END if token % 6 == 0 else token


def steps_of(batch):
    """Every step until all rows have left, by row."""
    got = defaultdict(list)
    while batch:
        for step in batch.step():
            got[step.row].append(step)
    return got


@pytest.mark.parametrize("path", ["cached", "naive"])
@pytest.mark.parametrize("lengths", [(1, 20), (20, 1), (3, 9, 4, 27), (31, 1, 32)])
def test_padding_may_be_wider_than_the_window(path, lengths):
    ids = [prompt(length, seed=length) for length in lengths]
    got = defaultdict(list)
    for steps in generate_batch(MODEL, ids, path=path, max_new_tokens=8, stop_at_end=False):
        for step in steps:
            got[step.row].append(step)
    for row, one in enumerate(ids):
        assert_same(got[row], alone(Request(one, 8, False), path))


def test_padding_may_run_past_the_last_position():
    first, second = Request(prompt(30), 3, False), Request(prompt(25, seed=1), 3, False)
    batch = Batch(MODEL, 2, CONTEXT, prefill_chunk=20)
    batch.join(first)
    assert batch.step() == []
    batch.join(second)  # the first row's 10 tokens are padded to 20 now, up to position 40
    got = steps_of(batch)
    assert_same(got[0], alone(first))
    assert_same(got[1], alone(second))


@pytest.mark.parametrize("path", ["cached", "naive"])
@pytest.mark.parametrize("filler", [END, 0])
def test_tokens_with_the_id_of_padding_or_of_the_end_are_tokens_like_others(path, filler):
    ids = [[filler, 5, filler, filler], [7, filler], prompt(9), [filler]]
    (rows,) = generate_batch(MODEL, ids, path=path, max_new_tokens=1)
    for one, step in zip(ids, rows, strict=True):
        want = run(MODEL, np.array([one]), Recompute())[0, -1]
        np.testing.assert_allclose(step.logits, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("path", ["cached", "naive"])
@pytest.mark.parametrize("ending", [{0}, {1}, {2}, {3}, {0, 1}, {0, 3}, {1, 2}, {0, 1, 2}])
def test_a_row_that_ends_neither_ends_nor_wipes_another(path, ending):
    def ends_third(logits, ids):
        return END if len(ids) >= 7 else greedy(logits)

    ids = [prompt(5, seed=row) for row in range(4)]
    choose = [ends_third if row in ending else greedy for row in range(4)]
    got = defaultdict(list)
    for steps in generate_batch(MODEL, ids, path=path, max_new_tokens=9, choose=choose):
        assert [step.row for step in steps] == sorted(step.row for step in steps)
        for step in steps:
            got[step.row].append(step)
    for row in range(4):
        assert_same(got[row], alone(Request(ids[row], 9, choose=choose[row]), path))
        assert got[row][-1].finish == ("end" if row in ending else "length")


def test_a_row_and_its_seed_do_not_depend_on_their_neighbours():
    request = Request(prompt(6), 10, False, choose=Sampling(seed=3))
    want = alone(request)
    for neighbours in (0, 1, 4):
        batch = Batch(MODEL, 5, CONTEXT)
        for number in range(neighbours):
            batch.join(Request(prompt(1 + 5 * number), 3 + number, choose=Sampling(seed=number)))
        number = batch.join(request)
        assert_same(steps_of(batch)[number], want)


def test_one_seed_for_all_gives_each_row_what_it_gives_it_alone():
    ids, choose = [prompt(6), prompt(6, seed=1), prompt(6)], Sampling(seed=5)
    texts = [[], [], []]
    for steps in generate_batch(MODEL, ids, choose=choose, max_new_tokens=8, stop_at_end=False):
        for step in steps:
            texts[step.row].append(step.token)
    for one, text in zip(ids, texts, strict=True):
        assert text == [step.token for step in alone(Request(one, 8, False, choose=choose))]
    assert texts[0] == texts[2] != texts[1]


def test_the_choice_of_a_row_is_told_its_own_tokens():
    told = defaultdict(list)

    def listen(row):
        return lambda logits, ids: (told[row].append(list(ids)), 10 * row + len(ids))[1]

    ids = [[1], [2, 2, 2], [3, 3]]
    for _ in generate_batch(MODEL, ids, choose=[listen(row) for row in range(3)], max_new_tokens=2):
        pass
    assert told == {
        0: [[1], [1, 1]],
        1: [[2, 2, 2], [2, 2, 2, 13]],
        2: [[3, 3], [3, 3, 22]],
    }


# Passes


def passes_of(monkeypatch):
    """A list that grows with each forward pass: how many tokens it feeds each row."""
    passes, forward = [], Model.forward

    def counting(*args, counts, **options):
        passes.append(list(counts))
        return forward(*args, counts=counts, **options)

    monkeypatch.setattr(Model, "forward", counting)
    return passes


def test_rows_share_passes(monkeypatch):
    passes = passes_of(monkeypatch)
    list(generate_batch(MODEL, [prompt(3), prompt(9), prompt(1)], max_new_tokens=3))
    assert passes == [[3, 9, 1], [1, 1, 1], [1, 1, 1]]
    passes.clear()
    list(generate_batch(MODEL, [prompt(3), prompt(9)], path="naive", max_new_tokens=3))
    assert passes == [[3, 9], [4, 10], [5, 11]]


def test_rows_that_wait_are_fed_first_and_alone(monkeypatch):
    passes = passes_of(monkeypatch)
    batch = Batch(MODEL, 4, CONTEXT, prefill_chunk=4)
    batch.join(Request(prompt(2), 9, False))
    yielded = [[step.row for step in batch.step()] for _ in range(2)]
    for length in (9, 3, 6):
        batch.join(Request(prompt(length), 9, False))
    yielded += [[step.row for step in batch.step()] for _ in range(5)]
    assert passes == [[2], [1], [4, 3, 4], [4], [1], [2], [1, 1, 1, 1]]
    assert yielded == [[0], [0], [2], [], [1], [3], [0, 1, 2, 3]]


def test_every_row_has_the_time_of_the_passes_that_fed_it(monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("minineo.generation.batch.perf_counter", lambda: next(ticks))
    batch = Batch(MODEL, 3, CONTEXT, prefill_chunk=4)
    for length in (9, 3):
        batch.join(Request(prompt(length), 2, False))
    got = steps_of(batch)
    assert [step.seconds for step in got[0]] == [3, 1]
    assert [step.seconds for step in got[1]] == [1, 1]


def test_an_empty_batch_makes_no_pass(monkeypatch):
    passes = passes_of(monkeypatch)
    batch = Batch(MODEL, 2, CONTEXT)
    assert batch.step() == []
    assert batch.join(Request(prompt(3), 0)) == 0
    assert batch.step() == []
    assert list(generate_batch(MODEL, [prompt(3), prompt(4)], max_new_tokens=0)) == []
    assert passes == []


def test_a_trace_sees_all_rows_of_a_pass():
    trace = Trace(["queries"])
    shapes = []
    for _ in generate_batch(MODEL, [prompt(3), prompt(5)], max_new_tokens=2, trace=trace):
        shapes.append(trace["block0.queries"].shape)
    assert shapes == [(2, 4, 5, 8), (2, 4, 1, 8)]


# What breaks off


class BreaksInLayer2(Silent):
    """Breaks every pass in the middle while it is told to."""

    error = None

    def within(self, name):
        if self.error and name == "block2":
            raise self.error
        return self


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_pass_that_broke_off_is_not_gone_on_with(error):
    trace = BreaksInLayer2()
    batch = Batch(MODEL, 2, CONTEXT, trace=trace)
    batch.join(Request(prompt(3)))
    batch.step()
    trace.error = error
    with pytest.raises(error):
        batch.step()
    trace.error = None
    for later in (batch.step, lambda: batch.cancel(0)):
        with pytest.raises(InputError, match="broke off halfway; make a new batch"):
            later()


def test_a_choice_that_breaks_off_is_not_gone_on_with():
    def choose(logits, ids):
        raise KeyboardInterrupt

    batch = Batch(MODEL, 2, CONTEXT)
    batch.join(Request(prompt(3)))
    batch.join(Request(prompt(3), choose=choose))
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    with pytest.raises(InputError, match="broke off halfway; make a new batch"):
        batch.step()


def test_a_row_that_leaves_halfway_is_not_gone_on_with(monkeypatch):
    batch = Batch(MODEL, 2, CONTEXT)
    batch.join(Request(prompt(3)))
    monkeypatch.setattr(batch.cache, "drop", lambda row, last: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.cancel(0)
    with pytest.raises(InputError, match="broke off halfway; make a new batch"):
        batch.step()


def test_what_is_refused_leaves_the_batch_as_it_was():
    batch = Batch(MODEL, 1, 20)
    request = Request(prompt(6), 5, False)
    batch.join(request)
    first = batch.step()
    for refused in (Request(prompt(3)), Request([], 3), Request([999]), Request([1], -1)):
        with pytest.raises(InputError):
            batch.join(refused)
    with pytest.raises(InputError):
        batch.cancel(7)
    assert_same(first + steps_of(batch)[0], alone(request))


def test_abandoned_batches_leave_nothing_behind():
    ids = [prompt(5), prompt(9)]
    want = [[step.token for step in steps] for steps in generate_batch(MODEL, ids)]
    abandoned = generate_batch(MODEL, [prompt(20, seed=1)] * 2)
    next(abandoned)
    other = generate_batch(MODEL, [prompt(9, seed=2), prompt(5, seed=3)], stop_at_end=False)
    got = []
    for steps in generate_batch(MODEL, ids):
        got.append([step.token for step in steps])
        next(other, None)
    assert got == want
    abandoned.close()


# What is refused


@pytest.mark.parametrize(
    ("length", "count", "total"),
    [
        (12, 10, "12 + 10 - 1 = 21"),
        (21, 1, "21 + 1 - 1 = 21"),
        (12, 99, "12 + 99 - 1 = 110"),
        (21, 0, "21 + 0 - 1 = 20"),
    ],
)
@pytest.mark.parametrize("path", ["cached", "naive"])
def test_a_request_that_can_never_fit_is_refused_at_once_with_the_sum(path, length, count, total):
    batch = Batch(MODEL, 1, 20, path=path)
    batch.join(Request(prompt(3)[:3], 5))  # no row is free, but waiting would not help
    with pytest.raises(InputError) as error:
        batch.join(Request(prompt(length), count))
    assert f"{total} slots, a row of this batch has 20" in str(error.value)


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_a_request_that_just_fits_is_written_to_its_end(path):
    request = Request(prompt(12), 9, False)
    batch = Batch(MODEL, 1, 20, path=path)
    batch.join(request)
    assert_same(steps_of(batch)[0], alone(request, path))


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_a_request_over_the_context_ends_with_it_in_a_row_of_the_whole_context(path):
    batch = Batch(MODEL, 2, CONTEXT, path=path)
    batch.join(Request(prompt(30), 99, False))
    batch.join(Request(prompt(32), 99, False))
    got = steps_of(batch)
    assert [step.finish for step in got[0]] == [None, None, "context"]
    assert [step.finish for step in got[1]] == ["context"]
    with pytest.raises(InputError, match="33 tokens; this model reads 32 at most"):
        batch.join(Request([1] * 33, 1))


def test_a_batch_whose_rows_are_taken_refuses_another_until_one_leaves():
    batch = Batch(MODEL, 2, CONTEXT)
    numbers = [batch.join(Request(prompt(3), 2, False)) for _ in range(2)]
    with pytest.raises(InputError, match="all 2 rows of the batch are taken"):
        batch.join(Request(prompt(3)))
    batch.cancel(numbers[0])
    assert batch.join(Request(prompt(3), 2, False)) == 2
    assert sorted(steps_of(batch)) == [1, 2]


def test_a_row_that_is_not_there_cannot_be_cancelled():
    batch = Batch(MODEL, 2, CONTEXT)
    batch.join(Request(prompt(3), 1))
    with pytest.raises(InputError, match="row 1 is not in the batch"):
        batch.cancel(1)
    batch.step()
    with pytest.raises(InputError, match="row 0 is not in the batch"):
        batch.cancel(0)


@pytest.mark.parametrize("path", ["cached", "naive"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8), "rows is 0; it must be a whole number from 1"),
        ((1.5, 8), "rows is 1.5"),
        ((2, 0), "capacity is 0"),
        ((2, None), "capacity is None"),
    ],
)
def test_a_batch_without_room_is_refused(path, sizes, message):
    with pytest.raises(InputError, match=message):
        Batch(MODEL, *sizes, path=path)


def test_a_batch_on_an_unknown_path_is_refused():
    with pytest.raises(InputError, match="unknown path 'fast'"):
        Batch(MODEL, 1, 8, path="fast")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "a list of one prompt or more"),
        ("text", {}, "a list of one prompt or more"),
        ([1, 2], {}, "a prompt must be text or a list"),
        ([[1], []], {}, "the prompt is empty"),
        ([[1], [1] * 33], {}, "33 tokens"),
        ([[1], [101]], {}, "101 is no token"),
        ([[1], [2]], {"choose": [greedy]}, "choose has 1 functions; there are 2 prompts"),
        ([[1], [2]], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ([[1], [2]], {"stop": ""}, "no stop string"),
        ([[1], [2]], {"prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_prompts_and_options_that_are_not_usable_are_refused_at_once(prompts, options, message):
    with pytest.raises(InputError, match=message):
        generate_batch(MODEL, prompts, **options)


# Whatever is asked, in whatever order


prompts = st.builds(prompt, st.integers(1, CONTEXT), st.integers(0, 99))
choices = (
    st.sampled_from([greedy])
    | st.builds(Sampling, seed=st.integers(0, 9))
    | st.builds(Restless, st.integers(0, 9))
)
requests = st.builds(
    Request, prompts, st.integers(0, 12), stop_at_end=st.booleans(), choose=choices
)
ways = st.sampled_from([{"path": "naive"}, {}, {"prefill_chunk": 1}, {"prefill_chunk": 5}])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(prompts, choices), min_size=1, max_size=6), st.integers(0, 12), ways)
def test_each_row_is_what_it_is_alone_and_comes_in_the_order_given(pairs, count, way):
    ids, choose = zip(*pairs, strict=True)
    got = defaultdict(list)
    for steps in generate_batch(MODEL, ids, choose=choose, max_new_tokens=count, **way):
        assert steps
        assert [step.row for step in steps] == sorted({step.row for step in steps})
        for step in steps:
            got[step.row].append(step)
    path = way.get("path", "cached")
    for row, (one, choice) in enumerate(pairs):
        assert_same(got[row], alone(Request(one, count, choose=choice), path))


def poison(cache, used):
    """Fill every slot that no row in use has written with numbers that nobody could miss."""
    if not isinstance(cache, Recompute):
        assert not cache.lengths[used:].any()
        for row, length in enumerate(cache.lengths):
            for array in (*cache.keys, *cache.values):
                array[row, :, length:] = 1e4


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), ways)
def test_rows_join_and_leave_in_any_order(data, rows, way):
    batch = Batch(MODEL, rows, CONTEXT, **way)
    asked, cancelled, got = [], set(), defaultdict(list)

    def step():
        poison(batch.cache, len(batch))
        for each in batch.step():
            got[each.row].append(each)

    def under_way():
        done = {number for number, steps in got.items() if steps[-1].finish}
        idle = {number for number, request in enumerate(asked) if request.max_new_tokens == 0}
        return sorted(set(range(len(asked))) - done - idle - cancelled)

    for _ in range(data.draw(st.integers(1, 25), "operations")):
        operations = ["step"] * 2
        operations += ["join"] * (len(batch) < rows and len(asked) < 7)
        operations += ["cancel"] * (len(batch) > 0)
        operation = data.draw(st.sampled_from(operations))
        if operation == "join":
            asked.append(data.draw(requests))
            assert batch.join(asked[-1]) == len(asked) - 1
        elif operation == "cancel":
            number = data.draw(st.sampled_from(under_way()))
            batch.cancel(number)
            cancelled.add(number)
        else:
            step()
        assert len(batch) == len(under_way())
    while batch:
        step()
    for number, request in enumerate(asked):
        want = alone(request, way.get("path", "cached"))
        assert_same(got[number], want[: len(got[number])] if number in cancelled else want)


# The embedded model


@pytest.fixture(scope="module")
def embedded():
    return load("tiny", device="cpu")


TEXTS = ["Once upon a time", "One day, a boy named Tim found a big red box. He", "The", "😀 é"]


@pytest.mark.parametrize("choose", [greedy, Sampling(temperature=1.5, seed=4)])
@pytest.mark.parametrize("stop", [(), [".", "and the"], [" a", "x"]])
def test_the_text_of_a_row_is_that_of_its_prompt_alone(embedded, choose, stop):
    options = {"choose": choose, "stop": stop, "max_new_tokens": 25}
    texts, finish = [""] * 4, {}
    for steps in generate_batch(embedded, TEXTS, **options):
        for step in steps:
            texts[step.row] += step.text
            finish[step.row] = step.finish
    for row, text in enumerate(TEXTS):
        steps = list(generate(embedded, text, **options))
        assert texts[row] == "".join(step.text for step in steps)
        assert finish[row] == steps[-1].finish


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_texts_and_log_probabilities_are_those_of_transformers(embedded, path):
    import torch
    import transformers

    from minineo.checkpoints.find import find

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        find("tiny"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(find("tiny"))
    got = defaultdict(list)
    for steps in generate_batch(embedded, TEXTS, path=path, max_new_tokens=30):
        for step in steps:
            got[step.row].append(step)
    for row, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        said = reference.generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        want = said.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = [torch.log_softmax(logits[0], -1) for logits in said.logits]
        assert [step.token for step in got[row]] == want
        assert "".join(step.text for step in got[row]) == tokenizer.decode(
            [token for token in want if token != embedded.config.end_token]
        )
        for step, token, likely in zip(got[row], want, logprobs, strict=True):
            assert step.logprob == pytest.approx(float(likely[token]), abs=1e-4)
            best = torch.topk(likely, 5)
            assert [logprob for _, logprob in step.top(5)] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )


def test_what_chooses_cannot_change_the_text_or_the_logits():
    def meddle(logits, ids):
        assert isinstance(ids, tuple)
        with pytest.raises(ValueError, match="read-only"):
            logits[0] = 9
        return 7

    steps = list(generate(MODEL, prompt(3), choose=meddle, max_new_tokens=3))
    assert [(step.index, step.length, step.fed) for step in steps] == [
        (0, 3, 3),
        (1, 4, 1),
        (2, 5, 1),
    ]


@pytest.mark.parametrize("choose", ["x", None, 5, [None]])
def test_something_that_cannot_choose_is_refused_at_once(choose):
    with pytest.raises(InputError, match=r"choose is .*; give a function"):
        generate_batch(MODEL, [prompt(3)], choose=choose)


@pytest.mark.parametrize("chosen", [[5], [[5]], [], 1.5, True])
def test_a_choice_that_is_no_token_is_refused(chosen):
    with pytest.raises(InputError, match=r"one token id|whole numbers"):
        next(generate(MODEL, prompt(3), choose=lambda logits, ids: chosen))


def test_nobody_joins_a_batch_that_broke_off():
    batch = Batch(MODEL, rows=2, capacity=8)
    batch.join(Request(prompt(2), 2, choose=lambda logits, ids: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        batch.step()
    with pytest.raises(InputError, match="broke off halfway"):
        batch.join(Request(prompt(2), 2))


@pytest.mark.parametrize("prompts", [None, {}, {"a": 1}, 5, "text", []])
def test_prompts_that_are_no_list_are_refused(prompts):
    with pytest.raises(InputError, match="a list of one prompt or more"):
        generate_batch(MODEL, prompts)


@pytest.mark.parametrize("number", [True, 0.0, None, "0", -1])
def test_a_row_to_cancel_is_a_whole_number(number):
    batch = Batch(MODEL, rows=2, capacity=8)
    batch.join(Request(prompt(2), 2))
    with pytest.raises(InputError, match="row is"):
        batch.cancel(number)
