import json
import math
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file
from small import TINY, random_tensor, tiny_config

from minineo import InputError, KVCache, Model, load
from minineo.checkpoints.read import expected_shapes
from minineo.device import choose
from minineo.study import verify as study
from minineo.study.verify import FACTOR, PATHS, verify
from minineo.transformer import attention, functions
from minineo.transformer import model as transformer

ONE_PAIR = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
SHAPES = {
    "tiny": {},
    "width 4": {"hidden_size": 4, "num_heads": 2},
    "head_dim 4": {"hidden_size": 64, "num_heads": 16},
    "head_dim 128": {"hidden_size": 256, "num_heads": 2, **ONE_PAIR},
    "width 768": {"hidden_size": 768, "num_heads": 12, **ONE_PAIR},
    "24 layers": {"num_layers": 24, "attention_types": [[["global", "local"], 12]]},
    "odd sizes": {"hidden_size": 21, "num_heads": 3, "intermediate_size": 35, "vocab_size": 103},
    "local first": {"num_layers": 3, "attention_types": [[["local"], 1], [["global"], 2]]},
    "all global": {"attention_types": [[["global"], 4]]},
    "untied": {"tie_word_embeddings": False},
    "window 1": {"window_size": 1},
    "window above the context": {"window_size": 99},
    "another eps": {"layer_norm_epsilon": 0.1},
    "one position": {"max_position_embeddings": 1},
    "long": {"max_position_embeddings": 300, "window_size": 70, **ONE_PAIR},
}


def write_model(folder, changes=None, spoil=None):
    """Write a small random model in Hugging Face's layout."""
    config, rng = tiny_config(**(changes or {})), np.random.default_rng(0)
    tensors = {
        name if name.startswith("lm_head") else f"transformer.{name}": np.ascontiguousarray(
            random_tensor(name, shape, config, rng), dtype="float32"
        )
        for name, shape in expected_shapes(config).items()
    }
    if spoil:
        spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY | (changes or {})))
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("wide"), SHAPES["width 768"])


@pytest.fixture(scope="module")
def passed(tiny):
    return verify(tiny, device="cpu")


# Correct models


@pytest.mark.parametrize("name", SHAPES)
def test_a_correct_model_passes_whatever_its_shape(name, tmp_path):
    verification = verify(write_model(tmp_path, SHAPES[name]), device="cpu")
    assert verification.passed, verification.first_difference
    assert verification.first_difference is None


def test_the_embedded_model_passes():
    verification = verify(load("tiny", device="cpu"), lengths=[1, 63, 65, 131])
    assert verification.passed, verification.first_difference


def test_a_model_whose_rounding_is_large_passes_by_its_own_measure(tmp_path):
    """Weights of 0.3 are too large for this width: correct float32 code differs by 0.01 there."""

    def enlarge(tensors):
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = np.float32(0.3 / tensor.std()) * tensor

    verification = verify(write_model(tmp_path, SHAPES["width 768"], enlarge), device="cpu")
    assert verification.passed, verification.first_difference
    assert verification.values[-1].difference > 1e-3


def test_every_value_is_named_in_the_order_of_a_pass(passed):
    names = [(parity.layer, parity.value) for parity in passed.values]
    layers = [(layer, value) for layer in range(4) for value in ("pattern", "after")]
    assert names == [(None, "embedding"), *layers, (None, "final"), (None, "logits")]


def test_every_value_of_every_length_and_path_is_held_against_its_twin(tiny, monkeypatch):
    seen = set()
    note = study.note

    def spy(largest, name, difference, *place):
        if len(place) == 3:
            seen.add((name, *place))
        note(largest, name, difference, *place)

    monkeypatch.setattr(study, "note", spy)
    monkeypatch.setattr(attention, "QUERY_ROWS", 3)  # so that a pattern has several tiles
    verification = verify(tiny, device="cpu", lengths=[5, 11])
    assert verification.passed
    for name in ("block0.before", "block2.after", "block3.pattern", "final", "logits"):
        for length in (5, 11):
            for path in PATHS:
                assert any(place[:3] == (name, length, path) for place in seen)
    fed_alone = {position for _, length, path, position in seen if (length, path) == (11, PATHS[1])}
    assert {6, 7, 8, 9, 10} <= fed_alone


# Faults


def patch_attend(change):
    attend = attention.attend

    def changed(queries, keys, values, positions, window, trace):
        return attend(*change(queries, keys, values, positions, window), trace)

    return [(attention, "attend", changed)]


def patch_norm(change):
    norm = functions.layer_norm
    return [(transformer, "layer_norm", lambda *given: norm(*change(*given)))]


def default_scale(queries, *others):
    return (queries / math.sqrt(queries.shape[-1]), *others)


def erf_gelu(x):
    erf = np.vectorize(math.erf, otypes=["float64"])
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)


def cut_in_float32(x, *others):
    """Lose bits in float32, but none in float64."""
    return (x.astype("float16").astype("float32") if x.dtype == "float32" else x, *others)


FAULTS = {  # what is put in, and the first value that must differ
    "default scale": (patch_attend(default_scale), (0, "pattern")),
    "window one too wide": (
        patch_attend(lambda q, k, v, p, window: (q, k, v, p, window + 1)),
        (1, "pattern"),
    ),
    "window one too narrow": (
        patch_attend(lambda q, k, v, p, window: (q, k, v, p, window - (window == 4))),
        (1, "pattern"),
    ),
    "local layers run as global": (
        patch_attend(lambda q, k, v, p, window: (q, k, v, p, 99)),
        (1, "pattern"),
    ),
    "values of another token": (
        patch_attend(lambda q, k, v, p, window: (q, k, np.roll(v, 1, axis=2), p, window)),
        (0, "after"),
    ),
    "gelu without tanh": ([(functions, "gelu_new", erf_gelu)], (0, "after")),
    "eps 1e-6": (patch_norm(lambda x, s, b, eps: (x, s, b, 1e-6)), (0, "pattern")),
    "bits lost in float32 alone": (patch_norm(cut_in_float32), (0, "pattern")),
    "positions one too far": (
        [
            (
                transformer,
                "embed",
                lambda t, p, w, embed=transformer.embed: embed(t, np.minimum(p + 1, 31), w),
            )
        ],
        (None, "embedding"),
    ),
}


SMALL_FAULTS = ("gelu without tanh", "eps 1e-6", "bits lost in float32 alone")


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, "tiny") for name in FAULTS), *((name, "wide") for name in SMALL_FAULTS)],
)
def test_a_fault_fails_by_far_and_the_first_value_names_it(name, size, request, monkeypatch):
    folder = request.getfixturevalue(size)
    patches, first = FAULTS[name]
    for patch in patches:
        monkeypatch.setattr(*patch)
    verification = verify(folder, device="cpu", lengths=[1, 6, 20])
    assert not verification.passed
    found = verification.first_difference
    assert max(p.difference / p.tolerance for p in verification.values) > 2.5
    if name == "eps 1e-6" and size == "tiny":  # layer 0 may stay within rounding
        return
    assert (found.layer, found.value) == first


extend, advance = KVCache.extend, KVCache.advance


def forget_slot_0(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    if layer == 2 and cache.length:
        values[:, :, 0] = 0
    return keys, values


def not_a_number(cache, layer, new_keys, new_values):
    keys, values = extend(cache, layer, new_keys, new_values)
    return keys, values * np.nan if layer == 2 and cache.length else values


def advance_too_little(cache, counts):
    advance(cache, counts - (cache.length == 6))


@pytest.mark.parametrize(
    ("name", "fault", "first"),
    [
        ("extend", forget_slot_0, (2, "after")),
        ("extend", not_a_number, (2, "after")),
        ("advance", advance_too_little, (None, "embedding")),
    ],
)
def test_a_fault_in_the_cache_fails_on_the_cached_path(tiny, monkeypatch, name, fault, first):
    monkeypatch.setattr(KVCache, name, fault)
    verification = verify(tiny, device="cpu", lengths=[12])
    found = verification.first_difference
    assert (found.layer, found.value) == first
    assert found.path in ("token by token", "in chunks")
    assert found.position > 0


def test_a_fault_that_only_decoding_shows_is_found_where_it_is(tiny, monkeypatch):
    def fault(cache, layer, new_keys, new_values):
        keys, values = extend(cache, layer, new_keys, new_values)
        if layer == 3 and cache.length == 9 and new_keys.shape[2] == 1:
            keys = keys + 0.01
            keys[:, :, :-1] -= 0.01  # the newest key alone
        return keys, values

    monkeypatch.setattr(KVCache, "extend", fault)
    found = verify(tiny, device="cpu", lengths=[12]).first_difference
    assert (found.layer, found.value) == (3, "pattern")
    assert (found.path, found.length, found.position) == ("token by token", 12, 9)
    assert str(found) == "layer 3, pattern (token by token, length 12, position 9)"


def test_weights_that_are_not_those_of_the_files_fail_in_their_layer(tiny):
    model = load(tiny, device="cpu")
    model.weights.blocks[2].mlp.down[3, 5] += 0.01
    found = verify(model).first_difference
    assert (found.layer, found.value) == (2, "after")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_a_number_fails_even_on_both_sides(tmp_path):
    def spoil(tensors):
        tensors["transformer.h.2.mlp.c_fc.bias"][0] = np.nan

    verification = verify(write_model(tmp_path, spoil=spoil), device="cpu", lengths=[1, 6])
    found = verification.first_difference
    assert (found.layer, found.value) == (2, "after")
    assert math.isnan(found.difference)
    data = json.loads(json.dumps(verification.to_json(), allow_nan=False))
    assert data["passed"] is False
    assert data["values"][-1]["difference"] is None
    assert data["values"][-1]["agrees"] is False


# The tolerance


def test_the_tolerance_is_a_multiple_of_the_smaller_distance_from_float64():
    values = np.array([1.0, -3.0])
    assert study.allowed(values, (2e-3, 5e-3), 1e-6) == (2e-3, FACTOR * 2e-3)
    assert study.allowed(values, (5e-3, 2e-3), 1e-6) == (2e-3, FACTOR * 2e-3)
    assert study.allowed(values, (0.0, 0.0), 1e-6) == (0.0, FACTOR * 3e-6)


def test_a_distance_that_is_not_a_number_leaves_the_other_one():
    values, nan = np.array([1.0]), float("nan")
    assert study.allowed(values, (nan, 2e-3), 1e-6) == (2e-3, FACTOR * 2e-3)
    assert study.allowed(values, (2e-3, nan), 1e-6) == (2e-3, FACTOR * 2e-3)
    assert math.isnan(study.allowed(values * nan, (nan, nan), 1e-6)[1])


def test_the_largest_difference_is_found_in_its_row_and_is_what_is_no_number_first():
    want = np.zeros((1, 2, 4, 3), "float32")
    got = want.copy()
    got[0, 1, 2, 0], got[0, 0, 1, 2] = -5, 3
    assert study.largest_difference(got, want) == (5, 2)
    got[0, 0, 3, 1] = np.nan
    difference, row = study.largest_difference(got, want)
    assert math.isnan(difference)
    assert row == 3
    assert math.isnan(study.largest_difference(want + np.inf, want + np.inf)[0])
    big = np.full((1, 1), 60000, "float16")
    assert study.largest_difference(big, -big) == (120000, 0)


def test_the_first_of_the_largest_differences_stays():
    largest = {}
    for place, difference in enumerate([0.0, 2.0, 1.0, 2.0]):
        study.note(largest, "a", difference, place)
    assert largest == {"a": (2.0, 1)}
    for place, difference in enumerate([float("nan"), 9.0, float("nan")]):
        study.note(largest, "a", difference, place)
    assert math.isnan(largest["a"][0])
    assert largest["a"][1] == 0


def test_a_pattern_is_held_against_its_twin_beside_its_tile_too():
    found = []
    expected = {"block0.pattern": np.zeros((1, 1, 8, 8), "float32")}
    expected["block0.pattern"][0, 0, 6, 1] = 0.5
    trace = study.Against(expected, 4, lambda *what: found.append(what), choose("cpu"))
    tile = np.zeros((1, 1, 3, 2), "float32")
    trace.within("block0").tile(slice(1, 4), slice(6, 8), (4, 8), pattern=tile, scores=tile)
    assert found == [("block0.pattern", 0.5, 6)]


# Lengths and passes


def test_the_lengths_reach_past_the_window_and_fit_into_the_context():
    def lengths(**changes):
        return study.check_lengths(None, tiny_config(**changes))

    assert lengths() == (1, 3, 4, 5, 11, 32)
    assert lengths(max_position_embeddings=2048, window_size=256) == (1, 5, 255, 256, 257, 515)
    assert lengths(max_position_embeddings=512, window_size=64) == (1, 5, 63, 64, 65, 131, 512)
    assert lengths(max_position_embeddings=10) == (1, 3, 4, 5, 10)
    assert lengths(window_size=1) == (1, 2, 5, 32)
    assert lengths(max_position_embeddings=1) == (1,)
    glob = {"attention_types": [[["global"], 4]], "max_position_embeddings": 2048}
    assert lengths(**glob) == (1, 5, 63, 64, 65, 131)


@pytest.mark.parametrize("length", [1, 2, 5, 64, 131, 515])
def test_every_path_feeds_every_token_once(length):
    feeds = study.feeds(length)
    assert tuple(feeds) == PATHS
    for edges in feeds.values():
        assert edges[0] == 0
        assert edges[-1] == length
        assert all(start < stop for start, stop in pairwise(edges))
    assert feeds["naive"] == [0, length]
    steps = [stop - start for start, stop in pairwise(feeds["token by token"])][1:]
    assert steps == [1] * min(length // 2, 64)
    if length > 5:
        assert {stop - start for start, stop in pairwise(feeds["in chunks"])} - {1}


def test_decoding_crosses_the_edge_of_the_window():
    for window in (4, 64, 256):
        edges = study.feeds(window + 1)["token by token"]
        assert {window - 1, window, window + 1} <= {*edges}


def test_the_naive_path_recomputes_and_the_others_fill_a_cache(tiny, monkeypatch):
    seen, forward = [], Model.forward

    def spy(model, tokens, cache, **options):
        seen.append((type(cache).__name__, tokens.shape[1]))
        return forward(model, tokens, cache, **options)

    monkeypatch.setattr(Model, "forward", spy)
    verify(tiny, device="cpu", lengths=[7])
    rounding, naive, *cached = seen[1:]  # the first two are one block, in float64 and float32
    assert seen[0] == rounding == ("KVCache", 7)
    assert naive == ("Recompute", 7)
    assert cached == [("KVCache", new) for new in (4, 1, 1, 1, 2, 2, 2, 1)]


def test_progress_is_told_pass_by_pass(tiny):
    calls = []
    verify(tiny, device="cpu", lengths=[1, 6], progress=lambda *call: calls.append(call))
    assert calls == [(done, 8) for done in range(1, 9)]


def test_no_more_is_kept_than_the_values_of_transformers(tmp_path):
    """Those lie in memory of torch, which is not counted here."""
    folder = write_model(
        tmp_path, {"max_position_embeddings": 600, "vocab_size": 5, "eos_token_id": 4}
    )
    model = load(folder, device="cpu")
    verify(model, lengths=[1])  # whatever is imported now does not count
    tracemalloc.start()
    try:
        verify(model, lengths=[600])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    patterns = 4 * 4 * 600 * 600 * 4
    assert peak < patterns / 2


def test_float64_weights_of_a_block_exist_only_while_it_is_looked_at(tiny):
    weights = load(tiny, device="cpu").weights
    exact = study.in_float64(weights)
    assert exact.unembedding is exact.token_embedding
    assert len(exact.blocks) == 4
    block = exact.blocks[1]
    assert block is not exact.blocks[1]
    assert {array.dtype for part in block for array in part} == {np.dtype("float64")}
    np.testing.assert_array_equal(block.mlp.up, weights.blocks[1].mlp.up)
    untied = study.in_float64(weights._replace(unembedding=weights.token_embedding * 2))
    np.testing.assert_array_equal(untied.unembedding, 2 * exact.token_embedding)


# Results and refusals


def test_the_numbers_are_those_of_the_result(passed):
    data = json.loads(json.dumps(passed.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert data["first_difference"] is None
    assert data["lengths"] == [1, 3, 4, 5, 11, 32]
    assert data["paths"] == list(PATHS)
    assert data["dtype"] == "float32"
    assert set(data["versions"]) == {"minineo", "numpy", "torch", "transformers"}
    for parity, row in zip(passed.values, data["values"], strict=True):
        assert row == {**vars(parity), "agrees": True}
        assert row["difference"] <= row["tolerance"]
        assert row["length"] in passed.lengths
        assert row["position"] < row["length"]


def test_a_model_in_float16_is_held_against_transformers_in_float16(tiny):
    def narrow(weights):
        if isinstance(weights, np.ndarray):
            return weights.astype("float16")
        parts = [narrow(part) for part in weights]
        return type(weights)(*parts) if hasattr(weights, "_fields") else tuple(parts)

    model = load(tiny, device="cpu")
    weights = narrow(model.weights)
    weights = weights._replace(unembedding=weights.token_embedding)
    verification = verify(replace(model, weights=weights), lengths=[1, 6])
    assert verification.passed, verification.first_difference
    assert verification.to_json()["dtype"] == "float16"
    opened = study.open_reference(tiny, verification.model.dtype)
    assert {str(parameter.dtype) for parameter in opened.parameters()} == {"torch.float16"}
    assert verification.values[-1].tolerance > 1e-2
    wrong = weights._replace(position_embedding=weights.position_embedding[::-1])
    assert not verify(replace(model, weights=wrong), lengths=[1, 6]).passed


def test_a_model_in_float64_is_refused(tiny):
    with pytest.raises(InputError, match=r"the model is in float64; .* load it in float32"):
        verify(load(tiny, device="cpu", dtype="float64"))


@pytest.mark.parametrize("lengths", [[], [0], [33], [1.0], [True], ["5"]])
def test_lengths_that_do_not_fit_are_refused(tiny, lengths):
    with pytest.raises(InputError, match="give whole numbers from 1 to 32"):
        verify(tiny, device="cpu", lengths=lengths)


def test_without_transformers_it_is_refused_in_one_line_that_says_how_to_get_it(monkeypatch):
    find_spec = study.find_spec
    monkeypatch.setattr(
        study, "find_spec", lambda name: find_spec(name) if name != "torch" else None
    )
    monkeypatch.setattr(study, "load", None)  # nothing is loaded before
    with pytest.raises(
        InputError, match=r"needs torch .*pip install torch transformers"
    ) as refusal:
        verify("tiny")
    assert "\n" not in str(refusal.value)


def test_files_that_transformers_cannot_open_are_refused_in_one_line(tiny, tmp_path):
    model = load(tiny, device="cpu")
    with pytest.raises(InputError, match="transformers cannot open") as refusal:
        study.open_reference(tmp_path, "float32")
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError, match="no/such"):
        verify(replace(model, name="no/such/folder"))


def test_torch_is_not_imported_before_it_is_needed():
    code = "import minineo.study.verify, sys; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
