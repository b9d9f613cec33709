"""The loop over time: one pass, one token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from ..checkpoints import Model
from ..transformer import InputError, KVCache, Recompute, forward, silent

PATHS = ("cached", "naive")


@dataclass(frozen=True)
class Step:
    """One pass through the model, and the token it yields.

    Attributes
    ----------
    index : int
        0 for the pass over the prompt, then 1, 2, ...
    phase : "prefill" or "decode"
        The pass over the prompt, or one of those after it.
    fed : int
        How many tokens were fed in this pass.
    length : int
        How many tokens the sequence had at the end of the pass: the last query saw so many keys
        in a global layer.
    logits : NumPy array [vocab]
        The scores for the next token.
    token : int
        The chosen token.
    seconds : float
        The time of the pass, without the choice of the token.
    cache_bytes : int
        Bytes of the keys and values held after the pass.
    finish : "stop", "length" or None
        Why this step is the last: the end-of-text token, or no more tokens wanted or no position
        left; None when it is not.
    """

    index: int
    phase: Literal["prefill", "decode"]
    fed: int
    length: int
    logits: np.ndarray
    token: int
    seconds: float
    cache_bytes: int
    finish: Literal["stop", "length"] | None


def greedy(logits):
    """Choose the token with the largest logit; of equals, the one with the smallest id.

    Raises
    ------
    InputError
        If a logit is not a number: the weights are broken.
    """
    token = int(np.argmax(logits))
    if not np.isfinite(logits[token]):
        raise InputError("the logits are not finite numbers; check the model's weights")
    return token


def generate(
    model: Model,
    prompt,
    *,
    path: str = "cached",
    max_new_tokens: int = 64,
    stop_at_end: bool = True,
    choose: Callable[[np.ndarray], int] = greedy,
    trace=silent,
) -> Iterator[Step]:
    """Write on from a prompt, one token per step.

    A sequence can be as long as the model's context: generation ends with the token that the
    last position yields.

    Parameters
    ----------
    model : Model
    prompt : str or sequence of int
        Text or token ids.
    path : "cached" or "naive", optional
        Keep keys and values and feed only new tokens, or feed the whole sequence every time.
    max_new_tokens : int, optional
        Stop after so many tokens. With 0 nothing is computed.
    stop_at_end : bool, optional
        Stop after the end-of-text token.
    choose : function, optional
        From logits [vocab] to the next token; by default the most likely one.
    trace : Trace, optional
        Sees the values of every pass; those of the latest stay.

    Yields
    ------
    Step

    Raises
    ------
    InputError
        If the prompt, the path or the number of tokens is not usable. Raised at once, not at the
        first step.

    Examples
    --------
    >>> for step in generate(model, "Once upon a time", max_new_tokens=5):
    ...     print(step.phase, step.fed, model.decode([step.token]))
    """
    ids = model.encode(prompt)
    if path not in PATHS:
        raise InputError(f"unknown path {path!r}: choose {' or '.join(PATHS)}")
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number from 0")
    cache = new_cache(model, path, len(ids) + max_new_tokens)
    return _steps(model, ids, cache, max_new_tokens, stop_at_end, choose, trace)


def is_whole(number):
    """Return whether something is a whole number, of Python or NumPy, and no bool."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def new_cache(model, path, length):
    """Return an empty cache for one sequence of so many tokens, on the cached or naive path."""
    if path == "naive":
        return Recompute()
    capacity = min(length, model.config.context)
    return KVCache(model.config, 1, capacity, like=model.weights.token_embedding)


def _steps(model, ids, cache, max_new_tokens, stop_at_end, choose, trace):
    tokens = np.array([ids])  # [1, length]
    for index in range(max_new_tokens):
        new_tokens = tokens[:, cache.length :]  # the naive path's length is 0: it feeds them all

        model.device.synchronize()
        start = perf_counter()
        all_logits = forward(new_tokens, model.weights, model.config, cache, trace=trace)
        model.device.synchronize()
        seconds = perf_counter() - start

        logits = model.device.get(all_logits[0, -1])
        token = choose(logits)
        length = tokens.shape[1]
        finish: Literal["stop", "length"] | None = None
        if stop_at_end and token == model.config.end_token:
            finish = "stop"
        elif index + 1 == max_new_tokens or length == model.config.context:
            finish = "length"
        yield Step(
            index=index,
            phase="prefill" if index == 0 else "decode",
            fed=new_tokens.shape[1],
            length=length,
            logits=logits,
            token=token,
            seconds=seconds,
            cache_bytes=cache.used_bytes,
            finish=finish,
        )
        if finish:
            return
        tokens = np.append(tokens, [[token]], axis=1)
