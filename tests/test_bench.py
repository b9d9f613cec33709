import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from statistics import median

import numpy as np
import pytest
from rich.console import Console

from minineo import Config, InputError, load
from minineo.checkpoints.read import expected_shapes
from minineo.cli import main
from minineo.cli.bench import print_benchmark
from minineo.study import contestants, costs, hardware
from minineo.study.bench import Benchmark, Plan, Run, bench, check_sizes
from minineo.study.shapes import shape_fields, write_random_model

bench_file = import_module("minineo.study.bench")  # not the function of that name
FIELDS = {
    **shape_fields("tinystories-1m"),
    "vocab_size": 96,
    "eos_token_id": 0,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "num_heads": 2,
    "num_layers": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
}
SMALL = Config(
    vocab=10, context=32, width=4, inner=8, n_layers=2, n_heads=2, windows=(32, 2), end_token=0
)
PARENT = """
import json, os, sys
from minineo.study.bench import bench
benchmark = bench(sys.argv[1], against="transformers", rounds=1, lengths=(6, 9), depths=(5,),
                  batches=(2,))
print(json.dumps({"json": benchmark.to_json(), "pid": os.getpid(), "modules": list(sys.modules)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_random_model(path, FIELDS)
    return path


@pytest.fixture(scope="module")
def measured(folder):
    """What a real run against transformers says, and the process that asked for it."""
    command = [sys.executable, "-c", PARENT, str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def both(folder):
    return contestants.Minineo(str(folder)), contestants.Transformers(str(folder))


def benchmark(busy=0.0, granted=1.0, **changes):
    """A benchmark with samples made by hand: transformers takes twice as long."""
    plan = Plan(lengths=(3, 4), depths=(2, 5), batches=(1, 8))
    samples = {
        ("minineo", "matvec", 0): [1.0, 2.0, 60.0],
        ("minineo", "granted", 0): [granted, 1.0],
    }
    for who, slower in (("minineo", 1), ("transformers", 2)):
        keys = [("load", 0), ("cold", 3), ("prefill", 3), ("prefill", 4), ("decode", 2)]
        keys += [("decode", 5), ("batch", 1), ("batch", 8), ("naive", 3), ("naive", 4)]
        samples |= {(who, *key): [slower * s for s in (4.0, 5.0, 90.0)] for key in keys}
        samples[who, "logits", 3] = [1.0, 2.0]
        samples[who, "loaded", 0] = [100.0]
        samples[who, "peak", 4] = [100.0 + 10 * slower]
    samples |= {("minineo", "matmul", rows): [1.0, 3.0, 4.0] for rows in plan.lengths}
    samples |= changes.pop("samples", {})
    runs = [Run("minineo", 1, 0.0, 1.0, 0.0), Run("transformers", 2, 1.0, 2.0, busy)]
    whole = Benchmark("small", True, SMALL, plan, 3, samples, runs)
    return replace(whole, **changes)


def printed(result):
    console = Console(width=100, file=io.StringIO())
    print_benchmark(result, console)
    return console.file.getvalue()


# figures


def test_arithmetic_bytes_and_calls_of_a_pass_are_told_apart():
    result = benchmark()
    needs = result.to_json()["needs"]
    step = costs.total(costs.pass_costs(SMALL, [1], [5]))
    assert needs["decode"][1] == {
        "depth": 5,
        "flops": step.flops,
        "bytes": step.bytes,
        "launches": costs.launches(SMALL, 1),
    }
    assert needs["naive"][0]["launches"] == costs.launches(SMALL, 3, cached=False)
    assert (
        needs["batch"][1]["flops"] == costs.total(costs.pass_costs(SMALL, [1] * 8, [2] * 8)).flops
    )
    (line,) = [
        each for each in printed(result).splitlines() if "at depth 5  " in each and "ms" not in each
    ]
    assert line.split()[-3:] == [
        f"{step.flops / 1e6:,.1f}", f"{step.bytes / 2**20:,.1f}", f"{costs.launches(SMALL, 1):,}",
    ]  # fmt: skip


def test_a_figure_is_the_median_of_the_samples_that_are_shown_beside_it(measured):
    figures = benchmark().to_json()["contestants"]["minineo"]
    assert figures["prefill"][0]["samples"] == [4.0, 5.0, 90.0]
    assert figures["prefill"][0]["seconds"] == 5.0
    for theirs in measured["json"]["contestants"].values():
        for measure in ("prefill", "decode", "batch", "naive"):
            for figure in theirs[measure]:
                assert figure["seconds"] == median(figure["samples"])


def test_a_ratio_is_minineos_median_over_that_of_transformers():
    samples = {("transformers", "decode", 5): [40.0, 1.0, 50.0]}
    ratios = benchmark(samples=samples).to_json()["ratios"]
    assert ratios["prefill"] == [{"tokens": 3, "ratio": 0.5}, {"tokens": 4, "ratio": 0.5}]
    assert ratios["decode"] == [{"depth": 2, "ratio": 0.5}, {"depth": 5, "ratio": 5 / 40}]
    assert ratios["batch"][1] == {"batch": 8, "ratio": 0.5}
    assert ratios["naive"][0] == {"tokens": 3, "ratio": 0.5}
    assert ratios["load_seconds"] == ratios["first_pass"] == 0.5
    assert (ratios["peak_bytes"], ratios["extra_bytes"]) == (110 / 120, 10 / 20)


def test_without_transformers_there_are_no_ratios():
    alone = benchmark(runs=[Run("minineo", 1, 0.0, 1.0, 0.0)])
    assert alone.to_json()["ratios"] is None
    assert list(alone.to_json()["contestants"]) == ["minineo"]


def test_speed_is_tokens_of_all_rows_per_second():
    figures = benchmark().to_json()["contestants"]["transformers"]
    assert figures["batch"][1]["tokens_per_second"] == 8 / 10
    assert figures["prefill"][1]["tokens_per_second"] == 4 / 10


def test_mbu_is_bytes_per_second_of_a_step_over_those_of_the_products():
    # two layers of 4 x 4 x 4 + 2 x 4 x 8 numbers, and 10 x 4 to the logits: 296 in matrices
    limit = 4 * 296 / 2.0
    assert benchmark().bytes_per_second == limit
    # and each layer's 3 biases and 2 norms, 8 + 4 + 4 + 16 numbers, and the last norm's 8: 368;
    # at depth 5 the global layer sees 6 keys and as many values of 4 numbers, the local one 2
    read = 4 * (368 + 2 * 4 * (6 + 2))
    assert benchmark().mbu("minineo", 5) == pytest.approx(read / 5.0 / limit)
    assert benchmark().mbu("transformers", 5) == pytest.approx(read / 10.0 / limit)


def test_mfu_is_operations_per_second_of_a_prefill_over_those_of_the_products():
    # one layer's 128 numbers with 4 rows
    limit = 2 * 4 * 128 / 3.0
    assert benchmark().flops_per_second(4) == limit
    # 4 queries see 1 + 2 + 3 + 4 keys in the global layer and 1 + 2 + 2 + 2 in the local one;
    # the logits are made for one of them
    flops = 2 * 4 * 2 * 128 + 4 * 4 * (10 + 7) + 2 * 10 * 4
    assert benchmark().mfu("minineo", 4) == pytest.approx(flops / 5.0 / limit)


def test_counted_bytes_are_those_of_the_arrays(folder):
    model = load(folder, device="cpu")
    weights = model.weights
    arrays = [array for block in weights.blocks for part in block for array in part]
    total = sum(array.nbytes for array in (*arrays, *weights.norm, weights.unembedding))
    assert costs.weight_bytes(model.config) == total
    held = [m.size for layer in hardware.matrices_by_layer(weights) for m in layer]
    assert sum(held) + weights.unembedding.size == costs.matrices(model.config)


@pytest.mark.parametrize("window", [1, 3, 7, 20])
def test_counted_pairs_are_those_that_the_window_shows(window):
    distance = np.arange(7)[:, None] - np.arange(7)
    assert costs.visible_pairs(7, window) == ((distance >= 0) & (distance < window)).sum()


# fairness


def test_every_run_is_a_process_of_its_own_and_never_two_at_once(measured):
    runs = measured["json"]["runs"]
    assert [r["contestant"] for r in runs] == ["minineo", "transformers"] * 2
    assert len({measured["pid"], *(r["pid"] for r in runs)}) == 1 + len(runs)
    moments = [moment for r in runs for moment in (r["started"], r["ended"])]
    assert moments == sorted(moments)


def test_the_process_that_waits_imports_neither_torch_nor_transformers(measured):
    assert not {"torch", "transformers"} & set(measured["modules"])


def test_contestants_take_turns_and_all_rounds_count(folder, monkeypatch):
    order = []

    def run(contestant, folder, measures, keep):
        order.append(contestant)
        for measure, *sizes in measures:
            keep(contestant, {"measure": measure, "sizes": sizes, "samples": [len(order)]})
        return len(order)

    monkeypatch.setattr(bench_file, "run", run)
    result = bench(str(folder), against="transformers", rounds=2)
    assert order == ["minineo", "transformers"] * 3
    assert result.samples["transformers", "prefill", 32] == [2, 4]


def test_progress_counts_every_measure(folder):
    seen = []
    sizes = {"lengths": (2,), "depths": (1,), "batches": (1,)}
    bench(str(folder), rounds=1, **sizes, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
    assert {total for _, total in seen} == {len(seen)}


def test_both_contestants_compute_the_same_with_and_without_a_cache(both):
    for rows in (1, 3):
        logits = []
        for contestant in both:
            prompt = contestants.tokens(contestant, 9, rows)
            first, cache = contestant.prefill(prompt)
            new = contestants.tokens(contestant, 1, rows)
            step = contestant.decode(new, cache)
            contestant.undo(cache)
            again = contestant.decode(new, cache)
            np.testing.assert_array_equal(step, again)
            naive = contestant.naive(prompt)
            assert first.shape == naive.shape == step.shape == (rows, 1, 96)
            logits.append(np.concatenate([first, step, naive], axis=1))
        np.testing.assert_allclose(*logits, atol=1e-5)
        np.testing.assert_allclose(logits[0][:, 0], logits[0][:, 2], atol=1e-5)
        assert np.abs(logits[0][:, 0] - logits[0][:, 1]).max() > 1e-3


def test_torch_gets_all_cores_and_float32(both):
    import torch

    assert torch.get_num_threads() == hardware.cores()
    assert {p.dtype for p in both[1].model.parameters()} == {torch.float32}


def test_another_result_of_the_opponent_is_a_warning():
    assert not benchmark().warnings
    other = benchmark(samples={("transformers", "logits", 3): [1.0, 2.1]})
    assert any("logits differ" in warning for warning in other.warnings)
    lost = benchmark(samples={("transformers", "logits", 3): [1.0, float("nan")]})
    assert any("logits differ" in warning for warning in lost.warnings)


def test_limits_are_measured_right_before_what_is_held_against_them():
    plan = Plan(lengths=(64, 2000), depths=(64,))
    ours, theirs = plan.timing("minineo"), plan.timing("transformers")
    for length in plan.lengths:
        assert ours.index(("matmul", length)) + 1 == ours.index(("prefill", length))
    assert ours[ours.index(("decode", 64)) - 1] == ("matvec",)
    limits = {("matvec",), ("granted",), ("matmul", 64), ("matmul", 2000)}
    assert theirs == [measure for measure in ours if measure not in limits]


# what is timed


class Counting:
    """A contestant that notes what it is asked for."""

    vocab = 96

    def __init__(self):
        self.calls, self.length = [], 0

    def tokens(self, ids):
        return ids

    def prefill(self, tokens):
        self.calls.append(("prefill", tokens.shape))
        self.length = tokens.shape[1]
        return np.zeros((len(tokens), 1, 96)), self

    def decode(self, tokens, cache):
        self.calls.append(("decode", tokens.shape, self.length))
        self.length += 1

    def undo(self, cache):
        self.length -= 1

    def naive(self, tokens):
        self.calls.append(("naive", tokens.shape))


def test_the_first_pass_is_timed_once_and_without_a_warm_up():
    contestant = Counting()
    assert len(contestants.time_cold(contestant, 6)) == 1
    assert contestant.calls == [("prefill", (1, 6))]


@pytest.mark.parametrize("measure", ["prefill", "naive"])
def test_a_warm_up_comes_first_and_is_not_counted(measure):
    contestant = Counting()
    samples = contestants.MEASURES[measure](contestant, 6)
    assert len(samples) >= 2
    assert contestant.calls == [(measure, (1, 6))] * (1 + len(samples))


@pytest.mark.parametrize(("length_of_a_pass", "times"), [(0.001, 10), (0.3, 4), (60.0, 2)])
def test_long_passes_are_timed_twice_and_short_ones_ten_times(length_of_a_pass, times, monkeypatch):
    monkeypatch.setattr(contestants, "seconds", lambda run: length_of_a_pass)
    assert contestants.repeat(lambda: None) == [length_of_a_pass] * times


def test_decode_feeds_one_token_to_each_row_always_at_the_same_depth():
    contestant = Counting()
    samples = contestants.MEASURES["batch"](contestant, 4, 7)
    assert contestant.calls[0] == ("prefill", (4, 7))
    assert len(samples) == contestants.DECODE_STEPS
    assert contestant.calls[1:] == [("decode", (4, 1), 7)] * (2 + len(samples))


def test_limits_are_products_with_every_matrix(folder):
    weights = load(folder, device="cpu").weights
    products = hardware.Products([weights.unembedding], rows=3)
    products.seconds([weights.unembedding])
    expected = np.full((3, 16), 0.5, dtype=np.float32) @ weights.unembedding.T
    np.testing.assert_array_equal(products.results[96], expected)
    assert len(hardware.matvec_seconds(weights, repeats=5)) == 5
    assert len(hardware.matmul_seconds(weights, rows=3)) == len(weights.blocks)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_peak_of_memory_begins_anew_where_asked():
    size = 200 * 2**20
    np.ones(size // 8).sum()
    before = hardware.peak_bytes()
    hardware.reset_peak()
    assert hardware.peak_bytes() < before - size // 2
    np.ones(size // 8).sum()
    assert hardware.peak_bytes() > hardware.resident_bytes() + size // 2


def test_the_peak_is_that_of_the_prefill_alone(monkeypatch):
    contestant = Counting()
    monkeypatch.setattr(hardware, "reset_peak", lambda: contestant.calls.append("reset"))
    monkeypatch.setattr(hardware, "peak_bytes", lambda: contestant.calls.append("peak"))
    assert contestants.MEASURES["peak"](contestant, 6) == []  # where the machine tells nothing
    assert contestant.calls == ["reset", ("prefill", (1, 6)), "peak"]


def test_memory_is_weighed_for_the_longest_prefill(measured):
    for figures in measured["json"]["contestants"].values():
        memory = figures["memory"]
        assert memory["tokens"] == 9
        if sys.platform == "linux":
            assert memory["peak_bytes"] > 2**20
            assert 0 <= memory["extra_bytes"] < memory["peak_bytes"]


# other load


def test_a_busy_machine_is_a_warning_that_is_printed_and_in_the_json():
    for noisy in (benchmark(busy=0.5), benchmark(granted=0.6)):
        (warning,) = noisy.to_json()["warnings"]
        assert f"Do not trust these figures: {warning}" in printed(noisy)
    assert "trust" not in printed(benchmark())
    assert benchmark(runs=[Run("minineo", 1, 0.0, 1.0, None)]).warnings == []


def test_a_busy_machine_is_told_of_before_the_first_process(folder, monkeypatch):
    said = []

    def run(*job):
        assert said == ["others keep 1.0 cores busy now: figures will be worthless"]
        raise InputError("seen")

    monkeypatch.setattr(bench_file, "run", run)
    monkeypatch.setattr(hardware, "busy_cores", lambda: 1.0)
    with pytest.raises(InputError, match="seen"):
        bench(str(folder), warn=said.append)
    said.clear()
    for quiet in (0.01, None):
        monkeypatch.setattr(hardware, "busy_cores", lambda quiet=quiet: quiet)
        monkeypatch.setattr(bench_file, "run", lambda *job: 1)
        bench(str(folder), warn=said.append)
    assert said == []


def test_the_work_of_others_is_that_of_the_machine_without_our_own():
    before = hardware.CpuTimes(clock=100.0, machine=50.0, own=10.0)
    assert before.others(hardware.CpuTimes(110.0, machine=68.0, own=15.0)) == pytest.approx(1.3)
    assert before.others(hardware.CpuTimes(110.0, machine=54.0, own=15.0)) == 0


def test_only_cores_that_may_be_used_are_looked_at(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 4000 500 6 7 8 90 0\n"
        "cpu1 5 5 5 5 5 5 5 5 5 5\n"
        "intr 12\n"
    )
    monkeypatch.setattr(hardware, "allowed_cores", lambda: {0})
    ticks = hardware.machine_seconds(stat) * os.sysconf("SC_CLK_TCK")
    assert ticks == pytest.approx(100 + 20 + 30 + 6 + 7 + 8)
    assert hardware.machine_seconds(tmp_path / "none") is None


@pytest.mark.skipif(hardware.CpuTimes.now() is None, reason="this machine does not tell")
def test_a_process_that_is_busy_beside_us_is_seen():
    other = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1
    )
    try:
        other.stdout.read(1)
        assert hardware.busy_cores(0.4) > hardware.BUSY_CORES
    finally:
        other.kill()
        other.communicate()


def test_processor_time_that_was_not_given_is_seen(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "process_time", hardware.perf_counter)
    assert hardware.granted_share(0.05) == pytest.approx(0.5, rel=0.05)


# sizes, shapes, JSON


def test_default_sizes_are_those_that_fit():
    assert check_sizes(None, bench_file.LENGTHS, 2048, "lengths") == (64, 256, 512, 1024, 2000)
    assert check_sizes(None, bench_file.LENGTHS, 512, "lengths") == (64, 256, 512)
    assert check_sizes(None, bench_file.DEPTHS, 511, "depths") == (64, 256)
    assert check_sizes(None, bench_file.LENGTHS, 32, "lengths") == (32,)
    assert Plan((64, 1024, 2000), (64,)).naive_lengths == (64, 1024)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("125m", 125_198_592),
        ("1.3b", 1_315_575_808),
        ("2.7b", 2_651_307_520),
        ("tinystories-33m", 68_514_048),
        ("tinystories-28m", 52.0e6),
        ("tinystories-8m", 19.7e6),
        ("tinystories-3m", 8.3e6),
        ("tinystories-1m", 3.7e6),
    ],
)
def test_shapes_are_those_of_the_public_models(shape, parameters):
    config = Config.from_dict(shape_fields(shape))
    total = sum(int(np.prod(s)) for s in expected_shapes(config).values())
    exact = isinstance(parameters, int)
    assert total == parameters if exact else total == pytest.approx(parameters, abs=0.05e6)
    assert config.windows[:2] == (2048, 256)


def test_random_weights_are_as_large_as_trained_ones_and_the_same_every_time(folder, tmp_path):
    model = load(folder, device="cpu")
    assert model.weights.norm.scale.mean() == pytest.approx(1, abs=0.1)
    assert model.weights.blocks[1].mlp.up.std() == pytest.approx(0.02, rel=0.1)
    write_random_model(tmp_path, FIELDS)
    file = "model.safetensors"
    assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()


def test_a_shape_is_run_with_random_weights_that_are_gone_afterwards(tmp_path, monkeypatch):
    seen = []

    def run(contestant, folder, measures, keep):
        seen.append(folder)
        assert load(folder, device="cpu").config.width == 64
        return 1

    monkeypatch.setattr(bench_file, "run", run)
    result = bench(shape="tinystories-1m", rounds=1)
    assert (result.name, result.random_weights) == ("tinystories-1m", True)
    assert seen
    assert not any(folder.exists() for folder in seen)


def test_json_holds_every_figure(measured):
    data = measured["json"]
    assert data["schema"] == 1
    assert {"model", "random_weights", "shape", "device", "dtype", "cores", "rounds"} <= set(data)
    assert {"warnings", "busy_cores", "granted_share", "hardware", "ratios", "runs"} <= set(data)
    limits = data["hardware"]
    assert limits["matvec_bytes_per_second"] > 0
    assert [row["rows"] for row in limits["matmul_flops_per_second"]] == [6, 9]
    for figures in data["contestants"].values():
        assert [row["tokens"] for row in figures["prefill"]] == [6, 9]
        assert [row["depth"] for row in figures["decode"]] == [5]
        assert [(row["batch"], row["depth"]) for row in figures["batch"]] == [(2, 5)]
        assert [row["tokens"] for row in figures["naive"]] == [6, 9]
        assert all(row["mfu"] > 0 for row in figures["prefill"])
        assert all(row["mbu"] > 0 for row in figures["decode"])
        assert figures["load_seconds"] > 0
        assert figures["first_pass"]["tokens"] == 6
        assert figures["versions"]
    assert data["ratios"]["max_logit_difference"] < 1e-4
    assert not any("logits" in warning for warning in data["warnings"])


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "9b"}, "unknown shape '9b'.*125m"),
        ({"against": "foo"}, "'foo'.*'transformers'"),
        ({"model": "tiny", "shape": "125m"}, "not both"),
        ({"model": "nowhere"}, "unknown model 'nowhere'"),
        ({"rounds": 0}, "rounds is 0"),
        ({"lengths": (33,)}, r"lengths are \[33\].*1 to 32"),
        ({"depths": (32,)}, r"depths are \[32\].*1 to 31"),
        ({"depths": ()}, r"depths are \[\]"),
        ({"batches": (0,)}, r"batches are \[0\]"),
        ({"batches": ()}, r"batches are \[\]"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder, arguments, message, monkeypatch):
    monkeypatch.setattr(bench_file, "run", lambda *job: pytest.fail("a process was started"))
    if not {"model", "shape"} & set(arguments):
        arguments = {"model": str(folder), **arguments}
    with pytest.raises(InputError, match=message) as caught:
        bench(**arguments)
    assert "\n" not in str(caught.value)


def test_transformers_that_is_not_there_is_named_with_the_way_to_get_it(folder, monkeypatch):
    monkeypatch.setattr(bench_file, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(InputError, match=r"^torch cannot be found; run `pip install torch"):
        bench(str(folder), against="transformers")


def test_a_process_that_breaks_down_is_reported_in_one_line(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="measures minineo broke down: cannot read") as caught:
        bench(str(tmp_path), rounds=1)
    assert "\n" not in str(caught.value)


def test_of_a_traceback_the_last_line_is_reported(folder):
    with pytest.raises(InputError, match=r"broke down: KeyError: 'nonsense'$") as caught:
        bench_file.run("minineo", folder, [("nonsense",)], keep=None)
    assert "\n" not in str(caught.value)


def test_what_a_library_prints_is_no_answer(monkeypatch, capsys):
    class Chatty(Counting):
        def __init__(self, folder):
            super().__init__()
            print("Welcome!")

    job = {"contestant": "chatty", "folder": "", "measures": [("cold", 6)]}
    monkeypatch.setitem(contestants.CONTESTANTS, "chatty", Chatty)
    monkeypatch.setattr(sys, "argv", ["contestants", json.dumps(job)])
    contestants.main()
    out, err = capsys.readouterr()
    assert json.loads(out)["measure"] == "cold"
    assert "Welcome!" in err


def test_an_interrupted_benchmark_leaves_no_process_behind(folder, monkeypatch):
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_file, "Popen", Noted)
    with pytest.raises(KeyboardInterrupt):
        bench(str(folder), rounds=1, progress=interrupt)
    (process,) = started
    assert process.returncode is not None
    assert process.returncode != 0


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--shape", "9b"], "9b"), (["--against", "foo"], "foo")]
)
def test_the_command_ends_with_status_2_and_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minineo", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("minineo: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_command_prints_the_figures_or_nothing_but_json(folder, monkeypatch, capsys):
    monkeypatch.setattr("minineo.cli.bench.bench", lambda *args, **options: benchmark())
    for arguments in ([], ["--json", "-"]):
        monkeypatch.setattr(sys, "argv", ["minineo", "bench", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, _ = capsys.readouterr()
        assert not caught.value.code
        if arguments:
            assert json.loads(out)["model"] == "small"
        else:
            assert "prefill of 4" in out
            assert "decode of 8 rows" in out
