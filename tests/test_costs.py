"""What a pass costs is predicted from shapes alone, and equals what the real code does."""

import inspect
from collections import defaultdict

import numpy as np
import pytest
from counting import (
    FUNCTIONS,
    LACKING_UFUNCS,
    CountingArray,
    Counts,
    TagKeysAndValues,
    put_weights,
    tag_cache,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model, random_weights, tiny_config

from minineo import Config, InputError, KVCache, Model, Trace, compare, forward, generate, score
from minineo.checkpoints.known import parameters
from minineo.device import Device
from minineo.study.costs import (
    Operation,
    cache_bytes,
    cache_bytes_read,
    least_flops,
    pass_costs,
    prefill_flops,
    run_costs,
    step_costs,
    total,
    visible_pairs,
    weight_bytes,
)
from minineo.study.shapes import shape_fields
from minineo.transformer import Recompute, attention

NORM, MATRIX, MATRIX_AND_BIAS = 2, 1, 2  # how many launches read the weights of one
READ_IN_A_LAYER = {
    "norm_1": NORM,
    "query": MATRIX,
    "key": MATRIX,
    "value": MATRIX,
    "output": MATRIX_AND_BIAS,
    "norm_2": NORM,
    "up": MATRIX_AND_BIAS,
    "down": MATRIX_AND_BIAS,
}


def on_device(model):
    counts = Counts()
    weights = put_weights(model.weights, counts)
    return Model("small", model.config, weights, None, Device("cuda", cupy=counts.cupy)), counts


def run_pass(config, fed, held=None, *, capacity=None, dtype="float32", **options):
    """Run a pass on counting arrays and return what was counted."""
    counts = Counts()
    weights = put_weights(random_weights(config, dtype), counts)
    cache = Recompute()
    if held is not None:
        slots = config.context if capacity is None else capacity
        cache = tag_cache(KVCache(config, len(fed), slots, like=weights.token_embedding))
        cache.advance(held)
    tokens = random_ids(config, len(fed), max(fed))
    counts.clear()
    forward(tokens, weights, config, cache, counts=fed, trace=TagKeysAndValues(), **options)
    return counts


def of_launch(launch):
    """Operations done, and bytes of weights read, of keys and values read, and of both written."""
    seen = launch.read["keys"] + launch.read["values"] if launch.name == "matmul" else 0
    written = launch.written["keys"] + launch.written["values"]
    return launch.flops, launch.read["weights"], seen, written


def counted(config, launches):
    """Add up launches by operation and layer."""
    places = [("embed", None)] * 2
    for layer in range(config.n_layers):
        places += [(name, layer) for name, n in READ_IN_A_LAYER.items() for _ in range(n)]
    places = iter([*places, ("norm", None), ("norm", None), ("unembedding", None)])
    found = defaultdict(lambda: np.zeros(4, dtype=int))
    for launch in launches:
        flops, weights, _, written = costs = of_launch(launch)
        if weights:
            name, layer = next(places)
        elif written:
            name = "extend"
        elif flops:
            name = "scores" if launch.read["keys"] else "mix"
        else:
            continue
        found[name, layer] += costs
    assert not list(places)
    return {place: tuple(costs) for place, costs in found.items()}


def numbers(operation):
    return (
        operation.flops,
        operation.weight_bytes,
        operation.key_value_bytes,
        operation.written_bytes,
    )


def predicted(operations):
    """The same of a prediction; what costs nothing is left out."""
    return {(o.name, o.layer): numbers(o) for o in operations if any(numbers(o))}


def check(config, fed, held=None, *, capacity=None, dtype="float32", last_only=True):
    counts = run_pass(config, fed, held, capacity=capacity, dtype=dtype, last_only=last_only)
    operations = pass_costs(
        config,
        fed,
        held,
        capacity=capacity,
        itemsize=np.dtype(dtype).itemsize,
        last_only=last_only,
    )
    found, expected = counted(config, counts.launches), predicted(operations)
    assert found == expected
    assert list(found) == list(expected)
    assert total(operations).flops == counts.flops


LONG = tiny_config(max_position_embeddings=200, window_size=70)
PASSES = {
    "one token": ([1], [0]),
    "prefill": ([20], [0]),
    "prefill of several blocks": ([150], [0]),
    "decode": ([1], [150]),
    "chunk": ([70], [100]),
    "batch": ([20, 20, 20], [0, 0, 0]),
    "ragged prefill": ([150, 3, 70], [0, 0, 0]),
    "ragged decode": ([1, 1, 1], [180, 3, 70]),
    "ragged chunks": ([5, 90], [100, 7]),
    "to the last position": ([130], [70]),
    "padding past the last position": ([100, 1], [0, 199]),
    "naive": ([150], None),
    "naive ragged": ([150, 3], None),
}


@pytest.mark.parametrize("window", [1, 4, 70, 200])
@pytest.mark.parametrize(("fed", "held"), PASSES.values(), ids=PASSES)
def test_every_operation_costs_what_is_predicted(fed, held, window):
    check(tiny_config(max_position_embeddings=200, window_size=window), fed, held)


@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
@pytest.mark.parametrize(("fed", "held"), PASSES.values(), ids=PASSES)
def test_blocks_of_any_size_cost_what_is_predicted(fed, held, rows, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_ROWS", rows)
    check(LONG, fed, held)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("last_only", [True, False])
@pytest.mark.parametrize("held", [None, [0, 0]])
def test_bytes_follow_the_dtype_and_logits_the_positions_asked_for(held, last_only, dtype):
    check(LONG, [70, 3], held, dtype=dtype, last_only=last_only)


@given(data=st.data())
@settings(deadline=None)
def test_every_shape_costs_what_is_predicted(data):
    def draw(least, most):
        return data.draw(st.integers(least, most))

    heads, context = draw(1, 3), 24
    kinds = data.draw(st.lists(st.sampled_from(["global", "local"]), min_size=1, max_size=3))
    config = tiny_config(
        vocab_size=draw(2, 9),
        max_position_embeddings=context,
        hidden_size=heads * draw(1, 4),
        num_heads=heads,
        num_layers=len(kinds),
        attention_types=[[kinds, 1]],
        intermediate_size=draw(1, 9),
        window_size=draw(1, context),
        eos_token_id=None,
    )
    batch = draw(1, 3)
    held = [draw(0, context - 1) for _ in range(batch)] if data.draw(st.booleans()) else None
    room = [context - length for length in held or [0] * batch]
    fed = [draw(1, most) for most in room]
    capacity = None
    if held is not None:
        capacity = draw(max(a + b for a, b in zip(fed, held, strict=True)), context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_ROWS", data.draw(st.sampled_from([1, 2, 5, 64])))
        check(config, fed, held, capacity=capacity, last_only=data.draw(st.booleans()))


# a whole run


@pytest.mark.parametrize(
    ("path", "options"),
    [("cached", {}), ("cached", {"prefill_chunk": 7}), ("naive", {})],
)
def test_every_step_of_generate_costs_what_is_predicted(path, options, monkeypatch):
    make = KVCache.__init__

    def make_tagged(self, *arguments, **options):
        make(self, *arguments, **options)
        tag_cache(self)

    monkeypatch.setattr(KVCache, "__init__", make_tagged)
    model, counts = on_device(random_model("float32"))
    prompt, new = random_ids(model.config, 20).tolist(), 6
    options = options | {"path": path}
    steps = generate(
        model, prompt, max_new_tokens=new, stop_at_end=False, trace=TagKeysAndValues(), **options
    )
    costs = run_costs(model.config, len(prompt), new, **options)
    so_far = np.zeros(4, dtype=int)
    for cost in costs:
        counts.clear()
        assert next(steps).fed == cost.fed
        found = np.sum([of_launch(launch) for launch in counts.launches], axis=0)
        so_far += found
        assert numbers(cost.cost) == tuple(found)
        assert numbers(cost.cost_so_far) == tuple(so_far)
    assert next(steps, None) is None


def test_the_naive_path_makes_keys_again_and_the_cached_path_does_not():
    naive, cached = (run_costs(LONG, 5, 4, path) for path in ("naive", "cached"))
    assert [step.fed for step in naive] == [5, 6, 7, 8]
    assert [step.remade for step in naive] == [0, 5, 6, 7]
    assert [step.fed_so_far for step in naive] == [5, 11, 18, 26]
    assert [step.remade_so_far for step in naive] == [0, 5, 11, 18]
    assert [step.fed for step in cached] == [5, 1, 1, 1]
    assert [step.remade_so_far for step in cached] == [0, 0, 0, 0]
    assert [step.fed_so_far for step in cached] == [5, 6, 7, 8]


def test_a_step_is_its_passes_one_operation_after_the_other():
    chunks = step_costs(LONG, 20, 0, prefill_chunk=15)
    assert chunks == pass_costs(LONG, [15], [0]) + pass_costs(LONG, [5], [15])
    assert step_costs(LONG, 20, 3) == pass_costs(LONG, [1], [22])
    assert step_costs(LONG, 20, 3, "naive") == pass_costs(LONG, [23])
    assert run_costs(LONG, 20, 0) == []


def test_writing_into_the_cache_is_all_that_sets_a_prefill_apart():
    naive, cached = pass_costs(LONG, [20]), pass_costs(LONG, [20], [0])
    differ = [b for a, b in zip(naive, cached, strict=True) if a != b]
    assert {operation.name for operation in differ} == {"extend"}
    assert total(differ).written_bytes == cache_bytes(LONG, 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_costs(LONG, []), "0 rows are fed and 0 held"),
        (lambda: pass_costs(LONG, [1], [1, 2]), "1 rows are fed and 2 held"),
        (lambda: pass_costs(LONG, [0]), "fed is 0"),
        (lambda: pass_costs(LONG, [1], [-1]), "held is -1"),
        (lambda: pass_costs(LONG, [1.5]), "fed is 1.5"),
        (lambda: pass_costs(LONG, 3), "fed is 3; it must be a list, a number for each row"),
        (lambda: pass_costs(LONG, [3], 0), "held is 0; it must be a list"),
        (lambda: pass_costs(LONG, [3], itemsize=0), "itemsize is 0"),
        (lambda: pass_costs(LONG, [3], itemsize=0.5), "itemsize is 0.5"),
        (lambda: run_costs(LONG, 3, 2, itemsize=-4), "itemsize is -4"),
        (lambda: pass_costs(LONG, [1], [200]), "201 positions are needed; this pass has 200"),
        (lambda: pass_costs(LONG, [5], [6], capacity=10), "11 positions are needed"),
        (lambda: pass_costs(LONG, [5], [6], capacity=0), "capacity is 0"),
        (lambda: run_costs(LONG, 200, 2), "201 positions are needed"),
        (lambda: run_costs(LONG, 0, 2), "prompt is 0"),
        (lambda: run_costs(LONG, 1, -1), "new is -1"),
        (lambda: step_costs(LONG, 1, -1), "index is -1"),
        (lambda: step_costs(LONG, 5, 0, "fast"), "unknown path 'fast'"),
        (lambda: step_costs(LONG, 5, 0, prefill_chunk=0), "prefill_chunk is 0"),
        (lambda: step_costs(LONG, 5, 0, "naive", prefill_chunk=2), "the naive path forgets"),
        (lambda: least_flops(LONG, [1], [200]), "201 positions are needed"),
    ],
)
def test_what_no_pass_can_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


# the least that is needed


@pytest.mark.parametrize("window", [1, 3, 9, 20])
@pytest.mark.parametrize("held", [0, 2, 11])
def test_visible_pairs_are_those_that_the_window_shows(held, window):
    distance = (held + np.arange(7))[:, None] - np.arange(held + 7)
    shown = ((distance >= 0) & (distance < window)).sum()
    assert visible_pairs(7, window, held) == shown


@pytest.mark.parametrize(("fed", "held"), PASSES.values(), ids=PASSES)
def test_what_is_done_is_never_less_than_the_least(fed, held):
    assert total(pass_costs(LONG, fed, held)).flops >= least_flops(LONG, fed, held)


@pytest.mark.parametrize(("fed", "held"), [([150], [0]), ([1], [150]), ([70], [100]), ([9], None)])
def test_queries_one_by_one_and_without_padding_do_the_least(fed, held, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_ROWS", 1)
    assert total(pass_costs(LONG, fed, held)).flops == least_flops(LONG, fed, held)


def test_the_least_of_a_batch_is_that_of_its_rows():
    rows = [(150, 0), (3, 20), (70, 7)]
    assert least_flops(LONG, *zip(*rows, strict=True)) == sum(
        least_flops(LONG, [fed], [held]) for fed, held in rows
    )


@pytest.mark.parametrize("depth", [0, 3, 69, 70, 150])
def test_a_decode_step_reads_the_least_bytes(depth):
    operations = pass_costs(LONG, [1], [depth])
    rows_looked_up = operations[0].weight_bytes
    assert rows_looked_up == 2 * 4 * LONG.width
    assert total(operations).weight_bytes - rows_looked_up == weight_bytes(LONG)
    assert total(operations).key_value_bytes == cache_bytes_read(LONG, depth)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_of_a_cache_are_those_of_its_arrays(dtype):
    cache = KVCache(LONG, 3, 50, like=np.zeros(1, dtype))
    assert 3 * cache_bytes(LONG, 50, np.dtype(dtype).itemsize) == cache.nbytes


def test_intensity_is_operations_per_byte():
    # a decode step does 2 operations for each number of 4 bytes; biases only cost bytes
    step = {(o.name, o.layer): o for o in pass_costs(LONG, [1], [150])}
    assert step["query", 0].intensity == step["scores", 0].intensity == 0.5
    assert step["up", 0].intensity == 2 * 32 * 128 / (4 * (32 * 128 + 128))
    assert step["norm_1", 0].intensity == 0
    # a prefill reads each matrix once for all its tokens, and a key once for a block of queries
    prefill = {(o.name, o.layer): o for o in pass_costs(LONG, [128], [0])}
    assert prefill["query", 0].intensity == 64
    assert prefill["scores", 0].intensity == 32
    assert Operation("nothing").intensity == 0


# the figures of the public models


def public(name):
    return Config.from_dict(shape_fields(name))


@pytest.mark.parametrize(
    ("name", "count", "full", "windowed"),
    [
        ("125m", 125_198_592, 144, 81),
        ("1.3b", 1_315_575_808, 768, 432),
        ("2.7b", 2_651_307_520, 1280, 720),
    ],
)
def test_public_models_have_their_known_sizes(name, count, full, windowed):
    config = public(name)
    assert parameters(config) == count
    assert weight_bytes(config, 1) == count - config.context * config.width
    assert cache_bytes(config, 2048) == full * 2**20
    assert cache_bytes(config, 2048, windowed=True) == windowed * 2**20


def test_the_example_of_300_tokens_has_its_known_floors():
    # 2.7B in float16 on a T4: 65 TFLOP/s, 320 GB/s; a prompt of 300 tokens, then 299 steps
    config = public("2.7b")
    assert prefill_flops(config, 300) / 1e12 == pytest.approx(1.525, abs=5e-4)
    assert prefill_flops(config, 300) / 65e12 == pytest.approx(23.5e-3, abs=5e-5)
    weights = weight_bytes(config, 2)
    assert weights / 1e9 == pytest.approx(5.29, abs=5e-3)
    assert weights / 320e9 == pytest.approx(16.5e-3, abs=5e-5)
    windowed = weights + cache_bytes_read(config, 449, 2)
    assert windowed / 320e9 == pytest.approx(16.9e-3, abs=5e-5)
    full = weights + cache_bytes(config, 450, 2)
    assert full / 320e9 == pytest.approx(17.0e-3, abs=5e-5)
    done = total(pass_costs(config, [300], [0], itemsize=2)).flops
    assert prefill_flops(config, 300) < done < 1.01 * prefill_flops(config, 300)


# the model obeys the rules of CuPy


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("last_only", [True, False])
def test_logits_and_traces_equal_those_of_numpy(last_only, dtype, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_ROWS", 3)
    model = random_model(dtype)
    device_model, _ = on_device(model)
    caches = [(Recompute(), Recompute())]
    caches.append(tuple(KVCache(m.config, 2, 32, m.weights[0]) for m in (model, device_model)))
    for cache, device_cache in caches:
        for new, rows in ((9, [9, 4]), (1, [1, 1]), (5, [2, 5])):
            tokens = random_ids(model.config, 2, new)
            trace, device_trace = Trace(), Trace()
            options = {"counts": rows, "last_only": last_only}
            logits = forward(tokens, model.weights, model.config, cache, trace=trace, **options)
            device_logits = forward(
                tokens,
                device_model.weights,
                model.config,
                device_cache,
                trace=device_trace,
                **options,
            )
            np.testing.assert_array_equal(device_logits.get(), logits)
            assert list(device_trace) == list(trace)
            for name, value in trace.items():
                np.testing.assert_array_equal(device_trace[name].get(), value)


@pytest.mark.parametrize(("fed", "held"), PASSES.values(), ids=PASSES)
def test_a_pass_never_waits_for_the_device_and_copies_no_weights(fed, held):
    counts = run_pass(LONG, fed, held)
    assert counts.downloads == counts.synchronisations == 0
    assert counts.copied("weights") == 0


def test_generation_comparison_and_score_run_on_the_device():
    model = random_model("float32")
    device_model, counts = on_device(model)
    prompt = random_ids(model.config, 20).tolist()
    for path in ("cached", "naive"):
        counts.clear()
        runs = [generate(m, prompt, path=path, max_new_tokens=5) for m in (model, device_model)]
        for step, device_step in zip(*runs, strict=True):
            np.testing.assert_array_equal(device_step.logits, step.logits)
        assert counts.downloads == 5
    assert compare(device_model, prompt, max_new_tokens=5).agree
    assert score(device_model, prompt).perplexity == score(model, prompt).perplexity


# the arrays that count


@pytest.fixture
def counts():
    return Counts()


@pytest.fixture
def array(counts):
    return counts.put(np.arange(6, dtype="float32").reshape(2, 3))


HOST = np.ones((2, 3), dtype="float32")


@pytest.mark.parametrize(
    "mix",
    [
        lambda array: array + HOST,
        lambda array: HOST + array,
        lambda array: HOST * array,
        lambda array: array @ HOST.T,
        lambda array: array == HOST,
        lambda array: array.__iadd__(HOST),
        lambda array: HOST.copy().__iadd__(array),
        lambda array: array + np.array(1.0),
        lambda array: array + None,
        lambda array: array + "1",
        lambda array: np.exp(array, out=HOST.copy()),
        lambda array: np.matmul(array, array.T, out=np.empty((2, 2), "float32")),
        lambda array: np.stack([array, HOST]),
        lambda array: np.where(HOST > 0, array, array),
        lambda array: np.copyto(array, HOST),
        lambda array: np.copyto(array, 0.0, where=HOST > 0),
        lambda array: np.copyto(HOST.copy(), array),
    ],
)
def test_arrays_of_numpy_do_not_mix(array, mix):
    with pytest.raises(TypeError):
        mix(array)


def test_arrays_of_numpy_are_not_assigned(array):
    with pytest.raises(ValueError, match="cannot be used for fill"):
        array[:] = HOST
    with pytest.raises(ValueError, match="cannot be used for fill"):
        array[0] = [1, 2, 3]


@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        np.array,
        lambda array: np.float32(array),
        lambda array: HOST.astype(int)[array],
        lambda array: np.add.at(HOST.copy(), 0, array[0]),
    ],
)
def test_nothing_becomes_an_array_of_numpy_unasked(array, convert):
    with pytest.raises(TypeError):
        convert(array)


def test_a_number_on_the_device_is_no_index(counts):
    number = counts.put(np.array(1))
    with pytest.raises(TypeError):
        range(number)
    with pytest.raises(TypeError):
        [1, 2][number]


@pytest.mark.parametrize(
    "call",
    [
        lambda array: np.block([array]),  # CuPy has no such function
        lambda array: np.spacing(array),  # nor such a ufunc
        lambda array: np.linalg.norm(array),  # not in the table
        lambda array: np.add.reduce(array),
        lambda array: np.divmod(array, 2),
        lambda array: np.exp(array, where=True),  # CuPy has no such parameter
        lambda array: np.sum(array, where=array > 0),
        lambda array: np.sum(array, initial=1),
        lambda array: np.full_like(array, 0, device="cpu"),
        lambda array: array.sum(initial=1),
        lambda array: array.max(where=True),
    ],
)
def test_what_cupy_lacks_is_refused(array, call):
    with pytest.raises(TypeError):
        call(array)


def test_methods_not_written_out_are_refused(array):
    with pytest.raises(AttributeError):
        array.ptp()


def test_scalars_mix_as_they_do_in_numpy(array):
    for number in (2, 2.5, True, np.float32(2), np.int64(2), np.float64(2)):
        host = array.get()
        for ours, theirs in ((array * number, host * number), (number - array, number - host)):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours.get(), theirs)


def test_a_result_of_no_dimensions_stays_on_the_device(array, counts):
    for number in (array.sum(), array.max(), np.sum(array), array[0, 1], array[0][1] + 1):
        assert type(number) is type(array)
        assert number.shape == ()
    assert counts.synchronisations == 0


def test_what_becomes_python_waits_for_the_device(array, counts):
    number = array[1, 2]
    assert (int(number), float(number), bool(number), number.item()) == (5, 5.0, True, 5.0)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array.get().sum() == 15
    assert counts.downloads == counts.synchronisations == 6
    assert array[array > 2].tolist() == [3, 4, 5]
    assert (counts.downloads, counts.synchronisations) == (7, 8)


def test_views_share_memory_and_tag_and_launch_nothing(array, counts):
    array.tag = "keys"
    views = array[1], array[:, None, 1:], array.T, array.swapaxes(0, 1), array.reshape(3, 2)
    assert counts.launches == []
    for value, view in enumerate(views):
        view[...] = value
        assert view.tag == "keys"
        assert (view.get() == value).all()
        assert np.may_share_memory(view._data, array._data)
    assert array.get().tolist() == [[4, 4, 4], [4, 4, 4]]
    assert [launch.written["keys"] for launch in counts.launches] == [12, 16, 24, 24, 24]
    assert array.T.reshape(6).tag == "other"  # such a view does not exist: it is a copy
    assert [launch.name for launch in counts.launches[5:]] == ["copy"]


def test_arrays_of_integers_take(array, counts):
    taken = array[counts.put([1, 1, 0])]
    assert taken.tolist() == [[3, 4, 5], [3, 4, 5], [0, 1, 2]]
    assert array[np.array([0])].tolist() == array[[0]].tolist() == [[0, 1, 2]]
    assert [(launch.name, launch.read["other"]) for launch in counts.launches] == [
        ("take", 36),
        ("take", 12),
        ("take", 12),
    ]
    assert counts.uploads == 1 + 1 + 2  # the array, the index, NumPy's index and the list
    array[counts.put(np.array(0))].fill(7)  # an array, and so no view
    assert array[0, 0].item() == 0


def test_what_is_created_like_an_array_lies_beside_it(array, counts):
    made = [
        np.zeros((2, 2), dtype="float32", like=array),
        np.empty_like(array, shape=(4,)),
        np.full_like(array, 3),
        np.arange(3, like=array),
        np.asarray([1, 2], like=array),
    ]
    assert {type(each) for each in made} == {type(array)}
    assert [launch.name for launch in counts.launches] == ["zeros", "full_like", "arange"]
    assert all(not launch.read for launch in counts.launches)
    assert counts.uploads == 2


def test_a_product_counts_its_operations_and_the_bytes_of_its_operands(counts):
    left, right = counts.put(np.ones((4, 2, 3))), counts.put(np.ones((4, 3, 5)), "values")
    (launch,) = [left @ right, counts.named("matmul")][1]
    assert launch.flops == 2 * 4 * 2 * 3 * 5
    assert launch.read == {"other": 8 * 4 * 2 * 3, "values": 8 * 4 * 3 * 5}
    assert launch.written == {"other": 8 * 4 * 2 * 5}
    assert counts.copied("values") == 0


def test_a_product_copies_what_cupy_copies(counts):
    def copied(product):
        counts.clear()
        product()
        return {tag: counts.copied(tag) for tag in ("keys", "other")}

    def put(shape, tag, dtype="float32"):
        return counts.put(np.ones(shape, dtype), tag)

    keys, queries = put((2, 8, 3), "keys"), put((2, 5, 3), "other")
    assert copied(lambda: queries @ keys.swapaxes(-1, -2)) == {"keys": 4 * 2 * 8 * 3, "other": 0}
    assert copied(lambda: queries @ keys[:, :3]) == {"keys": 4 * 2 * 3 * 3, "other": 0}
    assert copied(lambda: queries[:, :3] @ keys[:1, :3]) == {"keys": 0, "other": 4 * 2 * 3 * 3}
    one = put((1, 8, 3), "keys").swapaxes(-1, -2)
    assert copied(lambda: queries[:1] @ one) == {"keys": 4 * 8 * 3, "other": 0}
    half = put((2, 3, 3), "keys", "float16")
    assert copied(lambda: half @ half)["keys"] == 2 * 2 * 2 * 3 * 3
    # a result whose place is not laid out row by row is computed elsewhere, and then copied
    place = put((2, 5, 16), "other")[:, :, ::2]
    square = put((2, 3, 8), "other")
    assert copied(lambda: np.matmul(queries, square, out=place))["other"] == 4 * 2 * 5 * 8
    # in two dimensions either order will do, but no stride
    flat = put((8, 3), "keys")
    assert copied(lambda: queries[0] @ flat.T) == {"keys": 0, "other": 0}
    assert copied(lambda: queries[0] @ flat.T[:, ::2]) == {"keys": 4 * 3 * 4, "other": 0}


def test_the_tables_are_those_of_the_installed_cupy():
    cupy = pytest.importorskip("cupy", reason="no CuPy here to hold the tables against")
    for name, table in FUNCTIONS.items():
        found = inspect.signature(getattr(cupy, name)).parameters.values()
        kinds = {False: [], True: []}
        for parameter in found:
            kinds[parameter.kind is parameter.KEYWORD_ONLY].append(parameter.name)
        positional, _, by_name = table.partition(" * ")
        assert kinds[False] == positional.split(), name
        assert kinds[True] == by_name.split(), name
    ufuncs = {f.__name__ for f in vars(np).values() if isinstance(f, np.ufunc)}
    assert {name for name in ufuncs if not hasattr(cupy, name)} == LACKING_UFUNCS
    methods = {name for name in vars(CountingArray) if not name.startswith("_")}
    assert methods <= set(dir(cupy.ndarray))
