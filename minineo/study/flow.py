"""What flows through one head of one layer, pass by pass, on both paths: (Q × Kᵀ) × V."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import exp
from typing import Literal

import numpy as np

from ..checkpoints import Model
from ..generation.sampling import greedy, log_probabilities
from ..transformer import InputError, KVCache, Recompute, Trace, silent
from ..transformer.cache import whole
from .plain import number

NAMES = ("queries", "keys", "values", "scores", "pattern", "mixed")


@dataclass(frozen=True)
class PathFlow:
    """What one head does in one pass on one path. All of it is read off the trace of that pass.

    Attributes
    ----------
    queries : NumPy array [new, head_dim]
        One for each token that was fed.
    keys, values : NumPy array [all, head_dim]
        Those of all tokens so far: first what the cache held, then what was made in this pass.
    scores, pattern : NumPy array [new, all]
    mixed : NumPy array [new, head_dim]
    window : int
        How many positions a query sees: its own and those just before it.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    pattern: np.ndarray
    mixed: np.ndarray
    window: int

    @property
    def made(self) -> int:
        """How many tokens were fed: so many queries, keys and values were made."""
        return len(self.queries)

    @property
    def held(self) -> int:
        """How many keys and values came from the cache: those of the first so many slots."""
        return len(self.keys) - self.made

    @property
    def hidden(self) -> np.ndarray:
        """Whether a query may not look at a slot: of bool [new, all]."""
        positions, slots = np.arange(self.held, len(self.keys)), np.arange(len(self.keys))
        distance = positions[:, None] - slots
        return (distance < 0) | (distance >= self.window)

    def to_json(self) -> dict:
        """Return what the newest query did, with all keys and values, as plain numbers.

        Scores that are hidden from it, and what is not a number, are None.
        """
        scores = np.where(self.hidden[-1], np.nan, self.scores[-1])
        return {
            "tokens_fed": self.made,
            "keys_from_cache": self.held,
            "query": _plain(self.queries[-1]),
            "keys": [_plain(key) for key in self.keys],
            "scores": _plain(scores),
            "hidden": self.hidden[-1].tolist(),
            "pattern": _plain(self.pattern[-1]),
            "values": [_plain(value) for value in self.values],
            "mixed": _plain(self.mixed[-1]),
        }


@dataclass(frozen=True)
class FlowStep:
    """One pass, seen through one head of one layer, on both paths.

    Attributes
    ----------
    model : Model
    index : int
        The number of the pass, from 0.
    phase : "prefill" or "decode"
        Whether it fed tokens of the prompt, or one that was written.
    layer, head : int
    ids : list of int
        All tokens so far: the token at position p has its key in slot p.
    texts : list of str
        The text of each of them; its id where the model has no tokenizer.
    cached, naive : PathFlow
    candidates : list of tuple of int, str and float
        The likeliest next tokens with their text and probability, the likeliest first. None after
        a part of a prompt, which yields no token.
    """

    model: Model
    index: int
    phase: Literal["prefill", "decode"]
    layer: int
    head: int
    ids: list[int]
    texts: list[str]
    cached: PathFlow
    naive: PathFlow
    candidates: list[tuple[int, str, float]]

    @property
    def window(self) -> int:
        """How many positions a query of this layer sees."""
        return self.cached.window

    @property
    def kind(self) -> Literal["global", "local"]:
        """Whether a query of this layer sees all that is before it, or a window."""
        return "local" if self.window < self.model.config.context else "global"

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference between the paths in what both have, for each value by name.

        Rows that the naive path alone computes again are left out.
        """
        apart = {}
        for name in NAMES:
            ours, theirs = getattr(self.cached, name), getattr(self.naive, name)
            if name not in ("keys", "values"):
                theirs = theirs[-self.cached.made :]
            apart[name] = float(np.abs(ours - theirs).max())
        return apart

    def to_json(self) -> dict:
        """Return it as plain values; what is not a number becomes None."""
        return {
            "index": self.index,
            "phase": self.phase,
            "window": self.window,
            "ids": self.ids,
            "texts": self.texts,
            "token": self.candidates[0][0] if self.candidates else None,
            "candidates": [
                {"token": token, "text": text, "probability": probability}
                for token, text, probability in self.candidates
            ],
            "differences": {name: number(value) for name, value in self.differences.items()},
            "cached": self.cached.to_json(),
            "naive": self.naive.to_json(),
        }


@dataclass(frozen=True)
class Flow:
    """A walk through the passes of a text. ``flow[2]`` is pass 2, as a `FlowStep`.

    Only the tokens and a cache are kept. What is looked at is computed when it is looked at: the
    cache is cropped to what it held before that pass, and the pass is made again, traced.

    Attributes
    ----------
    model : Model
    ids : list of int
        All tokens that are fed, prompt and new ones.
    prompt : int
        How many of them are the prompt's.
    ends : tuple of int
        How many tokens there are at the end of each pass.
    layer, head : int
        What is looked at.
    cache : KVCache
        As it is after the last pass.
    """

    model: Model
    ids: list[int]
    prompt: int
    ends: tuple[int, ...]
    layer: int
    head: int
    cache: KVCache

    def __len__(self):
        return len(self.ends)

    def __iter__(self) -> Iterator[FlowStep]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> FlowStep:
        index = range(len(self))[index]
        start, end = (0, *self.ends)[index : index + 2]
        cache = self.cache.copy()
        cache.crop(start)
        cached, logits = self._look(self.ids[start:end], cache)
        naive, _ = self._look(self.ids[:end], Recompute())
        return FlowStep(
            model=self.model,
            index=index,
            phase="decode" if start >= self.prompt else "prefill",
            layer=self.layer,
            head=self.head,
            ids=self.ids[:end],
            texts=[self._text(token) for token in self.ids[:end]],
            cached=cached,
            naive=naive,
            candidates=self._candidates(logits) if end >= self.prompt else [],
        )

    def at(self, layer: int | None = None, head: int | None = None) -> "Flow":
        """Return the walk through the same passes that looks at another layer or head.

        Raises
        ------
        InputError
            If the model has no such layer or head.
        """
        config = self.model.config
        layer = self.layer if layer is None else one_of(config.n_layers, layer, "layer")
        head = self.head if head is None else one_of(config.n_heads, head, "head")
        return replace(self, layer=layer, head=head)

    def to_json(self, steps: Iterable[FlowStep]) -> dict:
        """Return the walk and some of its steps as plain values."""
        return {
            "schema": 1,
            "model": self.model.name,
            "device": self.model.device.name,
            "dtype": self.model.dtype,
            "prompt_tokens": self.prompt,
            "layer": self.layer,
            "head": self.head,
            "steps": [step.to_json() for step in steps],
        }

    def _look(self, new_ids, cache):
        """Make a pass; return what the head did in it, and the logits [vocab] of the last token."""
        get, trace = self.model.device.get, OneHead(self.layer, self.head)
        logits = self.model.forward([new_ids], cache, trace=trace)
        seen = {name: get(trace.kept[name])[0, 0] for name in NAMES}
        return PathFlow(**seen, window=self.model.config.windows[self.layer]), get(logits)[0, -1]

    def _text(self, token):
        return str(token) if self.model.tokenizer is None else self.model.decode([token])

    def _candidates(self, logits, most=5):
        found = log_probabilities(logits)
        best = np.argsort(-found, kind="stable")[:most].tolist()
        return [(token, self._text(token), exp(found[token])) for token in best]


class OneHead:
    """A trace that keeps the values of one head of one layer, and no others.

    Attributes
    ----------
    kept : Trace
        Values [batch, 1, ...] by their bare name, such as ``kept["pattern"]``.
    """

    def __init__(self, layer, head):
        self.kept = Trace()
        self._block, self._head = f"block{layer}", slice(head, head + 1)

    def __call__(self, **values):
        """Keep the head's part of each value."""
        self.kept(**self._parts(values))

    def tile(self, rows, slots, whole, **values):
        """Put the head's part of scores or a pattern into its place."""
        self.kept.tile(rows, slots, whole, **self._parts(values))

    def within(self, name):
        """Return itself in the layer, and the trace that keeps nothing in any other."""
        return self if name == self._block else silent

    def _parts(self, values):
        return {name: value[:, self._head] for name, value in values.items() if name in NAMES}


def flow(
    model: Model,
    prompt,
    *,
    layer: int = 0,
    head: int = 0,
    max_new_tokens: int = 8,
    prefill_chunk: int | None = None,
) -> Flow:
    """Write on from a prompt, and return a walk through the passes on both paths.

    The cached path chooses the likeliest tokens and the naive path is fed the same ones. The end
    of text does not stop it: there are as many passes as asked for, or as the context has room
    for.

    Parameters
    ----------
    model : Model
    prompt : str or sequence of int
        Text or token ids.
    layer, head : int, optional
        What is looked at, both from 0.
    max_new_tokens : int, optional
        How many tokens are written, 1 or more: one pass each.
    prefill_chunk : int, optional
        Feed the cached path at most so many tokens of the prompt in one pass; by default all. The
        naive path is fed all tokens up to there.

    Returns
    -------
    Flow

    Raises
    ------
    InputError
        If the prompt or an option is not usable, or the model has no such layer or head.

    Examples
    --------
    >>> walk = flow(load("tiny"), "Once upon a time", layer=1, head=2)
    >>> for step in walk:
    ...     print(step.phase, step.cached.held, step.cached.made, step.naive.made)
    prefill 0 4 4
    decode 4 1 5
    ...
    """
    ids, config = list(model.encode(prompt)), model.config
    prompt_length = len(ids)
    layer = one_of(config.n_layers, layer, "layer")
    head = one_of(config.n_heads, head, "head")
    new = whole(max_new_tokens, "max_new_tokens", 1)
    chunk = len(ids) if prefill_chunk is None else whole(prefill_chunk, "prefill_chunk", 1)

    last = min(prompt_length + new - 1, config.context)  # the last token is never fed
    ends = (*range(chunk, prompt_length, chunk), *range(prompt_length, last + 1))
    cache = KVCache(config, 1, last, like=model.weights.token_embedding)
    for end in ends:
        logits = model.forward([ids[cache.length : end]], cache)
        if len(ids) == end < last:
            ids.append(greedy(model.device.get(logits)[0, -1]))
    return Flow(model, ids, prompt_length, ends, layer, head, cache)


def one_of(count, index, name):
    """Return an index from 0 up to a count, or refuse it."""
    if isinstance(index, (int, np.integer)) and type(index) is not bool and 0 <= index < count:
        return int(index)
    raise InputError(f"{name} is {index!r}; choose one of 0 to {count - 1}")


def _plain(row):
    """Return a row of numbers as a list; what is not a number becomes None."""
    return [number(each) for each in row.tolist()]
