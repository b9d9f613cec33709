"""How likely a model finds a text: the log-probability of every token."""

from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

import numpy as np

from ..checkpoints import Model
from ..generation.batch import new_cache
from ..transformer import InputError
from ..transformer.model import check_ids

FED = 256  # tokens at once: the logits of more would take much memory
ROWS = 32  # rows of logits in float64 at once


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Attributes
    ----------
    ids : list of int
    log_probabilities : NumPy array of float64 [len(ids) - 1]
        The natural logarithm of the probability of each token after the first, which has none
        before it to be predicted from.
    n_bytes : int or None
        The length of the text in UTF-8; None when ids were scored.
    """

    ids: list[int]
    log_probabilities: np.ndarray
    n_bytes: int | None

    @property
    def total(self) -> float:
        """The log-probability of the text, given its first token: the sum of all."""
        return float(self.log_probabilities.sum())

    @property
    def loss(self) -> float:
        """The mean negative log-probability of a token, as transformers gives it."""
        return -float(self.log_probabilities.mean())

    @property
    def perplexity(self) -> float:
        """The exponential of the loss: the model is as unsure as among so many like tokens."""
        return exp(self.loss) if self.loss < 700 else inf  # more is no float64

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the scored tokens take, for each byte of the whole text; None for ids.

        It compares models whose tokens differ. The first token adds its bytes, but no bits.
        """
        return -self.total / log(2) / self.n_bytes if self.n_bytes else None

    def to_json(self) -> dict:
        """Return everything as plain numbers. A perplexity above all of them becomes None."""
        return {
            "schema": 1,
            "ids": self.ids,
            "log_probabilities": self.log_probabilities.tolist(),
            "total": self.total,
            "loss": self.loss,
            "perplexity": self.perplexity if self.perplexity < inf else None,
            "bytes": self.n_bytes,
            "bits_per_byte": self.bits_per_byte,
        }


def score(model: Model, text, *, special: bool = True) -> Score:
    """Return the log-probability of every token of a text, given those before it.

    A text may be longer than the context. It is then scored in windows of the context's length,
    each of which begins half a context after the one before: a token is predicted from all tokens
    before it, or from half a context of them at least. Up to a context and one token there is
    one window.

    Parameters
    ----------
    model : Model
    text : str or sequence of int
        Text or token ids: 2 tokens or more.
    special : bool, optional
        Take ``<|endoftext|>`` and other special tokens in text for what they are.

    Returns
    -------
    Score

    Raises
    ------
    InputError
        If there are fewer than 2 tokens, an id is no token, there is text and no tokenizer, or
        the model's logits are not finite numbers.

    Examples
    --------
    >>> result = score(load("tiny"), "Once upon a time, there was a little girl.")
    >>> result.perplexity, result.log_probabilities
    """
    ids = encode(model, text, special)
    if len(ids) < 2:
        raise InputError(
            f"{len(ids)} token{'' if ids else 's'} cannot be scored: each is predicted from those "
            "before it; give 2 or more"
        )
    found = [
        log_probabilities(model, ids, *window)
        for window in windows(len(ids) - 1, model.config.context)
    ]
    n_bytes = len(text.encode("utf-8")) if isinstance(text, str) else None
    return Score(ids, np.concatenate(found), n_bytes)


def encode(model, text, special):
    """Return the ids of a text of any length, or given ones once they are checked."""
    if isinstance(text, str):
        return model.encode_text(text, special)
    ids = check_ids(text, model.config)
    if ids.ndim != 1:
        raise InputError("what is scored must be text or a list of token ids")
    return ids.tolist()


def windows(fed, context):
    """Cover positions with windows that overlap by half.

    Parameters
    ----------
    fed : int
        How many tokens are fed: all but the last, which is only predicted.
    context : int

    Yields
    ------
    (int, int, int)
        Where a window starts, the first position that it predicts from, and its end.
    """
    start = done = 0
    while done < fed:
        end = min(start + context, fed)
        yield start, done, end
        done, start = end, start + (context + 1) // 2


def log_probabilities(model, ids, start, done, end):
    """Return the log-probability of the tokens behind the positions from `done` to `end`.

    The window is fed through a cache piece by piece, so that only a piece's logits exist.
    """
    cache = new_cache(model, "cached", 1, end - start)

    def logits(first, last, last_only):
        tokens = np.array([ids[first:last]])
        given = model.forward(tokens, cache, last_only=last_only)
        return model.device.get(given[0])

    found = []
    for first, last in pairwise(pieces(start, done, end)):
        if first < done:  # the window before has predicted from here
            logits(first, last, last_only=True)
        else:  # nothing holds the logits of a piece while the next one is fed
            found.append(pick(logits(first, last, last_only=False), ids[first + 1 : last + 1]))
    return np.concatenate(found)


def pieces(start, done, end):
    """Return where pieces of a window end and begin; one of the cuts is at `done`."""
    return [*range(start, done, FED), *range(done, end, FED), end]


def pick(logits, targets):
    """Return the log-probability of one token for each row of logits, in float64.

    Parameters
    ----------
    logits : NumPy array [rows, vocab]
    targets : sequence of int [rows]

    Returns
    -------
    NumPy array of float64 [rows]

    Raises
    ------
    InputError
        If a logit is not a finite number: the weights are broken.
    """
    picked = np.empty(len(targets))
    for first in range(0, len(targets), ROWS):
        rows = logits[first : first + ROWS].astype("float64")
        if not np.isfinite(rows).all():
            raise InputError("the logits are not finite numbers; check the model's weights")
        rows -= rows.max(axis=-1, keepdims=True)  # or exp might overflow
        right = rows[np.arange(len(rows)), targets[first : first + ROWS]]
        picked[first : first + ROWS] = right - np.log(np.exp(rows, out=rows).sum(axis=-1))
    return picked
