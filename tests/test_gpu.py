"""What only a CUDA GPU can tell: `pytest -m gpu`. Speed is measured by `gpu_check.py`."""

from dataclasses import replace

import gpu_check
import numpy as np
import pytest

from minineo import Recompute, compare, generate, generate_batch, load
from minineo.device import choose
from minineo.study import doctor
from minineo.study.shapes import shape_fields

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    """The GPU that works here."""
    found = choose("auto")
    if found.cupy is None:
        pytest.skip(found.why)
    return found


@pytest.fixture(scope="module", params=list(gpu_check.CASES))
def case(request, device):
    """A model, its logits in float64 on the CPU, and those of transformers on this GPU."""
    case = gpu_check.CASES[request.param]()
    exact = gpu_check.logits_of(case.model, [case.ids], Recompute(), last_only=False)[0]
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return case, exact, gpu_check.transformers_logits(case, place)


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_both_paths_are_those_of_float64_and_of_transformers(case, device, dtype, use_kernels):
    case, exact, theirs = case
    chosen = device if use_kernels else replace(device, kernels={})
    row = gpu_check.hold(case, gpu_check.placed(case.model, chosen, dtype), exact, theirs)
    assert row["holds"], row


def test_a_decode_step_launches_each_kernel_as_often_as_predicted(device):
    found = gpu_check.Findings()
    gpu_check.launches(found, device, shape_fields("125m"), gpu_check.profiled)
    assert not found.faults


def test_a_cache_takes_the_memory_that_is_predicted(device):
    found = gpu_check.Findings()
    gpu_check.cache_memory(found, device, shape_fields("125m"))
    assert not found.faults


def test_the_doctor_finds_the_gpu_and_its_speed(device):
    findings = {each.name: each for each in doctor.examine_gpus()}
    assert doctor.healthy([*findings.values()])
    for name in ("CuPy", "driver", "NVRTC", "cuBLAS", "cuda:0", "cuda:0 kernel", "cuda:0 matmul"):
        assert doctor.works(findings[name]), findings[name]
    assert findings["cuda:0 kernel"].numbers["bytes_per_second"] > 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_paths_agree_and_write_what_the_cpu_does(device, dtype):
    prompt = "Once upon a time, there was a"
    comparison = compare(load("tiny", device="cuda", dtype=dtype), prompt, max_new_tokens=12)
    assert comparison.agree
    assert comparison.model.device.kernels
    on_cpu = generate(load("tiny", device="cpu"), prompt, max_new_tokens=12, stop_at_end=False)
    assert comparison.new_ids == [step.token for step in on_cpu]


def test_rows_of_a_batch_are_those_on_the_cpu(device):
    prompts = ["Once upon a time", "The little dog"]
    models = [load("tiny", device=name) for name in ("cuda", "cpu")]
    options = {"max_new_tokens": 6, "stop_at_end": False}
    ours, theirs = (list(generate_batch(each, prompts, **options)) for each in models)
    for steps, twins in zip(ours, theirs, strict=True):
        assert [step.token for step in steps] == [step.token for step in twins]
        for step, twin in zip(steps, twins, strict=True):
            np.testing.assert_allclose(step.logits, twin.logits, atol=1e-4)
