"""One answer to each exercise. Others are as good: the checks know nothing of these."""

import numpy as np

from minineo import KVCache


def mix(queries, keys, values, hidden):
    """Exercise 1: (Q × Kᵀ) × V."""
    scores = queries @ keys.swapaxes(-1, -2)  # [..., new, all]; not divided by √head_dim
    scores = np.where(hidden, float(np.finfo(scores.dtype).min), scores)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))  # at most exp(0) = 1
    pattern = shares / shares.sum(axis=-1, keepdims=True)  # each row adds up to 1
    return pattern @ values  # [..., new, head_dim]


def hidden(positions, slots, window):
    """Exercise 2: what a query may not look at."""
    distance = positions[:, None] - slots  # [new, all]: how far a slot lies back
    return (distance < 0) | (distance >= window)  # the future, and what is behind the window


def extend(cache, layer, new_keys, new_values):
    """Exercise 3: write behind what is held, and return all."""
    keys, values = cache.keys[layer], cache.values[layer]  # [batch, heads, capacity, head_dim]
    new = new_keys.shape[2]
    for row, length in enumerate(cache.lengths):
        room = cache.capacity - length  # padding may reach past the last slot
        keys[row, :, length : length + new] = new_keys[row, :, :room]
        values[row, :, length : length + new] = new_values[row, :, :room]
    end = cache.length + new  # of the longest row
    return keys[:, :, :end], values[:, :, :end]


def generate(model, ids, n):
    """Exercise 4: a prefill yields the first token, each decode step one more."""
    cache = KVCache(model.config, 1, len(ids) + n - 1, like=model.weights.token_embedding)
    logits = model.forward(np.array([ids]), cache)  # prefill: [1, 1, vocab]
    new = [int(np.argmax(logits[0, -1]))]
    while len(new) < n:  # n - 1 times
        logits = model.forward(np.array([new[-1:]]), cache)  # decode: the newest token alone
        new.append(int(np.argmax(logits[0, -1])))
    return new


def cache_bytes(config, tokens, batch, itemsize):
    """Exercise 5: keys and values of every token, in every layer and row."""
    per_token = 2 * config.n_layers * config.n_heads * config.head_dim  # numbers; 2: both of them
    return per_token * tokens * batch * itemsize


def top_p(probabilities, p):
    """Exercise 6: the smallest set of likeliest tokens that reaches p."""
    likeliest_first = np.argsort(-probabilities)
    sums = np.cumsum(probabilities[likeliest_first])
    before = sums - probabilities[likeliest_first]  # what the likelier ones add up to
    kept = likeliest_first[before < p]  # they alone do not reach p
    if not len(kept):  # p = 0
        kept = likeliest_first[:1]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result
