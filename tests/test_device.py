import sys
import types

import numpy as np
import pytest
from small import tiny_config
from threadpoolctl import threadpool_info

from minineo import InputError
from minineo.device import choose


def cupy_that(**attributes):
    return types.SimpleNamespace(**attributes)


def fails(message):
    def ones(*args, **kwargs):
        raise RuntimeError(message)

    return ones


def test_without_cupy_auto_takes_the_cpu_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device = choose("auto")
    assert device.name == "cpu"
    assert "cupy" in device.why


def test_without_cupy_cuda_fails_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"cupy.*minineo\[cuda12\].*--device cpu"):
        choose("cuda")


def test_a_cupy_that_cannot_compute_is_not_used(monkeypatch):
    broken = cupy_that(ones=fails("no CUDA-capable device is detected\nmore"))
    monkeypatch.setitem(sys.modules, "cupy", broken)
    assert choose("auto").why == "no CUDA GPU in use: no CUDA-capable device is detected"
    with pytest.raises(InputError, match="no CUDA-capable device is detected"):
        choose("cuda")


def test_a_cupy_that_computes_wrongly_is_not_used(monkeypatch):
    wrong = cupy_that(ones=lambda shape, dtype: np.zeros(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", wrong)
    assert choose("auto").name == "cpu"


def test_a_cupy_that_computes_is_used(monkeypatch):
    waited = []
    stream = cupy_that(synchronize=lambda: waited.append(True))
    working = cupy_that(
        ones=np.ones,
        asarray=lambda a: ("there", a),
        asnumpy=lambda a: a[1],
        cuda=cupy_that(get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", working)
    device = choose("auto")
    assert (device.name, device.why) == ("cuda", "")
    assert device.get(device.put(7)) == 7
    device.synchronize()
    assert waited == [True]


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(InputError, match="unknown device 'tpu': choose auto, cpu or cuda"):
        choose("tpu")


@pytest.mark.parametrize(
    ("width", "tokens", "cores"),
    [(128, 1, 1), (128, 256, 1), (128, 257, None), (256, 64, 1), (768, 1, None)],
)
def test_a_small_pass_keeps_to_one_core_and_leaves_the_others_as_they_were(width, tokens, cores):
    config = tiny_config(hidden_size=width)
    before = blas_threads()
    with choose("cpu").threads(config, tokens):
        assert blas_threads() == ([cores] * len(before) if cores else before)
    assert blas_threads() == before


def blas_threads():
    return [blas["num_threads"] for blas in threadpool_info() if blas["user_api"] == "blas"]
