"""Attention, written by hand: every query looks at the keys it may see and mixes their values."""

import numpy as np

from .functions import linear, softmax, wide
from .replaceable import replaceable
from .trace import silent

QUERY_ROWS = 64  # queries attended for at once: their scores stay in the processor's cache


def attention(x, weights, cache, layer, positions, window, n_heads, trace=silent):
    """Self-attention of one layer over the new tokens and all that the cache remembers.

    The line that calls `cache.extend` is the only one at which the cached and the naive path
    part: one gets back the keys and values of all tokens so far, the other what it brought.

    Parameters
    ----------
    x : array [batch, new, width]
        The normed vectors of the new tokens.
    weights : Attention
    cache : Recompute or KVCache
    layer : int
    positions : NumPy array [batch or 1, new]
        The position of each new token, on the host; one row if it is the same in all.
    window : int
        How many positions a query sees: its own and those just before it.
    n_heads : int
    trace : Trace, optional

    Returns
    -------
    array [batch, new, width]
        What each new token has found: the mixed values of its heads, side by side.
    """
    queries = split_heads(linear(x, weights.query), n_heads)  # [batch, heads, new, head_dim]
    new_keys = split_heads(linear(x, weights.key), n_heads)  # [batch, heads, new, head_dim]
    new_values = split_heads(linear(x, weights.value), n_heads)  # [batch, heads, new, head_dim]
    keys, values = cache.extend(layer, new_keys, new_values)  # [batch, heads, all, head_dim]
    trace(queries=queries, new_keys=new_keys, new_values=new_values, keys=keys, values=values)
    mixed = attend(queries, keys, values, positions, window, trace)  # [batch, heads, new, head_dim]
    trace(mixed=mixed)
    return merge_heads(mixed)  # [batch, new, width]


@replaceable
def attend(queries, keys, values, positions, window, trace=silent):
    """Mix the values that each query may see: softmax(queries @ keysᵀ) @ values.

    A query at position p sees the slots s with ``0 <= p - s < window``. That alone hides the
    future, what lies behind the window, padding, and slots not yet written. GPT-Neo does not
    divide the scores by the square root of head_dim.

    Parameters
    ----------
    queries : array [batch, heads, new, head_dim]
    keys, values : array [batch, heads, all, head_dim]
        The key and value of the token at position p lie in slot p.
    positions : NumPy array [batch or 1, new]
        The position of each query, rising by one along a row.
    window : int
    trace : Trace, optional

    Returns
    -------
    array [batch, heads, new, head_dim]
        Laid out in memory as the queries are.

    References
    ----------
    Vaswani et al. (2017), Attention Is All You Need, arXiv:1706.03762; Black et al. (2021),
    GPT-Neo, for the window and the missing divisor.
    """
    new, all_slots = queries.shape[2], keys.shape[2]
    mixed = np.empty_like(queries)
    for start in range(0, new, QUERY_ROWS):
        rows = slice(start, min(start + QUERY_ROWS, new))
        first = min(positions[:, rows.start].tolist())
        last = max(positions[:, rows.stop - 1].tolist())
        # what these rows see; padding may stand behind the last slot
        slots = slice(max(0, first - window + 1), min(last + 1, all_slots))

        # scores and pattern are [batch, heads, rows, slots]
        scores = wide(queries[:, :, rows]) @ wide(keys[:, :, slots]).swapaxes(-1, -2)
        if first < last:  # a query alone sees all of these slots
            distance = positions[:, rows, None] - np.arange(slots.start, slots.stop)
            hidden = (distance < 0) | (distance >= window)  # [batch, rows, slots]
            hide(scores, hidden)
        pattern = softmax(scores)
        mixed[:, :, rows] = pattern @ wide(values[:, :, slots])

        trace.tile(rows, slots, (new, all_slots), scores=scores, pattern=pattern)
    return mixed


def hide(scores, hidden):
    """Lower hidden scores, in place, as far as their dtype allows: softmax makes them 0.

    Parameters
    ----------
    scores : array [batch, heads, new, all]
    hidden : NumPy array of bool [batch or 1, new, all]
    """
    lowest = float(np.finfo(scores.dtype).min)
    np.copyto(scores, lowest, where=np.asarray(hidden, like=scores)[:, None])


def split_heads(x, n_heads):
    """[batch, new, width] -> [batch, heads, new, head_dim], without a copy."""
    batch, new, width = x.shape
    return x.reshape(batch, new, n_heads, width // n_heads).swapaxes(1, 2)


def merge_heads(x):
    """[batch, heads, new, head_dim] -> [batch, new, width]."""
    batch, heads, new, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, new, heads * head_dim)
