import numpy as np
import pytest
from small import random_ids, random_model, run, tiny_config

from minineo import InputError, KVCache, Recompute
from minineo.transformer.trace import Silent


def cache_of(model, batch=1, capacity=32):
    return KVCache(model.config, batch, capacity, like=model.weights.token_embedding)


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_extend_returns_what_is_held_and_what_is_new_in_order(model):
    cache = cache_of(model)
    first, second = np.random.default_rng(0).normal(size=(2, 1, 4, 3, 8))
    keys, _ = cache.extend(1, first, first)
    np.testing.assert_array_equal(keys, first)
    cache.advance(np.array([3]))
    keys, values = cache.extend(1, second, -second)
    np.testing.assert_array_equal(keys, np.concatenate([first, second], axis=2))
    np.testing.assert_array_equal(values, np.concatenate([first, -second], axis=2))
    assert not cache.keys[0].any(), "another layer was written to"


def test_extend_returns_views_not_copies(model):
    cache = cache_of(model)
    new = np.ones((1, 4, 3, 8))
    keys, values = cache.extend(0, new, new)
    assert np.shares_memory(keys, cache.keys[0])
    assert np.shares_memory(values, cache.values[0])


def test_extend_alone_moves_no_length(model):
    cache = cache_of(model)
    cache.extend(0, np.ones((1, 4, 3, 8)), np.ones((1, 4, 3, 8)))
    assert cache.length == 0


def test_a_pass_counts_its_tokens_once(model):
    cache = cache_of(model)
    run(model, random_ids(model.config, 1, 5), cache)
    assert cache.length == 5
    run(model, random_ids(model.config, 1, 1), cache)
    assert cache.length == 6


def test_recompute_returns_what_it_is_given_and_remembers_nothing(model):
    cache, new = Recompute(), np.ones((1, 4, 3, 8))
    keys, values = cache.extend(0, new, 2 * new)
    assert keys is new
    np.testing.assert_array_equal(values, 2 * new)
    run(model, random_ids(model.config, 1, 5), cache)
    assert cache.length == cache.lengths.max() == cache.nbytes == 0


@pytest.mark.parametrize("kept", [1, 4, 5, 9, 10])
def test_crop_and_continue_with_several_tokens_equals_a_fresh_run(model, kept):
    tokens, others = random_ids(model.config, 1, 16), random_ids(model.config, 1, 10, seed=1)
    cache = cache_of(model)
    run(model, np.concatenate([tokens[:, :kept], others[:, kept:]], axis=1), cache)
    cache.crop(kept)
    got = run(model, tokens[:, kept:], cache, last_only=False)
    want = run(model, tokens, Recompute(), last_only=False)[:, kept:]
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_crop_to_zero_forgets_everything(model):
    cache = cache_of(model)
    run(model, random_ids(model.config, 1, 12, seed=1), cache)
    cache.crop(0)
    tokens = random_ids(model.config, 1, 9)
    np.testing.assert_allclose(
        run(model, tokens, cache), run(model, tokens, Recompute()), atol=1e-10
    )


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (-1, "length is -1; it must be a whole number from 0"),
        (13, "cannot crop to 13 tokens a cache that holds 12"),
    ],
)
def test_crop_outside_of_what_is_held_is_refused(model, length, message):
    cache = cache_of(model)
    run(model, random_ids(model.config, 1, 12), cache)
    with pytest.raises(InputError, match=message):
        cache.crop(length)
    assert cache.length == 12


def test_a_copy_shares_nothing(model):
    cache = cache_of(model)
    tokens = random_ids(model.config, 1, 8)
    run(model, tokens, cache)
    twin = cache.copy()
    run(model, random_ids(model.config, 1, 3, seed=1), twin)
    assert cache.length == 8
    assert twin.length == 11
    twin.keys[0][:] = twin.values[0][:] = np.nan
    following = random_ids(model.config, 1, 2, seed=2)
    got = run(model, following, cache)
    want = run(model, np.concatenate([tokens, following], axis=1), Recompute())
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_slots_behind_the_longest_row_are_never_read(model):
    cache = cache_of(model)
    for array in (*cache.keys, *cache.values):
        array[:] = np.nan
    tokens = random_ids(model.config, 1, 9)
    logits = [run(model, tokens[:, :6], cache), run(model, tokens[:, 6:], cache)]
    assert np.isfinite(logits).all()


def test_an_exception_in_the_middle_leaves_the_cache_as_it_was(model):
    tokens = random_ids(model.config, 1, 12)
    cache = cache_of(model)
    run(model, tokens[:, :7], cache)

    class BreaksInLayer2(Silent):
        def within(self, name):
            if name == "block2":
                raise RuntimeError
            return self

    with pytest.raises(RuntimeError):
        run(model, random_ids(model.config, 1, 5, seed=1), cache, trace=BreaksInLayer2())
    assert cache.length == 7
    got = run(model, tokens[:, 7:], cache)
    np.testing.assert_allclose(got, run(model, tokens, Recompute()), atol=1e-10)


def test_the_last_slot_is_usable_and_one_more_is_refused_before_anything_is_written(model):
    cache = cache_of(model, capacity=10)
    run(model, random_ids(model.config, 1, 8), cache)
    held = [array.copy() for array in cache.keys]
    with pytest.raises(InputError, match="10 slots and 11 are needed"):
        run(model, random_ids(model.config, 1, 3), cache)
    assert cache.length == 8
    assert all((a == b).all() for a, b in zip(held, cache.keys, strict=True))
    run(model, random_ids(model.config, 1, 2), cache)
    assert cache.length == 10


def test_rows_have_lengths_of_their_own(model):
    cache = cache_of(model, batch=3)
    run(model, random_ids(model.config, 3, 6), cache, counts=[6, 2, 5])
    assert cache.lengths.tolist() == [6, 2, 5]
    assert cache.length == 6
    run(model, random_ids(model.config, 3, 1), cache)
    assert cache.lengths.tolist() == [7, 3, 6]


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, 1),
        ({"num_heads": 8}, 1),
        ({"hidden_size": 64}, 1),
        ({}, 2),
    ],
)
def test_a_cache_of_another_model_or_batch_is_refused(model, changes, batch):
    cache = KVCache(tiny_config(**changes), batch, 32, like=model.weights.token_embedding)
    with pytest.raises(InputError, match="the cache is made for"):
        run(model, random_ids(model.config, 1, 3), cache)


@pytest.mark.parametrize(
    ("batch", "capacity", "message"),
    [
        (0, 8, "batch is 0; it must be a whole number from 1"),
        (1, 0, "capacity is 0; it must be a whole number from 1"),
        (1, 33, "a capacity of 33 slots does not fit this model; ask for 1 to 32"),
    ],
)
def test_a_cache_that_can_hold_nothing_or_too_much_is_refused(model, batch, capacity, message):
    with pytest.raises(InputError, match=message):
        cache_of(model, batch, capacity)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_those_of_a_key_and_a_value_in_every_layer(dtype):
    model = random_model(dtype)
    cache = cache_of(model, batch=2, capacity=10)
    itemsize = np.dtype(dtype).itemsize
    assert cache.nbytes == 2 * 10 * 2 * 4 * 32 * itemsize
    assert cache.used_bytes == 0
    run(model, random_ids(model.config, 2, 5), cache, counts=[5, 1])
    assert cache.used_bytes == 6 * 2 * 4 * 32 * itemsize
    assert cache.keys[0].dtype == dtype


def test_crop_leaves_shorter_rows_alone(model):
    cache = cache_of(model, batch=2)
    run(model, random_ids(model.config, 2, 9), cache, counts=[9, 2])
    cache.crop(4)
    assert cache.lengths.tolist() == [4, 2]


def test_a_cache_of_another_dtype_is_refused(model):
    cache = KVCache(model.config, 1, 32, like=np.zeros(1, "float32"))
    with pytest.raises(InputError, match="the cache holds float32 and the weights are float64"):
        run(model, random_ids(model.config, 1, 3), cache)


@pytest.mark.parametrize("bad", [1.5, 2.0, None, "1", True])
def test_sizes_that_are_no_whole_numbers_are_refused(model, bad):
    for ask in (
        lambda: cache_of(model, batch=bad),
        lambda: cache_of(model, capacity=bad),
        lambda: cache_of(model).crop(bad),
    ):
        with pytest.raises(InputError, match="must be a whole number"):
            ask()


def filled(model, batch, lengths):
    """A cache of rows of these lengths, and the tokens in it."""
    cache, tokens = cache_of(model, batch), random_ids(model.config, batch, max(lengths))
    run(model, tokens, cache, counts=lengths)
    return cache, tokens


def test_a_pass_over_some_rows_fills_and_advances_these_alone(model):
    cache, tokens = filled(model, 4, [5, 3, 7, 2])
    held = cache.copy()
    part = cache.rows(1, 3)
    assert part.lengths.tolist() == [3, 7]
    following = random_ids(model.config, 2, 4, seed=1)
    got = run(model, following, part, counts=[4, 2])
    assert part.lengths.tolist() == [7, 9]
    assert cache.lengths.tolist() == [5, 7, 9, 2]
    for row, length, count in ((1, 3, 4), (2, 7, 2)):
        whole = np.concatenate([tokens[row, :length], following[row - 1, :count]])
        want = run(model, whole[None], Recompute())
        np.testing.assert_allclose(got[row - 1], want[0], atol=1e-10)
    for array, before in zip(cache.keys + cache.values, held.keys + held.values, strict=True):
        np.testing.assert_array_equal(array[[0, 3]], before[[0, 3]])


def test_rows_of_a_cache_share_its_storage_and_lengths_both_ways(model):
    cache, _ = filled(model, 3, [5, 3, 7])
    part = cache.rows(1, 2)
    assert np.shares_memory(part.keys[2], cache.keys[2])
    assert np.shares_memory(part.values[2], cache.values[2])
    assert part.nbytes * 3 == cache.nbytes
    assert part.used_bytes == 3 * cache.token_bytes
    cache.crop(2)
    assert part.length == 2
    part.crop(1)
    assert cache.lengths.tolist() == [2, 1, 2]


def test_a_copy_of_some_rows_shares_nothing(model):
    cache, _ = filled(model, 3, [5, 3, 7])
    twin = cache.rows(0, 2).copy()
    twin.crop(0)
    twin.keys[0][:] = 1
    assert cache.lengths.tolist() == [5, 3, 7]
    assert not (cache.keys[0] == 1).any()


@pytest.mark.parametrize(("start", "stop"), [(1, 1), (2, 1), (0, 4), (3, 4)])
def test_rows_that_there_are_not_are_refused(model, start, stop):
    with pytest.raises(InputError, match=f"3 rows has no rows {start} to {stop}"):
        cache_of(model, batch=3).rows(start, stop)


def test_the_last_row_takes_the_place_of_one_that_is_dropped(model):
    cache, tokens = filled(model, 4, [9, 3, 7, 5])
    held = cache.copy()
    cache.drop(1, 2)
    assert cache.lengths.tolist() == [9, 7, 0, 5]
    for array, before in zip(cache.keys + cache.values, held.keys + held.values, strict=True):
        np.testing.assert_array_equal(array[1, :, :7], before[2, :, :7])
        np.testing.assert_array_equal(array[1, :, 7:], before[1, :, 7:])  # no more is copied
        np.testing.assert_array_equal(array[[0, 3]], before[[0, 3]])
    following = random_ids(model.config, 1, 3, seed=1)
    got = run(model, following, cache.rows(1, 2))
    want = run(model, np.concatenate([tokens[2:3, :7], following], axis=1), Recompute())
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_the_last_row_itself_is_dropped_by_its_length_alone(model):
    cache, _ = filled(model, 3, [5, 3, 7])
    held = cache.copy()
    cache.drop(2, 2)
    assert cache.lengths.tolist() == [5, 3, 0]
    np.testing.assert_array_equal(cache.keys[1], held.keys[1])


@pytest.mark.parametrize(("row", "last"), [(0, 3), (2, 1)])
def test_a_row_that_cannot_be_dropped_is_refused(model, row, last):
    cache, _ = filled(model, 3, [5, 3, 7])
    with pytest.raises(InputError, match=f"row {last} cannot move into row {row} in a cache of 3"):
        cache.drop(row, last)
    assert cache.lengths.tolist() == [5, 3, 7]


def test_a_new_row_sees_nothing_of_one_that_was_dropped(model):
    cache, tokens = filled(model, 3, [30, 6, 30])
    cache.drop(0, 2)
    cache.drop(0, 1)
    for array in (*cache.keys, *cache.values):
        array[0, :, 6:] = array[1:] = 1e4
    joined = random_ids(model.config, 1, 9, seed=1)
    run(model, joined[:, :3], cache.rows(1, 2))
    pair = cache.rows(0, 2)
    for step in range(6):
        fed = np.array([[tokens[1, 6 + step]], [joined[0, 3 + step]]])
        got = run(model, fed, pair)
        for row, ids in enumerate((tokens[1, : 7 + step], joined[0, : 4 + step])):
            np.testing.assert_allclose(got[row], run(model, ids[None], Recompute())[0], atol=1e-10)


def test_recompute_has_no_rows_of_its_own():
    cache = Recompute()
    assert cache.rows(2, 5) is cache
    cache.drop(0, 3)
    assert cache.token_bytes == cache.used_bytes == cache.length == 0


@pytest.mark.parametrize("rows", [(0.0, 2), (None, 2), ("0", 1), (True, 2), (-1, 1)])
def test_rows_are_named_by_whole_numbers(rows):
    model = random_model()
    cache = KVCache(model.config, 3, 4, like=model.weights.token_embedding)
    for act in (cache.rows, cache.drop):
        with pytest.raises(InputError, match="must be a whole number"):
            act(*rows)
