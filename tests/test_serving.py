"""Queued requests share forward passes: who waits for whom, on a clock that can be worked out."""

import json
import sys
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model

from minineo import InputError, cli, generate, load
from minineo.cli.batch import figure, sense
from minineo.generation import Sampling
from minineo.study import serving
from minineo.study.costs import pass_costs, total
from minineo.study.figures import plot_serving
from minineo.study.serving import (
    LONGEST,
    MEASURES,
    MULTIPLES,
    OPENINGS,
    POLICIES,
    Arrival,
    Experiment,
    Load,
    Pass,
    Refused,
    Served,
    Service,
    burst,
    experiment,
    poisson,
    read_arrivals,
    serve,
)

MODEL = random_model()
TOKEN = 2048  # bytes of a token's keys and values in it
KIB = 1 / 1024  # in MiB


def never_ends(logits, ids):
    return int(np.argmax(logits[:50]))


def ask(seconds, new=3, prompt=4, choose=never_ends):
    return Arrival(seconds, random_ids(MODEL.config, prompt, seed=prompt).tolist(), new, choose)


def fake_step(batch):
    """A prefill takes 2 seconds and a decode step 1, however many rows share it."""
    steps = batch.step()
    return steps, 2.0 if steps[0].phase == "prefill" else 1.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(serving, "timed_step", fake_step)


def moments(service):
    """When each request left the queue, had its first token, and its last."""
    assert [each.number for each in service.served] == list(range(len(service.served)))
    return [(each.admitted, each.first_token_at, each.finished) for each in service.served]


@pytest.mark.usefixtures("clock")
def test_one_by_one_each_waits_for_the_one_before():
    arrivals, want = [ask(0), ask(1), ask(10)], [(0, 2, 4), (4, 6, 8), (10, 12, 14)]
    assert moments(serve(MODEL, arrivals, policy="one", rows=8)) == want
    for policy in POLICIES:  # where there is one row, all policies are the same
        assert moments(serve(MODEL, arrivals, policy=policy, rows=1, wait_ms=5000)) == want


@pytest.mark.usefixtures("clock")
def test_dynamic_starts_when_there_are_enough_or_the_first_has_waited_its_time():
    arrivals = [ask(0), ask(1), ask(2), ask(20), ask(25)]
    assert moments(serve(MODEL, arrivals, policy="dynamic", rows=2, wait_ms=5000)) == [
        (1, 3, 5),  # two are there
        (1, 3, 5),
        (7, 9, 11),  # alone, after 5 s
        (25, 27, 29),  # one that comes at the last moment comes in time
        (25, 27, 29),
    ]


@pytest.mark.usefixtures("clock")
def test_dynamic_counts_the_wait_from_the_first_that_came():
    service = serve(MODEL, [ask(3), ask(0), ask(6)], policy="dynamic", rows=4, wait_ms=5000)
    assert [each.admitted for each in service.served] == [5, 5, 11]


@pytest.mark.usefixtures("clock")
def test_dynamic_without_a_wait_takes_those_who_came_meanwhile_and_no_more_than_fit():
    arrivals = [ask(0), *[ask(1)] * 5]
    assert moments(serve(MODEL, arrivals, policy="dynamic", rows=3, wait_ms=0)) == [
        (0, 2, 4),
        *[(4, 6, 8)] * 3,
        *[(8, 10, 12)] * 2,
    ]


@pytest.mark.usefixtures("clock")
def test_dynamic_lets_nobody_in_before_the_last_row_is_done():
    arrivals = [ask(0, new=1), ask(0, new=5), ask(0, new=2)]
    service = serve(MODEL, arrivals, policy="dynamic", rows=2)
    assert moments(service) == [(0, 2, 2), (0, 2, 6), (6, 8, 9)]


@pytest.mark.usefixtures("clock")
def test_continuous_gives_a_free_row_to_the_next_between_two_passes():
    arrivals = [ask(0, new=2), ask(0, new=4), ask(1, new=2), ask(1, new=1)]
    service = serve(MODEL, arrivals, policy="continuous", rows=2)
    assert moments(service) == [(0, 2, 3), (0, 2, 9), (3, 5, 6), (6, 8, 8)]
    assert [astuple(each)[:6] for each in service.passes] == [
        (0, 2, "prefill", 2, 8, 8 * TOKEN),
        (2, 1, "decode", 2, 2, 10 * TOKEN),
        (3, 2, "prefill", 1, 4, 9 * TOKEN),  # the other row, with 5 tokens, waits
        (5, 1, "decode", 2, 2, 11 * TOKEN),
        (6, 2, "prefill", 1, 4, 10 * TOKEN),
        (8, 1, "decode", 1, 1, 7 * TOKEN),
    ]
    fed_and_held = [([4, 4], [0, 0]), ([1, 1], [4, 4]), ([4], [0]), ([1, 1], [4, 5]), ([4], [0]),
                    ([1], [6])]  # fmt: skip
    costs = [
        total(pass_costs(MODEL.config, *each, capacity=7, itemsize=8)) for each in fed_and_held
    ]
    assert [each.flops for each in service.passes] == [cost.flops for cost in costs]
    assert [each.bytes for each in service.passes] == [cost.bytes for cost in costs]
    assert service.flops_per_token == sum(cost.flops for cost in costs) / 9
    assert service.bytes_per_token == sum(cost.bytes for cost in costs) / 9
    assert service.mean_batch == 9 / 6
    assert service.peak_bytes == 11 * TOKEN
    assert service.slots == 7, "the last token is never fed"
    assert service.reserved_bytes == 2 * 7 * TOKEN


@pytest.mark.usefixtures("clock")
def test_an_idle_hour_is_skipped_and_results_come_in_the_order_given():
    arrivals = [ask(3600), ask(3600), ask(0), ask(3600)]
    service = serve(MODEL, arrivals, policy="continuous", rows=2)
    assert moments(service) == [*[(3600, 3602, 3604)] * 2, (0, 2, 4), (3604, 3606, 3608)]
    assert service.seconds == 3608
    assert len(service.passes) == 9


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_single_token_is_done_with_the_prefill_and_has_no_time_per_token(policy):
    service = serve(MODEL, [ask(5, new=1)], policy=policy, wait_ms=0)
    (only,) = service.served
    assert (only.first_token_at, only.finished, only.finish) == (7, 7, "length")
    assert only.per_token is None
    assert service.percentile("per_token", 50) is None
    assert [astuple(each)[:6] for each in service.passes] == [(5, 2, "prefill", 1, 4, 4 * TOKEN)]
    assert service.throughput == 1 / 2
    assert service.to_json()["per_token_seconds"] == {"p50": None, "p95": None, "p99": None}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(1, 9)), min_size=1),
    st.sampled_from(POLICIES),
    st.integers(1, 5),
    st.sampled_from([0, 2500, 10_000]),
)
def test_every_request_is_served_once_in_turn(requests, policy, rows, wait_ms):
    arrivals = [ask(*request) for request in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "timed_step", fake_step)
        service = serve(MODEL, arrivals, policy=policy, rows=rows, wait_ms=wait_ms)
    assert [each.number for each in service.served] == list(range(len(arrivals)))
    for arrival, each in zip(arrivals, service.served, strict=True):
        assert len(each.ids) == arrival.max_new_tokens
        assert each.arrived == arrival.seconds <= each.admitted
        assert each.admitted + 2 <= each.first_token_at <= each.finished
        assert each.first_token == each.queue + each.prefill
    in_turn = sorted(service.served, key=lambda each: each.arrived)
    assert [e.admitted for e in in_turn] == sorted(e.admitted for e in in_turn)
    for before, after in zip(service.passes, service.passes[1:], strict=False):
        assert before.start + before.seconds <= after.start
    assert max(each.rows for each in service.passes) <= (1 if policy == "one" else rows)
    assert sum(each.rows for each in service.passes) == service.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_yields_what_it_yields_alone(policy):
    tiny = load("tiny", device="cpu")
    arrivals = [
        Arrival(0.004 * i, OPENINGS[i], 4 + 3 * i, Sampling(temperature=0.8, seed=i))
        for i in range(6)
    ]
    service = serve(tiny, arrivals, policy=policy, rows=3, wait_ms=5)
    for arrival, each in zip(arrivals, service.served, strict=True):
        options = {"max_new_tokens": arrival.max_new_tokens, "choose": arrival.choose}
        alone = list(generate(tiny, arrival.prompt, **options))
        assert each.ids == [step.token for step in alone]
        assert each.text == "".join(step.text for step in alone)
        assert each.finish == alone[-1].finish
        assert each.prompt_tokens == alone[0].fed
    assert all(each.seconds > 0 for each in service.passes), "the passes are measured"


def test_the_choice_of_a_request_is_asked_for_its_tokens_alone():
    told = []
    choose = lambda logits, ids: (told.append(len(ids)), 1)[1]  # noqa: E731
    serve(MODEL, [ask(0, choose=choose)], policy="one")
    assert told == [4, 5, 6]


def test_a_text_that_ends_sooner_frees_its_row():
    def ends(logits, ids):
        return 100 if len(ids) == 6 else 1

    service = serve(MODEL, [ask(0, new=9, choose=ends)], policy="one")
    assert (service.served[0].finish, len(service.served[0].ids)) == ("end", 3)
    assert service.slots == 12


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody(policy):
    arrivals = [ask(0, new=20), ask(0), ask(0, new=7), ask(0)]
    service = serve(MODEL, arrivals, policy=policy, budget_mib=20 * KIB, wait_ms=0)
    assert [each.number for each in service.served] == [1, 2, 3]
    assert service.refused == [
        Refused(
            0,
            "a prompt of 4 tokens and 20 new ones take 4 + 20 - 1 = 23 slots of 2 KiB, 46 KiB in "
            "all; the budget is 20 KiB",
        )
    ]
    assert service.slots == 10


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("kib", "rows"), [(11.99, None), (12, 1), (23.9, 1), (24, 2), (999, 4)])
def test_the_budget_bounds_the_rows(kib, rows):
    arrivals = [ask(0)] * 9  # 6 slots of 2 KiB each
    if rows is None:
        with pytest.raises(InputError, match=r"no request can be served; the first: .* 12 KiB in"):
            serve(MODEL, arrivals, policy="dynamic", rows=4, budget_mib=kib * KIB)
        return
    service = serve(MODEL, arrivals, policy="dynamic", rows=4, budget_mib=kib * KIB)
    assert service.rows == rows == service.passes[0].rows
    assert service.reserved_bytes == rows * 6 * TOKEN <= kib * 1024
    assert service.served[rows - 1].admitted == 0, "a full batch is as large as the budget allows"


def test_prompts_of_no_use_are_refused_and_block_nobody():
    good = ask(0)
    arrivals = [Arrival(0, [7] * 33), good, Arrival(0, [500]), Arrival(0, "text")]
    service = serve(MODEL, arrivals, policy="continuous")
    assert [each.number for each in service.served] == [1]
    assert [each.number for each in service.refused] == [0, 2, 3]
    for refused, reason in zip(
        service.refused, ("has 33 tokens; this model reads 32", "500 is no", "no tokenizer"),
        strict=True,
    ):  # fmt: skip
        assert reason in refused.reason


def test_the_context_bounds_what_a_request_takes():
    service = serve(MODEL, [ask(0, new=99, prompt=30)], policy="one")
    assert (service.slots, service.served[0].finish) == (32, "context")
    with pytest.raises(InputError, match=r"= 128 slots \(at most 32, the context\) of 2 KiB, 64"):
        serve(MODEL, [ask(0, new=99, prompt=30)], policy="one", budget_mib=63 * KIB)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"policy": "random"}, "unknown policy 'random': choose one, dynamic, continuous"),
        ({"rows": 0}, "rows is 0"),
        ({"wait_ms": -1}, "wait_ms is -1; it must be a number from 0"),
        ({"wait_ms": float("inf")}, "wait_ms is inf"),
        ({"budget_mib": 0}, "budget_mib is 0; it must be a number above 0"),
        ({"budget_mib": float("nan")}, "budget_mib is nan"),
        ({"arrivals": []}, "there is no request"),
    ],
)
def test_what_cannot_be_served_is_refused(options, complaint):
    with pytest.raises(InputError, match=complaint):
        serve(**{"model": MODEL, "arrivals": [ask(0)], "policy": "dynamic"} | options)


@pytest.mark.parametrize("seconds", [-1, float("nan"), 1.01 * LONGEST, "1", True])
def test_an_arrival_at_no_time_is_refused(seconds):
    with pytest.raises(InputError, match="seconds is "):
        Arrival(seconds, "One day")
    with pytest.raises(InputError, match="new_tokens is 0"):
        Arrival(0, "One day", 0)


def test_more_rows_than_requests_take_no_memory():
    service = serve(MODEL, [ask(0)], policy="continuous", rows=10**15)
    assert service.reserved_bytes == 6 * TOKEN
    assert service.rows == 1


def served(first_token, per_token=1.0, number=0):
    """One that waited half its time to the first token, and has three tokens."""
    finished = first_token + 2 * per_token
    return Served(number, 0.0, first_token / 2, first_token, finished, 4, [1, 2, 3], "", "length")


def service(*first_tokens):
    requests = [served(seconds, number=i) for i, seconds in enumerate(first_tokens)]
    return Service("one", 1, 6, 6 * TOKEN, requests, [], [Pass(0, 1, "prefill", 1, 4, 8, 0, 0)])


def test_times_are_told_apart_and_percentiles_interpolated():
    request = served(4.0, per_token=1.5)
    assert [getattr(request, m) for m in MEASURES] == [2, 2, 4, 1.5, 7]
    many = service(*range(1, 102))
    assert [many.percentile("first_token", p) for p in (0, 50, 95, 99, 100)] == [
        1,
        51,
        96,
        100,
        101,
    ]
    assert service(1, 2).percentile("queue", 50) == 0.75
    assert many.throughput == 303 / 103


@pytest.mark.parametrize(
    ("dynamic", "turn"),
    [
        ((2, 2, 2, 2), 10 * 2**0.5),  # in the middle, on a logarithmic scale
        ((2, 1, 2, 2), 10),
        ((1, 0.5, 2, 2), 5),  # 1 is no sooner than 1
        ((2, 2, 5, 2), 20 * 2 ** (np.log(5 / 4) / np.log(5))),
        ((0.5, 2, 2, 2), None),  # sooner, later, sooner
        ((2, 0.5, 5, 2), None),  # three crossings
        ((0.5, 2, 5, 9), None),  # the other way
        ((0.5, 0.5, 2, 2), None),  # sooner under all loads
        ((2, 2, 2, 20), None),  # later under the heaviest
    ],
)
def test_it_turns_where_the_times_to_the_first_token_cross(dynamic, turn):
    one = (1, 1, 4, 8)
    loads = [
        Load(rate, {"one": service(ours), "dynamic": service(theirs)})
        for rate, ours, theirs in zip((5, 10, 20, 40), one, dynamic, strict=True)
    ]
    found = Experiment(MODEL, 0.1, 0.05, None, loads, None)
    assert found.turns_at("dynamic") == (None if turn is None else pytest.approx(turn))
    assert found.turns_at("continuous") is None, "there is nothing to compare"


def test_one_seed_gives_the_same_requests_at_every_rate_and_gaps_that_scale():
    slow, fast, at_once = poisson(2, 50, seed=3), poisson(8, 50, seed=3), burst(50, seed=3)
    assert slow == poisson(2, 50, seed=3) != poisson(2, 50, seed=4)
    for one, other, third in zip(slow, fast, at_once, strict=True):
        assert one.seconds == pytest.approx(4 * other.seconds)
        assert (one.prompt, one.max_new_tokens) == (other.prompt, other.max_new_tokens)
        assert third == Arrival(0.0, one.prompt, one.max_new_tokens)
    assert {each.max_new_tokens for each in poisson(1, 500)} == set(range(18, 31))
    assert {each.max_new_tokens for each in burst(50, new_tokens=1)} == {1}


def test_arrivals_are_a_poisson_process():
    gaps = np.diff([0, *(each.seconds for each in poisson(5, 20_000))])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # as in an exponential distribution
    assert np.mean(gaps > 0.4) == pytest.approx(np.exp(-2), rel=0.05)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: poisson(0, 3), "rate is 0; it must be a number above 0"),
        (lambda: poisson(float("inf"), 3), "rate is inf"),
        (lambda: poisson(1e-320, 3), "rate is 1e-320; the last request would come after 1e"),
        (lambda: poisson(1, 0), "requests is 0"),
        (
            lambda: burst(10**20),
            "requests is 1000.*; it must be a whole number from 1 up to 100,000",
        ),
        (lambda: burst(1, new_tokens=10**20), "new_tokens is 1000.* from 1 up to 500,000"),
        (lambda: Arrival(0, "a", 10**20), "new_tokens is 1000.* from 1 up to 1,000,000"),
        (lambda: burst(1, new_tokens=0), "new_tokens is 0"),
        (lambda: burst(1, seed=-1), "seed is -1"),
    ],
)
def test_requests_that_cannot_be_drawn_are_refused(make, complaint):
    with pytest.raises(InputError, match=complaint):
        make()


def test_arrivals_are_read_from_lines_of_json(tmp_path):
    file = tmp_path / "arrivals.jsonl"
    file.write_text(
        '\ufeff{"seconds": 2, "prompt": "Zoë\\nran", "new_tokens": 5}\r\n\n'
        '  {"prompt": [1, 2], "seconds": 0.5}',
        encoding="utf-8",
    )
    assert read_arrivals(file, new_tokens=7) == [
        Arrival(2, "Zoë\nran", 5),
        Arrival(0.5, [1, 2], 7),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"One day", "this is no JSON"),
        (b'{"seconds": 1, "prompt": "a"} 2', "this is no JSON"),
        (b"\xff", "this is no JSON"),
        (b"[" * 100_000, "this is no JSON"),
        (b"[0, 1]", 'write {"seconds": 0.5, "prompt": "Once upon a time"}'),
        (b'{"prompt": "a"}', 'write {"seconds": 0.5'),
        (b'{"seconds": 1}', 'write {"seconds": 0.5'),
        (b'{"seconds": -1, "prompt": "a"}', "seconds is -1; it must be a number from 0"),
        (b'{"seconds": NaN, "prompt": "a"}', "seconds is nan"),
        (b'{"seconds": 1e400, "prompt": "a"}', "seconds is inf"),
        (b'{"seconds": "1", "prompt": "a"}', "seconds is '1'"),
        (b'{"seconds": null, "prompt": "a"}', "seconds is None"),
        (b'{"seconds": 1, "prompt": ""}', "prompt is ''"),
        (b'{"seconds": 1, "prompt": []}', "prompt is []"),
        (b'{"seconds": 1, "prompt": 5}', "prompt is 5"),
        (b'{"seconds": 1, "prompt": {"a": 1}}', "prompt is {'a': 1}"),
        (b'{"seconds": 1, "prompt": "a", "new_tokens": 0}', "new_tokens is 0"),
        (b'{"seconds": 1, "prompt": "a", "new_tokens": 1.5}', "new_tokens is 1.5"),
        (b'{"seconds": 1, "prompt": "a", "tokens": 5}', "unknown field 'tokens'"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_reason(tmp_path, line, reason):
    file = tmp_path / "arrivals.jsonl"
    file.write_bytes(b'{"seconds": 0, "prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(InputError) as refused:
        read_arrivals(file)
    assert str(refused.value).startswith(f"{file}, line 3: ")
    assert reason in str(refused.value)


def test_numbers_of_numpy_become_plain_ones():
    arrival = Arrival(np.float32(0.5), np.arange(4), np.int64(3), lambda *_: np.int64(1))
    assert [type(arrival.seconds), type(arrival.max_new_tokens)] == [float, int]
    options = {"wait_ms": np.float32(0), "budget_mib": np.float32(1), "rows": np.int32(2)}
    data = experiment(MODEL, [arrival], **options).to_json()
    assert data == json.loads(json.dumps(data))
    found = experiment(load("tiny", device="cpu"), requests=2, new_tokens=2, rates=np.ones(1, "f4"))
    json.dumps(found.to_json())


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for file, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(InputError, match=f"cannot read {file}: {reason}"):
            read_arrivals(file)


def test_a_file_without_requests_is_refused(tmp_path):
    file = tmp_path / "arrivals.jsonl"
    file.write_text("\n \n")
    with pytest.raises(InputError, match="holds no request"):
        read_arrivals(file)


@pytest.mark.usefixtures("clock")
def test_the_sweep_runs_from_idle_to_flooded():
    told = []
    found = experiment(
        load("tiny", device="cpu"),
        requests=6,
        new_tokens=3,
        rows=6,
        progress=lambda *numbers: told.append(numbers),
    )
    assert found.alone_seconds == pytest.approx(2 + np.mean([e.max_new_tokens - 1 for e in burst(6, new_tokens=3)]))  # fmt: skip
    assert [load.rate * found.alone_seconds for load in found.loads] == pytest.approx(MULTIPLES)
    total = len(MULTIPLES) * 3 * 6
    assert told == [(n + 1, total) for n in range(total)]
    for each in found.loads:
        assert tuple(each.services) == POLICIES
        texts = [[r.text for r in each.services[p].served] for p in POLICIES]
        assert texts[0] == texts[1] == texts[2]
    light, heavy = found.loads[0], found.loads[-1]
    assert heavy.gain("dynamic") > 2 > light.gain("dynamic")
    assert found.turns_at("dynamic") is not None or heavy.ratio("first_token", "dynamic") < 1
    data = found.to_json()
    assert data == json.loads(json.dumps(data, allow_nan=False))
    one = data["loads"][-1]["policies"]["one"]
    assert one["tokens"] == sum(len(request["ids"]) for request in one["requests"])
    assert sum(each["rows"] for each in one["passes"]) == one["tokens"]
    assert one["queue_seconds"]["p99"] > one["queue_seconds"]["p50"]
    assert len(plot_serving(found).axes) == 3


@pytest.mark.usefixtures("clock")
def test_requests_of_ones_own_are_one_load():
    found = experiment(
        MODEL, [ask(0), ask(0, new=30)], policies=["continuous"], budget_mib=20 * KIB
    )
    ((rate, services),) = [(load.rate, load.services) for load in found.loads]
    assert rate is None
    assert tuple(services) == ("continuous",)
    assert found.alone_seconds == 4, "the one that is refused does not count"
    assert found.to_json()["budget_bytes"] == 20 * 1024
    assert len(plot_serving(found).axes) == 1


@pytest.mark.usefixtures("clock")
def test_alone_a_request_takes_the_time_of_the_tokens_that_come():
    def alone(*arrivals):
        return experiment(MODEL, arrivals, policies=["one"]).alone_seconds

    def ends(logits, ids):
        return 100 if len(ids) == 6 else 1

    assert alone(ask(0, new=9, choose=ends)) == 2 + 2, "it ends with its third token"
    assert alone(ask(0, new=99, prompt=30)) == 2 + 2, "the context has room for three"
    beyond = [ask(0, new=99, prompt=30)] * (serving.CALIBRATION + 1)
    assert alone(*beyond) == 2 + 2


def explained(one, dynamic):
    """What the command says of first tokens at rising loads, whose further tokens take 1 s."""
    loads = [
        Load(rate, {"one": service(ours), "dynamic": service(theirs)})
        for rate, ours, theirs in zip((50, 100, 200, 400), one, dynamic, strict=False)
    ]
    return " ".join(map(str, sense(Experiment(MODEL, 0.1, 0.0, None, loads, None))))


def test_each_sentence_is_said_where_it_is_true():
    said = explained((1, 1, 4, 80), (2, 2, 2, 2))
    assert "Look first" not in said, "the queue takes half of these times, as the prefill does"
    assert "Dynamic buys 20.5 x the tokens per second of one by one under the heaviest" in said
    assert "; rows in a pass: 1 at most." in said
    assert (
        "It costs: the first token under the lightest load takes 2.00 s instead of 1.00 s" in said
    )
    assert "further token" not in said, "these take the same time"
    assert "It turns at about 141 requests a second. Below, waiting" in said

    said = explained((1, 4, 1, 4), (0.5, 5, 0.5, 5))
    assert "Dynamic buys nothing: 0.9 x" in said
    assert "It costs" not in said
    assert "at no one rate: first tokens come sooner than one by one under 2 of 4 loads" in said

    said = explained([4], [5])
    assert "load" not in said
    assert "It turns" not in said
    assert list(sense(Experiment(MODEL, 1, 0, None, [Load(1, {"one": service(1)})], None))) == []


@pytest.mark.parametrize(
    ("number", "text"), [(0.0001, "0.0001"), (0.25, "0.25"), (123.4, "123"), (999.6, "1,000")]
)
def test_a_rate_is_written_out(number, text):
    assert figure(number) == text


def call(capsys, *arguments):
    """Run the command in this process; return its exit status and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["minineo", "batch", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out, printed.err


FEW = ("--requests", "4", "--new-tokens", "3", "--rows", "2", "--device", "cpu")


@pytest.mark.usefixtures("clock")
def test_the_command_prints_both_ends_of_the_sweep_and_what_they_mean(capsys, tmp_path):
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    files = ("--json", str(numbers), "--plot", str(picture))
    status, out, err = call(capsys, *FEW, "--wait-ms", "3000", *files)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "0.25 x what one by one can serve" in out
    assert "16 x what one by one can serve" in out
    text = " ".join(out.split())
    assert "4 requests of 9 to 11 tokens, 3.0 new ones on average" in text
    assert "Alone, a request takes 4.00 s: one by one can serve 0.25 a second." in text
    for beginning in ("Look first", "Dynamic buys", "It costs", "It turns", "Continuous makes"):
        assert beginning in text
    assert len(json.loads(numbers.read_text())["loads"]) == len(MULTIPLES)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [numbers, picture]


@pytest.mark.usefixtures("clock")
def test_files_are_written_even_if_whoever_reads_the_terminal_leaves(capsys, tmp_path, monkeypatch):
    def leave(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("minineo.cli.batch.print_experiment", leave)
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    status, _, _ = call(capsys, *FEW, "--burst", "--json", str(numbers), "--plot", str(picture))
    assert status == 130
    assert sorted(tmp_path.iterdir()) == [numbers, picture]


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_the_file_of_arrivals_is_never_written_over(capsys, tmp_path, option):
    file, link = tmp_path / "arrivals.png", tmp_path / "link.png"
    file.write_text('{"seconds": 0, "prompt": "One day"}')
    link.symlink_to(file)
    status, out, err = call(capsys, "--arrivals", str(file), option, str(link))
    assert (status, out) == (2, "")
    assert err == f"minineo: {option} would write over {file}; give another file\n"
    assert json.loads(file.read_text())["seconds"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "gpt-5", "--rate", "0"],
        ["--model", "gpt-5", "--rate", "1e-320"],
        ["--model", "gpt-5", "--rows", "0"],
        ["--model", "gpt-5", "--wait-ms", "-1"],
        ["--model", "gpt-5", "--budget-mib", "0"],
    ],
)
def test_numbers_are_checked_before_the_model_is_loaded(capsys, arguments):
    status, _, err = call(capsys, *arguments)
    assert status == 2
    assert f"{arguments[2][2:].replace('-', '_')} is " in err


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("policy", POLICIES)
def test_one_policy_at_one_rate(capsys, policy):
    status, out, err = call(capsys, *FEW, "--rate", "1", "--policy", policy, "--json", "-")
    assert (status, err) == (0, "")
    (only,) = json.loads(out)["loads"]
    assert only["requests_per_second"] == 1
    assert list(only["policies"]) == [policy]
    status, out, err = call(capsys, *FEW, "--burst", "--policy", policy)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.usefixtures("clock")
def test_a_file_with_one_request_too_large(capsys, tmp_path):
    lines = [
        {"seconds": i, "prompt": "One day", "new_tokens": 1 + 200 * (i == 1)} for i in range(3)
    ]
    file = tmp_path / "a b.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    status, out, err = call(capsys, "--arrivals", str(file), "--budget-mib", "0.5")
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "1 refused; number 2: a prompt of 2 tokens and 201 new ones take" in text
    assert "the budget is 512 KiB." in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "random"], "'random' is not one of"),
        (["--rate", "0"], "rate is 0.0; it must be a number above 0"),
        (["--rate", "nan"], "rate is nan"),
        (["--rate", "1", "--burst"], "exclude each other"),
        (["--rows", "0"], "rows is 0"),
        (["--wait-ms", "-1"], "wait_ms is -1.0"),
        (["--requests", "0"], "requests is 0"),
        (["--new-tokens", "0"], "new_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--budget-mib", "0.001"], "the budget is 1.024 KiB"),
        (["--arrivals", "no-such-file"], "cannot read no-such-file: No such file or directory"),
        (["--arrivals", "."], "cannot read .: Is a directory"),
        (
            ["--arrivals", "a", "--requests", "32", "--seed", "0"],
            "--requests and --seed would do nothing with --arrivals; leave that out",
        ),
        (["--arrivals", "a", "--burst"], "exclude each other"),
        (["--policy", "one", "--wait-ms", "5"], "--wait-ms would do nothing with --policy one"),
        (["--requests", "99999999999"], "requests is 99999999999"),
        (["--new-tokens", "99999999999999999999"], "new_tokens is 99999999999999999999"),
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--plot", "out.bmp"], ".png, .svg or .pdf"),
        (["--plot", "a.png", "--json", "./a.png"], "give two files"),
        (["--json", "no/such/out.json"], "no/such does not exist"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    def interrupted(batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "timed_step", interrupted)
    assert call(capsys, *FEW) == (130, "", "")
