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


@pytest.mark.parametrize("length", [-1, 13])
def test_crop_outside_of_what_is_held_is_refused(model, length):
    cache = cache_of(model)
    run(model, random_ids(model.config, 1, 12), cache)
    with pytest.raises(InputError, match=f"cannot crop to {length} "):
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


@pytest.mark.parametrize(("batch", "capacity"), [(0, 8), (1, 0), (1, 33)])
def test_a_cache_that_can_hold_nothing_or_too_much_is_refused(model, batch, capacity):
    with pytest.raises(InputError, match=r"ask for 1"):
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


@pytest.mark.parametrize("bad", [1.5, 2.0, None, "1"])
def test_sizes_that_are_no_whole_numbers_are_refused(model, bad):
    for ask in (
        lambda: cache_of(model, batch=bad),
        lambda: cache_of(model, capacity=bad),
        lambda: cache_of(model).crop(bad),
    ):
        with pytest.raises(InputError, match="must be a whole number"):
            ask()
