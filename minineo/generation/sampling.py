"""From one row of logits to the next token.

All of it runs on the host, in NumPy and float64, whatever the model ran on: from equal logits, a
CPU and a GPU make the same text.
"""

from dataclasses import dataclass
from math import isfinite
from numbers import Real

import numpy as np

from ..transformer import InputError
from ..transformer.cache import whole
from ..transformer.functions import softmax
from ..transformer.model import whole_numbers

ROUNDING = 1e-6  # how far float32 logits may move a sum of probabilities


def greedy(logits, ids=()):
    """Choose the token with the largest logit; of equals, the one with the smallest id.

    Parameters
    ----------
    logits : NumPy array [vocab]
    ids : sequence of int, optional
        The tokens before it: they change nothing.

    Returns
    -------
    int

    Raises
    ------
    InputError
        If the largest logit is not a finite number: the weights are broken.
    """
    token = int(np.argmax(logits))
    if not np.isfinite(logits[token]):
        raise broken_logits()
    return token


@dataclass(frozen=True)
class Sampling:
    """Draw the next token by chance: a function like `greedy`, from logits and ids to a token.

    It has no state. The random number of a draw is made of the seed and of how many tokens stand
    before it, so a text depends on its own seed and tokens alone: not on other texts drawn beside
    it, in whatever order, and not on those given up half-way.

    Attributes
    ----------
    temperature : float
        Divides the logits: below 1 likely tokens become more likely, above 1 less. With 0 the
        best token is taken, as `greedy` does.
    top_k : int
        Draw from the so many best tokens; with 0, or more than there are, from all.
    top_p : float
        Draw from the smallest set of best tokens whose probabilities add up to so much. With 1
        all are kept, with 0 the best one.
    repetition_penalty : float
        Above 1, tokens that already stand in prompt or text become less likely; below 1, more.
    seed : int
        Another one gives another text.

    Raises
    ------
    InputError
        If one of them is not a finite number, or out of its range.

    Examples
    --------
    >>> choose = Sampling(temperature=0.8, top_p=0.9, seed=1)
    >>> choose(np.array([1.0, 3.0, 2.0]), [5, 7])
    1
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, fits, range_ in (
            ("temperature", lambda number: number >= 0, "a number from 0"),
            ("top_p", lambda number: 0 <= number <= 1, "a number from 0 to 1"),
            ("repetition_penalty", lambda number: number > 0, "a number above 0"),
        ):
            number = getattr(self, name)
            if not (is_finite(number) and fits(number)):
                raise InputError(f"{name} is {number!r}; it must be {range_}")
        whole(self.top_k, "top_k")
        whole(self.seed, "seed")

    def __call__(self, logits, ids) -> int:
        """Draw the token that comes after `ids`.

        The ids share the range from 0 to 1 among them, in rising order, each as much of it as its
        probability: the random number falls into the share of one.

        Parameters
        ----------
        logits : NumPy array [vocab]
        ids : sequence of int
            All tokens before it, prompt and text.

        Returns
        -------
        int

        Raises
        ------
        InputError
            As `distribution` does.
        """
        ends = np.cumsum(distribution(logits, ids, self))
        ends /= ends[-1]  # rounding may have left it beside 1
        number = np.random.default_rng((int(self.seed), len(ids))).random()  # below 1
        return int(np.searchsorted(ends, number, side="right"))


@np.errstate(over="ignore")  # far below the best, at a small temperature, -inf is the right limit
def distribution(logits, ids, sampling):
    """Return what a token is drawn from: penalty, temperature, top-k and top-p, in this order.

    It is the order of transformers. A temperature T makes ``exp(logit / T) / Σ exp(logits / T)``
    of what the penalty leaves.

    Parameters
    ----------
    logits : NumPy array [vocab]
        A single one may be -inf: its token is never drawn.
    ids : sequence of int
        All tokens before it.
    sampling : Sampling

    Returns
    -------
    NumPy array of float64 [vocab]
        Probabilities, 0 for tokens that are not kept.

    Raises
    ------
    InputError
        If the largest logit is not a finite number, or `penalize` refuses.

    References
    ----------
    Ackley, Hinton, Sejnowski (1985), A Learning Algorithm for Boltzmann Machines, Cognitive
    Science 9, for the temperature.
    """
    scores = finite(logits)
    if sampling.repetition_penalty != 1:
        scores = penalize(scores, ids, float(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return (np.arange(len(scores)) == greedy(scores)).astype(np.float64)
    scores = (scores - scores.max()) / float(sampling.temperature)  # the best, 0, cannot overflow
    kept = keep_top_p(keep_top_k(scores, int(sampling.top_k)), float(sampling.top_p))
    return softmax(kept)


@np.errstate(over="ignore")
def penalize(logits, ids, penalty):
    """Make the tokens among `ids` less likely, or more likely by a penalty below 1.

    Their logits become ``logit / penalty`` where they are positive and ``logit × penalty`` where
    they are negative: once for each token, however often it is there.

    Parameters
    ----------
    logits : NumPy array [vocab]
    ids : sequence of int
        All tokens so far.
    penalty : float
        Above 0; 1 changes nothing.

    Returns
    -------
    NumPy array of float64 [vocab]

    Raises
    ------
    InputError
        If the largest logit is not a finite number, before or after, or an id is no token.

    References
    ----------
    Keskar et al. (2019), CTRL: A Conditional Transformer Language Model for Controllable
    Generation, arXiv:1909.05858. It divides negative logits too, which makes their
    tokens more likely; multiplying them is what transformers does.
    """
    scores = finite(logits)
    seen = np.unique(whole_numbers(ids, "token ids")).astype(int)
    if seen.size and not 0 <= seen[0] <= seen[-1] < len(scores):
        wrong = seen[0] if seen[0] < 0 else seen[-1]
        raise InputError(f"{wrong} is no token here; ids are 0 to {len(scores) - 1}")
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if not np.isfinite(scores.max()):
        raise InputError(
            f"a repetition penalty of {penalty!r} makes numbers of the logits that float64 cannot "
            "hold; choose one nearer to 1"
        )
    return scores


def keep_top_k(logits, k):
    """Keep the k best tokens, and all that are as good as the last of them.

    Parameters
    ----------
    logits : NumPy array [vocab]
    k : int
        With 0, or more than there are, all are kept.

    Returns
    -------
    NumPy array of float64 [vocab]
        -inf for all other tokens.

    Raises
    ------
    InputError
        If the largest logit is not a finite number.

    References
    ----------
    Fan, Lewis, Dauphin (2018), Hierarchical Neural Story Generation, arXiv:1805.04833.
    """
    scores = finite(logits)
    if 0 < k < len(scores):
        scores[scores < np.partition(scores, -k)[-k]] = -np.inf
    return scores


def keep_top_p(logits, p):
    """Keep the smallest set of best tokens whose probabilities add up to p.

    Of equals, those with the smallest ids are kept. A sum within 1e-6 of p has reached it: the
    rounding of float32 logits moves it as far, and a set whose sum is p on paper must not need
    another token for that. One token is always kept, and all of them with p = 1.

    Parameters
    ----------
    logits : NumPy array [vocab]
    p : float
        From 0 to 1.

    Returns
    -------
    NumPy array of float64 [vocab]
        -inf for all other tokens.

    Raises
    ------
    InputError
        If the largest logit is not a finite number.

    References
    ----------
    Holtzman et al. (2019), The Curious Case of Neural Text Degeneration, arXiv:1904.09751,
    section 3.1.
    """
    scores = finite(logits)
    if p < 1:
        best_first = np.argsort(-scores, kind="stable")
        sums = np.cumsum(softmax(scores)[best_first])
        scores[best_first[np.searchsorted(sums, p - ROUNDING) + 1 :]] = -np.inf
    return scores


def log_probabilities(logits):
    """Return the natural logarithm of every token's probability: ``logit - log Σ exp(logits)``.

    Parameters
    ----------
    logits : NumPy array [vocab]

    Returns
    -------
    NumPy array of float64 [vocab]

    Raises
    ------
    InputError
        If the largest logit is not a finite number.
    """
    scores = finite(logits)
    scores -= scores.max()  # or exp might overflow
    return scores - np.log(np.exp(scores).sum())


def finite(logits):
    """Return a copy in float64 of logits whose largest is a finite number, and none is NaN."""
    scores = np.array(logits, dtype=np.float64)
    if not np.isfinite(scores.max()):
        raise broken_logits()
    return scores


def broken_logits():
    """Return the error for logits that nothing can be drawn from."""
    return InputError("the logits are not finite numbers; check the model's weights")


def is_finite(number):
    """Return whether something is a finite number, of Python or NumPy, and no bool."""
    if not isinstance(number, Real) or isinstance(number, bool):
        return False
    try:
        return isfinite(number)
    except OverflowError:  # a whole number above all floats
        return False
