import json
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest
from test_cli import call
from test_device import (
    BROKEN_IMPORT,
    NO_CUBLAS,
    NO_DEVICE,
    NO_DRIVER,
    NO_NVRTC,
    TWO_WHEELS,
    WHEEL,
    FakeCupy,
    machine,  # noqa: F401 - a fixture
)

from minineo import InputError, KVCache
from minineo.study import doctor, hardware
from minineo.study.doctor import Finding, examine, healthy, summary


@pytest.fixture(autouse=True)
def quick(monkeypatch, machine):  # noqa: F811
    """Small measurements, on the driver that the fake machine has."""
    monkeypatch.setattr(doctor, "SIDE", 16)
    monkeypatch.setattr(doctor, "SHAPE", "tinystories-1m")
    monkeypatch.setattr(doctor.hardware, "busy_cores", lambda seconds: 0.0)

    def has(*args, driver=(13, 0), **options):
        monkeypatch.setattr(doctor, "driver_cuda", lambda: driver)
        return machine(*args, driver=driver, **options)

    has()
    return has


def by_name(findings):
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings), "each is named once"
    return named


def printed(capsys, *arguments):
    status, out, err = call(capsys, "doctor", *arguments)
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    return status, " ".join(out.split())


def test_without_cupy_the_cpu_path_works_and_that_is_no_failure(capsys):
    status, out = printed(capsys)
    assert status == 0
    assert "CuPy missing CuPy is not installed" in out
    assert "-> pip install 'cupy-cuda13x[ctk]'" in out
    assert out.endswith(
        "The CPU path works; a GPU is not in use because CuPy is not installed (import of cupy "
        "halted; None in sys.modules)."
    )


def test_what_is_read_is_what_is_there():
    found = by_name(examine())
    assert found["Python"].found.startswith(sys.version.split()[0])
    assert sys.executable in found["Python"].found
    assert found["minineo"].found == version("minineo")
    assert np.__version__ in found["NumPy"].found
    assert found["cores"].numbers == {"cores": hardware.cores(), "busy": 0.0}
    assert found["memory"].numbers["bytes"] > 2**28
    assert all(number > 0 for number in found["speed"].numbers.values())
    assert 0 < found["both paths"].numbers["seconds"] < 10
    for package in ("tokenizers", "matplotlib"):
        assert found[package] == Finding("extras", package, "ok", version(package))


def test_the_numbers_are_written_for_a_program(capsys):
    status, out, err = call(capsys, "doctor", "--json", "-")
    data = json.loads(out)
    assert (status, err, data["schema"], data["healthy"]) == (0, "", 1, True)
    assert data["summary"].startswith("The CPU path works; ")
    for finding in data["findings"]:
        assert finding.keys() == {"part", "name", "state", "found", "cure", "numbers"}
        assert finding["state"] in ("ok", "missing", "wrong")
        assert (finding["state"] == "ok") or finding["cure"], "whatever is wrong has a cure"


@pytest.mark.parametrize(
    ("broken", "driver", "wheels", "name", "state", "text", "cure"),
    [
        ({"gpu": NO_DRIVER}, None, WHEEL, "driver", "missing", "there is no NVIDIA driver",
         "install its driver"),
        ({"gpu": NO_DRIVER}, (12, 4), WHEEL, "driver", "wrong",
         "the driver supports CUDA up to 12.4, and is too old for cupy-cuda13x", "cupy-cuda12x[ctk]"),
        ({"gpu": NO_DRIVER}, (12, 4), WHEEL, "NVRTC", "wrong", "NVRTC 13.0 compiles for a newer",
         "update the driver"),
        ({"gpu": NO_DEVICE}, (13, 0), WHEEL, "GPU", "missing", "no GPU is to be seen",
         "CUDA_VISIBLE_DEVICES"),
        ({"kernel": NO_NVRTC}, (13, 0), WHEEL, "NVRTC", "wrong", "a CUDA library is missing",
         "'cupy-cuda13x[ctk]'"),
        ({"kernel": NO_NVRTC}, (13, 0), WHEEL, "cuda:0", "wrong", "libnvrtc", "[ctk]"),
        ({"matmul": NO_CUBLAS}, (13, 0), WHEEL, "cuBLAS", "wrong", "libcublasLt.so.13", "[ctk]"),
        ({"matmul": NO_CUBLAS}, (13, 0), WHEEL, "cuda:0", "wrong", "libcublasLt.so.13", "[ctk]"),
        ({"matmul": 1.0}, (13, 0), WHEEL, "cuda:0", "wrong", "a first matmul gave a wrong result",
         "update the driver"),
        ({}, (13, 0), TWO_WHEELS, "CuPy", "wrong", "more than once",
         "pip uninstall cupy-cuda12x cupy-cuda13x"),
    ],
)  # fmt: skip
def test_what_keeps_a_gpu_out_of_use(
    quick, capsys, broken, driver, wheels, name, state, text, cure
):
    quick(FakeCupy(**broken), driver=driver, wheels=wheels)
    findings = examine()
    finding = by_name(findings)[name]
    assert finding.state == state
    assert text in finding.found
    assert cure in finding.cure
    assert summary(findings).startswith("The CPU path works; a GPU is not in use because ")
    status, out = printed(capsys)
    assert status == (not healthy(findings)) == any(each.state == "wrong" for each in findings)
    assert f"{name} {state}" in out


def test_the_broken_libraries_of_a_machine_without_a_driver_are_wrong_all_the_same(quick):
    quick(FakeCupy(gpu=NO_DRIVER, kernel=NO_NVRTC, matmul=NO_CUBLAS), driver=None, wheels=WHEEL)
    findings = examine()
    assert not healthy(findings)
    assert {each.name: each.state for each in findings if each.part == "GPU"} == {
        "CuPy": "ok", "driver": "missing", "NVRTC": "wrong", "cuBLAS": "wrong",
    }  # fmt: skip
    assert summary(findings).endswith("because there is no NVIDIA driver.")


class Broken:
    """A module that cannot be used, as a package leaves it whose files are gone."""

    __version__ = "14.2.0"


@pytest.mark.parametrize("wheels", [(), WHEEL])
def test_a_cupy_without_files_is_wrong(quick, wheels):
    quick(Broken(), wheels=wheels)
    finding = by_name(examine())["CuPy"]
    assert finding.state == "wrong"
    assert finding.found.startswith("files of CuPy are missing or broken ('Broken' object has no")


def test_a_cupy_that_cannot_be_imported_is_wrong(quick, monkeypatch):
    def broken():
        raise BROKEN_IMPORT

    monkeypatch.setattr(doctor, "import_cupy", broken)
    finding = by_name(examine())["CuPy"]
    assert (finding.state, "numpy.core.multiarray" in finding.found) == ("wrong", True)


def test_gpus_that_work_are_measured(quick, capsys):
    quick(FakeCupy(2), wheels=WHEEL)
    findings = examine()
    found = by_name(findings)
    assert all(finding.state == "ok" for finding in findings if finding.part == "GPU")
    assert found["CuPy"].found == "14.2.0, cupy-cuda13x, made for CUDA 13.2"
    assert found["driver"].found == "supports CUDA up to 13.0"
    assert found["NVRTC"].found == "13.0"
    for index in (0, 1):
        finding = found[f"cuda:{index}"]
        assert f"NVIDIA Fake {index}, compute capability 9.0, 3.0 GiB free" in finding.found
        assert finding.numbers == {"free_bytes": 3 * 2**30, "bytes": (4 + index) * 2**30}
        kernel = found[f"cuda:{index} kernel"].numbers
        matmul = found[f"cuda:{index} matmul"].numbers
        assert kernel["bytes_per_second"] * kernel["seconds"] == pytest.approx(2 * 4 * 16**2)
        assert matmul["flops_per_second"] * matmul["seconds"] == pytest.approx(2 * 16**3)
    status, out = printed(capsys)
    assert status == 0
    assert out.endswith("and so does the GPU: --device auto uses cuda:0.")


def test_a_gpu_that_works_beside_one_that_does_not_is_named(quick):
    cupy = quick(FakeCupy(2), wheels=WHEEL)
    enter = cupy.cuda.Device.__enter__

    def only_the_second(gpu):
        if gpu.index == 0:
            raise NO_DEVICE
        enter(gpu)

    cupy.cuda.Device.__enter__ = only_the_second
    assert summary(examine()).endswith("but --device cuda:1 works.")


def test_no_gpu_at_all_is_said(quick):
    quick(FakeCupy(0), wheels=WHEEL)
    assert summary(examine()) == "The CPU path works; a GPU is not in use because there is none."


def test_a_cache_that_is_wrong_is_a_failure(capsys, monkeypatch):
    extend = KVCache.extend

    def fault(cache, layer, new_keys, new_values):
        keys, values = extend(cache, layer, new_keys, new_values)
        return (keys * 2 if layer == 3 else keys), values

    monkeypatch.setattr(KVCache, "extend", fault)
    status, out = printed(capsys)
    assert status == 1
    assert "both paths wrong" in out
    assert out.endswith(
        "The CPU path does not work: the cached and the naive path differ at step 0, layer 3, keys."
    )


def test_a_model_that_cannot_be_loaded_is_a_failure(capsys, monkeypatch):
    def refuse(*args, **options):
        raise InputError("the weights are cut off")

    monkeypatch.setattr(doctor, "load", refuse)
    status, out = printed(capsys)
    assert status == 1
    assert out.endswith("The CPU path does not work: the weights are cut off.")


def test_a_package_that_is_missing_is_told_from_one_whose_files_are_gone(capsys, monkeypatch):
    def no_torch(package):
        if package == "torch":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor, "version", no_torch)
    status, out = printed(capsys)
    assert status == 0
    assert "torch missing" in out
    assert "-> for verify, and bench --against transformers: pip install torch" in out
    monkeypatch.setattr(doctor, "find_spec", lambda package: package != "matplotlib" or None)
    status, out = printed(capsys)
    assert status == 1
    assert "matplotlib wrong" in out
    assert "-> pip install --force-reinstall matplotlib" in out


def test_a_busy_machine_and_too_many_threads_are_said_and_are_no_failure(capsys, monkeypatch):
    monkeypatch.setattr(doctor.hardware, "busy_cores", lambda seconds: 1.25)
    monkeypatch.setattr(doctor.hardware, "cores", lambda: 2)
    blas = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "num_threads": 9}
    monkeypatch.setattr(doctor, "threadpool_info", lambda: [blas])
    status, out = printed(capsys)
    assert status == 0
    assert "2; other programs keep 1.2 of them busy just now" in out
    assert "do not trust times taken now" in out
    assert "OPENBLAS_NUM_THREADS=2" in out


def test_a_system_that_tells_little_is_no_failure(monkeypatch, capsys):
    def untold():
        raise InputError("this system does not tell")

    monkeypatch.setattr(doctor, "memory_bytes", untold)
    monkeypatch.setattr(doctor.hardware, "busy_cores", lambda seconds: None)
    monkeypatch.setattr(doctor, "threadpool_info", list)
    assert printed(capsys)[0] == 0


def test_a_file_that_cannot_be_written_is_refused_before_any_work(capsys, monkeypatch):
    monkeypatch.setattr("minineo.cli.doctor.examine", None)
    status, out, err = call(capsys, "doctor", "--json", "no/such/folder/out.json")
    assert (status, out) == (2, "")
    assert "no/such/folder does not exist" in err
