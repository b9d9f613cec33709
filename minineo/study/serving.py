"""Queued requests that share forward passes: what it buys in throughput and costs in waiting.

The model really makes every pass; the clock is virtual. It is moved on by the measured time of each
pass, and jumps where there is nothing to do, so that an hour of arrivals needs no hour.

References
----------
Yu et al. (2022), Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI,
for rows that join and leave between passes.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Literal

import numpy as np

from ..checkpoints import Model
from ..generation import Batch, Request, greedy
from ..generation.batch import Choose
from ..generation.sampling import is_finite
from ..transformer import InputError
from ..transformer.cache import whole
from . import hardware
from .costs import cache_bytes, pass_costs, total

POLICIES = ("one", "dynamic", "continuous")
MEASURES = ("queue", "prefill", "first_token", "per_token", "latency")  # of `Served`, in seconds
PERCENTILES = (50, 95, 99)
MULTIPLES = (0.25, 0.5, 1, 2, 4, 16)  # of what one by one can serve: from idle to flooded
CALIBRATION = 8  # requests
LONGEST = 1e8  # seconds: three years, of which a float still tells the microseconds
MOST_REQUESTS = 100_000
MOST_NEW_TOKENS = 1_000_000  # far above every context
OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a small dog ran into the forest.",
    "Tom and his mom went to the park.",
    "The sun was warm and the birds were singing.",
    "There was a big red ball in the garden.",
    "Ben had a toy car that he loved very much.",
    "It was raining, so the children stayed inside.",
    "A little fish lived in a blue pond.",
)


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes.

    Attributes
    ----------
    seconds : float
        When it comes, on the virtual clock: from 0 to 1e8.
    prompt : str or sequence of int
    max_new_tokens : int
        How many tokens it asks for, from 1 to 1,000,000.
    choose : function
        As in `generate`.

    Raises
    ------
    InputError
        If a number is out of its range.
    """

    seconds: float
    prompt: str | Sequence[int]
    max_new_tokens: int = 24
    choose: Choose = greedy

    def __post_init__(self):
        new = counted(self.max_new_tokens, "new_tokens", MOST_NEW_TOKENS)
        object.__setattr__(self, "seconds", checked(self.seconds, "seconds", LONGEST))
        object.__setattr__(self, "max_new_tokens", new)


@dataclass(frozen=True)
class Served:
    """A request that was served, and its times on the virtual clock, in seconds.

    Attributes
    ----------
    number : int
        Its place among the arrivals as given, from 0.
    arrived, admitted, first_token_at, finished : float
        When it came, left the queue, had its first token, and its last.
    prompt_tokens : int
    ids : list of int
        The new tokens.
    text : str
        What they add to the prompt: equal to what the request yields alone.
    finish : str
        As in `Step`.
    """

    number: int
    arrived: float
    admitted: float
    first_token_at: float
    finished: float
    prompt_tokens: int
    ids: list[int]
    text: str
    finish: str

    @property
    def queue(self) -> float:
        """The wait in the queue."""
        return self.admitted - self.arrived

    @property
    def prefill(self) -> float:
        """The time from the queue to the first token: the pass over the prompt."""
        return self.first_token_at - self.admitted

    @property
    def first_token(self) -> float:
        """The time to the first token, TTFT: wait and prefill."""
        return self.first_token_at - self.arrived

    @property
    def per_token(self) -> float | None:
        """The time per output token after the first, TPOT; a single token has none."""
        after = len(self.ids) - 1
        return (self.finished - self.first_token_at) / after if after else None

    @property
    def latency(self) -> float:
        """The time from the arrival to the last token."""
        return self.finished - self.arrived


@dataclass(frozen=True)
class Refused:
    """A request that can never be served: its place among the arrivals, and why."""

    number: int
    reason: str


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes
    ----------
    start, seconds : float
        When it began on the virtual clock, and its measured time: the pass itself, the choice of
        the tokens and their text.
    phase : "prefill" or "decode"
    rows : int
        How many rows it fed. Each of them has a new token after it.
    fed : int
        How many tokens it fed, padding not counted.
    cache_bytes : int
        Bytes of keys and values held at its end, by the rows that it did not feed too.
    flops : int
        Floating-point operations in its matrix products.
    bytes : int
        Bytes of weights, keys and values that it read and wrote.
    """

    start: float
    seconds: float
    phase: Literal["prefill", "decode"]
    rows: int
    fed: int
    cache_bytes: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Service:
    """How arrivals were served under one policy.

    Attributes
    ----------
    policy : "one", "dynamic" or "continuous"
    rows : int
        How many could share a pass: no more than there are requests, or than the budget allows.
    slots : int
        How many tokens a row had room for: as many as the largest request may need.
    reserved_bytes : int
        What the cache set aside for them.
    served : list of Served
        In the order of the arrivals as given.
    refused : list of Refused
    passes : list of Pass
    """

    policy: str
    rows: int
    slots: int
    reserved_bytes: int
    served: list[Served]
    refused: list[Refused]
    passes: list[Pass]

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return sum(len(request.ids) for request in self.served)

    @property
    def seconds(self) -> float:
        """The time from the first arrival to the last token."""
        return max(r.finished for r in self.served) - min(r.arrived for r in self.served)

    @property
    def throughput(self) -> float:
        """New tokens per second, from the first arrival to the last token."""
        return self.tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        """New tokens per pass: the mean number of rows that a pass fed."""
        return self.tokens / len(self.passes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of keys and values that were held at the end of a pass."""
        return max(each.cache_bytes for each in self.passes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes read and written for each new token: rows that share a pass share its weights."""
        return sum(each.bytes for each in self.passes) / self.tokens

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations for each new token, those of its prompt included."""
        return sum(each.flops for each in self.passes) / self.tokens

    def percentile(self, measure, percent) -> float | None:
        """Return a percentile of a time of all served requests, interpolated linearly.

        Percentiles do not add up: the request that waits longest is seldom the one whose prefill
        takes longest. Of few requests, p99 is close to the longest time.

        Parameters
        ----------
        measure : str
            One of `MEASURES`, a property of `Served`.
        percent : float
            From 0 to 100.

        Returns
        -------
        float or None
            In seconds; None when no request has such a time.
        """
        values = [getattr(request, measure) for request in self.served]
        known = [value for value in values if value is not None]
        return float(np.percentile(known, percent)) if known else None

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds and bytes."""
        return {
            "policy": self.policy,
            "rows": self.rows,
            "slots": self.slots,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.throughput,
            "mean_batch": self.mean_batch,
            "cache_reserved_bytes": self.reserved_bytes,
            "cache_peak_bytes": self.peak_bytes,
            "bytes_per_token": self.bytes_per_token,
            "flops_per_token": self.flops_per_token,
            **{
                f"{measure}_seconds": {
                    f"p{percent}": self.percentile(measure, percent) for percent in PERCENTILES
                }
                for measure in MEASURES
            },
            "requests": [
                vars(request) | {f"{m}_seconds": getattr(request, m) for m in MEASURES}
                for request in self.served
            ],
            "refused": [vars(request) for request in self.refused],
            "passes": [vars(each) for each in self.passes],
        }


@dataclass(frozen=True)
class Load:
    """The same arrivals under several policies.

    Attributes
    ----------
    rate : float or None
        Requests per second; None where the arrivals were given.
    services : dict of str to Service
        By policy.
    """

    rate: float | None
    services: dict[str, Service]

    def gain(self, policy) -> float:
        """Return the throughput under a policy divided by that under one by one."""
        return self.services[policy].throughput / self.services["one"].throughput

    def ratio(self, measure, policy):
        """Return the median of a time under a policy divided by that under one by one."""
        ours, theirs = (self.services[each].percentile(measure, 50) for each in (policy, "one"))
        return ours / theirs if theirs else None


@dataclass(frozen=True)
class Experiment:
    """The policies under one load or several.

    Attributes
    ----------
    model : Model
    alone_seconds : float
        The time that a request of mean length takes alone: a median prefill and median decode
        passes for the other tokens, measured before. The length is that of the text that came or,
        for requests beyond the measured ones, the longest that the context has room for.
    wait_seconds : float
        How long a request waits for others at most, under the dynamic policy.
    budget_bytes : float or None
        The memory that keys and values may take.
    loads : list of Load
        By rising rate.
    busy_cores : float or None
        How many cores others kept busy meanwhile, or None where nothing tells.
    """

    model: Model
    alone_seconds: float
    wait_seconds: float
    budget_bytes: float | None
    loads: list[Load]
    busy_cores: float | None

    @property
    def capacity(self) -> float:
        """Requests per second that one by one can serve."""
        return 1 / self.alone_seconds

    @property
    def warnings(self) -> list[str]:
        """Why the figures are worthless; empty when nothing speaks against them."""
        return hardware.busy_warnings(self.busy_cores)

    def turns_at(self, policy) -> float | None:
        """Return the rate below which first tokens come no sooner than one by one, above it sooner.

        The medians are compared; the rate is read between two loads, on logarithmic scales. None
        if there is no such rate, as they cross several times, the other way or not at all, or
        there is nothing to compare.
        """
        if any(not {"one", policy} <= load.services.keys() for load in self.loads):
            return None
        logs = [math.log(load.ratio("first_token", policy)) for load in self.loads]
        later = [log >= 0 for log in logs]
        if len(set(later)) == 1 or later != sorted(later, reverse=True):
            return None
        last = sum(later) - 1
        low, high = (load.rate or 0.0 for load in self.loads[last : last + 2])
        return low * (high / low) ** (logs[last] / (logs[last] - logs[last + 1]))

    def to_json(self) -> dict:
        """Return everything as plain numbers, in seconds and bytes."""
        return {
            "schema": 1,
            "model": self.model.name,
            "device": self.model.device.name,
            "kernels": bool(self.model.device.kernels),
            "dtype": self.model.dtype,
            "alone_seconds": self.alone_seconds,
            "wait_seconds": self.wait_seconds,
            "budget_bytes": self.budget_bytes,
            "busy_cores": self.busy_cores,
            "warnings": self.warnings,
            "loads": [
                {
                    "requests_per_second": load.rate,
                    "policies": {name: each.to_json() for name, each in load.services.items()},
                }
                for load in self.loads
            ],
        }


def poisson(rate, count, *, new_tokens=24, seed=0) -> list[Arrival]:
    """Return story openings that arrive by chance, independently of each other.

    The gaps between arrivals are drawn from an exponential distribution: a Poisson process. One
    seed gives the same requests at every rate, and with `burst`, and the same gaps but for their
    scale.

    Parameters
    ----------
    rate : float
        Requests per second on average.
    count : int
        Number of requests, from 1 to 100,000.
    new_tokens : int, optional
        Tokens that a request asks for on average, from 1 to 500,000: each draws up to a quarter
        less or more.
    seed : int, optional

    Raises
    ------
    InputError
        If a number is out of its range, or the last request would come after 1e8 seconds.
    """
    rate = checked(rate, "rate", 1e6, above=0)
    requests = burst(count, new_tokens=new_tokens, seed=seed)
    gaps = np.random.default_rng((seed, 1)).standard_exponential(len(requests))
    with np.errstate(over="ignore"):
        moments = np.cumsum(gaps) / rate
    if moments[-1] > LONGEST:
        raise InputError(f"rate is {rate!r}; the last request would come after {LONGEST:g} seconds")
    return [
        replace(request, seconds=seconds)
        for request, seconds in zip(requests, moments.tolist(), strict=True)
    ]


def burst(count, *, new_tokens=24, seed=0) -> list[Arrival]:
    """Return story openings that arrive all at once; the parameters are those of `poisson`."""
    count = counted(count, "requests", MOST_REQUESTS)
    new = counted(new_tokens, "new_tokens", MOST_NEW_TOKENS // 2)
    draw = np.random.default_rng((whole(seed, "seed"), 0))
    lengths = draw.integers(new - new // 4, new + new // 4, endpoint=True, size=count)
    openings = draw.integers(len(OPENINGS), size=count)
    return [
        Arrival(0.0, OPENINGS[opening], length)
        for opening, length in zip(openings, lengths, strict=True)
    ]


def read_arrivals(file, *, new_tokens=24) -> list[Arrival]:
    """Read requests from a file of JSON lines: one object a line, empty lines skipped.

    ``{"seconds": 0.5, "prompt": "Once upon a time", "new_tokens": 24}``: when it arrives, counted
    from the start; the prompt, as text or token ids; and, if need be, the most tokens to write.
    The lines can have any order.

    Parameters
    ----------
    file : str or path
        In UTF-8.
    new_tokens : int, optional
        For the lines without their own.

    Raises
    ------
    InputError
        If the file cannot be read, a line is not usable, with its number and the reason, or there
        is none.
    """
    try:
        lines = Path(os.path.expanduser(file)).read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    arrivals = []
    for number, line in enumerate(lines):
        try:
            if line.strip():
                arrivals.append(arrival(line, new_tokens))
        except InputError as error:
            raise InputError(f"{file}, line {number + 1}: {error}") from None
    if not arrivals:
        raise InputError(f"{file} holds no request; write one a line, as JSON")
    return arrivals


def arrival(line, new_tokens):
    """Return the request that a line of JSON describes."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no JSON ({error})") from None
    if not isinstance(fields, dict) or not {"seconds", "prompt"} <= fields.keys():
        raise InputError('write {"seconds": 0.5, "prompt": "Once upon a time"}')
    if unknown := fields.keys() - {"seconds", "prompt", "new_tokens"}:
        raise InputError(f"unknown field {min(unknown)!r}: use seconds, prompt and new_tokens")
    if not fields["prompt"] or not isinstance(fields["prompt"], str | list):
        raise InputError(f"prompt is {fields['prompt']!r}; it must be a text or a list of ids")
    return Arrival(fields["seconds"], fields["prompt"], fields.get("new_tokens", new_tokens))


def serve(
    model: Model,
    arrivals: Iterable[Arrival],
    *,
    policy: str,
    rows: int = 8,
    wait_ms: float = 50,
    budget_mib: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Service:
    """Serve requests under a policy, first come, first served.

    - ``"one"``: one request at a time.
    - ``"dynamic"``: when none is being served, wait until there are as many as there are rows, or
      until the first has waited its time. Then serve what is there, up to so many, to the end of
      the last of them.
    - ``"continuous"``: between passes, finished rows leave and waiting requests take free rows.

    Before the clock runs, a few passes warm the model up.

    Parameters
    ----------
    model : Model
    arrivals : iterable of Arrival
        In any order.
    policy : str
    rows : int, optional
        How many requests may share a pass.
    wait_ms : float, optional
        How long the dynamic policy lets a request wait for others, in milliseconds.
    budget_mib : float, optional
        Memory for keys and values, in MiB. Every row sets aside room for the longest request, so
        the budget bounds the rows. A request that is too large for it is refused at once.
    progress : function, optional
        Called as ``progress(done, total)`` after each request.

    Returns
    -------
    Service

    Raises
    ------
    InputError
        If a number is not usable, or every request is refused.

    Examples
    --------
    >>> service = serve(load("tiny"), poisson(20, 48), policy="continuous")
    >>> service.throughput, service.percentile("first_token", 95)
    """
    if policy not in POLICIES:
        raise InputError(f"unknown policy {policy!r}: choose {', '.join(POLICIES)}")
    check_limits(rows, wait_ms, budget_mib)
    visits, refused = admit(model, arrivals, budget_mib)
    slots = max(visit.request.slots(model.config.context) for visit in visits)
    if budget_mib is not None:
        rows = min(rows, int(budget_mib * 2**20) // (slots * token_bytes(model)))
    rows, wait = 1 if policy == "one" else int(rows), float(wait_ms) / 1000
    used = min(rows, len(visits))  # more rows than requests would only take memory

    warm_up(Batch(model, used, slots), visits)
    batch, now, done = Batch(model, used, slots), 0.0, 0
    coming = deque(sorted(visits, key=lambda visit: visit.arrived))
    queue: deque[Visit] = deque()
    running: dict[int, Visit] = {}
    passes: list[Pass] = []
    while coming or queue or batch:
        while coming and coming[0].arrived <= now:
            queue.append(coming.popleft())
        deadline = queue[0].arrived + wait if queue else np.inf
        ready = policy != "dynamic" or (not batch and (len(queue) >= rows or now >= deadline))
        while ready and queue and len(batch) < rows:
            visit = queue.popleft()
            visit.admitted = now
            running[batch.join(visit.request)] = visit
        if not batch:
            now = min(deadline, coming[0].arrived if coming else np.inf)
            continue
        start, (steps, seconds) = now, timed_step(batch)
        now += seconds
        for step in steps:
            running[step.row].take(step, now)
        held = sum(visit.cache_bytes for visit in running.values())
        fed = sum(step.fed for step in steps)
        cost = costs_of(model, steps, slots)
        phase, fed_rows = steps[0].phase, len(steps)
        passes.append(Pass(start, seconds, phase, fed_rows, fed, held, cost.flops, cost.bytes))
        for step in steps:
            if step.finish:
                del running[step.row]
                done += 1
                progress(done, len(visits))
    served = [visit.served() for visit in visits]
    return Service(policy, used, slots, batch.cache.nbytes, served, refused, passes)


class Visit:
    """A request on its way."""

    def __init__(self, number, arrival, request):
        self.number, self.arrival, self.request = number, arrival, request
        self.arrived = arrival.seconds
        self.admitted = self.first_token_at = self.finished = 0.0
        self.ids = []
        self.text, self.finish, self.cache_bytes = "", "", 0

    def take(self, step, now):
        """Note a new token, which has come now."""
        if not self.ids:
            self.first_token_at = now
        self.ids.append(step.token)
        self.text += step.text
        self.finished, self.finish, self.cache_bytes = now, step.finish, step.cache_bytes

    def served(self):
        """Return what became of it."""
        return Served(
            number=self.number,
            arrived=self.arrived,
            admitted=self.admitted,
            first_token_at=self.first_token_at,
            finished=self.finished,
            prompt_tokens=len(self.request.ids),
            ids=self.ids,
            text=self.text,
            finish=self.finish,
        )


def admit(model, arrivals, budget_mib):
    """Tell the requests that can be served from those that never can.

    Returns
    -------
    visits : list of Visit
        One or more.
    refused : list of Refused
    """
    budget = np.inf if budget_mib is None else 2**20 * budget_mib
    visits, refused = [], []
    for number, each in enumerate(arrivals):
        try:
            request = Request(model.encode(each.prompt), each.max_new_tokens, choose=each.choose)
            check_fits(request, model, budget)
            visits.append(Visit(number, each, request))
        except InputError as error:
            refused.append(Refused(number, str(error)))
    if not visits:
        raise InputError(
            f"no request can be served; the first: {refused[0].reason}"
            if refused
            else "there is no request; give one or more"
        )
    return visits, refused


def check_limits(rows, wait_ms, budget_mib):
    """Refuse options of `serve` that are out of their range."""
    whole(rows, "rows", 1)
    checked(wait_ms, "wait_ms", 1000 * LONGEST)
    if budget_mib is not None:
        checked(budget_mib, "budget_mib", 1e9, above=0)


def check_fits(request, model, budget):
    """Refuse a request whose keys and values are too large for a budget in bytes, with the sum."""
    context, size = model.config.context, token_bytes(model)
    prompt, new, slots = len(request.ids), request.max_new_tokens, request.slots(context)
    if slots * size > budget:
        bound = f" (at most {context}, the context)" if prompt + new - 1 > context else ""
        raise InputError(
            f"a prompt of {prompt} tokens and {new} new ones take {prompt} + {new} - 1 = "
            f"{prompt + new - 1} slots{bound} of {size / 1024:,g} KiB, {slots * size / 1024:,g} "
            f"KiB in all; the budget is {budget / 1024:,g} KiB"
        )


def costs_of(model, steps, slots):
    """Return what the pass that yielded these steps cost, in rows of so many slots."""
    fed = [step.fed for step in steps]
    held = [step.length - step.fed for step in steps]
    itemsize = model.weights.token_embedding.itemsize
    return total(pass_costs(model.config, fed, held, capacity=slots, itemsize=itemsize))


def token_bytes(model):
    """Return the bytes of one token's keys and values, in all layers."""
    return cache_bytes(model.config, 1, model.weights.token_embedding.itemsize)


def warm_up(batch, visits):
    """Make a few passes in a batch of its own: first ones allocate and wake threads."""
    for visit in visits[: batch.most_rows]:
        batch.join(replace(visit.request, choose=greedy))
    for _ in range(3):
        batch.step()


def timed_step(batch):
    """Make one pass; return its steps and how long it took, the choice of the tokens included."""
    start = perf_counter()
    steps = batch.step()
    return steps, perf_counter() - start


def experiment(
    model: Model,
    arrivals: Sequence[Arrival] | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    rates: Sequence[float] = (),
    requests: int = 32,
    new_tokens: int = 24,
    seed: int = 0,
    rows: int = 8,
    wait_ms: float = 50,
    budget_mib: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Experiment:
    """Serve the same requests under several policies and, unless they are given, several loads.

    Parameters
    ----------
    model : Model
    arrivals : sequence of Arrival, optional
        Requests of your own; by default those of `poisson`, as the next parameters say.
    policies : sequence of str, optional
    rates : sequence of float, optional
        Requests per second. By default a few requests are measured first, one by one, and the
        rates run from a quarter of what that can serve to sixteen times as much.
    requests, new_tokens, seed : int, optional
        How many, how long and which ones, for `poisson`.
    rows, wait_ms, budget_mib : optional
        As in `serve`.
    progress : function, optional
        Called as ``progress(done, total)`` after each request under each policy and load.

    Returns
    -------
    Experiment

    Raises
    ------
    InputError
        If an option is not usable, or every request is refused.
    """
    check_limits(rows, wait_ms, budget_mib)
    draw = partial(poisson, count=requests, new_tokens=new_tokens, seed=seed)
    cases: dict[float | None, Sequence[Arrival]] = {float(r): draw(r) for r in sorted(rates)}
    if arrivals is None:
        sample = burst(requests, new_tokens=new_tokens, seed=seed)
    else:
        sample = list(arrivals)
        cases = {None: sample}
    visits, _ = admit(model, sample, budget_mib)
    alone = alone_seconds(model, visits)
    cases = cases or {multiple / alone: draw(multiple / alone) for multiple in MULTIPLES}
    total = len(cases) * len(policies) * len(visits)

    def report(earlier, done, _):
        progress(earlier + done, total)

    before, loads, earlier = hardware.CpuTimes.now(), [], 0
    for rate, case in cases.items():
        services = {}
        for policy in policies:
            services[policy] = serve(
                model,
                case,
                policy=policy,
                rows=rows,
                wait_ms=wait_ms,
                budget_mib=budget_mib,
                progress=partial(report, earlier),
            )
            earlier += len(visits)
        loads.append(Load(rate, services))
    busy = hardware.busy_since(before)
    budget = None if budget_mib is None else 2**20 * float(budget_mib)
    return Experiment(model, alone, float(wait_ms) / 1000, budget, loads, busy)


def alone_seconds(model, visits):
    """Measure how long a request of mean length takes alone, from medians of its passes."""
    few = [replace(visit.arrival, seconds=0.0) for visit in visits[:CALIBRATION]]
    service = serve(model, few, policy="one")
    others = [visit.request for visit in visits[CALIBRATION:]]
    lengths = [len(request.ids) for request in service.served] + [
        request.slots(model.config.context) - len(request.ids) + 1 for request in others
    ]

    def middle(phase):
        return median([each.seconds for each in service.passes if each.phase == phase] or [0.0])

    return middle("prefill") + (mean(lengths) - 1) * middle("decode")


def checked(number, name, most, above=None):
    """Return a finite number from 0, or above a bound, up to `most`, or refuse it."""
    fits = is_finite(number) and (number >= 0 if above is None else number > above)
    if not (fits and number <= most):
        least = "from 0" if above is None else f"above {above}"
        raise InputError(f"{name} is {number!r}; it must be a number {least} up to {most:g}")
    return float(number)


def counted(number, name, most):
    """Return a whole number from 1 up to `most` as an int, or refuse it."""
    if whole(number, name, 1) > most:
        raise InputError(f"{name} is {number}; it must be a whole number from 1 up to {most:,}")
    return int(number)
