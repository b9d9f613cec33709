"""The CUDA kernels, compiled by g++ and run on the CPU, are the NumPy functions they stand in for.

`Gpu` is a device that counts, as in `counting.py`, and runs kernels: cuda_on_cpu.h supplies what
CUDA C has and g++ lacks. Each launch is over copies of its arrays in memory of their own, so that
what is read past an end is wrong, and what is written there is seen.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from counting import CountingArray, Counts, Launch, put_weights, tag_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_weights, tiny_config

from minineo import KVCache, Model, Trace, forward, generate, generate_batch
from minineo.cuda import kernels
from minineo.device import Device
from minineo.study.costs import launches
from minineo.transformer import Recompute, attention, functions, replaceable
from minineo.transformer.replaceable import replaced

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
DTYPES = ["float16", "float32", "float64"]
# How far a result may lie from that of NumPy in float64, in the rounding of its largest number.
ROUNDINGS = 8
ROUNDINGS_OF_A_PASS = 80  # NumPy in float32 comes to half of it

pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and shutil.which("g++")),
    reason="the kernels run on the CPU only where there is g++ on Linux",
)


@cache
def compiled(code, options):
    """Compile kernels.cu into a library that the CPU runs."""
    names = [
        line.split("(")[0].split()[-1] for line in code.splitlines() if "__global__ void" in line
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernels.cpp")
        source.write_text(code + "".join(f"\nLAUNCHABLE({name})" for name in names))
        command = ["g++", *options, "-O1", "-shared", "-fPIC", "-include", HEADER, source]
        subprocess.run([*command, "-o", source.with_suffix(".so")], check=True)
        return ctypes.CDLL(source.with_suffix(".so"))


class Gpu(Counts):
    """A device that counts, and runs kernels on the CPU.

    Parameters
    ----------
    backwards : bool, optional
        Run the threads of a block from last to first.
    """

    def __init__(self, backwards=False):
        super().__init__()
        self.backwards = backwards
        # Around arrays lies NaN, which no sum hides, or else a number that every kernel changes.
        self.around = 0xC2 if backwards else 0xFF

    @property
    def cupy(self):
        def raw_module(*, code, options):
            library = compiled(code, options)
            return SimpleNamespace(get_function=lambda name: partial(self.run, library, name))

        cupy = super().cupy
        cupy.RawModule = raw_module
        return cupy

    def run(self, library, name, grid, block, arguments, *, shared_mem=0):
        arrays = [each for each in arguments if isinstance(each, CountingArray)]
        memory = {id(array): Guarded(array._data, self.around) for array in arrays}
        values = [by_value(memory.get(id(each), each)) for each in arguments]
        launch = getattr(library, f"launch_{name}")
        launch.restype = ctypes.c_char_p
        complaint = launch(
            (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values)),
            (ctypes.c_size_t * len(values))(*(value.nbytes for value in values)),
            len(values),
            (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
            ctypes.c_uint(*block),
            ctypes.c_size_t(shared_mem),
            self.backwards,
        )
        assert complaint is None, f"{name}: {complaint.decode()}"
        for guarded in memory.values():
            guarded.take_back()
        self.launches.append(Launch(name, 0, Counter(), Counter()))


class Guarded:
    """A copy of the memory of an array, between two stretches of one byte."""

    MARGIN = 1 << 14

    def __init__(self, array, around):
        self.start, end = np.lib.array_utils.byte_bounds(array)
        self.size, self.around = end - self.start, around
        self.bytes = np.full(self.size + 2 * self.MARGIN, around, np.uint8)
        self.copy = self.bytes.ctypes.data + self.MARGIN
        self.address = self.copy + array.ctypes.data - self.start
        ctypes.memmove(self.copy, self.start, self.size)

    def take_back(self):
        ctypes.memmove(self.start, self.copy, self.size)
        margins = np.delete(self.bytes, slice(self.MARGIN, -self.MARGIN))
        assert (margins == self.around).all(), "something is written outside of an array"


def by_value(argument):
    """What CuPy hands to a kernel: a pointer, 8 bytes for a number, or one element of NumPy."""
    if isinstance(argument, Guarded):
        return np.array(argument.address, np.uint64)
    if type(argument) in (int, float):
        return np.array(argument)
    assert isinstance(argument, np.ndarray), type(argument)
    assert argument.size == 1
    return argument


@pytest.fixture(params=[False, True], ids=["first-to-last", "last-to-first"])
def gpu(request):
    return Gpu(backwards=request.param)


@pytest.fixture
def few_threads(monkeypatch):
    monkeypatch.setattr(kernels, "THREADS", 32)
    monkeypatch.setattr(kernels, "ATTEND_THREADS", 32)


def call(gpu, name, *arguments):
    """Call a stand-in with NumPy arrays on the device; positions and numbers stay on the host."""
    device = [gpu.put(each) if is_float(each) else each for each in arguments]
    return kernels.kernels(gpu.cupy)[name](*device)._data


def is_float(value):
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def roundings(got, want):
    """The largest difference, in the rounding of the largest number of `want`, or of 1."""
    difference = np.abs(got - want).max()  # NaN where one is not a number
    return float(difference / np.finfo(got.dtype).eps / max(1, np.abs(want).max()))


def check(gpu, name, plain, *arguments):
    """Hold a stand-in against a NumPy function that is given the same numbers in float64."""
    exact = [each.astype("float64") if is_float(each) else each for each in arguments]
    want, got = plain(*exact), call(gpu, name, *arguments)
    assert got.shape == want.shape
    assert got.dtype == arguments[0].dtype
    assert roundings(got, want) <= ROUNDINGS
    return got


def normal(dtype, *shape, seed=0, scale=1):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(dtype)


# functions of one vector


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 5, 64, 255, 256, 257, 768, 1000])
def test_layer_norm(gpu, dtype, width):
    x = normal(dtype, 1, 3, width, scale=5) + np.asarray(2, dtype)
    vectors = normal(dtype, 2, width, seed=1)
    check(gpu, "layer_norm", functions.layer_norm, x, *vectors, 1e-5)


def test_layer_norm_of_large_numbers_in_float16(gpu):
    x = np.float16([[300, -300] * 400])
    ones, zeros = np.ones(800, "float16"), np.zeros(800, "float16")
    got = check(gpu, "layer_norm", functions.layer_norm, x, ones, zeros, 1e-5)
    np.testing.assert_array_equal(got, np.sign(x))


def test_layer_norm_of_a_view_and_of_a_constant(gpu):
    x = np.moveaxis(normal("float32", 7, 2, 3), 0, 2)
    check(gpu, "layer_norm", functions.layer_norm, x, *normal("float32", 2, 7), 1e-5)
    shift = normal("float32", 9)
    got = call(gpu, "layer_norm", np.full((1, 9), 7, "float32"), shift, shift, 1e-5)
    np.testing.assert_array_equal(got, [shift])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 256), (3, 85), (1, 2, 257), (2, 3, 171)])
def test_functions_of_each_number(gpu, dtype, shape):
    out, into = shape[-1], 3
    x, weight, bias = normal(dtype, *shape[:-1], into), normal(dtype, out, into), normal(dtype, out)
    residual = normal(dtype, *shape, seed=1, scale=3)
    linear, gelu_new = functions.linear, functions.gelu_new
    check(gpu, "gelu_new", gelu_new, residual)
    check(gpu, "linear", linear, x, weight, bias)
    check(gpu, "linear", linear, x, weight)
    check(gpu, "linear_gelu", lambda *inputs: gelu_new(linear(*inputs)), x, weight, bias)
    check(gpu, "add_linear", lambda r, *inputs: r + linear(*inputs), residual, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_has_its_limits_at_both_ends(gpu, dtype):
    x = np.array([-6e4, -50, -11, -0.0, 11, 50, 6e4], dtype)
    got = call(gpu, "gelu_new", x)
    np.testing.assert_allclose(got, [0, 0, 0, 0, 11, 50, 6e4], atol=1e-6)


# the cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 3])
def test_append_to_rows_of_different_lengths_up_to_the_last_slot(gpu, dtype, new, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_ROWS", 2)
    monkeypatch.setattr(kernels, "POSITIONS", np.dtype([("of", np.int64, 2)]))
    lengths = np.array([0, 4, 8, 7, 2])  # of 9 slots: padding reaches past the last one
    new_keys, new_values = (
        attention.split_heads(each, 3) for each in normal(dtype, 2, 5, new, 3 * 5)
    )
    want = normal(dtype, 2, 5, 3, 9, 5, seed=1)
    got = [gpu.put(each) for each in want]
    kernels.plain_append(*want, new_keys, new_values, lengths)
    gpu.clear()
    device = [CountingArray(each, gpu) for each in (new_keys, new_values)]
    kernels.kernels(gpu.cupy)["append"](*got, *device, lengths)
    assert [launch.name for launch in gpu.launches] == ["append"] * 3
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine._data, other)


def test_keys_and_values_that_are_laid_out_in_two_ways_are_appended_all_the_same(gpu):
    keys, values = gpu.put(np.zeros((1, 2, 4, 3))), gpu.put(np.zeros((1, 4, 2, 3))).swapaxes(1, 2)
    new = gpu.put(np.ones((1, 2, 1, 3)))
    kernels.kernels(gpu.cupy)["append"](keys, values, new, new, np.array([2]))
    for array in (keys, values):
        assert array._data[:, :, 2].all()
        assert array._data.sum() == 6


# attention


def attention_case(dtype, positions, heads=2, head_dim=8, seed=0):
    """Queries, keys and values as a pass has them: views of [batch, new, width] and of a cache."""
    positions = np.asarray(positions)
    (batch, new), slots = positions.shape, int(positions.max()) + 1
    scale = head_dim**-0.25  # of scores: about 1
    queries = normal(dtype, batch, new, heads * head_dim, seed=seed, scale=scale)
    cache = normal(dtype, 2, batch, heads, slots + 3, head_dim, seed=seed + 1, scale=scale)
    cache[:, :, :, slots:] = np.nan
    keys, values = cache[:, :, :, :slots]
    return attention.split_heads(queries, heads), keys, values, positions


def check_attend(gpu, queries, keys, values, positions, window, launches=None):
    """Hold `attend` against NumPy's, with the arrays laid out as they are."""
    device = [CountingArray(array, gpu) for array in (queries, keys, values)]
    exact = [array.astype("float64") for array in (queries, keys, values)]
    gpu.clear()
    got = kernels.kernels(gpu.cupy)["attend"](*device, positions, window)
    want = attention.attend(*exact, positions, window)
    assert got.dtype == queries.dtype
    assert roundings(got._data, want) <= ROUNDINGS
    assert gpu.uploads == gpu.downloads == gpu.synchronisations == 0
    if launches is not None:
        attention.merge_heads(got)  # needs no copy
        assert [launch.name for launch in gpu.launches] == launches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 4, 7, 16, 48, 64, 100, 128])
def test_one_query_of_each_head_dim(gpu, dtype, head_dim):
    case = attention_case(dtype, [[300]], heads=1, head_dim=head_dim)
    check_attend(gpu, *case, 301, ["attend"])


@pytest.mark.parametrize("length", [1, 2, 3, 255, 256, 257, 513, 2048])
@pytest.mark.parametrize("window", [1, 2, 256, 2048])
def test_one_query_at_each_length_and_window(gpu, length, window):
    case = attention_case("float32", [[length - 1]], heads=1, head_dim=4)
    case[1][:, :, : max(0, length - window)] = np.nan
    case[2][:, :, : max(0, length - window)] = np.nan
    check_attend(gpu, *case, window, ["attend"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 70, 2048])
def test_one_query_in_each_row_of_rows_of_different_lengths(gpu, dtype, window):
    queries, keys, values, positions = attention_case(dtype, [[6], [0], [290], [75]])
    for row, (position,) in enumerate(positions):
        for array in (keys, values):
            array[row, :, position + 1 :] = np.nan
            array[row, :, : max(0, position + 1 - window)] = np.nan
    exact = [array.astype("float64") for array in (queries, keys, values)]
    got = call(gpu, "attend", queries, keys, values, positions, window)
    for row, (position,) in enumerate(positions):
        alone = [array[row : row + 1] for array in exact]
        alone = [alone[0], *(array[:, :, : position + 1] for array in alone[1:])]
        want = attention.attend(*alone, positions[row : row + 1], window)
        assert roundings(got[row : row + 1], want) <= ROUNDINGS
    assert [launch.name for launch in gpu.launches] == ["attend"]


def test_one_query_over_keys_that_are_no_cache(gpu):
    arrays = normal("float32", 3, 1, 1, 24)
    case = [attention.split_heads(array, 3) for array in arrays]
    check_attend(gpu, *case, np.array([[0]]), 5, ["attend"])


def test_more_rows_than_travel_with_one_launch(gpu, few_threads, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_ROWS", 3)
    monkeypatch.setattr(kernels, "POSITIONS", np.dtype([("of", np.int64, 3)]))
    case = attention_case("float32", np.full((7, 1), 40), heads=2, head_dim=4)
    check_attend(gpu, *case, 9, ["attend"] * 3)
    case = attention_case("float32", np.arange(7)[:, None] + np.arange(4), head_dim=4)
    check_attend(gpu, *case, 9)


@pytest.mark.parametrize(("name", "limit"), [("ATTEND_THREADS", 32), ("SHARED_BYTES", 2300)])
def test_what_does_not_fit_into_one_block_goes_in_blocks_of_queries(gpu, monkeypatch, name, limit):
    """A head wider than a block has threads, or more slots than its shared memory holds."""
    monkeypatch.setattr(kernels, name, limit)
    check_attend(gpu, *attention_case("float32", [[50]], heads=1, head_dim=33), 60)
    assert len(gpu.named("softmax")) == 1


@st.composite
def blocks(draw):
    batch, new = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    starts = draw(st.lists(st.integers(0, 30), min_size=batch, max_size=batch))
    context = draw(st.integers(max(starts) + 1, 80))
    positions = np.minimum(np.array(starts)[:, None] + np.arange(new), context - 1)
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    case = attention_case(dtype, positions, head_dim=4, seed=seed)
    return *case, draw(st.integers(1, 90))


@settings(max_examples=40, deadline=None)
@given(blocks(), st.integers(1, 20))
def test_blocks_of_queries_whatever_the_starts_window_and_rows_at_once(case, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "THREADS", 8)
        patch.setattr(kernels, "QUERY_ROWS", rows)
        check_attend(Gpu(), *case)


def test_a_prompt_of_several_blocks(gpu, few_threads):
    new = kernels.QUERY_ROWS + 5
    case = attention_case("float32", np.arange(new)[None], heads=1, head_dim=4)
    check_attend(gpu, *case, 100)


def test_padding_that_sees_no_slot_stays_finite(gpu, few_threads):
    queries, keys, values, positions = attention_case("float32", np.arange(5, 25)[None])
    full = slice(0, 10)  # a cache with no more slots
    check_attend(gpu, queries, keys[:, :, full], values[:, :, full], positions, 3)


@pytest.mark.parametrize("new", [1, 5])
def test_scores_beyond_float16(gpu, few_threads, new):
    """64 products of 32 and 32 are 65,536, and float16 ends at 65,504."""
    queries, keys, values, positions = attention_case(
        "float16", np.arange(5 - new, 5)[None], head_dim=64
    )
    queries[:], keys[:] = 32, 32 + np.arange(1, 6)[:, None] / 32
    check_attend(gpu, queries, keys, values, positions, 5)


def test_a_traced_call_is_the_plain_function(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "plain_attend", lambda *inputs: inputs)
    stand_in = kernels.kernels(gpu.cupy)["attend"]
    inputs = (*attention_case("float32", [[5]]), 6, Trace("pattern"))
    assert stand_in(*inputs) == inputs


def test_every_function_that_can_be_replaced_is_and_nothing_is_compiled_before_it_is_called():
    of_a_cpu = {"blocks"}  # cores share it
    assert kernels.kernels(None).keys() == replaceable._names - of_a_cpu


# whole passes


def logits_of_passes(config, weights):
    """Run passes over one cache of 2 rows: a prompt, a chunk, and two steps."""
    cache = KVCache(config, 2, config.context, like=weights.token_embedding)
    passes = ([9, 4], [3, 5], [1, 1], [1, 1])
    tokens = [random_ids(config, 2, max(fed)) for fed in passes]
    return [
        forward(ids, weights, config, cache, counts=fed)
        for ids, fed in zip(tokens, passes, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_with_kernels_are_those_without(gpu, few_threads, dtype):
    config = tiny_config()
    weights = random_weights(config, dtype)
    with replaced(**kernels.kernels(gpu.cupy)):
        got = logits_of_passes(config, put_weights(weights, gpu))
    for mine, want in zip(got, logits_of_passes(config, in_float64(weights)), strict=True):
        assert roundings(mine._data, want) <= ROUNDINGS_OF_A_PASS


def test_a_naive_pass_with_kernels_is_one_without(gpu, few_threads):
    config = tiny_config()
    tokens, weights = random_ids(config, 1, 20), random_weights(config, "float32")
    with replaced(**kernels.kernels(gpu.cupy)):
        got = forward(tokens, put_weights(weights, gpu), config, Recompute())
    want = forward(tokens, in_float64(weights), config, Recompute())
    assert roundings(got._data, want) <= ROUNDINGS_OF_A_PASS


def in_float64(weights):
    """The same numbers in float64."""
    if isinstance(weights, tuple):
        return getattr(type(weights), "_make", tuple)(in_float64(part) for part in weights)
    return weights.astype("float64")


def on_gpu(config, dtype="float32", use_kernels=True):
    """A model on a device that counts, and that device."""
    gpu = Gpu()
    stand_ins = kernels.kernels(gpu.cupy) if use_kernels else {}
    device = Device("cuda", cupy=gpu.cupy, kernels=stand_ins)
    weights = put_weights(random_weights(config, dtype), gpu)
    return Model("small", config, weights, None, device), gpu


def names(gpu):
    return Counter(launch.name for launch in gpu.launches)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_decode_step_of_12_layers_needs_162_launches_however_many_rows(few_threads, dtype, rows):
    model, gpu = on_gpu(
        tiny_config(num_layers=12, attention_types=[[["global", "local"], 6]]), dtype
    )
    cache = KVCache(model.config, rows, 22, like=model.weights.token_embedding)
    cache.advance(np.arange(20, 20 - rows, -1))
    gpu.clear()
    model.forward(random_ids(model.config, rows, 1), cache)
    products = 12 * 6 + 1  # query, key, value, output, up, down; and the unembedding
    assert names(gpu) == {
        "layer_norm": 25,
        "matmul": products,
        "append": 12,
        "attend": 12,
        "add_linear": 24,
        "linear_gelu": 12,
        "take": 2,
        "add": 1,
        "stack": 1,
    }
    assert len(gpu.launches) == 162 == launches(model.config, 1, kernels=True)
    assert gpu.downloads == gpu.synchronisations == 0
    assert gpu.uploads == 2  # tokens and positions


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_launches_with_kernels_are_those_of_the_real_code(few_threads, monkeypatch, cached, new):
    monkeypatch.setattr(kernels, "QUERY_ROWS", 4)
    model, gpu = on_gpu(tiny_config())
    cache = KVCache(model.config, 1, 9, model.weights.token_embedding) if cached else Recompute()
    gpu.clear()
    model.forward(random_ids(model.config, 1, new), cache)
    found = names(gpu)
    del found["copy"]
    assert found.total() == launches(model.config, new, cached=cached, kernels=True)


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_a_run_waits_for_the_device_at_both_ends_of_a_step_and_brings_one_row_of_logits(
    few_threads, path
):
    model, gpu = on_gpu(tiny_config())
    steps = generate(model, [1, 2, 3], path=path, max_new_tokens=3, stop_at_end=False)
    for index in range(3):
        gpu.clear()
        step = next(steps)
        assert type(step.logits) is np.ndarray
        assert (gpu.uploads, gpu.downloads) == (2, 1)
        assert gpu.synchronisations == 3  # before and after the pass, and for its logits
        layer = ["layer", "attention", "", ""]
        assert gpu.ranges == ["prefill" if index == 0 else "decode", *4 * layer, ""]
        assert not {"copy"} & names(gpu).keys() or path == "naive" or index == 0


def test_rows_of_a_batch_on_the_device_are_those_on_the_cpu(few_threads):
    prompts = [[5, 6, 7, 8, 9, 10], [1, 2]]
    model, _ = on_gpu(tiny_config())
    weights = random_weights(model.config, "float32")
    on_cpu = Model("small", model.config, weights, None, Device("cpu"))
    options = {"max_new_tokens": 4, "stop_at_end": False}
    ours, theirs = (list(generate_batch(each, prompts, **options)) for each in (model, on_cpu))
    for steps, twins in zip(ours, theirs, strict=True):
        assert [step.token for step in steps] == [step.token for step in twins]
        for step, twin in zip(steps, twins, strict=True):
            np.testing.assert_allclose(step.logits, twin.logits, atol=2e-5)


def test_a_step_without_kernels_copies_keys_and_values_and_with_them_nothing(few_threads):
    for use_kernels in (True, False):
        model, gpu = on_gpu(tiny_config(), use_kernels=use_kernels)
        cache = tag_cache(KVCache(model.config, 1, 32, model.weights.token_embedding))
        cache.advance(20)
        gpu.clear()
        model.forward([[1]], cache)
        assert bool(gpu.copied("keys")) is not use_kernels
        assert gpu.copied("weights") == 0


def test_an_error_in_a_pass_ends_all_ranges(few_threads):
    model, gpu = on_gpu(tiny_config())
    stand_ins = model.device.kernels | {"attend": lambda *inputs: 1 / 0}
    model = replace(model, device=replace(model.device, kernels=stand_ins))
    with pytest.raises(ZeroDivisionError):
        next(generate(model, [1, 2], max_new_tokens=1))
    assert gpu.ranges == ["prefill", "layer", "attention", "", "", ""]


@pytest.mark.parametrize(
    ("replacements", "options", "plain"),
    [
        ({}, {}, False),
        ({}, {"trace": Trace("final")}, True),
        ({"attend": attention.attend}, {}, True),
    ],
    ids=["alone", "traced", "with another function put in"],
)
def test_a_model_uses_its_kernels_where_nothing_else_is_asked_for(
    few_threads, replacements, options, plain
):
    model, gpu = on_gpu(tiny_config())
    with replaced(**{name: each.__wrapped__ for name, each in replacements.items()}):
        model.forward([[1]], Recompute(), **options)
    assert bool(names(gpu).keys() & kernels.kernels(None).keys()) is not plain


# what the tests above would see

FAULTS = {
    "layer_norm": {
        "a wrong index": ("shift[i]", "shift[0]"),
        "a row too far": ("x += blockIdx.x * width", "x += (blockIdx.x + 1) * width"),
        "half left out": ("i += blockDim.x)\n        sum", "i += 2 * blockDim.x)\n        sum"),
        "no barrier before a sum": ("__syncthreads();  // all have read what", "// "),
        "no barrier in a sum": ("half /= 2) {\n        __syncthreads();", "half /= 2) {"),
        "no barrier after a sum": ("__syncthreads();\n    return", "return"),
    },
    "gelu_new": {"no guard at the tail": ("if (i < size)\n        result", "result")},
    "append": {
        "a slot too far": ("lengths.of[b] + t", "lengths.of[b] + t + 1"),
        "the head of another": ("h * new_head", "b * new_head"),
        "past the last slot": ("if (s < capacity)", "if (s <= capacity)"),
        "keys for values": ("= new_values[from]", "= new_keys[from]"),
    },
    "linear": {"the bias of another column": ("bias[i % width]", "bias[i / width]")},
    "attend": {
        "a slot too many": ("position - first + 1", "position - first + 2"),
        "a window too wide": ("position - window + 1", "position - window"),
        "the keys of another row": ("blockIdx.y * row ", "blockIdx.x * row "),
        "a lane left out": ("other = 1;", "other = 2;"),
        "too much shared memory": ("scores = parts + ", "scores = parts + 2 * "),
        "no barrier before scores": ("queries[i]);\n    __syncthreads();", "queries[i]);"),
        "no barrier before lanes": ("= score;\n        __syncthreads();", "= score;"),
        "no barrier after lanes": ("__syncthreads();  // all have read `parts`", ""),
        "no barrier before the mix": ("__syncthreads();  // all have read the sum", "// "),
        "no barrier in the mix": ("= mix;\n    __syncthreads();", "= mix;"),
        "a barrier for some": ("total mix = 0;", "total mix = 0; if (group) __syncthreads();"),
    },
    "softmax": {
        "the future not hidden": ("distance < 0 || ", ""),
        "slots counted from the first of all": ("position - (start + s)", "position - s"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fault"), [(kernel, fault) for kernel in FAULTS for fault in FAULTS[kernel]]
)
def test_a_fault_in_a_kernel_is_found(kernel, fault, tmp_path, monkeypatch, few_threads):
    right, wrong = FAULTS[kernel][fault]
    code = kernels.SOURCE.read_text(encoding="utf-8")
    assert right in code
    faulty = tmp_path / "kernels.cu"
    faulty.write_text(code.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(kernels, "SOURCE", faulty)
    assert finds_fault(kernel, Gpu()) or finds_fault(kernel, Gpu(backwards=True))


def finds_fault(kernel, gpu):
    """Whether a test of this kernel fails."""
    try:
        if kernel == "layer_norm":
            test_layer_norm(gpu, "float32", 100)
        elif kernel == "attend":
            test_one_query_in_each_row_of_rows_of_different_lengths(gpu, "float32", 70)
        elif kernel == "append":
            with pytest.MonkeyPatch.context() as patch:
                test_append_to_rows_of_different_lengths_up_to_the_last_slot(
                    gpu, "float32", 3, patch
                )
        elif kernel == "softmax":
            check_attend(gpu, *attention_case("float32", np.arange(40, 50)[None]), 20)
        else:
            test_functions_of_each_number(gpu, "float32", (3, 85))
    except AssertionError:
        return True
    return False
