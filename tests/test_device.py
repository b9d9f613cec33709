import json
import re
import sys
import threading
import types
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
from counting import CountingArray, Counts
from small import tiny_config
from test_cli import call
from threadpoolctl import threadpool_info

from minineo import InputError, device, load
from minineo.device import Device, Memory, choose, diagnose, driver_cuda

# A CuPy that can be broken. Its errors are those of CuPy 14.2.0, read off its wheels on a machine
# without a GPU: the bare one, the one with [ctk], and two wheels side by side.


class CUDARuntimeError(RuntimeError):
    __module__ = "cupy_backends.cuda.api.runtime"


class DynamicLibNotFoundError(RuntimeError):
    __module__ = "cuda.pathfinder._dynamic_libs.load_dl_common"


class CompileException(Exception):  # noqa: N818 - CuPy's name
    __module__ = "cupy.cuda.compiler"


class OutOfMemoryError(MemoryError):
    __module__ = "cupy.cuda.memory"


NO_DRIVER = CUDARuntimeError(
    "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
)
NO_DEVICE = CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
NO_NVRTC = DynamicLibNotFoundError(
    'Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file: libnvrtc.so.13 or '
    "libnvrtc.so.12, No such file: libnvrtc.so.13 or libnvrtc.so.12\n"
)
NO_CUBLAS = ImportError(
    'Failure finding "libcublasLt.so.13 or libcublasLt.so.12": No such file: libcublasLt.so.13 or '
    "libcublasLt.so.12, No such file: libcublasLt.so.13 or libcublasLt.so.12\n"
)
NO_HEADERS = CompileException(
    '/tmp/x.cu(1): catastrophic error: could not open source file "vector_types.h" (no '
    "directories in search list)\n  #include <vector_types.h>\n"
)
BROKEN_IMPORT = ImportError(
    "\n================\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: ...\n========\n"
)
BROKEN_IMPORT.__cause__ = ImportError("numpy.core.multiarray failed to import")


class Product(CountingArray):
    """An array whose products fail, or are wrong."""

    def __matmul__(self, other):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FakeCupy(types.ModuleType):
    """A CuPy on arrays of `counting`, with GPUs of which each thread has a current one.

    `broken` says which of "gpu", "kernel", "matmul" fails, and with what.
    """

    __version__ = "14.2.0"

    def __init__(self, gpus=1, nvrtc=(13, 0), **broken):
        super().__init__("cupy")
        self.broken, self.gpus, self.counts = broken, gpus, Counts()
        self.made_on, self.threads = [], threading.local()
        fake = self

        def get_version():
            fake.fail("kernel")
            return nvrtc

        class Cuda(SimpleNamespace):
            @property
            def cublas(self):
                fake.fail("matmul")

        class Gpu:
            compute_capability = "90"

            def __init__(self, index):
                self.index = index

            def use(self):
                fake.fail("gpu")
                fake.threads.current = self.index

            def __enter__(self):
                self.before = fake.current
                self.use()

            def __exit__(self, *error):
                fake.threads.current = self.before

        class Event:
            def record(self):
                self.time = perf_counter()

            def synchronize(self):
                fake.counts.wait()

        self.cuda = Cuda(
            Device=Gpu,
            Event=Event,
            get_elapsed_time=lambda start, end: 1000 * (end.time - start.time),
            get_current_stream=self.counts.cupy.cuda.get_current_stream,
            nvtx=self.counts.cupy.cuda.nvtx,
            nvrtc=SimpleNamespace(getVersion=get_version),
            runtime=SimpleNamespace(
                getDeviceCount=self.count,
                runtimeGetVersion=lambda: 13020,
                memGetInfo=lambda: (3 * 2**30, (4 + self.current) * 2**30),
                getDeviceProperties=lambda index: {"name": b"NVIDIA Fake %d" % index},
            ),
        )

    @property
    def current(self):
        return getattr(self.threads, "current", 0)

    def fail(self, place):
        if isinstance(self.broken.get(place), Exception):
            raise self.broken[place]

    def count(self):
        self.fail("gpu")
        return self.gpus

    def asarray(self, array):
        self.fail("gpu")
        self.made_on.append(self.current)
        return self.counts.put(array)

    def asnumpy(self, array):
        return self.counts.cupy.asnumpy(array)

    def ones(self, shape, dtype):
        self.fail("kernel")
        array = self.asarray(np.ones(shape, dtype))
        if "matmul" in self.broken:
            array = Product(array._data, self.counts)
            array.result = self.broken["matmul"]
        return array

    def get_default_memory_pool(self):
        return SimpleNamespace(used_bytes=lambda: 7)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with a driver and, unless a test says otherwise, no package of CuPy."""

    def has(cupy=None, driver=(13, 0), wheels=()):
        monkeypatch.setattr(device, "distributions", lambda name: [name] * (name in wheels))
        monkeypatch.setattr(device, "driver_cuda", lambda: driver)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        return cupy

    monkeypatch.setattr(device, "kernels", lambda cupy: {})  # test_cuda_kernels.py runs those
    has()
    return has


WHEEL = ("cupy-cuda13x",)
TWO_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")
# what breaks; the driver; the packages; what is said of it; what to do about it; is it missing?
TROUBLES = {
    "no cupy": (None, (13, 1), (), "CuPy is not installed", r"cupy-cuda13x\[ctk\]'", True),
    "an old driver": (None, (12, 4), (), "CuPy is not installed", r"cupy-cuda12x\[ctk\]'", True),
    "a new driver": (None, (14, 0), (), "CuPy is not installed", r"cupy-cuda13x\[ctk\]'", True),
    "a very old driver": (None, (11, 8), (), "CuPy is not installed", "update the driver", True),
    "nothing": (None, None, (), "CuPy is not installed", r"cuda13x\[ctk\].*cuda12x\[ctk\].*nvidia-smi", True),
    "its files are gone": (None, (13, 0), WHEEL, "files of CuPy are", "pip uninstall", False),
    "no driver": (
        {"gpu": NO_DRIVER}, None, WHEEL, "there is no NVIDIA driver", "install its driver", True,
    ),
    "a driver too old": (
        {"gpu": NO_DRIVER}, (12, 4), WHEEL, "the driver is too old for cupy-cuda13x",
        r"update the driver, or pip uninstall cupy-cuda13x and pip install 'cupy-cuda12x\[ctk\]'",
        False,
    ),
    "a driver too old for all": (
        {"gpu": NO_DRIVER}, (11, 8), WHEEL, "the driver is too old", "; update the driver; or", False,
    ),
    "no gpu": ({"gpu": NO_DEVICE}, (13, 0), WHEEL, "no GPU is to be seen", "nvidia-smi", True),
    "no nvrtc": (
        {"kernel": NO_NVRTC}, (13, 0), WHEEL, "a CUDA library is missing",
        r"pip install 'cupy-cuda13x\[ctk\]'", False,
    ),
    "no headers": (
        {"kernel": NO_HEADERS}, (13, 0), WHEEL, "a CUDA library is missing",
        r"pip install 'cupy-cuda13x\[ctk\]'", False,
    ),
    "no cublas": (
        {"matmul": NO_CUBLAS}, (12, 4), ("cupy-cuda12x",), "a CUDA library is missing",
        r"pip install 'cupy-cuda12x\[ctk\]'", False,
    ),
    "no cublas for another build": (
        {"matmul": NO_CUBLAS}, (13, 0), ("cupy",), "library is missing", "CUDA Toolkit", False,
    ),
    "two wheels": (
        {}, (13, 0), TWO_WHEELS, "CuPy is installed more than once",
        r"pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'cupy-cuda13x\[ctk\]'", False,
    ),
    "two wheels that break": (
        {"kernel": NO_NVRTC}, (13, 0), TWO_WHEELS, "CuPy is installed more than once",
        "pip uninstall cupy-cuda12x cupy-cuda13x", False,
    ),
    "a wrong result": (
        {"matmul": 1.0}, (13, 0), WHEEL, "the GPU fails", "update the driver and", False,
    ),
    "not a number": ({"matmul": float("nan")}, (13, 0), WHEEL, "the GPU fails", "update", False),
    "a gpu too old": (
        {"kernel": CompileException("nvrtc: error: invalid value for --gpu-architecture (-arch)")},
        (13, 0), WHEEL, "cupy-cuda13x does not know this GPU", r"cupy-cuda12x\[ctk\]", False,
    ),
    "a full gpu": (
        {"kernel": OutOfMemoryError("Out of memory allocating 512 bytes (allocated so far: 0 ...")},
        (13, 0), WHEEL, "the memory of the GPU is full", "nvidia-smi", False,
    ),
    "a busy gpu": (
        {"gpu": CUDARuntimeError("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy "
         "or unavailable")}, (13, 0), WHEEL, "the GPU is busy", "nvidia-smi", False,
    ),
    "an error without words": (
        {"gpu": CUDARuntimeError()}, (13, 0), WHEEL, r"the GPU fails \(CUDARuntimeError\)", "update",
        False,
    ),
}  # fmt: skip


@pytest.fixture(params=TROUBLES.values(), ids=TROUBLES)
def trouble(request, machine):
    """A machine on which no GPU works; what is to be said of it."""
    broken, driver, wheels, *expected = request.param
    machine(None if broken is None else FakeCupy(**broken), driver, wheels)
    return expected


def test_auto_takes_the_cpu_and_says_why_in_one_short_line(trouble):
    what, _, _ = trouble
    chosen = choose("auto")
    assert (chosen.name, chosen.cupy) == ("cpu", None)
    assert chosen.why.startswith("no CUDA GPU in use: ")
    assert len(chosen.why) <= 160, "two lines of 80 columns"
    assert "\n" not in chosen.why
    assert_found(what, chosen.why)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_fails_with_the_cure_and_what_was_said(trouble, name):
    what, cure, _ = trouble
    if isinstance(sys.modules["cupy"], FakeCupy):
        sys.modules["cupy"].gpus = 2
    with pytest.raises(InputError) as refused:
        choose(name)
    message = str(refused.value)
    assert message.startswith(f"{name} does not work here: ")
    assert message.endswith("; or use --device cpu")
    assert "\n" not in message
    assert_found(f"{what}.*{cure}", message)


@pytest.mark.parametrize("error", [NO_DRIVER, NO_NVRTC, NO_CUBLAS, NO_HEADERS, BROKEN_IMPORT])
def test_the_first_line_of_the_error_is_kept(machine, error):
    machine(FakeCupy(gpu=error), wheels=WHEEL)
    original = error.__cause__ or error
    with pytest.raises(InputError) as refused:
        choose("cuda")
    assert str(original).splitlines()[0] in str(refused.value)


def test_what_is_missing_is_told_from_what_is_broken(trouble):
    *_, missing = trouble
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind
        device.working_cupy(0)
    assert diagnose(raised.value).missing == missing


@pytest.mark.parametrize(("arguments", "status"), [(["auto"], 0), (["cuda"], 2), (["cuda:1"], 2)])
def test_compare_says_the_right_thing(trouble, capsys, arguments, status):
    what, cure, _ = trouble
    if isinstance(sys.modules["cupy"], FakeCupy):
        sys.modules["cupy"].gpus = 2
    left, out, err = call(capsys, "compare", "One", "--new-tokens", "1", "--device", *arguments)
    assert left == status
    if status:
        assert out == ""
        assert err.startswith("minineo: cuda")
        assert err.count("\n") == 1
        assert_found(f"{what}.*{cure}", err)
    else:
        assert err == ""
        assert_found(what, " ".join(out.split()))
        assert max(map(len, out.splitlines())) <= 80


def assert_found(pattern, text):
    assert re.search(pattern, text), text


@pytest.mark.parametrize(
    ("gpus", "there"), [(1, "has 1 GPU, cuda:0;"), (3, "has 3 GPUs, cuda:0 to cuda:2;")]
)
def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are(
    machine, capsys, gpus, there
):
    cupy = machine(FakeCupy(gpus), wheels=WHEEL)
    with pytest.raises(InputError, match=f"^no cuda:{gpus}: this machine {there}"):
        choose(f"cuda:{gpus}")
    assert cupy.current == 0
    status, out, err = call(capsys, "compare", "--device", f"cuda:{gpus}")
    assert (status, out) == (2, "")
    assert there in err


@pytest.mark.parametrize(
    "name",
    ["tpu", "", "CUDA", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cuda:1 ", "cuda:1\n",
     "cuda: 1", "cuda:²", "cuda:٣", "cuda1", "cuda:" + "9" * 5000, "cpu:0", None, 0],
)  # fmt: skip
def test_an_unknown_device_is_refused_by_name(machine, name):
    machine(FakeCupy(2))
    with pytest.raises(InputError, match=r"unknown device .*: choose auto, cpu, cuda, or cuda:1"):
        choose(name)


@pytest.mark.parametrize(
    ("asked", "name", "index"),
    [("auto", "cuda", 0), ("cuda", "cuda", 0), ("cuda:0", "cuda:0", 0), ("cuda:01", "cuda:1", 1)],
)
def test_a_gpu_that_computes_is_used(machine, asked, name, index):
    cupy = machine(FakeCupy(2), wheels=WHEEL)
    chosen = choose(asked)
    assert chosen == Device(name, "", cupy, index)
    assert cupy.current == index, "new arrays of this thread are made there"
    numbers = np.arange(3.0)
    np.testing.assert_array_equal(chosen.get(chosen.put(numbers)), numbers)
    assert cupy.made_on == [index, index], "the probe and the array"
    before = cupy.counts.synchronisations
    chosen.synchronize()
    assert cupy.counts.synchronisations == before + 1


def test_two_gpus_are_kept_apart(machine):
    cupy = machine(FakeCupy(3))
    first, second = choose("cuda:1"), choose("cuda:2")
    cupy.made_on.clear()
    first.put(np.ones(1)), second.put(np.ones(1)), first.put(np.ones(1))
    assert cupy.made_on == [1, 2, 1]
    assert cupy.current == 2, "the one chosen last"
    with first.threads(tiny_config()):
        assert cupy.current == 1, "a pass runs where the weights are"
    assert cupy.current == 2


def test_another_thread_works_on_the_gpu_as_well(machine):
    cupy = machine(FakeCupy(2))
    chosen, seen = choose("cuda:1"), []

    def work():
        with chosen.threads(tiny_config()):
            seen.append(cupy.current)
        chosen.put(np.ones(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, cupy.made_on[-1]) == ([1], 1)


def test_the_memory_in_use_is_told_from_what_is_free(machine):
    machine(FakeCupy(2))
    assert choose("cuda:1").memory() == Memory(used=7, free=3 * 2**30, total=5 * 2**30)
    assert choose("cpu").memory() is None


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_work_is_timed_once_it_is_done(machine, name):
    cupy, calls = machine(FakeCupy()), []
    chosen = choose(name)
    waited = cupy.counts.synchronisations
    start = perf_counter()
    seconds = chosen.seconds(lambda: calls.append(sum(range(100_000))))
    assert 0 < seconds <= perf_counter() - start
    assert len(calls) == 1
    assert cupy.counts.synchronisations == waited + (name == "cuda")


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_compare_runs_on_a_gpu_that_works(machine, capsys, name):
    cupy = machine(FakeCupy(2), wheels=WHEEL)
    arguments = ["--new-tokens", "2", "--device", name, "--json", "-"]
    status, out, err = call(capsys, "compare", "Once upon a time", *arguments)
    assert (status, err) == (0, "")
    index = int(name == "cuda:1")
    assert json.loads(out)["device"] == ("cuda:1" if index else "cuda")
    assert set(cupy.made_on) == {index}, "all weights are put there"


def test_no_array_of_numpy_is_left_in_the_weights(machine):
    def arrays(part):
        if isinstance(part, tuple):
            return [array for each in part for array in arrays(each)]
        return [part]

    machine(FakeCupy())
    assert {type(array) for array in arrays(load("tiny", device="cuda").weights)} == {CountingArray}


@pytest.mark.parametrize("command", ["generate", "compare", "step", "batch"])
def test_every_kernel_is_launched_on_the_gpu_that_was_asked_for(machine, capsys, command):
    cupy, places = machine(FakeCupy(2)), set()
    launch = cupy.counts.launch

    def note(*args, **options):
        places.add(cupy.current)
        return launch(*args, **options)

    cupy.counts.launch = note
    prompt = ["--burst", "--requests", "2"] if command == "batch" else ["Once upon a time"]
    assert call(capsys, command, *prompt, "--new-tokens", "2", "--device", "cuda:1")[0] == 0
    assert places == {1}


def test_the_driver_is_asked_which_cuda_it_supports(monkeypatch):
    monkeypatch.undo()  # the real one

    def driver(version):
        def get(pointer):
            pointer._obj.value = version
            return 0

        return lambda name: SimpleNamespace(cuDriverGetVersion=get)

    for version, expected in ((12040, (12, 4)), (13000, (13, 0)), (11080, (11, 8)), (0, None)):
        monkeypatch.setattr(device.ctypes, "CDLL", driver(version))
        assert driver_cuda() == expected

    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    for library in (none, lambda name: SimpleNamespace()):
        monkeypatch.setattr(device.ctypes, "CDLL", library)
        assert driver_cuda() is None


def test_installed_packages_are_found_by_their_names(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for folder in ("cupy_cuda12x-14.2.0", "cupy_cuda13x-14.2.0", "cupy_xarray-0.1.4"):
        (tmp_path / f"{folder}.dist-info").mkdir()
    assert device.cupy_wheels() == list(TWO_WHEELS)


def test_the_real_error_of_a_missing_cupy_is_known(machine):
    with pytest.raises(ModuleNotFoundError) as missing:
        device.import_cupy()
    assert diagnose(missing.value).what == "CuPy is not installed"


@pytest.mark.parametrize(
    ("width", "cores"), [(128, 1), (256, 1), (362, 1), (364, None), (768, None)]
)
def test_a_small_model_keeps_to_one_core_and_leaves_the_others_as_they_were(width, cores):
    config = tiny_config(hidden_size=width, num_heads=2)
    before = blas_threads()
    with choose("cpu").threads(config):
        assert blas_threads() == ([cores] * len(before) if cores else before)
    assert blas_threads() == before


def blas_threads():
    return [blas["num_threads"] for blas in threadpool_info() if blas["user_api"] == "blas"]
