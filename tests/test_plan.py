import json
import socket
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import TINY, random_ids, random_model, random_weights, tiny_config
from test_cli import call

from minineo import InputError, KVCache, forward, plan
from minineo.checkpoints import hub
from minineo.cli.plan import formulas
from minineo.study import gpus
from minineo.study.gpus import GPUS, Processor, find_gpu, processor
from minineo.study.plan import (
    DTYPES,
    Plan,
    Times,
    activation_bytes,
    bytes_text,
    config_file,
    find_config,
    seconds_text,
)

MIB = 2**20
ROOMY = Processor("roomy", 10**12, 1e9, 1e9, "made up")
OWN = {"memory": 16, "bandwidth": 320, "tflops": 65}
ARGUMENTS = ["--memory", "16", "--bandwidth", "320", "--tflops", "65"]
BOOK = ["plan", "--model", "EleutherAI/gpt-neo-2.7B", "--gpu", "T4", "--dtype", "float16"]
BOOK += ["--prompt", "300", "--new", "300"]
MEASURED = ["--prefill-ms", "50", "--decode-ms", "36"]


@pytest.fixture
def no_network(monkeypatch):
    def no_socket(*arguments, **options):
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, no_socket)


def book(**options):
    return plan("gpt-neo-2.7b", gpu="T4", prompt=300, new=300, **options)


def small(config=None, dtype="float32", prompt=9, new=7, **options):
    return Plan("small", config or tiny_config(), ROOMY, dtype, prompt, new, **options)


# the figures of the public models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("EleutherAI/gpt-neo-125m", 125_198_592),
        ("EleutherAI/gpt-neo-1.3B", 1_315_575_808),
        ("EleutherAI/gpt-neo-2.7B", 2_651_307_520),
        ("roneneldan/TinyStories-33M", 68_514_048),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_weights_of_the_public_models(name, parameters, dtype, no_network):
    result = plan(name, dtype=dtype, **OWN)
    assert result.parameters == parameters
    assert result.weight_bytes == parameters * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("name", "millions"),
    [("1m", 3.7), ("3m", 8.3), ("8m", 19.7), ("28m", 52.0)],
)
def test_parameters_of_the_tinystories(name, millions, no_network):
    parameters = plan(f"tinystories-{name}", **OWN).parameters
    assert parameters / 1e6 == pytest.approx(millions, abs=0.051)


@pytest.mark.parametrize(
    ("name", "full", "windowed"), [("125m", 144, 81), ("1.3b", 768, 432), ("2.7b", 1280, 720)]
)
def test_caches_of_the_public_models_at_the_whole_context(name, full, windowed, no_network):
    result = plan(name, dtype="float32", prompt=2000, new=48, **OWN)
    assert result.cache_bytes == full * MIB
    assert result.cache_bytes_windowed == windowed * MIB
    assert result.cache_bytes_per_token * 2048 == full * MIB


def test_the_book_example_has_its_known_floors():
    result = book()
    assert result.prefill_floor.flops / 1e12 == pytest.approx(1.525, abs=5e-4)
    assert result.floor.prefill_seconds == pytest.approx(23.5e-3, abs=5e-5)
    assert result.floor.ttft_seconds == result.floor.prefill_seconds
    decode = result.decode_floor
    assert result.mean_depth + 1 == 450
    assert decode.weight_bytes / 1e9 == pytest.approx(5.29, abs=5e-3)
    assert decode.weight_bytes / 320e9 == pytest.approx(16.5e-3, abs=5e-5)
    assert result.floor.decode_seconds_per_token == pytest.approx(16.9e-3, abs=5e-5)
    full = result.decode_floor_at(result.mean_depth, windowed=False)
    assert full.seconds == pytest.approx(17.0e-3, abs=5e-5)
    assert (result.prefill_floor.bound, decode.bound) == ("arithmetic", "memory")


def test_the_book_example_has_its_known_total_and_efficiency():
    result = book(prefill_ms=50, decode_ms=36)
    assert result.measured.total_seconds == pytest.approx(10.85)
    assert result.measured.exact_total_seconds == pytest.approx(10.814)
    assert result.measured.ttft_seconds == 0.05
    assert result.efficiency["prefill"] == pytest.approx(0.47, abs=5e-3)
    assert result.efficiency["decode"] == pytest.approx(0.47, abs=5e-3)


# memory that is counted


@st.composite
def configs(draw):
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(["global", "local"]), min_size=layers, max_size=layers))
    return tiny_config(
        vocab_size=draw(st.integers(2, 40)),
        max_position_embeddings=draw(st.integers(2, 40)),
        hidden_size=heads * draw(st.integers(1, 5)),
        num_heads=heads,
        num_layers=layers,
        attention_types=[[kinds, 1]],
        intermediate_size=draw(st.none() | st.integers(1, 30)),
        window_size=draw(st.integers(1, 40)),
        tie_word_embeddings=draw(st.booleans()),
        eos_token_id=None,
    )


@given(config=configs(), dtype=st.sampled_from(DTYPES))
@settings(deadline=None)
def test_weights_are_the_bytes_of_the_arrays_that_are_allocated(config, dtype):
    def arrays(part):
        return [a for each in part for a in arrays(each)] if isinstance(part, tuple) else [part]

    once = {id(array): array.nbytes for array in arrays(random_weights(config, dtype))}
    assert small(config, dtype, 1, 1).weight_bytes == sum(once.values())


@given(data=st.data(), config=configs(), dtype=st.sampled_from(DTYPES))
@settings(deadline=None)
def test_the_cache_is_the_bytes_of_the_arrays_that_are_allocated(data, config, dtype):
    length = data.draw(st.integers(2, config.context))
    prompt, batch = data.draw(st.integers(1, length - 1)), data.draw(st.integers(1, 3))
    cache = KVCache(config, batch, length, like=np.zeros(1, dtype))
    result = small(config, dtype, prompt, length - prompt, batch=batch)
    assert result.cache_bytes == cache.nbytes
    assert result.cache_bytes_per_token == cache.token_bytes
    assert result.cache_bytes_windowed <= result.cache_bytes
    kept = [cache.keys[layer][:, :, -window:].nbytes for layer, window in enumerate(config.windows)]
    assert result.cache_bytes_windowed == 2 * sum(kept)


@given(
    config=configs(),
    data=st.data(),
    memory=st.integers(1, 200_000),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_the_largest_batch_and_the_longest_prompt_fit_and_one_more_does_not(
    config, data, memory, dtype
):
    length = data.draw(st.integers(2, config.context))
    prompt, batch = data.draw(st.integers(1, length - 1)), data.draw(st.integers(1, 3))
    result = replace(
        small(config, dtype, prompt, length - prompt, batch=batch),
        processor=replace(ROOMY, memory_bytes=memory),
    )
    most, longest = result.max_batch, result.max_length
    assert most == 0 or replace(result, batch=most).fits
    assert not replace(result, batch=most + 1).fits
    assert result.fits == (batch <= most)

    def whole_prompt(tokens):
        return replace(result, prompt=tokens, new=0)

    assert longest == 0 or whole_prompt(longest).fits
    assert longest == config.context or not whole_prompt(longest + 1).fits


@pytest.mark.parametrize("new", [1, 30, 120, 400])
@pytest.mark.parametrize(
    "changes", [{}, {"num_heads": 16, "hidden_size": 64}, {"window_size": 400}]
)
def test_activations_are_near_what_a_prefill_really_allocates(new, changes):
    shape = {"hidden_size": 128, "max_position_embeddings": 400, "vocab_size": 101} | changes
    model = random_model("float32", **shape)
    tokens = random_ids(model.config, 1, new)
    cache = KVCache(model.config, 1, new, model.weights.token_embedding)
    forward(tokens, model.weights, model.config, cache)
    cache.crop(0)
    tracemalloc.start()
    try:
        forward(tokens, model.weights, model.config, cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    estimate = activation_bytes(model.config, new, 4)
    assert estimate <= 1.25 * peak
    assert peak <= 1.35 * estimate + 10_000  # and what Python itself allocates


def test_what_fills_the_memory_to_the_last_byte_fits():
    needed = small().needed_bytes
    exact = replace(small(), processor=replace(ROOMY, memory_bytes=needed))
    assert exact.fits
    assert exact.max_batch == 1
    assert not replace(exact, processor=replace(ROOMY, memory_bytes=needed - 1)).fits


def test_what_does_not_fit_is_an_answer():
    result = plan("2.7b", gpu="T4", dtype="float32", batch=16)
    assert not result.fits
    assert 0 < result.max_batch < 16
    nothing = plan("2.7b", memory=1, bandwidth=1, tflops=1)
    assert (nothing.fits, nothing.max_batch, nothing.max_length) == (False, 0, 0)


# time


def test_a_floor_is_the_longer_of_arithmetic_and_memory():
    limits = Processor("slow", 10**12, 1e6, 1e6, "made up")
    for speeds, bound in (((1e6, 1e9), "memory"), ((1e9, 1e3), "arithmetic")):
        faster = replace(limits, bytes_per_second=speeds[0], flops_per_second=speeds[1])
        for floor in (replace(small(), processor=faster).prefill_floor,
                      replace(small(), processor=faster).decode_floor):  # fmt: skip
            assert floor.bound == bound
            assert floor.seconds == max(floor.arithmetic_seconds, floor.memory_seconds)
            assert floor.arithmetic_seconds == floor.flops / speeds[1]
            moved = floor.weight_bytes + floor.cache_bytes
            assert floor.memory_seconds == moved / speeds[0]


def test_rows_share_the_weights_and_nothing_else():
    one, four = small(), small(batch=4)
    for name in ("prefill_floor", "decode_floor"):
        alone, together = getattr(one, name), getattr(four, name)
        assert together.flops == 4 * alone.flops
        assert together.cache_bytes == 4 * alone.cache_bytes
        assert together.weight_bytes == alone.weight_bytes


@pytest.mark.parametrize(
    ("new", "depth"), [(1, 300), (2, 300), (3, 300), (4, 301), (300, 449), (301, 449)]
)
def test_the_mean_depth_is_that_of_the_step_in_the_middle(new, depth):
    result = plan("125m", prompt=300, new=new, **OWN)
    assert result.mean_depth == depth
    depths = range(300, 300 + new - 1)
    if depths:
        assert abs(np.mean(depths) - depth) <= 0.5


@pytest.mark.parametrize("new", [1, 2, 3, 40, 300])
def test_a_floor_is_the_sum_of_the_floors_of_its_passes(new):
    result = plan("125m", gpu="T4", prompt=100, new=new)  # the window fills up on the way
    steps = [result.decode_floor_at(depth).seconds for depth in range(100, 100 + new - 1)]
    total = result.prefill_floor.seconds + sum(steps)
    assert result.floor.exact_total_seconds == pytest.approx(total, rel=1e-12)


def test_the_last_new_token_needs_no_room():
    for context, prompt, new in ((32, 20, 13), (32, 32, 1), (1, 1, 1)):
        config = tiny_config(max_position_embeddings=context)
        result = plan(config, prompt=prompt, new=new, **OWN)
        assert result.length == context
        assert result.cache_bytes == result.cache_bytes_of(context)
        assert result.mean_depth < context
        assert result.to_json()["floor"]["total_seconds"] > 0
        with pytest.raises(InputError, match="do not fit"):
            plan(config, prompt=prompt, new=new + 1, **OWN)
    assert plan(tiny_config(max_position_embeddings=1), **OWN).length == 1
    assert book().cache_bytes == 600 * book().cache_bytes_per_token


def test_the_exact_total_has_one_decode_step_less():
    times = Times(1.0, 0.5, 4)
    assert (times.total_seconds, times.exact_total_seconds) == (3.0, 2.5)
    assert Times(1.0, 0.5, 1).exact_total_seconds == 1.0


def test_an_efficiency_stretches_the_floor():
    result = book(efficiency=0.5)
    for name in ("prefill_seconds", "decode_seconds_per_token", "total_seconds"):
        assert getattr(result.expected, name) == pytest.approx(2 * getattr(result.floor, name))
    assert result.efficiency == pytest.approx({"prefill": 0.5, "decode": 0.5})
    assert book(efficiency=1).expected == book().floor


def test_json_holds_the_keys_of_the_design():
    data = book(prefill_ms=50, decode_ms=36).to_json()
    assert data == json.loads(json.dumps(data, allow_nan=False))
    keys = "parameters weight_bytes cache_bytes_per_token cache_bytes cache_bytes_windowed "
    keys += "max_batch max_length floor measured efficiency"
    assert set(keys.split()) <= data.keys()
    times = {"prefill_seconds", "decode_seconds_per_token", "ttft_seconds", "total_seconds"}
    assert times <= data["floor"].keys()
    assert times <= data["measured"].keys()
    assert data["efficiency"].keys() == {"prefill", "decode"}
    assert type(data["weight_bytes"]) is int
    without = book().to_json()
    assert (without["measured"], without["efficiency"], without["expected"]) == (None,) * 3


# the model


def test_a_config_a_folder_and_a_name_give_the_same_shape(tmp_path, no_network):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    for model in (tiny_config(), folder, str(folder)):
        assert plan(model, **OWN).config == tiny_config()
    names = ("2.7b", "gpt-neo-2.7b", "GPT-Neo-2.7B", "EleutherAI/gpt-neo-2.7B")
    assert len({find_config(name)[1] for name in names}) == 1
    assert find_config("TINY")[1].context == 512


def test_of_a_model_on_the_hub_only_the_config_is_fetched(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    asked = []

    def download(repo, revision, choose):
        asked.append((repo, revision, choose(["model.safetensors", "config.json", "vocab.json"])))
        return tmp_path

    monkeypatch.setattr(hub, "cached_folder", lambda repo, revision: None)
    monkeypatch.setattr(hub, "download", download)
    assert plan("someone/neo@v2", **OWN).config == tiny_config()
    assert asked == [("someone/neo", "v2", ["config.json"])]
    with pytest.raises(InputError, match=r"no config\.json"):
        config_file(["model.safetensors"])
    monkeypatch.setattr(hub, "cached_folder", lambda repo, revision: tmp_path)
    monkeypatch.setattr(hub, "download", None)
    assert find_config("someone/neo") == ("someone/neo", tiny_config())


def test_defaults_fit_every_context():
    assert (plan("2.7b", **OWN).prompt, plan("2.7b", **OWN).new) == (300, 300)
    assert plan("tiny", **OWN).length == 512
    assert plan(tiny_config(), **OWN).length == 32


# the processor


@pytest.mark.parametrize(
    ("name", "full"),
    [("T4", "T4"), ("t4", "T4"), ("RTX 3090", "RTX-3090"), ("rtx4090", "RTX-4090"),
     ("H100", "H100-SXM"), ("A100-80GB", None), ("A100", None), ("", None), ("-", None),
     ("RTX", None), ("TPU", None), ("a100_40", "A100-40")],
)  # fmt: skip
def test_a_gpu_is_found_by_the_beginning_of_its_name(name, full):
    if full:
        assert find_gpu(name) == (full, GPUS[full])
    else:
        with pytest.raises(InputError, match=r"gpu .* choose .*A100-40"):
            find_gpu(name) if name != "RTX" else find_gpu("A100")


def test_each_dtype_has_its_peak():
    for dtype, peak in (("float32", 8.1e12), ("float16", 65e12)):
        assert plan("125m", gpu="T4", dtype=dtype).processor.flops_per_second == peak
    with pytest.raises(InputError, match="no float64 peak of the T4 is known; give --tflops"):
        plan("125m", gpu="T4", dtype="float64")
    assert plan("125m", gpu="T4", dtype="float64", tflops=1).processor.flops_per_second == 1e12


def test_own_figures_stand_in_for_published_ones():
    limits = plan("125m", gpu="T4", memory=15, bandwidth=300, tflops=60).processor
    assert limits == Processor(
        "T4", 15 * 10**9, 300e9, 60e12,
        "published peaks, but --memory and --bandwidth and --tflops as given",
    )  # fmt: skip
    assert plan("125m", gpu="T4", bandwidth=300).processor.memory_bytes == 16 * 10**9
    own = plan("125m", **OWN)
    assert (own.processor.source, own.dtype) == ("given", "float16")


def test_this_machine_is_measured_and_only_what_is_not_given(monkeypatch):
    limits = plan("tiny").processor
    assert limits.name == "this machine"
    assert plan("tiny").dtype == "float32"
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops_per_second < 1e15
    assert 1e8 < limits.memory_bytes < 1e14
    for name in ("memory_bytes", "measure_bandwidth"):
        monkeypatch.setattr(gpus, name, None)
    assert plan("tiny", gpu="This", memory=1, bandwidth=2).processor.bytes_per_second == 2e9
    nothing_left = plan("tiny", gpu="this", memory=1, bandwidth=2, tflops=3).processor
    assert (nothing_left.name, nothing_left.flops_per_second) == ("this machine", 3e12)
    assert nothing_left.source == "given"


def test_a_large_batch_is_measured_in_as_many_rows_as_are_useful(monkeypatch):
    rows = []
    monkeypatch.setattr(gpus, "products_seconds", lambda *arguments: rows.append(arguments[2]) or 1)
    processor("this", tiny_config(), 10**9, "float32", memory=1, bandwidth=1)
    assert rows == [gpus.MOST_ROWS]


def test_the_measured_bandwidth_is_that_of_all_layers(monkeypatch):
    seen = []
    monkeypatch.setattr(
        gpus, "products_seconds", lambda config, matrices, rows: seen.append(matrices) or 2.0
    )
    read = gpus.measure_bandwidth(tiny_config(), "float64")
    assert read == sum(matrix.nbytes for matrix in seen[0]) / 2.0
    assert len(seen[0]) == 4 * 6


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0}, "prompt is 0; it must be a whole number from 1"),
        ({"prompt": -3}, "prompt is -3"),
        ({"prompt": 1.5}, "prompt is 1.5"),
        ({"prompt": True}, "prompt is True"),
        ({"new": 0}, "new is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"prompt": 2000, "new": 50}, r"2000 \+ 50 - 1 = 2049 tokens do not fit .* 2048"),
        ({"prompt": 10**400}, r"1000+\.\.\.0+ \+ 300 - 1 = .* tokens do not fit"),
        ({"batch": 10**400}, r"batch is 10+\.\.\.0+; it must be 1,000,000 at most"),
        ({"efficiency": 5e-324}, "efficiency is 5e-324"),
        ({"bandwidth": 5e-324}, "bandwidth is 5e-324; it must be a number above 0 and finite"),
        ({"tflops": 1e-320}, "tflops is 1e-320"),
        ({"memory": 10**400}, r"memory is 10+\.\.\.0+; .* from 0\.000001 to 1,000,000,000"),
        ({"memory": float("inf")}, "memory is inf; it must be a number above 0 and finite"),
        ({"prefill_ms": 50, "decode_ms": 1e300}, r"decode_ms is 1e\+300"),
        ({"gpu": 3}, "gpu is 3; it must be a name such as T4, or this"),
        ({"efficiency": 0}, "efficiency is 0"),
        ({"efficiency": 1.01}, "efficiency is 1.01; it is a share, above 0 and up to 1"),
        ({"efficiency": float("nan")}, "efficiency is nan"),
        ({"efficiency": -0.5}, "efficiency is -0.5"),
        ({"prefill_ms": 50}, "decode_ms is missing; give both"),
        ({"decode_ms": 36}, "prefill_ms is missing; give both"),
        ({"prefill_ms": 0, "decode_ms": 36}, "prefill_ms is 0; it must be a number above 0"),
        ({"prefill_ms": 50, "decode_ms": float("inf")}, "decode_ms is inf"),
        ({"prefill_ms": 1, "decode_ms": 1, "efficiency": 0.5}, "give one of them"),
        ({"memory": 0}, "memory is 0"),
        ({"bandwidth": -1}, "bandwidth is -1"),
        ({"tflops": float("inf")}, "tflops is inf"),
        ({"tflops": "many"}, "tflops is 'many'"),
        ({"memory": 1e308}, "memory is 1e[+]308"),
        ({"gpu": "TPU"}, "unknown gpu 'TPU': choose T4, L4, .* or this"),
        ({"gpu": "A100"}, "more than one gpu 'A100': choose A100-40, A100-80"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose float16, float32, float64"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'"),
        ({"model": 5}, "5 is no model; give a name, a folder or a Config"),
        ({"gpu": None, "dtype": "float16"}, "float16 needs a GPU"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_one_line(options, message):
    options = {"model": "125m", "gpu": "T4"} | options
    with pytest.raises(InputError, match=message) as refusal:
        plan(**options)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "TPU"], "unknown gpu 'TPU': choose T4, L4"),
        (["--prompt", "0", *ARGUMENTS], "prompt is 0"),
        (["--prompt", "500", "--new", "14", *ARGUMENTS], "500 + 14 - 1 = 513 tokens do not"),
        (["--prompt", "x"], "--prompt"),
        (["--efficiency", "2", *ARGUMENTS], "efficiency is 2.0"),
        (["--prefill-ms", "5", *ARGUMENTS], "decode_ms is missing"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--dtype", "float16"], "float16 needs a GPU"),
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--plot", "p.bmp"], ".png, .svg or .pdf"),
        (["--json", "."], ". is a folder"),
        (["--json", "a.png", "--plot", "a.png"], "give two files"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(capsys, arguments, complaint):
    status, out, err = call(capsys, "plan", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err


# the command


def test_the_book_example_works_offline(capsys, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = call(capsys, *BOOK, *MEASURED, "--json", "-")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["floor"]["prefill_seconds"] == pytest.approx(23.5e-3, abs=5e-5)
    assert data["floor"]["decode_seconds_per_token"] == pytest.approx(16.9e-3, abs=5e-5)
    assert data["measured"]["total_seconds"] == pytest.approx(10.85)
    assert data["efficiency"]["prefill"] == pytest.approx(0.47, abs=5e-3)
    assert data["parameters"] == 2_651_307_520


def test_the_formulas_are_spelled_out_for_a_reader(capsys):
    status, out, err = call(capsys, *BOOK, *MEASURED)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "1.525 TFLOP / 65 TFLOP/s 23.5 ms" in text
    assert "(5.29 GB weights + 116 MB cache) / 320 GB/s 16.9 ms" in text
    assert "Usual: 50 + 300 x 36 = 10,850 ms: a decode step for every new token." in text
    assert "Exact: 50 + 299 x 36 = 10,814 ms: the prefill yields the first token." in text
    assert "47% of the arithmetic peak" in text
    assert "47% of the bandwidth" in text
    assert "estimated" in text
    assert "It fits." in text


@given(
    first=st.floats(1e-9, 1e6),
    each=st.floats(1e-9, 1e6),
    new=st.integers(1, 2048),
)
def test_the_sums_come_out_by_hand(first, each, new):
    for formula in formulas(Times(first, each, new)):
        a, _, steps, _, b, _, total, unit = formula.replace(",", "").split()
        assert unit in ("ms", "µs")
        by_hand = float(a) + int(steps) * float(b)
        digits = len(total.partition(".")[2])
        assert abs(by_hand - float(total)) <= 0.5001 * 10.0**-digits, formula


def test_small_times_are_summed_in_microseconds():
    assert formulas(Times(5.87e-3, 0.904e-3, 48))[0] == "5.87 + 48 x 0.904 = 49.26 ms"
    assert formulas(Times(1e-6, 7e-7, 256)) == [
        "1 + 256 x 0.7 = 180.2 µs",
        "1 + 255 x 0.7 = 179.5 µs",
    ]


def test_what_is_never_fed_is_said(capsys):
    _, out, _ = call(capsys, *BOOK)
    text = " ".join(out.split())
    assert "Room for 600 tokens; the last new one is never fed, so 599 are used." in text
    assert "exact: room for 600 tokens x 327,680 bytes" in text
    _, out, _ = call(capsys, "plan", "--prompt", "512", "--new", "1", *ARGUMENTS)
    text = " ".join(out.split())
    assert "Room for 512 tokens; the last new one is never fed, so 512 are used." in text
    assert "No decode step is needed: the prefill yields the one new token." in text
    assert "middle" not in text
    _, out, _ = call(capsys, "plan", "--prompt", "5", "--new", "2", "--batch", "3", *ARGUMENTS)
    text = " ".join(out.split())
    assert "Room for 7 tokens a row; the last new one is never fed, so 6 are used." in text
    assert "There is one decode step: its query sees 6 tokens." in text


def test_rows_that_fit_have_thousands_commas(capsys):
    _, out, _ = call(capsys, "plan", "--prompt", "20", "--new", "20", "--gpu", "T4")
    rows = plan(gpu="T4", prompt=20, new=20).max_batch
    assert rows > 10_000
    assert f"There is room for {rows:,} rows of 40 tokens" in " ".join(out.split())


def test_on_a_gpu_it_is_said_what_is_not_counted_and_what_1_gb_for_it_leaves(capsys):
    _, out, _ = call(capsys, *BOOK, "--batch", "49")
    with_less = plan("2.7b", gpu="T4", memory=15).max_batch
    assert with_less < 49 == book().max_batch
    said = "It fits. There is room for 49 rows of 600 tokens, or for 553 tokens in each of 49 rows."
    said += " The CUDA context, libraries and the allocator are not counted: with 1 GB set aside "
    assert f"{said}for them, there is room for {with_less} rows." in " ".join(out.split())
    for memory, rows in (("6.6", "1 row."), ("6.4", "no row")):  # of 5.3 GB weights + 217 MB a row
        _, out, _ = call(capsys, *BOOK, "--memory", memory)
        assert f"set aside for them, there is room for {rows}" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [ARGUMENTS, ["--gpu", "this", *ARGUMENTS], ["--gpu", "T4", "--memory", "0.001"]],
)
def test_nothing_is_set_aside_on_another_processor_or_where_nothing_fits(capsys, arguments):
    status, out, _ = call(capsys, "plan", *arguments)
    assert status == 0
    assert "set aside" not in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "2.7b", "--batch", "1000", "--dtype", "float64", *ARGUMENTS],
        ["--model", "gpt-neo-1.3b", "--gpu", "RTX-4090", "--batch", "12345"],
        ["--model", "2.7b", "--gpu", "H100", "--prompt", "1", "--new", "1"],
        ["--model", "tiny", "--efficiency", "0.001", *ARGUMENTS],
    ],
)
def test_every_line_stays_within_80_columns(capsys, arguments):
    status, out, _ = call(capsys, "plan", *arguments)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    for line in out.splitlines():
        assert "…" not in line, "nothing is cut off"


def test_what_does_not_fit_is_said_with_the_sum_and_status_0(capsys):
    arguments = ["--model", "2.7b", "--gpu", "T4", "--dtype", "float32", "--batch", "16"]
    status, out, _ = call(capsys, "plan", *arguments)
    assert status == 0
    text = " ".join(out.split())
    assert "It does not fit: 10.6 GB + 6.29 GB + 642 MB = 17.5 GB are more than 16 GB." in text
    bar = next(line for line in out.splitlines() if line.startswith("["))
    assert bar.index("]") < len(bar.rstrip()) - 1, "the bar runs past its end"
    _, out, _ = call(capsys, "plan", "--model", "2.7b", "--memory", "1", *ARGUMENTS[2:])
    assert "There is no room for any row." in " ".join(out.split())


@pytest.mark.parametrize("batch", [1, 7, 20, 49, 50, 90, 1000])
def test_the_bar_shows_the_shares_of_the_memory(batch):
    from minineo.cli.plan import BAR, bar

    result = plan("2.7b", gpu="T4", batch=batch)
    line = bar(result)
    assert len(line) == BAR + 2
    whole = max(result.processor.memory_bytes, result.needed_bytes)
    for mark, size in (("W", result.weight_bytes), ("C", result.cache_bytes)):
        assert abs(line.count(mark) - BAR * size / whole) <= 1
    assert ("." in line) == (result.needed_bytes < 0.98 * whole)
    assert line.endswith("]") == result.fits


def test_figures_faster_than_the_floor_are_called_so(capsys):
    _, out, _ = call(capsys, *BOOK, "--prefill-ms", "5", "--decode-ms", "36")
    text = " ".join(out.split())
    assert "Prefill would be faster than the floor" in text


def test_a_picture_shows_the_cache_and_what_fits(capsys, tmp_path):
    file = tmp_path / "plan.png"
    status, *_ = call(capsys, *BOOK, "--plot", str(file))
    assert status == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_line_for_every_memory():
    from minineo.study.figures import plot_cache_growth

    for result in (
        book(batch=4),
        plan("tiny", **OWN),
        plan("2.7b", memory=1, bandwidth=1, tflops=1),
    ):
        growth, capacity = plot_cache_growth(result, gpus=("L4", "H200")).axes
        full, windowed = growth.lines[:2]
        assert full.get_ydata()[-1] == result.cache_bytes_of(result.config.context) / 1e6
        assert windowed.get_ydata()[-1] < full.get_ydata()[-1]
        labels = [line.get_label() for line in capacity.lines]
        for name in (result.processor.name, "L4", "H200"):
            assert any(label.startswith(name) for label in labels)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (327_680, "328 kB"), (16e9, "16 GB"),
     (5_302_615_040, "5.3 GB"), (999_600, "1 MB"), (1.5e13, "15,000 GB")],
)  # fmt: skip
def test_bytes_are_said_in_decimal_units(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (83.2e-6, "83.2 µs"), (0.0235, "23.5 ms"), (0.9996, "1.00 s"), (10.85, "10.85 s")],
)  # fmt: skip
def test_times_are_said_in_the_unit_that_suits_them(seconds, text):
    assert seconds_text(seconds) == text
