"""The exercises: solutions pass, typical slips are named, and the notebooks run."""

import importlib.util
import inspect
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from minineo import KVCache, Recompute

FOLDER = Path(__file__).parent.parent / "notebooks/exercises"
NOTEBOOKS = {
    "mix": "1-attention",
    "hidden": "2-mask",
    "extend": "3-extend",
    "generate": "4-decode",
    "cache_bytes": "5-memory",
    "top_p": "6-top-p",
}
NOT_WRITTEN = "not written yet: put your own lines in the place of the one that raises."


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


checks, solutions = module("checks"), module("solutions")


def verdict(name, answer):
    return getattr(checks, f"check_{name}")(answer)


# What readers write, and what the check must tell them. Each is a whole answer.
WRONG = []


def wrong(name, sentence):
    def keep(answer):
        WRONG.append(pytest.param(name, answer, sentence, id=f"{name}-{answer.__name__}"))
        return answer

    return keep


def softmax(x, axis=-1):
    shares = np.exp(x - x.max(axis=axis, keepdims=True))
    return shares / shares.sum(axis=axis, keepdims=True)


def scores_of(queries, keys):
    return queries @ keys.swapaxes(-1, -2)


def low(scores, hidden):
    return np.where(hidden, float(np.finfo(scores.dtype).min), scores)


@wrong("mix", "query 0 looks at key 2, which is hidden from it")
def no_mask(queries, keys, values, hidden):
    return softmax(scores_of(queries, keys)) @ values


@wrong("mix", "query 0 looks at key 2, which is hidden from it")
def hidden_scores_are_0(queries, keys, values, hidden):
    return softmax(np.where(hidden, 0, scores_of(queries, keys))) @ values


@wrong("mix", "query 0 looks at key 2, which is hidden from it")
def hidden_scores_are_not_low_enough(queries, keys, values, hidden):
    return softmax(np.where(hidden, -100, scores_of(queries, keys))) @ values


@wrong("mix", "`hidden` is True where a query may not look")
def mask_the_wrong_way_round(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys), ~hidden)) @ values


@wrong("mix", "and not to 1: hide scores before the softmax")
def mask_after_softmax(queries, keys, values, hidden):
    return np.where(hidden, 0, softmax(scores_of(queries, keys))) @ values


@wrong("mix", "divided by the square root of head_dim")
def scaled(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys) / queries.shape[-1] ** 0.5, hidden)) @ values


@wrong("mix", "the scores are 0.2 times what they must be")
def scaled_by_head_dim(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys) / queries.shape[-1], hidden)) @ values


@wrong("mix", "softmax takes e to the score; this is 2 to the score")
def base_two(queries, keys, values, hidden):
    powers = 2.0 ** low(scores_of(queries, keys), hidden)
    return powers / powers.sum(axis=-1, keepdims=True) @ values


@wrong("mix", "the columns of the pattern add up to 1")
def softmax_over_queries(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys), hidden), axis=-2) @ values


@wrong("mix", "with batch and heads as further axes in front row 0, head 0 is wrong")
def softmax_over_axis_1(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys), hidden), axis=1) @ values


@wrong("mix", "`.T` turns all axes round, `.swapaxes(-1, -2)` the last two")
def keys_turned_round(queries, keys, values, hidden):
    return softmax(low(queries @ keys.T, hidden)) @ values


@wrong("mix", "`np.where(hidden, ...)` lets further axes pass")
def mask_as_index(queries, keys, values, hidden):
    scores = scores_of(queries, keys)
    scores[hidden] = -np.inf
    return softmax(scores) @ values


@wrong("mix", "the queries meet the columns of `keys`")
def keys_not_transposed(queries, keys, values, hidden):
    return softmax(low(queries @ keys, hidden)) @ values


@wrong("mix", "the same whatever the values are")
def mixes_keys(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys), hidden)) @ keys


@wrong("mix", "it returns the shape [4, 3]")
def cuts_a_head_dim(queries, keys, values, hidden):
    return softmax(low(scores_of(queries, keys), hidden)) @ values[..., :3]


@wrong("mix", "subtract each row's largest score before `np.exp`")
def exp_overflows(queries, keys, values, hidden):
    shares = np.where(hidden, 0, np.exp(scores_of(queries, keys)))
    return shares / shares.sum(axis=-1, keepdims=True) @ values


@wrong("mix", "the shares of query")
def divides_by_all(queries, keys, values, hidden):
    shares = np.exp(low(scores_of(queries, keys), hidden))
    return shares / shares.sum() @ values


@wrong("mix", "it changes `queries`")
def scales_in_place(queries, keys, values, hidden):
    queries *= 1.5
    return softmax(low(scores_of(queries, keys), hidden)) @ values


@wrong("mix", "float32 goes in and float64 comes out")
def in_float64(queries, keys, values, hidden):
    return softmax(low(np.float64(1) * scores_of(queries, keys), hidden)) @ values


@wrong("mix", "it stops at `scores = queries @ keys.X` with AttributeError: ")
def stops(queries, keys, values, hidden):
    scores = queries @ keys.X
    return softmax(low(scores, hidden)) @ values


@wrong("mix", "it returns None")
def lacks_return(queries, keys, values, hidden):
    softmax(low(scores_of(queries, keys), hidden)) @ values


@wrong("hidden", "token 0 looks at token 1, which comes after it: hide distance < 0")
def window_alone(positions, slots, window):
    return positions[:, None] - slots >= window


@wrong(
    "hidden", "token 3 sees 4 of these tokens, itself included, and must see 3 with a window of 3"
)
def future_alone(positions, slots, window):
    return positions[:, None] - slots < 0


@wrong(
    "hidden", "token 3 sees 4 of these tokens, itself included, and must see 3 with a window of 3"
)
def window_too_wide(positions, slots, window):
    distance = positions[:, None] - slots
    return (distance < 0) | (distance > window)


@wrong(
    "hidden", "token 2 sees 2 of these tokens, itself included, and must see 3 with a window of 3"
)
def window_too_narrow(positions, slots, window):
    distance = positions[:, None] - slots
    return (distance < 0) | (distance >= window - 1)


@wrong("hidden", "token 0 does not see itself")
def hides_itself(positions, slots, window):
    distance = positions[:, None] - slots
    return (distance <= 0) | (distance >= window)


@wrong("hidden", "the wrong way round")
def visible(positions, slots, window):
    distance = positions[:, None] - slots
    return (distance >= 0) & (distance < window)


@wrong("hidden", "rows and columns are exchanged")
def transposed(positions, slots, window):
    distance = positions - slots[:, None]
    return (distance < 0) | (distance >= window)


@wrong("hidden", "token 0 looks at token 1, which comes after it")
def and_for_or(positions, slots, window):
    distance = positions[:, None] - slots
    return (distance < 0) & (distance >= window)


@wrong("hidden", "token 0 looks at token 1, which comes after it")
def past_and_future_exchanged(positions, slots, window):
    distance = slots - positions[:, None]
    return (distance < 0) | (distance >= window)


@wrong("hidden", "with a query at position 7 alone in its pass")
def counts_rows(positions, slots, window):
    distance = np.arange(len(positions))[:, None] - slots
    return (distance < 0) | (distance >= window)


@wrong("hidden", "with slots that begin at 4")
def counts_slots(positions, slots, window):
    distance = positions[:, None] - np.arange(len(slots))
    return (distance < 0) | (distance >= window)


@wrong("hidden", "it returns float64; True and False are asked for")
def lowest_numbers(positions, slots, window):
    distance = positions[:, None] - slots
    return np.where((distance < 0) | (distance >= window), -np.inf, 0.0)


def write_row(array, row, start, new):
    room = array.shape[2] - start
    array[row, :, start : start + new.shape[2]] = new[row, :, :room]


def write_rows(cache, layer, new_keys, new_values):
    for row, length in enumerate(cache.lengths):
        write_row(cache.keys[layer], row, length, new_keys)
        write_row(cache.values[layer], row, length, new_values)


@wrong("extend", "the keys of the new token alone come back")
def returns_new_ones(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    return new_keys, new_values


@wrong("extend", "all 6 slots of keys come back, and 2 are not written yet")
def returns_all_slots(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    return cache.keys[layer], cache.values[layer]


@wrong("extend", "the keys come back without the new token")
def returns_old_ones(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    return cache.keys[layer][:, :, : cache.length], cache.values[layer][:, :, : cache.length]


def up_to_end(cache, layer, new_keys):
    end = cache.length + new_keys.shape[2]
    return cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]


@wrong("extend", "it moves `cache.lengths`")
def moves_lengths(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    both = up_to_end(cache, layer, new_keys)
    cache.lengths += new_keys.shape[2]
    return both


@wrong("extend", "the keys of tokens 0 to 2 are no longer what they were")
def writes_from_slot_0(cache, layer, new_keys, new_values):
    for row in range(len(cache.lengths)):
        write_row(cache.keys[layer], row, 0, new_keys)
        write_row(cache.values[layer], row, 0, new_values)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "the keys of tokens 0 to 2 are no longer what they were")
def writes_one_slot_too_early(cache, layer, new_keys, new_values):
    for row, length in enumerate(cache.lengths):
        write_row(cache.keys[layer], row, max(length - 1, 0), new_keys)
        write_row(cache.values[layer], row, max(length - 1, 0), new_values)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "the keys of the new token are not in slot 3")
def writes_one_slot_too_late(cache, layer, new_keys, new_values):
    for row, length in enumerate(cache.lengths):
        write_row(cache.keys[layer], row, length + 1, new_keys)
        write_row(cache.values[layer], row, length + 1, new_values)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "the values of the new token are not in slot 3")
def forgets_values(cache, layer, new_keys, new_values):
    for row, length in enumerate(cache.lengths):
        write_row(cache.keys[layer], row, length, new_keys)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "keys and values are exchanged")
def exchanges(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_values, new_keys)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "`cache.keys[0]` has changed: every layer has its own")
def layer_0_alone(cache, layer, new_keys, new_values):
    write_rows(cache, 0, new_keys, new_values)
    return up_to_end(cache, 0, new_keys)


@wrong("extend", "but the cache does not hold them")
def joins_and_keeps_nothing(cache, layer, new_keys, new_values):
    keys, values = up_to_end(cache, layer, new_keys[:, :, :0])
    return np.concatenate([keys, new_keys], axis=2), np.concatenate([values, new_values], axis=2)


@wrong("extend", "cache.keys[1] has another shape now")
def grows_storage(cache, layer, new_keys, new_values):
    keys, values = up_to_end(cache, layer, new_keys[:, :, :0])
    cache.keys[layer] = np.concatenate([keys, new_keys], axis=2)
    cache.values[layer] = np.concatenate([values, new_values], axis=2)
    return cache.keys[layer], cache.values[layer]


@wrong("extend", "`cache.keys[layer]` is another array now")
def copies_storage(cache, layer, new_keys, new_values):
    cache.keys[layer], cache.values[layer] = cache.keys[layer].copy(), cache.values[layer].copy()
    write_rows(cache, layer, new_keys, new_values)
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "row 0 holds 2 tokens, and the new keys are not in slot 2")
def one_length_for_all_rows(cache, layer, new_keys, new_values):
    start = cache.length
    cache.keys[layer][:, :, start : start + 1] = new_keys
    cache.values[layer][:, :, start : start + 1] = new_values
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "3 slots come back: return 5, up to the end of the longest row")
def up_to_the_first_row(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    end = cache.lengths[0] + new_keys.shape[2]
    return cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]


@wrong("extend", "padding may reach past the last slot")
def no_room_for_padding(cache, layer, new_keys, new_values):
    new = new_keys.shape[2]
    for row, length in enumerate(cache.lengths):
        cache.keys[layer][row, :, length : length + new] = new_keys[row]
        cache.values[layer][row, :, length : length + new] = new_values[row]
    return up_to_end(cache, layer, new_keys)


@wrong("extend", "it must return two arrays")
def returns_keys_alone(cache, layer, new_keys, new_values):
    write_rows(cache, layer, new_keys, new_values)
    return up_to_end(cache, layer, new_keys)[0]


def best(logits):
    return int(np.argmax(logits[0, -1]))


def cache_of(model, ids, n, extra=0):
    slots = len(ids) + n - 1 + extra
    return KVCache(model.config, 1, slots, like=model.weights.token_embedding)


@wrong(
    "generate", "1 prefill and 6 decode steps for 6 tokens: the prefill's last logits already give"
)
def n_decode_steps(model, ids, n):
    cache = cache_of(model, ids, n, extra=1)
    logits, new = model.forward(np.array([ids]), cache), []
    for _ in range(n):
        new.append(best(logits))
        logits = model.forward(np.array([new[-1:]]), cache)
    return new


@wrong("generate", "7 tokens come back for n = 6")
def one_token_more(model, ids, n):
    cache = cache_of(model, ids, n, extra=1)
    new = [best(model.forward(np.array([ids]), cache))]
    for _ in range(n):
        new.append(best(model.forward(np.array([new[-1:]]), cache)))
    return new


@wrong("generate", "the first new token is missing: it comes from the logits of the prefill")
def first_token_lost(model, ids, n):
    cache = cache_of(model, ids, n, extra=1)
    last, new = best(model.forward(np.array([ids]), cache)), []
    for _ in range(n):
        last = best(model.forward(np.array([[last]]), cache))
        new.append(last)
    return new


@wrong("generate", "the prompt comes back with the new tokens")
def returns_all_ids(model, ids, n):
    return [*ids, *solutions.generate(model, ids, n)]


@wrong("generate", "it changes `ids`")
def appends_to_the_prompt(model, ids, n):
    new = solutions.generate(model, ids, n)
    ids += new
    return new


@wrong("generate", "pass 1 feeds 20 tokens, and the cache holds 19 already")
def feeds_all_again(model, ids, n):
    cache, ids = cache_of(model, ids, 200), list(ids)
    start = len(ids)
    for _ in range(n):
        ids.append(best(model.forward(np.array([ids]), cache)))
    return ids[start:]


@wrong("generate", "pass 1 finds an empty cache")
def a_new_cache_each_time(model, ids, n):
    ids, start = list(ids), len(ids)
    for _ in range(n):
        ids.append(best(model.forward(np.array([ids]), cache_of(model, ids, 1))))
    return ids[start:]


@wrong("generate", "`Recompute`, which remembers nothing")
def the_naive_path(model, ids, n):
    ids, start = list(ids), len(ids)
    for _ in range(n):
        ids.append(best(model.forward(np.array([ids]), Recompute())))
    return ids[start:]


@wrong("generate", "the first pass feeds 1 of 19 tokens: feed the whole prompt at once")
def prompt_token_by_token(model, ids, n):
    cache = cache_of(model, ids, n)
    for token in ids:
        logits = model.forward(np.array([[token]]), cache)
    new = [best(logits)]
    while len(new) < n:
        new.append(best(model.forward(np.array([new[-1:]]), cache)))
    return new


@wrong("generate", "pass 1 feeds the last token of the prompt, which the cache holds already")
def last_of_the_prompt_again(model, ids, n):
    cache = cache_of(model, ids, n)
    new = [best(model.forward(np.array([ids]), cache))]
    last = ids[-1]
    while len(new) < n:
        last = best(model.forward(np.array([[last]]), cache))
        new.append(last)
    return new


@wrong("generate", "pass 1 feeds the token")
def the_least_likely(model, ids, n):
    cache = cache_of(model, ids, n)
    new = [int(np.argmin(model.forward(np.array([ids]), cache)[0, -1]))]
    while len(new) < n:
        new.append(int(np.argmin(model.forward(np.array([new[-1:]]), cache)[0, -1])))
    return new


@wrong("generate", "it still goes on")
def never_ends(model, ids, n):
    cache = cache_of(model, ids, 400)
    last = best(model.forward(np.array([ids]), cache))
    while True:
        last = best(model.forward(np.array([[last]]), cache))


@wrong("generate", "the cache has 18 slots and 19 are needed")
def cache_too_small(model, ids, n):
    return [best(model.forward(np.array([ids]), cache_of(model, ids, 0)))]


def bytes_of(config, tokens, batch, itemsize):
    return 2 * config.n_layers * config.width * tokens * batch * itemsize


@wrong("cache_bytes", "it is half of what there is: keys are kept, and values too")
def no_factor_2(config, tokens, batch, itemsize):
    return bytes_of(config, tokens, batch, itemsize) // 2


@wrong("cache_bytes", "it does not grow with the number of layers")
def one_layer(config, tokens, batch, itemsize):
    return 2 * config.width * tokens * batch * itemsize


@wrong("cache_bytes", "it does not grow with the batch")
def one_row(config, tokens, batch, itemsize):
    return bytes_of(config, tokens, 1, itemsize)


@wrong("cache_bytes", "it does not grow with the bytes of a number")
def always_float32(config, tokens, batch, itemsize):
    return bytes_of(config, tokens, batch, 4)


@wrong("cache_bytes", "it does not grow with the number of tokens")
def the_whole_context(config, tokens, batch, itemsize):
    return bytes_of(config, config.context, batch, itemsize)


@wrong(
    "cache_bytes", "with twice the number of tokens the cache is twice as large, and the answer 4"
)
def tokens_squared(config, tokens, batch, itemsize):
    return bytes_of(config, tokens**2, batch, itemsize)


@wrong("cache_bytes", "it leaves out the heads")
def one_head(config, tokens, batch, itemsize):
    return 2 * config.n_layers * config.head_dim * tokens * batch * itemsize


@wrong("cache_bytes", "it counts the heads twice")
def width_for_each_head(config, tokens, batch, itemsize):
    return bytes_of(config, tokens, batch, itemsize) * config.n_heads


@wrong("cache_bytes", "8 times what there is: bytes are asked for, not bits")
def bits(config, tokens, batch, itemsize):
    return bytes_of(config, tokens, batch, itemsize) * 8


@wrong("cache_bytes", "it is 4 times what a KVCache of this size has set aside")
def inner_width(config, tokens, batch, itemsize):
    return 2 * config.n_layers * 4 * config.width * tokens * batch * itemsize


def kept(probabilities, chosen):
    result = np.where(chosen, probabilities, 0)
    return result / result.sum()


def first_of(probabilities, count):
    """Which are the `count` likeliest."""
    return np.argsort(np.argsort(-probabilities, kind="stable"), kind="stable") < count


def how_many(probabilities, p, side="left"):
    return np.searchsorted(np.cumsum(np.sort(probabilities)[::-1]), p - 1e-9, side=side)


@wrong("top_p", "the token with which the sum reaches p is kept too")
def stops_before_p(probabilities, p):
    return kept(probabilities, first_of(probabilities, max(1, how_many(probabilities, p))))


@wrong("top_p", "with p = 0.4 it keeps 2 tokens, and p is reached without the last of them")
def one_too_many(probabilities, p):
    return kept(probabilities, first_of(probabilities, how_many(probabilities, p) + 2))


@wrong("top_p", "with p = 0.75 it keeps 3 tokens, and p is reached without the last of them")
def goes_on_at_exactly_p(probabilities, p):
    sums = np.cumsum(np.sort(probabilities)[::-1])
    return kept(probabilities, first_of(probabilities, np.searchsorted(sums, p, side="right") + 1))


@wrong("top_p", "add up from the likeliest token downwards")
def not_sorted(probabilities, p):
    return kept(probabilities, np.cumsum(probabilities) - probabilities < p)


@wrong("top_p", "add up from the likeliest token downwards")
def sorted_upwards(probabilities, p):
    order = np.argsort(probabilities)
    sums = np.cumsum(probabilities[order])
    chosen = np.zeros(len(order), bool)
    chosen[order[sums - probabilities[order] < p]] = True
    return kept(probabilities, chosen)


@wrong("top_p", "each must stay in the place of its token")
def stays_sorted(probabilities, p):
    return np.sort(solutions.top_p(probabilities, p))[::-1]


@wrong("top_p", "what is kept adds up to 0.50: divide it by its sum")
def not_divided(probabilities, p):
    return np.where(solutions.top_p(probabilities, p) > 0, probabilities, 0)


@wrong("top_p", "not in proportion")
def all_alike(probabilities, p):
    return kept(np.ones_like(probabilities), solutions.top_p(probabilities, p) > 0)


@wrong("top_p", "no token is kept: the likeliest always is")
def none_at_0(probabilities, p):
    chosen = first_of(probabilities, how_many(probabilities, p) + 1) & (p > 0)
    return kept(probabilities, chosen) if chosen.any() else np.zeros_like(probabilities)


@wrong("top_p", "the token with which the sum reaches p is kept too")
def those_above_a_threshold(probabilities, p):
    return kept(probabilities, probabilities >= min(1 - p, probabilities.max()))


@wrong("top_p", "it changes `probabilities`")
def in_place(probabilities, p):
    probabilities[:] = solutions.top_p(probabilities, p)
    return probabilities


@wrong("top_p", "it returns the shape [1]; [vocab] is [5] here")
def kept_alone(probabilities, p):
    result = solutions.top_p(probabilities, p)
    return result[result > 0]


# Tests


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_solution_passes(name):
    assert verdict(name, getattr(solutions, name)).startswith("right: ")


@pytest.mark.parametrize(("name", "answer", "sentence"), WRONG)
def test_a_typical_slip_is_named_in_one_sentence(name, answer, sentence):
    said = verdict(name, answer)
    assert said.startswith("wrong: ")
    assert sentence in said
    assert said.endswith(".")
    assert "\n" not in said


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_not_written_is_said_to_be_so(name):
    def stub(*given):
        raise NotImplementedError

    assert verdict(name, stub) == NOT_WRITTEN


def read(name):
    return nbformat.read(FOLDER / f"{NOTEBOOKS[name]}.ipynb", as_version=4)


def stub_of(notebook):
    (cell,) = (cell for cell in notebook.cells if "raise NotImplementedError" in cell.source)
    return cell


def outputs(notebook):
    return "".join(
        out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", [])
    )


def execute(notebook):
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return outputs(notebook)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_unsolved_and_says_so(name):
    notebook = read(name)
    stub = stub_of(notebook)
    solution = inspect.signature(getattr(solutions, name))
    assert f"def {name}({', '.join(solution.parameters)}):" in stub.source
    assert outputs(notebook).endswith(f"{NOT_WRITTEN}\n")
    assert all(out.output_type == "stream" for c in notebook.cells for out in c.get("outputs", []))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_unsolved_and_solved(name):
    notebook = read(name)
    committed = outputs(notebook)
    assert execute(notebook) == committed
    stub_of(notebook).source = inspect.getsource(getattr(solutions, name))
    assert "right: " in execute(notebook)


def test_every_notebook_belongs_to_an_exercise():
    assert sorted(NOTEBOOKS.values()) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
