"""The loop over time: rows that share forward passes, one token per row and pass."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import numpy as np

from ..checkpoints import Model
from ..transformer import InputError, KVCache, Recompute, silent
from ..transformer.cache import whole
from ..transformer.model import check_ids
from .sampling import greedy, log_probabilities
from .text import TextStream

PATHS = ("cached", "naive")
BROKEN_OFF = "a pass of this batch broke off halfway; make a new batch"
Choose = Callable[[np.ndarray, tuple[int, ...]], int]


@dataclass(frozen=True)
class Step:
    """One new token of a row, and the pass that yielded it.

    Attributes
    ----------
    index : int
        0 for the row's first new token, then 1, 2, ...
    row : int
        The number of the prompt in the order given, from 0.
    phase : "prefill" or "decode"
        The pass over the prompt, or one of those after it.
    fed : int
        How many tokens of the row were fed. A prompt that is fed in chunks takes several passes,
        which are added up, here and in `seconds`.
    length : int
        How many tokens the sequence had at the end of the pass: the last query saw so many keys
        in a global layer.
    logits : NumPy array [vocab]
        The scores for the next token.
    token : int
        The chosen token.
    text : str
        What is added to the text: characters that no later token can change. The last step adds
        all that was held back. Empty when the model has no tokenizer.
    seconds : float
        The time of the pass, for whatever rows shared it, without the choice of the token.
    cache_bytes : int
        Bytes of the row's keys and values held after the pass.
    finish : "end", "stop", "length", "context" or None
        Why this step is the row's last: the end-of-text token, a stop string, no more tokens
        wanted, or no position left; None when it is not.
    """

    index: int
    row: int
    phase: Literal["prefill", "decode"]
    fed: int
    length: int
    logits: np.ndarray
    token: int
    text: str
    seconds: float
    cache_bytes: int
    finish: Literal["end", "stop", "length", "context"] | None

    @property
    def logprob(self) -> float:
        """The log-probability that the model gives to the chosen token."""
        return float(log_probabilities(self.logits)[self.token])

    def top(self, n: int) -> list[tuple[int, float]]:
        """Return the n likeliest tokens with their log-probabilities, the likeliest first."""
        found = log_probabilities(self.logits)
        best = np.argsort(-found, kind="stable")[: whole(n, "n")]
        return [(int(token), float(found[token])) for token in best]


@dataclass(frozen=True)
class Request:
    """What a row of a batch shall write: a prompt as token ids, and the options of `generate`."""

    ids: Sequence[int]
    max_new_tokens: int = 64
    stop_at_end: bool = True
    stop: str | Sequence[str] = ()
    choose: Choose = greedy

    def slots(self, context: int) -> int:
        """Return how many slots its row takes in a cache at most: the last token is never fed."""
        return min(len(self.ids) + max(self.max_new_tokens, 1) - 1, context)


class Batch:
    """Rows that share forward passes; they join and leave between passes.

    Each row writes what it would write alone: its logits differ by rounding at most. The rows
    lie in the cache without gaps: one that joins becomes the last, and when one leaves, the last
    moves into its place.

    Parameters
    ----------
    model : Model
    rows : int
        How many rows there can be at once.
    capacity : int
        How many slots each has in the cache.
    path : "cached" or "naive", optional
        Keep keys and values and feed only new tokens, or feed whole sequences every time.
    prefill_chunk : int, optional
        Feed at most so many tokens of a prompt in a pass; by default all. For the cached path.
    trace : Trace, optional
        Sees the values of every pass; those of the latest stay.

    Attributes
    ----------
    cache : KVCache or Recompute

    Raises
    ------
    InputError
        If the path is unknown or a number is not usable.

    Examples
    --------
    >>> batch = Batch(model, rows=8, capacity=256)
    >>> number = batch.join(Request(model.encode("Once upon a time")))
    >>> while batch:  # until every row has left
    ...     for step in batch.step():
    ...         print(step.row, step.text)
    """

    def __init__(
        self, model: Model, rows, capacity, *, path="cached", prefill_chunk=None, trace=silent
    ):
        if prefill_chunk is not None:
            prefill_chunk = whole(prefill_chunk, "prefill_chunk", 1)
            if path == "naive":
                raise InputError("the naive path forgets every chunk: leave prefill_chunk out")
        self.model, self.most_rows = model, whole(rows, "rows", 1)
        self.capacity = whole(capacity, "capacity", 1)
        self.cache = new_cache(model, path, rows, capacity)
        self._chunk, self._trace = prefill_chunk, trace
        self._rows: list[_Row] = []  # in their order in the cache
        self._joined = 0
        self._broken = False

    def __len__(self):
        return len(self._rows)

    def join(self, request: Request) -> int:
        """Let a row take part from the next pass on; one for 0 tokens is done at once.

        Returns
        -------
        int
            The row's number, as in its steps: 0 for the first that joins, then 1, 2, ...

        Raises
        ------
        InputError
            If the request is not usable, can never fit into a row, or no row is free.
        """
        if self._broken:
            raise InputError(BROKEN_OFF)
        if not callable(request.choose):
            raise InputError(
                f"choose is {request.choose!r}; give a function from logits and ids to a token"
            )
        new = whole(request.max_new_tokens, "max_new_tokens")
        request = replace(request, ids=self.model.encode(request.ids), max_new_tokens=new)
        if request.slots(self.model.config.context) > self.capacity:
            prompt = len(request.ids)
            raise InputError(
                f"a prompt of {prompt} tokens and {new} new ones take {prompt} + {new} - 1 = "
                f"{prompt + new - 1} slots, a row of this batch has {self.capacity}; ask for less"
            )
        if len(self) == self.most_rows:
            raise InputError(f"all {len(self)} rows of the batch are taken; wait until one leaves")
        row = _Row(self.model, request, self._joined)
        self._joined += 1
        if new:
            self._rows.append(row)
        return row.number

    def cancel(self, number: int):
        """Let a row leave before it has finished.

        Raises
        ------
        InputError
            If it has left or never joined.
        """
        number = whole(number, "row")
        row = next((row for row in self._rows if row.number == number), None)
        if row is None:
            raise InputError(f"row {number!r} is not in the batch: it has left or never joined")
        with self._unbroken():
            self._leave(row)

    def step(self) -> list[Step]:
        """Make one forward pass and return the steps of the rows that have a new token.

        While rows wait for their prompt to be fed, a pass feeds some of these alone, neighbours in
        the cache; otherwise it feeds all rows. A part of a prompt yields no step.

        Raises
        ------
        InputError
            If no token can be chosen, or something broke off earlier: what is half done is never
            gone on with.
        """
        if not self._rows:
            return []
        with self._unbroken():
            start, stop = self._next_rows()
            rows, cache = self._rows[start:stop], self.cache.rows(start, stop)
            held = (np.zeros(len(rows), int) + cache.lengths).tolist()  # 0 on the naive path
            new_ids = [row.ids[n:][: self._chunk] for row, n in zip(rows, held, strict=True)]
            logits, seconds = self._forward(rows[0].phase, new_ids, cache)  # [batch, 1, vocab]

            steps = []
            for place, (row, new) in enumerate(zip(rows, map(len, new_ids), strict=True)):
                row.fed += new
                row.seconds += seconds
                if held[place] + new == len(row.ids):
                    last_logits = self.model.device.get(logits[place, -1])
                    steps.append(row.write(last_logits, cache.token_bytes))
            for row in rows:
                if row.finish:
                    self._leave(row)
        return steps

    def _next_rows(self):
        """Return where the rows that the next pass feeds begin and end."""
        waiting = [row.made == 0 for row in self._rows]
        if not any(waiting):
            return 0, len(waiting)
        start = waiting.index(True)
        return start, [*waiting, False].index(False, start)

    def _forward(self, phase, new_ids, cache):
        """Feed each row its new tokens; return the logits of the last ones, and the time."""
        model, counts = self.model, [len(ids) for ids in new_ids]
        tokens = np.zeros((len(counts), max(counts)), dtype=int)  # padded on the right
        for row, ids in zip(tokens, new_ids, strict=True):
            row[: len(ids)] = ids
        model.device.synchronize()
        start = perf_counter()
        with model.device.range(phase):
            logits = model.forward(tokens, cache, counts=counts, trace=self._trace)
        model.device.synchronize()
        return logits, perf_counter() - start

    def _leave(self, row):
        """Let the last row move into the place of this one."""
        place, last = self._rows.index(row), len(self._rows) - 1
        self.cache.drop(place, last)
        self._rows[place] = self._rows[last]
        del self._rows[last]

    @contextmanager
    def _unbroken(self):
        """Refuse to begin where something before has not come to its end, be it by Ctrl-C."""
        if self._broken:
            raise InputError(BROKEN_OFF)
        self._broken = True
        yield
        self._broken = False


class _Row:
    """A request and what has come of it so far."""

    def __init__(self, model, request, number):
        self.request, self.number, self.config = request, number, model.config
        self.ids = list(request.ids)  # prompt and new tokens
        self.stream = TextStream(model, request.ids, request.stop)
        self.fed, self.seconds = 0, 0.0  # since the last token
        self.finish = None

    @property
    def made(self):
        """Number of new tokens."""
        return len(self.ids) - len(self.request.ids)

    @property
    def phase(self):
        """What the next pass is for this row: prefill until there is a new token."""
        return "decode" if self.made else "prefill"

    def write(self, logits, token_bytes):
        """Choose the next token and return its step."""
        index, phase, length = self.made, self.phase, len(self.ids)
        logits.flags.writeable = False  # they are the step's too
        token = one_token(self.request.choose(logits, tuple(self.ids)), self.config)
        self.ids.append(token)
        text = self._spell(token)
        fed, self.fed = self.fed, 0
        seconds, self.seconds = self.seconds, 0.0
        return Step(
            index=index,
            row=self.number,
            phase=phase,
            fed=fed,
            length=length,
            logits=logits,
            token=token,
            text=text,
            seconds=seconds,
            cache_bytes=token_bytes * length,
            finish=self.finish,
        )

    def _spell(self, token):
        """Return what the newest token adds to the text, and note whether it is the last."""
        text = ""
        if self.request.stop_at_end and token == self.config.end_token:
            self.finish = "end"
        else:
            text = self.stream.push(token)
            if self.made == self.request.max_new_tokens:
                self.finish = "length"
            elif len(self.ids) > self.config.context:
                self.finish = "context"
        if self.finish:
            text += self.stream.finish()
        if self.stream.stopped is not None:
            self.finish = "stop"
        return text


def one_token(chosen, config) -> int:
    """Return what a function has chosen as a token, or refuse it."""
    token = check_ids(chosen, config)
    if token.ndim:
        raise InputError(f"choose has returned {chosen!r}; it must return one token id")
    return int(token)


def new_cache(model: Model, path: str, rows: int, capacity: int) -> Recompute | KVCache:
    """Return an empty cache for the cached or the naive path, or refuse any other."""
    if path not in PATHS:
        raise InputError(f"unknown path {path!r}: choose {' or '.join(PATHS)}")
    if path == "naive":
        return Recompute()
    with model.device.selected():
        return KVCache(model.config, rows, capacity, like=model.weights.token_embedding)
