"""`gpu_check.py` does its work: every section at a small size, on a CPU and on the stand-in."""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import numpy as np
import pytest
from gpu_check import Findings, Minineo, Transformers
from small import TINY

from minineo.cuda import kernels
from minineo.device import choose
from minineo.transformer import attention
from minineo.transformer.replaceable import replaced

CPU = choose("cpu")
SCRIPT = Path(gpu_check.__file__)


TWO_LAYERS = TINY | {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}


def tiny_case(fields=TINY):
    return gpu_check.random_case("tiny shapes", fields)


class Here:
    """A contestant in this process, in place of one of its own."""

    def __init__(self, make):
        self.make, self.kept = make, {}

    def begin(self, task):
        self.task = json.loads(json.dumps(task))

    def result(self):
        return json.loads(json.dumps(gpu_check.answer(self.make, self.kept, self.task)))


@pytest.fixture
def askers(monkeypatch):
    monkeypatch.setattr(gpu_check, "BUDGET", 0)
    monkeypatch.setattr(gpu_check, "free", lambda: None)
    monkeypatch.setattr(Minineo.limits, "__defaults__", (2**10, 16))

    def ours(fields, dtype):
        return Minineo(fields, dtype, CPU)

    def theirs(fields, dtype):
        return Transformers(fields, dtype, "cpu")

    return dict(zip(gpu_check.NAMES, map(Here, (ours, ours, theirs)), strict=True))


# parity


def test_parity_holds_on_a_cpu_in_both_dtypes_and_against_transformers():
    found = Findings()
    gpu_check.parity(found, [CPU], "cpu", {"tiny shapes": tiny_case})
    assert not found.faults
    assert [row["dtype"] for row in found.data["rows"]] == ["float32", "float16"]
    for row in found.data["rows"]:
        assert list(row["differences"]) == [
            "naive",
            "prefill",
            "decode",
            "chunk",
            "ragged prefill",
            "ragged decode",
        ]
        assert row["holds"]
        assert 0 < max(row["differences"].values()) <= row["tolerance"]
    assert 0 < found.data["rows"][0]["transformers_difference"] < 1e-4
    assert 0 < found.data["transformers_from_float64"]["tiny shapes"] < 1e-4


def test_the_models_of_the_parity_section_are_there():
    assert list(gpu_check.CASES) == ["tiny shapes", "embedded", "125m"]
    case = gpu_check.embedded()
    assert case.model.dtype == "float64"
    assert case.model.config.tied is case.fields["tie_word_embeddings"]
    assert len(case.ids) > max(case.model.config.windows[1] + gpu_check.STEPS, 64)
    exact = gpu_check.logits_of(case.model, [case.ids], gpu_check.Recompute(), last_only=False)[0]
    theirs = gpu_check.transformers_logits(case, "cpu")
    assert np.abs(theirs - exact).max() < 1e-4


@pytest.mark.parametrize("fault", ["shifted", "not a number"])
def test_a_fault_of_one_path_fails_loudly_and_the_rest_still_runs(fault, capsys):
    def faulty(queries, keys, *rest):
        mixed = attention.attend.__wrapped__(queries, keys, *rest)
        cached = queries.shape[2] < keys.shape[2]
        return mixed + (1e-2 if fault == "shifted" else np.nan) if cached else mixed

    found = Findings()
    with replaced(attend=faulty):
        gpu_check.parity(found, [CPU], "cpu", {"tiny shapes": tiny_case})
    assert [row["holds"] for row in found.data["rows"]] == [False, False]
    found.seconds = 1
    assert found.to_json()["status"] == "failed"
    assert "FAILED" in capsys.readouterr().err
    row = gpu_check.plain(found.data)["rows"][0]
    assert not row["paths_agree"]
    assert row["differences"]["naive"] < 1e-4
    json.dumps(row, allow_nan=False)


def test_what_breaks_down_is_a_fault_with_its_traceback():
    found = Findings()
    broken = replace(CPU, kernels={"linear": lambda *inputs: 1 / 0})
    gpu_check.parity(found, [broken, CPU], "nowhere", {"tiny shapes": tiny_case, "none": dict})
    assert len(found.data["rows"]) == 2  # those of the device that works
    assert sum("ZeroDivisionError" in fault for fault in found.faults) == 2
    assert any("nowhere" in fault for fault in found.faults)  # transformers
    assert any("parity of none" in fault for fault in found.faults)


def test_no_time_left_is_a_fault_of_what_must_be_done_and_else_is_said():
    found = Findings(end=0)
    found.attempt("a must", pytest.fail)
    found.attempt("a wish", pytest.fail, optional=True)
    assert found.left_out == ["a must", "a wish"]
    assert found.faults == ["a must: no time was left"]


def test_a_section_that_has_not_come_to_its_end_has_failed():
    found = Findings()
    assert found.to_json()["status"] == "failed"
    found.seconds = 1
    assert found.to_json()["status"] == "ok"


# on the stand-in, which runs the kernels


@pytest.fixture
def gpu(monkeypatch):
    stand_in = pytest.importorskip("test_cuda_kernels")
    if stand_in.pytestmark.args[0]:
        pytest.skip(stand_in.pytestmark.kwargs["reason"])
    monkeypatch.setattr(kernels, "THREADS", 8)
    monkeypatch.setattr(kernels, "ATTEND_THREADS", 8)
    model, _ = stand_in.on_gpu(tiny_case().model.config)
    return model.device


def test_parity_holds_with_kernels_and_without(gpu, monkeypatch):
    monkeypatch.setattr(gpu_check, "STEPS", 2)
    found = Findings()
    devices = [gpu, replace(gpu, kernels={})]
    gpu_check.parity(found, devices, "cpu", {"tiny shapes": lambda: tiny_case(TWO_LAYERS)})
    assert not found.faults
    assert [(row["dtype"], row["kernels"]) for row in found.data["rows"]] == [
        ("float32", True),
        ("float32", False),
        ("float16", True),
        ("float16", False),
    ]


def test_launches_of_a_decode_step_are_counted_kernel_by_kernel(gpu):
    def profiled(work, synchronize):
        work()
        synchronize()
        return {"some kernel": 54}

    found = Findings()
    gpu_check.launches(found, gpu, TINY, profiled)
    assert not found.faults
    own, products = sum(found.data["own"].values()), found.data["matrix_products"]
    assert own + products + 4 == found.data["predicted"]  # two lookups, their sum, the last token
    assert found.data["profiled_total"] == 54


def test_a_profiler_that_is_forbidden_is_no_fault(gpu):
    found = Findings()
    gpu_check.launches(found, gpu, TINY, lambda *inputs: 1 / 0)
    assert not found.faults
    assert found.left_out == ["profiler: division by zero"]
    assert found.data["profiled_total"] is None


# speed


def test_all_contestants_are_timed_in_turn_at_each_size(askers):
    found, order = Findings(), []
    for name, asker in askers.items():
        asker.begin = lambda task, name=name, begin=asker.begin: (order.append(name), begin(task))
    gpu_check.speed(found, askers, CPU, [("125m", TINY, "float32")], (5, 9), (4, 8), rounds=2)
    assert not found.faults
    assert [(row["measure"], row["size"]) for row in found.data["rows"]] == [
        ("prefill", 5),
        ("prefill", 9),
        ("decode", 4),
        ("decode", 8),
    ]
    a_round = ["minineo", *4 * gpu_check.NAMES]  # the limits, and four measures
    assert order == [*gpu_check.NAMES, *a_round, *a_round, *gpu_check.NAMES]  # load, ..., drop
    assert not any(asker.kept for asker in askers.values())
    for row in found.data["rows"]:
        assert list(row["contestants"]) == list(gpu_check.NAMES)
        for figures in row["contestants"].values():
            assert figures["seconds"] > 0
            assert figures["share_of_limit"] > 0
            assert len(figures["samples"]) == 2 * gpu_check.FEWEST
        assert row["contestants"]["transformers"]["ratio_to_transformers"] == 1
    assert found.data["contestants"]["transformers"]["tf32"] is False
    assert found.data["decode_within_half_of_transformers"] in (True, False)
    (limits,) = found.data["limits"]
    assert limits["bytes_per_second"] > 0
    assert limits["flops_per_second"] > 0


def test_a_contestant_that_fails_is_asked_no_more_and_the_others_go_on(askers):
    askers["transformers"].make = lambda fields, dtype: 1 / 0
    found = Findings()
    gpu_check.speed(found, askers, CPU, [("tiny", TINY, "float16")], (5,), (4,), rounds=1)
    assert len(found.faults) == 1
    assert "ZeroDivisionError" in found.faults[0]
    for row in found.data["rows"]:
        assert list(row["contestants"]) == ["minineo", "minineo without kernels"]
        assert row["contestants"]["minineo"]["ratio_to_transformers"] is None


def test_a_race_that_no_time_is_left_for_is_left_out(askers):
    found = Findings(end=0)
    gpu_check.speed(found, askers, CPU, [("tiny", TINY, "float32")])
    assert found.left_out == ["speed of tiny in float32"]
    assert not found.faults


def test_a_race_that_does_not_fit_into_the_memory_is_left_out_with_the_reason(monkeypatch):
    """125M in float32: 3 x (0.50 GB of weights + 0.15 GB of keys and values) + 4 GB."""
    memory = SimpleNamespace(free=5_920_000_000)
    device, fields = SimpleNamespace(memory=lambda: memory), gpu_check.shape_fields("125m")
    reason = "3 such models at once need 5.9 GB of the GPU's memory, and 5.9 GB are free"
    assert gpu_check.too_little_memory(device, fields, "float32") == reason
    memory.free += 10_000_000
    assert gpu_check.too_little_memory(device, fields, "float32") is None

    def speed_of(found, askers, *race):
        raced.append(race[:3])
        memory.free -= 500_000_000

    raced, found = [], Findings()
    monkeypatch.setattr(gpu_check, "speed_of", speed_of)
    races = [("125m", fields, dtype) for dtype in ("float32", "float32", "float16")]
    gpu_check.speed(found, {}, device, races)
    assert not found.faults
    assert raced == [races[0], races[2]]
    reason = "3 such models at once need 5.9 GB of the GPU's memory, and 5.4 GB are free"
    assert found.left_out == [f"speed of 125m in float32: {reason}"]


def test_the_page_says_how_much_memory_each_race_needs():
    device = SimpleNamespace(memory=lambda: SimpleNamespace(free=0))
    needed = [
        float(re.search(r"need ([\d.]+) GB", gpu_check.too_little_memory(device, fields, dtype))[1])
        for name, dtype in gpu_check.RACES
        for fields in [gpu_check.shape_fields(name)]
    ]
    page = (SCRIPT.parent.parent / "docs/how-to/gpu.md").read_text(encoding="utf-8")
    table = re.search(r"\| free memory.*?\n\n", page, re.DOTALL)[0]
    assert [float(each) for each in re.findall(r"^\| ([\d.]+) \|", table, re.M)] == sorted(needed)


def test_what_has_begun_is_waited_for_even_if_time_is_over_so_that_answers_stay_in_step(askers):
    found = Findings()
    load = askers["transformers"].begin

    def begin(task):
        load(task)
        found.end = 0  # the time is over once all load

    askers["transformers"].begin = begin
    gpu_check.race(found, askers, TINY, "float32", [{"measure": "naive", "size": 3}])
    assert not found.faults
    assert list(found.data["contestants"]) == list(gpu_check.NAMES)
    assert not any(asker.kept for asker in askers.values())


def test_a_contestant_drops_its_model_before_it_gives_the_memory_back(monkeypatch):
    kept, calls = {"contestant": object()}, []
    pool = SimpleNamespace(free_all_blocks=lambda: calls.append(("cupy", dict(kept))))
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(empty_cache=lambda: calls.append(("torch", dict(kept))))
    )
    monkeypatch.setattr(gpu_check.gc, "collect", lambda: calls.append(("gc", dict(kept))))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert gpu_check.answer(None, kept, {"measure": "drop"}) == {}
    assert calls == [("gc", {}), ("cupy", {}), ("torch", {})]


def test_transformers_makes_its_weights_in_their_dtype(monkeypatch):
    """In float32 first, they would take twice the memory in float16."""
    torch = pytest.importorskip("torch")
    made = []
    wanted = torch.nn.Linear.__init__

    def linear(self, *inputs, **options):
        wanted(self, *inputs, **options)
        made.append(self.weight.dtype)

    monkeypatch.setattr(torch.nn.Linear, "__init__", linear)
    contestant = Transformers(TINY, "float16", "cpu")
    assert set(made) == {torch.float16}
    assert {each.dtype for each in contestant.model.parameters()} == {torch.float16}
    assert torch.get_default_dtype() == torch.float32


def test_contestants_make_the_same_passes(askers):
    """With the same weights, both return the same logits from prefill, decode and naive pass."""
    ours, theirs = Minineo(TINY, "float32", CPU), Transformers(TINY, "float32", "cpu")
    case = tiny_case()
    ours.model = gpu_check.placed(case.model, CPU, "float32")
    names = gpu_check.leaves(gpu_check.assemble(lambda name: name, case.model.config))
    tensors = dict(zip(names, gpu_check.leaves(ours.model.weights), strict=True))
    for name, parameter in theirs.model.transformer.named_parameters():
        parameter.data[...] = theirs.torch.tensor(tensors[name])
    found = []
    for contestant in (ours, theirs):
        prompt, new = (gpu_check.contestants.tokens(contestant, length, 2) for length in (9, 1))
        first, cache = contestant.prefill(prompt)
        steps = []
        for _ in range(2):  # the second time after an undo
            steps.append(contestant.decode(new, cache))
            contestant.undo(cache)
        found.append([np.asarray(each) for each in (first, contestant.naive(prompt), *steps)])
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


# paths, batches, memory


def test_naive_and_cached_steps_batches_and_memory(askers):
    found = Findings()
    gpu_check.paths(found, askers, CPU, TINY, lengths=(4, 8), batches=(1, 3), depth=5)
    assert not found.faults
    assert list(found.data["steps"]) == ["minineo", "minineo without kernels"]
    for steps in found.data["steps"].values():
        assert [step["length"] for step in steps] == [4, 8]
        assert all(step["naive_seconds"] > 0 < step["cached_seconds"] for step in steps)
    assert [row["batch"] for row in found.data["batches"]] == [1, 3]
    for row in found.data["batches"]:
        for figures in row["contestants"].values():
            assert figures["tokens_per_second"] == row["batch"] / figures["seconds"]
    memory = found.data["cache_memory"]
    assert memory["predicted_bytes"] == memory["array_bytes"] == 4 * 32 * 2 * 4 * 4 * 32
    assert memory["measured_bytes"] is None


@pytest.mark.parametrize(("used", "faults"), [(131_072, 0), (131_584, 0), (10**6, 1), (1, 1)])
def test_memory_that_the_pool_gave_is_held_against_the_prediction(used, faults):
    readings = iter([SimpleNamespace(used=0), SimpleNamespace(used=used)])
    device = SimpleNamespace(put=CPU.put, memory=lambda: next(readings))
    found = Findings()
    gpu_check.cache_memory(found, device, TINY)
    assert found.data["cache_memory"]["predicted_bytes"] == 131_072
    assert len(found.faults) == faults


@pytest.mark.parametrize(
    ("cached", "naive", "length"),
    [([1, 1, 1], [2, 2, 2], 1), ([3, 1, 1], [2, 2, 2], 2), ([1, 3, 1], [2, 2, 2], 3)],
)
def test_the_crossover_is_where_the_cached_step_begins_to_be_faster_for_good(cached, naive, length):
    steps = [
        {"length": i, "cached_seconds": c, "naive_seconds": n}
        for i, (c, n) in enumerate(zip(cached, naive, strict=True), 1)
    ]
    assert gpu_check.crossover(steps) == length
    assert gpu_check.crossover([{"length": 1, "cached_seconds": 2, "naive_seconds": 1}]) is None


# the script itself


class FakeCupy:
    """As much of `cupy` as the section on the environment reads."""

    __version__ = "14"

    class cuda:  # noqa: N801 - CuPy's own name
        class runtime:  # noqa: N801
            getDeviceProperties = staticmethod(lambda index: {"name": b"a GPU"})  # noqa: N815
            driverGetVersion = staticmethod(lambda: 13000)  # noqa: N815
            runtimeGetVersion = staticmethod(lambda: 13020)  # noqa: N815

        nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
        Device = staticmethod(lambda index: SimpleNamespace(compute_capability="90"))


def test_the_environment_is_written_down():
    memory = SimpleNamespace(total=2, free=1)
    device = SimpleNamespace(cupy=FakeCupy, index=0, memory=lambda: memory)
    found = Findings()
    gpu_check.environment(found, device)
    assert found.data["gpu"] == "a GPU"
    assert found.data["versions"].keys() == {"minineo", "numpy", "torch", "transformers", "cupy"}
    torch = pytest.importorskip("torch")
    assert bool(found.faults) is not torch.cuda.is_available()


def test_all_sections_run_in_their_order_and_share_one_set_of_contestants(monkeypatch):
    made, closed = [], []

    class Process(Here):
        def __init__(self, name, end):
            made.append(name)

        def close(self):
            closed.append(self)

    ran = []
    for name in ("environment", "parity", "launches", "speed", "paths"):

        def section(found, *inputs, name=name):
            ran.append(name)
            if name == "parity":
                raise ZeroDivisionError

        monkeypatch.setattr(gpu_check, name, section)
    monkeypatch.setattr(gpu_check, "Process", Process)
    monkeypatch.setattr(gpu_check, "free", lambda: None)
    found = {}
    gpu_check.examine(CPU, found)
    results = {name: each.to_json() for name, each in found.items()}
    assert ran == ["environment", "parity", "launches", "speed", "paths"]
    assert list(results) == list(gpu_check.SECONDS)
    assert made == list(gpu_check.NAMES)
    assert len(closed) == 3
    assert [result["status"] for result in results.values()] == ["ok", "failed", *["ok"] * 3]
    assert "ZeroDivisionError" in results["parity"]["faults"][0]
    gpu_check.examine(CPU, found := {}, "counts")
    assert list(found) == ["counts"]
    assert sum(gpu_check.SECONDS.values()) < gpu_check.ALARM < 300


def test_a_process_answers_line_by_line_and_says_what_went_wrong():
    """Without a GPU, that is why there is none."""
    if choose("auto").cupy is not None:
        pytest.skip("there is a GPU: test_gpu.py runs the real thing")
    with ExitStack() as stack:
        process = gpu_check.Process("minineo", gpu_check.perf_counter() + 60)
        stack.callback(process.close)
        if hasattr(os, "getsid"):  # Ctrl-C goes to a session, and is for the script alone
            assert os.getsid(process.process.pid) != os.getsid(0)
        for _ in range(2):
            process.begin({"measure": "load", "fields": TINY, "dtype": "float32"})
            with pytest.raises(RuntimeError, match="cuda does not work here"):
                process.result()
        process.process.stdin.close()
        with pytest.raises(RuntimeError, match="the process of minineo ended"):
            process.result()


def test_a_contestant_serves_one_task_after_the_other(monkeypatch, capsys):
    tasks = [
        {"measure": "load", "fields": TINY, "dtype": "float32"},
        {"measure": "naive", "size": 3},
        {"measure": "naive", "size": 1000},
    ]
    make = lambda name: lambda fields, dtype: Minineo(fields, dtype, CPU)  # noqa: E731
    monkeypatch.setattr(gpu_check, "contestant_maker", make)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, tasks))))
    gpu_check.serve("minineo")
    loaded, naive, too_long = map(json.loads, capsys.readouterr().out.splitlines())
    assert loaded == {"value": {"kernels": False, "tf32": False}}
    assert len(naive["value"]) >= gpu_check.FEWEST
    assert "InputError" in too_long["error"]


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_it_prints_one_json_and_a_failure_is_its_exit_status(status, monkeypatch, capsys, tmp_path):
    def examine(device, results, only):
        print("what a library prints")
        found = results[only] = Findings()
        found.data["difference"], found.seconds = float("nan"), 0
        found.expect(status == "ok", "a fault")

    file = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_check, "choose", lambda name: CPU)
    monkeypatch.setattr(gpu_check, "examine", examine)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--only", "counts", "--out", str(file)])
    assert gpu_check.main() == (status == "failed")
    printed, said = capsys.readouterr()
    report = json.loads(printed)
    assert report == json.loads(file.read_text(encoding="utf-8"))
    assert report["schema"] == 1
    assert report["passed"] is (status == "ok")
    assert report["sections"]["counts"]["difference"] is None
    assert "what a library prints" in said


def test_ctrl_c_reports_what_there_is(monkeypatch, capsys, tmp_path):
    def section(found, *inputs):
        found.data["difference"] = 1e-6

    def stopped(found, *inputs):
        found.data["layers"] = 12
        raise KeyboardInterrupt

    file = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_check, "choose", lambda name: CPU)
    monkeypatch.setattr(gpu_check, "environment", section)
    monkeypatch.setattr(gpu_check, "parity", section)
    monkeypatch.setattr(gpu_check, "launches", stopped)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(file)])
    assert gpu_check.main() == 130
    printed, said = capsys.readouterr()
    report = json.loads(printed)
    assert report == json.loads(file.read_text(encoding="utf-8"))
    assert report["passed"] is False
    sections = report["sections"]
    assert list(sections) == ["environment", "parity", "counts"]
    assert [each["status"] for each in sections.values()] == ["ok", "ok", "failed"]
    assert sections["parity"]["difference"] == 1e-6
    assert sections["counts"]["layers"] == 12
    assert said.splitlines()[-1].startswith("interrupted after ")


def test_ctrl_c_between_two_sections_is_no_success(monkeypatch, capsys):
    def examine(device, results, only):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "choose", lambda name: CPU)
    monkeypatch.setattr(gpu_check, "examine", examine)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert gpu_check.main() == 130
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.parametrize("name", ["miss/ing.json", ""])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_check, "choose", pytest.fail)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path / name)])
    assert gpu_check.main() == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert len(said.splitlines()) == 1
    assert re.search("does not exist|is a folder", said)
    assert list(tmp_path.iterdir()) == []


def test_without_its_packages_it_ends_at_once_with_the_command_that_installs_them():
    """Not even NumPy is there without site-packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, "-S", SCRIPT], capture_output=True, text=True, env=env)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr == (
        f"not installed: numpy, torch, transformers, cupy; {sys.executable} -m pip install "
        "numpy torch transformers 'cupy-cuda13x[ctk]' "
        "(cupy-cuda12x where nvidia-smi names a CUDA below 13)\n"
    )


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        (["torch"], "not installed: torch; python -m pip install torch"),
        (
            ["torch", "transformers"],
            "not installed: torch, transformers; python -m pip install torch transformers",
        ),
        (["cupy"], None),  # `choose` says it, and which CuPy the driver needs
        ([], None),
    ],
)
def test_of_its_packages_it_names_those_that_are_missing(absent, line, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name in absent else name)
    monkeypatch.setattr(sys, "executable", "python")
    assert gpu_check.missing_packages() == line


def test_without_a_gpu_it_ends_at_once_with_one_line():
    if choose("auto").cupy is not None:
        pytest.skip("there is a GPU: test_gpu.py runs the real thing")
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("cuda does not work here: ")
    assert "--device" not in ran.stderr  # it has no such option
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a permission there")
def test_it_starts_from_a_source_tree_that_is_not_installed(tmp_path):
    """Beside a copy of the installed packages that lacks minineo and what a GPU does not need."""
    absent = re.compile("minineo|__editable__|_editable|typer|rich|matplotlib|threadpoolctl", re.I)
    for folder in {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}:
        for entry in Path(folder).iterdir():
            if not absent.match(entry.name):
                Path(tmp_path, entry.name).symlink_to(entry)
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import gpu_check, minineo; "
        "from minineo.device import choose; from minineo.study import doctor; "
        "print(minineo.__version__, gpu_check.embedded().model.config.n_layers)"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program, SCRIPT.parent],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert ran.stderr == ""
    assert ran.stdout == "0+source 6\n"
