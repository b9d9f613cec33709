"""Checks that say in one sentence what is wrong with an answer. minineo itself is the judge.

Each takes the function that a reader has written and returns a sentence that begins with "right",
"wrong" or "not written yet". The answer is tried on small arrays in which the usual slips show one
by one; then it takes the place of minineo's own code in the embedded model.
"""

import math
import traceback
from copy import copy
from dataclasses import replace
from functools import cache, wraps

import numpy as np

import minineo
from minineo import KVCache, Model, Recompute, Sampling
from minineo.checkpoints.known import public_config
from minineo.generation.sampling import distribution
from minineo.study import costs
from minineo.transformer import attention
from minineo.transformer.functions import softmax
from minineo.transformer.replaceable import replaced

PROMPT = "Once upon a time, there was a little girl named Lily. She had a small red ball"
LONG = 90  # tokens: more than the local window of the embedded model


class Wrong(Exception):  # noqa: N818 - it is the answer that is wrong
    """The answer is wrong; the message says how, and what to do about it."""


def check(examine):
    """Let a check return a sentence, whatever the answer does."""

    @wraps(examine)
    def judge(answer):
        try:
            with np.errstate(all="ignore"):  # what overflows is found by what comes of it
                return f"right: {examine(answer)}"
        except NotImplementedError:
            return "not written yet: put your own lines in the place of the one that raises."
        except Wrong as wrong:
            return f"wrong: {wrong}"
        except Exception as error:  # the answer's own
            return f"wrong: it stops {place_of(error, answer)}."

    return judge


def place_of(error, answer):
    """Return where an answer has stopped, and why, in a few words."""
    says = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
    reason = f"with {type(error).__name__}: {says}"
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"at `{lines[-1]}` {reason}" if lines and lines[-1] else reason


def require(true, sentence):
    """Say what is wrong unless something is true."""
    if not true:
        raise Wrong(sentence)


def call(answer, **given):
    """Return what an answer makes of these arguments, and see that it leaves them as they are."""
    before = {name: copy(value) for name, value in given.items()}
    result = answer(*given.values())
    require(result is not None, "it returns None: end it with a `return`.")
    for name, value in given.items():
        require(
            not isinstance(value, (np.ndarray, list)) or np.array_equal(value, before[name]),
            f"it changes `{name}`, which belongs to whoever called it: work on a copy.",
        )
    return result


def require_array(result, shape, axes):
    """See that a result is an array of this shape."""
    require(isinstance(result, np.ndarray), f"it returns a {type(result).__name__}, not an array.")
    require(
        result.shape == shape,
        f"it returns the shape {list(result.shape)}; {axes} is {list(shape)} here.",
    )


def close(a, b):
    """Whether two arrays are the same but for rounding."""
    return np.allclose(a, b, rtol=1e-4, atol=1e-5)


@cache
def tiny():
    """The embedded model, on the CPU: the answers are written for NumPy."""
    return minineo.load("tiny", device="cpu")


def long_ids():
    """A sequence that is longer than a local window."""
    return np.random.default_rng(0).integers(tiny().config.vocab, size=(1, LONG))


def require_same_logits(attend):
    """See that the model gives the same logits with another `attend` as with its own."""
    right = tiny().forward(long_ids(), Recompute(), last_only=False)
    with replaced(attend=attend):
        logits = tiny().forward(long_ids(), Recompute(), last_only=False)
    require(
        close(logits, right),
        "it is right on small arrays, but in the model the logits differ by "
        f"{np.abs(logits - right).max():.2g}.",
    )


def continued(**options):
    """Return the prompt with what the model writes behind it."""
    steps = minineo.generate(tiny(), PROMPT, max_new_tokens=12, **options)
    return PROMPT + "".join(step.text for step in steps)


# 1. Attention


@check
def check_mix(answer):
    """Exercise 1: (Q × Kᵀ) × V."""
    rng = np.random.default_rng(1)
    head_dim = slots = 5
    queries, keys, values = (rng.normal(size=(n, head_dim)) for n in (4, slots, slots))
    hidden = np.arange(4)[:, None] + 1 < np.arange(slots)  # query i sees keys 0 to i + 1

    def pattern_of(queries, keys, values=None):
        values = np.eye(slots) if values is None else values  # which let the pattern through
        result = call(answer, queries=queries, keys=keys, values=values, hidden=hidden)
        require_array(result, (4, head_dim), "[new, head_dim]")
        return result

    require(
        not close(pattern_of(queries, keys, values), pattern_of(queries, keys, 2 * values)),
        "the result is the same whatever the values are: mix the values, `pattern @ values`.",
    )
    explain_pattern(pattern_of(queries, keys), queries, keys, hidden)
    require(
        close(pattern_of(queries, keys, values), right_mix(queries, keys, values, hidden)),
        "the pattern is right, but what is made of the values is not: it is `pattern @ values`.",
    )
    large = pattern_of(1000 * queries, keys)
    require(
        np.isfinite(large).all(),
        "with scores of some thousands the result is not a number: "
        "subtract each row's largest score before `np.exp`, which changes nothing else.",
    )
    explain_pattern(large, 1000 * queries, keys, hidden)
    check_all_heads(answer)
    single = [array.astype("float32") for array in (queries, keys, values)]
    dtype = answer(*single, hidden).dtype
    require(
        dtype == "float32",
        f"float32 goes in and {dtype} comes out: use Python's numbers in the place of NumPy's.",
    )

    def attend(queries, keys, values, positions, window, trace=None):
        not_seen = right_hidden(positions[0], np.arange(keys.shape[2]), window)
        return answer(queries, keys, values, not_seen)

    require_same_logits(attend)
    with replaced(attend=attend):
        return f"in the place of minineo's own it writes “{continued()}”."


def right_mix(queries, keys, values, hidden):
    """What exercise 1 asks for, in minineo's own functions."""
    scores = queries @ keys.swapaxes(-1, -2)
    return softmax(np.where(hidden, np.finfo(scores.dtype).min, scores)) @ values


def explain_pattern(pattern, queries, keys, hidden):
    """Say what is wrong with a pattern [new, all]."""
    right = right_mix(queries, keys, np.eye(len(keys)), hidden)
    if close(pattern, right):
        return
    require(
        np.isfinite(pattern).all(),
        "there are shares that are not a number: "
        "is a whole row of scores hidden, or does `np.exp` overflow?",
    )
    require(
        not close(np.where(hidden, 0, pattern)[hidden.any(axis=-1)], 0),
        "the queries look at what is hidden and at nothing else: "
        "`hidden` is True where a query may not look.",
    )
    sums = pattern.sum(axis=-1)
    require(
        close(sums, 1) or not close(pattern.sum(axis=0), 1),
        "the columns of the pattern add up to 1 and not its rows: softmax goes along the last "
        "axis, so that each query shares out 1 among the keys.",
    )
    for query, key in np.argwhere(hidden & (pattern > 1e-6)):
        raise Wrong(
            f"query {query} looks at key {key}, which is hidden from it: before the softmax, set "
            "hidden scores to the lowest number there is, `np.finfo(scores.dtype).min`."
        )
    worst = int(np.argmax(np.abs(sums - 1)))
    require(
        close(sums, 1),
        f"the shares of query {worst} add up to {sums[worst]:.2f} and not to 1: hide scores before "
        "the softmax, not shares after it, and divide by the sum over the last axis.",
    )
    require(
        not close(pattern, softmax(np.where(hidden, -np.inf, queries @ keys))),
        "the queries meet the columns of `keys`: the score of query i and key j is the sum of "
        "`queries[i] * keys[j]`, which is `queries @ keys.T` for one head.",
    )
    explain_scale(pattern, right, keys.shape[-1])
    query, key = np.unravel_index(np.argmax(np.abs(pattern - right)), pattern.shape)
    raise Wrong(
        f"query {query} gives key {key} a share of {pattern[query, key]:.3f}; "
        f"{right[query, key]:.3f} is right."
    )


def explain_scale(pattern, right, head_dim):
    """Say so if all scores are the right ones times a factor: ratios of shares tell."""
    got, want = (np.log(array[:, 1] / array[:, 0]) for array in (pattern, right))
    factors = got / want
    if not close(factors, factors[0]):
        return
    if close(factors[0], head_dim**-0.5):
        raise Wrong(
            "the scores are divided by the square root of head_dim: most models do that, "
            "GPT-Neo does not."
        )
    if close(factors[0], math.log(2)):
        raise Wrong("softmax takes e to the score; this is 2 to the score, as on paper.")
    raise Wrong(f"the scores are {factors[0]:.3g} times what they must be: leave them as they are.")


def check_all_heads(answer):
    """See that batch and heads pass through."""
    rng = np.random.default_rng(2)
    queries, keys, values = (rng.normal(size=(2, 3, new, 4)) for new in (5, 6, 6))
    hidden = np.arange(5)[:, None] + 1 < np.arange(6)
    try:
        result = call(answer, queries=queries, keys=keys, values=values, hidden=hidden)
    except (ValueError, IndexError) as error:
        hint = "`.T` turns all axes round, `.swapaxes(-1, -2)` the last two"
        if isinstance(error, IndexError):
            hint = "`np.where(hidden, ...)` lets further axes pass, an index does not"
        raise Wrong(
            "it is right for one head, but with batch and heads as further axes in front it stops "
            f"{place_of(error, answer)}; {hint}."
        ) from None
    require_array(result, (2, 3, 5, 4), "[batch, heads, new, head_dim]")
    right = right_mix(queries, keys, values, hidden)
    wrong = np.argwhere(~np.isclose(result, right))
    if len(wrong):
        raise Wrong(
            "it is right for one head, but with batch and heads as further axes in front row "
            f"{wrong[0][0]}, head {wrong[0][1]} is wrong: count axes from the end, -1 for the last."
        )


# 2. The mask


@check
def check_hidden(answer):
    """Exercise 2: what a query may not look at."""
    explain_mask(answer, np.arange(4), np.arange(6), 3)
    explain_mask(answer, np.array([7]), np.arange(8), 3, "a query at position 7 alone in its pass")
    explain_mask(answer, np.arange(6, 9), np.arange(4, 9), 3, "slots that begin at 4")
    for window in (1, 2, 5, 64):
        explain_mask(answer, np.arange(9), np.arange(9), window, f"a window of {window}")

    def attend(queries, keys, values, positions, window, trace=None):
        not_seen = answer(positions[0], np.arange(keys.shape[2]), window)
        return right_mix(queries, keys, values, not_seen)

    require_same_logits(attend)
    return (
        f"over {LONG} tokens, past the local window of 64, the model's logits stay what they are."
    )


def right_hidden(positions, slots, window):
    """What exercise 2 asks for, read off minineo's attention.

    Where queries and keys are 0, a query gives every key it may see the same share, and values
    that are the identity let the shares through.
    """
    length = int(max(positions.max(), slots.max())) + 1
    nothing, identity = np.zeros((1, 1, length, length)), np.eye(length)[None, None]
    everyone = np.arange(length)[None]
    shares = attention.attend.__wrapped__(nothing, nothing, identity, everyone, window)[0, 0]
    return shares[positions][:, slots] == 0


def explain_mask(answer, positions, slots, window, case=""):
    """Say what is wrong with a mask, for these positions and slots."""
    mask = call(answer, positions=positions, slots=slots, window=window)
    right = right_hidden(positions, slots, window)
    with_case = f"with {case}, " if case else ""
    require(isinstance(mask, np.ndarray), f"it returns a {type(mask).__name__}, not an array.")
    require(
        mask.shape == right.shape or mask.shape != right.T.shape,
        "rows and columns are exchanged: a row for each query, a column for each slot.",
    )
    require_array(mask, right.shape, "[new, all]")
    require(mask.dtype == bool, f"it returns {mask.dtype}; True and False are asked for.")
    if np.array_equal(mask, right):
        return
    require(
        not np.array_equal(mask, ~right),
        "it is the wrong way round: True is what a query may not look at.",
    )
    distance = positions[:, None] - slots
    for query, slot in np.argwhere(~mask & (distance < 0)):
        raise Wrong(
            f"{with_case}token {positions[query]} looks at token {slots[slot]}, which comes after "
            "it: hide distance < 0, where distance = position - slot."
        )
    for query, _slot in np.argwhere(mask & (distance == 0)):
        raise Wrong(
            f"{with_case}token {positions[query]} does not see itself: distance 0 is never hidden."
        )
    for query, slot in np.argwhere(mask != right):
        seen, must = (~mask[query]).sum(), (~right[query]).sum()
        what = (
            "looks too far back, hide distance >= window"
            if not mask[query, slot]
            else "does not look as far back as it may, hide distance >= window and no less"
        )
        raise Wrong(
            f"{with_case}token {positions[query]} sees {seen} of these tokens, itself included, and "
            f"must see {must} with a window of {window}: it {what}."
        )


# 3. The cache


@check
def check_extend(answer):
    """Exercise 3: write behind what is held and return all."""
    check_equal_rows(answer)
    check_ragged_rows(answer)
    mine = type("MyCache", (KVCache,), {"extend": answer})
    ids = long_ids()
    right = [tiny().forward(ids[:, :end], Recompute()) for end in range(LONG - 3, LONG + 1)]
    held = mine(tiny().config, 1, LONG, like=tiny().weights.token_embedding)
    for step, expected in enumerate(right):
        new = ids[:, held.length : LONG - 3 + step]
        logits = tiny().forward(new, held)
        require(
            close(logits, expected),
            f"it is right on small arrays, but in the model the logits of step {step} differ by "
            f"{np.abs(logits - expected).max():.2g} from the naive path.",
        )
    return "the model decodes from your cache and says what the naive path says."


def small_cache(batch, capacity, lengths):
    """A small cache, as if it had been used, that holds tokens of these lengths."""
    shape = {"width": 6, "n_heads": 2, "n_layers": 2, "windows": (9, 9), "context": 9}
    made = KVCache(replace(tiny().config, **shape), batch, capacity, like=np.zeros(1))
    numbers = np.random.default_rng(3)
    for array in (*made.keys, *made.values):
        array[:] = numbers.normal(size=array.shape)
    made.lengths[:] = lengths
    return made


def new_ones(batch, new):
    """New keys and values [batch, heads, new, head_dim] for a small cache."""
    numbers = np.random.default_rng(4)
    return numbers.normal(size=(batch, 2, new, 3)), numbers.normal(size=(batch, 2, new, 3))


def extended(answer, held, layer, new_keys, new_values):
    """Let an answer extend a cache, and see that it does nothing but that."""
    before = held.copy()
    pair = call(answer, cache=held, layer=layer, new_keys=new_keys, new_values=new_values)
    require(
        isinstance(pair, (tuple, list)) and len(pair) == 2,
        "it must return two arrays: `return keys, values`.",
    )
    require(
        np.array_equal(held.lengths, before.lengths),
        "it moves `cache.lengths`: `advance` does that once a pass, or the next layer would write "
        "one place too far.",
    )
    for name in ("keys", "values"):
        old, now = getattr(before, name), getattr(held, name)
        require(
            all(a.shape == b.shape for a, b in zip(old, now, strict=True)),
            f"cache.{name}[{layer}] has another shape now: write into the slots that are there.",
        )
        require(
            np.array_equal(old[1 - layer], now[1 - layer]),
            f"layer {layer} was asked for, and `cache.{name}[{1 - layer}]` has changed: every "
            "layer has its own.",
        )
    return pair


def check_equal_rows(answer):
    """Three tokens are held, one comes."""
    held, (new_keys, new_values) = small_cache(1, 6, [3]), new_ones(1, 1)
    storage = held.keys[1], held.values[1]
    old_keys, old_values = (array[:, :, :3].copy() for array in storage)
    keys, values = extended(answer, held, 1, new_keys, new_values)
    expected = {
        "keys": (keys, np.concatenate([old_keys, new_keys], axis=2)),
        "values": (values, np.concatenate([old_values, new_values], axis=2)),
    }
    require(
        not (
            np.shape(keys) == np.shape(values) == (1, 2, 4, 3)
            and np.array_equal(keys[:, :, 3:], new_values)
            and np.array_equal(values[:, :, 3:], new_keys)
        ),
        "keys and values are exchanged.",
    )
    for name, (got, want) in expected.items():
        shape = np.shape(got)
        require(
            shape != (1, 2, 1, 3),
            f"the {name} of the new token alone come back: a query needs those of all 4.",
        )
        require(
            shape != (1, 2, 6, 3),
            f"all 6 slots of {name} come back, and 2 are not written yet: return the slots up to "
            "`cache.length + new`.",
        )
        require(
            shape != (1, 2, 3, 3),
            f"the {name} come back without the new token: it looks at itself too.",
        )
        require_array(got, want.shape, "[batch, heads, all, head_dim]")
        require(
            np.array_equal(got[:, :, :3], want[:, :, :3]),
            f"the {name} of tokens 0 to 2 are no longer what they were: write behind them, from "
            "slot `cache.lengths[row]` on.",
        )
        require(
            np.array_equal(got, want),
            f"the {name} of the new token are not in slot 3, right behind the 3 that are held.",
        )
    for name, before in zip(expected, storage, strict=True):
        now = getattr(held, name)[1]
        require(
            now is before,
            f"`cache.{name}[layer]` is another array now: write into the one that is there, whose "
            "memory was set aside once and for all.",
        )
        require(
            np.array_equal(now[:, :, :4], expected[name][1]),
            f"the right {name} come back, but the cache does not hold them: write them into "
            f"`cache.{name}[layer]`.",
        )


def check_ragged_rows(answer):
    """Rows of different lengths, and padding that reaches past the last slot."""
    for new, capacity, lengths in ((1, 6, [2, 4]), (1, 6, [4, 2]), (3, 6, [5, 2])):
        held, arrays = small_cache(2, capacity, lengths), new_ones(2, new)
        twin = held.copy()
        right = twin.extend(0, *arrays)
        try:
            pair = extended(answer, held, 0, *arrays)
        except ValueError as error:
            raise Wrong(
                f"with rows that hold {lengths[0]} and {lengths[1]} tokens, {new} fed and "
                f"{capacity} slots in each it stops {place_of(error, answer)}; padding may reach "
                "past the last slot, write no more than there is room for."
            ) from None
        for name, got, want in zip(("keys", "values"), pair, right, strict=True):
            require(
                np.shape(got) == want.shape,
                f"with rows that hold {lengths[0]} and {lengths[1]} tokens and {new} fed, "
                f"{np.shape(got)[2]} slots come back: return {want.shape[2]}, up to the end of the "
                "longest row.",
            )
            for row, length in enumerate(lengths):
                end = min(length + new, capacity)
                require(
                    np.array_equal(got[row, :, :end], want[row, :, :end]),
                    f"row {row} holds {length} tokens, and the new {name} are not in slot {length}: "
                    "each row has a length of its own, `cache.lengths[row]`.",
                )


# 4. The decode loop


@check
def check_generate(answer):
    """Exercise 4: prefill, then one token at a time."""
    ids = tiny().encode(PROMPT)
    for n in (6, 1):
        passes, new = watched(answer, ids, n)
        right = right_tokens(ids, n + 1)
        explain_tokens(new, ids, right, n)
        explain_passes(passes, ids, right, n)
    return (
        f"1 prefill of {len(ids)} tokens and 5 decode steps of 1 made 6 new tokens, "
        f"“{tiny().tokenizer.decode(right_tokens(ids, 6))}”."
    )


def right_tokens(ids, n):
    """The likeliest n tokens behind ids, one after the other."""
    return [step.token for step in minineo.generate(tiny(), ids, max_new_tokens=n)]


def watched(answer, ids, n):
    """Let an answer write with a model that notes each pass: what it is fed, and what is held."""
    passes = []

    class Watched(Model):
        def forward(self, tokens, cache, **options):
            tokens = np.array(tokens)
            require(
                len(passes) < len(ids) + 2 * n,
                f"after {len(passes)} passes it still goes on: {n} tokens are asked for.",
            )
            passes.append((tokens.ravel().tolist(), type(cache), cache.length))
            return super().forward(tokens, cache, **options)

    model = Watched(**{name: getattr(tiny(), name) for name in Model.__dataclass_fields__})
    return passes, call(answer, model=model, ids=list(ids), n=n)


def explain_tokens(new, ids, right, n):
    """Say what is wrong with the tokens that come back; `right` has one more than asked for."""
    require(
        isinstance(new, (list, tuple, np.ndarray)) and np.ndim(new) == 1,
        f"it returns a {type(new).__name__}: a list of {n} token ids is asked for.",
    )
    new = [int(token) for token in new]
    require(
        new[: len(ids)] != list(ids),
        "the prompt comes back with the new tokens: return the new ones alone.",
    )
    require(
        new not in (right[1 : n + 1], right[1:n]) or new == right[:n],
        "the first new token is missing: it comes from the logits of the prefill.",
    )
    require(
        len(new) == n,
        f"{len(new)} tokens come back for n = {n}: the prefill yields the first, and each of the "
        "n - 1 decode steps one more.",
    )


def explain_passes(passes, ids, right, n):
    """Say what is wrong with the passes."""
    require(passes, "it makes no pass: call `model.forward(tokens, cache)`.")
    fed, kind, _ = passes[0]
    require(
        kind is not Recompute,
        "the cache is `Recompute`, which remembers nothing: make a `KVCache`.",
    )
    require(
        fed == list(ids),
        f"the first pass feeds {len(fed)} of {len(ids)} tokens: feed the whole prompt at once, that "
        "is the prefill.",
    )
    require(
        len(passes) == n,
        f"it makes 1 prefill and {len(passes) - 1} decode steps for {n} tokens: the prefill's last "
        f"logits already give the first, so {n - 1} are needed.",
    )
    for step, (fed, _, held) in enumerate(passes[1:], 1):
        require(
            held > 0,
            f"pass {step} finds an empty cache: make one before the loop, and use it in each pass.",
        )
        require(
            len(fed) == 1,
            f"pass {step} feeds {len(fed)} tokens, and the cache holds {held} already: feed the "
            "newest token alone.",
        )
        require(
            fed != ids[-1:] or fed == right[step - 1 : step],
            f"pass {step} feeds the last token of the prompt, which the cache holds already: feed "
            "the token that the pass before it has yielded.",
        )
        require(
            fed == right[step - 1 : step],
            f"pass {step} feeds the token {fed[0]}: the likeliest after the pass before it is "
            f"{right[step - 1]}, the argmax of its last position's logits.",
        )


# 5. The memory of the cache


@check
def check_cache_bytes(answer):
    """Exercise 5: bytes of keys and values."""
    given = {"config": shape(), "tokens": 11, "batch": 13, "itemsize": 4}
    base = call(answer, **given)
    require(
        np.ndim(base) == 0 and base > 0, f"it returns {base!r}; a number of bytes is asked for."
    )
    doubled = {
        "the number of layers": {"config": shape(n_layers=6, windows=(20,) * 6)},
        "the number of tokens": {"tokens": 22},
        "the batch": {"batch": 26},
        "the bytes of a number": {"itemsize": 8},
        "head_dim": {"config": shape(width=70)},
    }
    for name, change in doubled.items():
        factor = call(answer, **given | change) / base
        require(factor != 1, f"it does not grow with {name}.")
        require(
            factor == 2,
            f"with twice {name} the cache is twice as large, and the answer {factor:g} times.",
        )
    factor = call(answer, **given | {"config": shape(context=40)}) / base
    require(factor == 1, "it grows with the context: count the tokens that are held.")
    factor = call(answer, **given | {"config": shape(n_heads=1)}) / base
    require(
        factor <= 1,
        "it leaves out the heads: each of the n_heads heads keeps head_dim numbers of a token.",
    )
    require(
        factor == 1,
        "it counts the heads twice: width is n_heads × head_dim already.",
    )
    like = np.zeros(1, "float32")
    share = base / KVCache(given["config"], given["batch"], given["tokens"], like=like).nbytes
    require(share != 0.5, "it is half of what there is: keys are kept, and values too.")
    require(share != 8, "it is 8 times what there is: bytes are asked for, not bits.")
    require(share == 1, f"it is {share:.4g} times what a KVCache of this size has set aside.")
    large = public_config("gpt-neo-2.7b")
    count = answer(large, 2048, 1, 2)
    require(count == costs.cache_bytes(large, 2048, 2), "it is wrong for GPT-Neo 2.7B.")
    return f"a full context of GPT-Neo 2.7B takes {count / 2**20:,.0f} MiB in float16."


def shape(**changes):
    """A config in which no two numbers are the same."""
    fields = {"n_layers": 3, "n_heads": 5, "width": 35, "inner": 140, "context": 20}
    return replace(tiny().config, **{**fields, "windows": (20,) * 3, **changes})


# 6. Top-p


@check
def check_top_p(answer):
    """Exercise 6: the smallest set of likeliest tokens that reaches p."""
    shares = np.array([0.1, 0.05, 0.5, 0.2, 0.15])
    explain_top_p(answer, shares, 0.4)
    explain_top_p(answer, shares, 0.8)
    explain_top_p(answer, np.array([0.125, 0.25, 0.5, 0.125]), 0.75)  # sums that are exact
    explain_top_p(answer, shares, 0.0)
    explain_top_p(answer, shares, 1.0)
    rng = np.random.default_rng(5)
    for _ in range(20):
        explain_top_p(answer, rng.dirichlet(np.full(30, 0.3)), rng.uniform(0.05, 0.95))

    draws = np.random.default_rng(6)

    def choose(logits, ids):
        kept = answer(softmax(logits.astype("float64")), 0.9)
        return int(draws.choice(len(kept), p=kept))

    return f"with p = 0.9 the model draws “{continued(choose=choose)}”."


def explain_top_p(answer, shares, p):
    """Say what is wrong with what is kept of these probabilities."""
    result = call(answer, probabilities=shares, p=p)
    require_array(result, shares.shape, "[vocab]")
    right = distribution(np.log(shares), (), Sampling(top_p=p))
    if close(result, right):
        return
    kept, best = result > 0, int(np.argmax(shares))
    require(
        np.isfinite(result).all() and kept.any(),
        f"with p = {p:g} no token is kept: the likeliest always is.",
    )
    require(
        not close(result, np.sort(right)[::-1]),
        "the probabilities come back in order of size: each must stay in the place of its token, "
        "or another token is drawn.",
    )
    for low, high in np.argwhere(kept[:, None] & ~kept & (shares[:, None] < shares)):
        raise Wrong(
            f"token {low} ({shares[low]:.2f}) is kept and token {high} ({shares[high]:.2f}) is not: "
            "add up from the likeliest token downwards."
        )
    require(kept[best], f"token {best}, the likeliest, is not kept.")
    reached, without_last = shares[kept].sum(), shares[kept].sum() - shares[kept].min()
    require(
        reached > p - 1e-6,
        f"with p = {p:g} the kept tokens reach {reached:.3f} only: the token with which the sum "
        "reaches p is kept too.",
    )
    require(
        kept.sum() == 1 or without_last < p - 1e-6,
        f"with p = {p:g} it keeps {kept.sum()} tokens, and p is reached without the last of them: "
        "the smallest set is asked for.",
    )
    require(
        close(result.sum(), 1),
        f"what is kept adds up to {result.sum():.2f}: divide it by its sum, so that a token can be "
        "drawn.",
    )
    raise Wrong("the right tokens are kept, but their probabilities are not in proportion.")
