"""Choose where arrays live and how they are computed. The only file that imports CuPy."""

import ctypes
import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from textwrap import shorten
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from .cores import one_core, shared_blocks, sharers
from .cuda.kernels import kernels
from .transformer import Config, InputError
from .transformer.trace import Silent, silent

# Numbers in a matrix. Products with one as small gain little or nothing on several cores, and take
# a hundred times as long where another program keeps a core busy.
SMALL_MATRIX = 2**19

CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")  # no two go together
INSTALL_DRIVER = (
    "if there is an NVIDIA GPU, install its driver, until nvidia-smi lists it; a container is to "
    "be started with --gpus all"
)


class Memory(NamedTuple):
    """The memory of a GPU, in bytes.

    Attributes
    ----------
    used : int
        In arrays of this process. What CuPy's pool keeps for later arrays is neither used nor free.
    free : int
        Not taken by any process.
    total : int
    """

    used: int
    free: int
    total: int


class Trouble(NamedTuple):
    """Why a GPU does not work.

    Attributes
    ----------
    what : str
        What is wrong, in a short sentence.
    cure : str
        What to do about it.
    said : str
        The first line of the error that showed it.
    missing : bool
        Whether something is not there at all, rather than broken.
    """

    what: str
    cure: str
    said: str
    missing: bool = False


@dataclass(frozen=True)
class Device:
    """A place where arrays live and are computed.

    Attributes
    ----------
    name : str
        "cpu", "cuda", or "cuda:1" when a GPU was asked for by number.
    why : str
        Why `auto` chose the CPU, in one line; empty otherwise.
    cupy : module or None
        CuPy, on a GPU.
    index : int or None
        The number of the GPU. With None, work goes to whichever GPU is current.
    kernels : mapping
        Functions that stand in for the replaceable ones of their names on this device. Empty on
        the CPU, and on a GPU where the plain operations are wanted.
    """

    name: str
    why: str = ""
    cupy: Any = None
    index: int | None = None
    kernels: Mapping = field(default_factory=dict, compare=False)

    def selected(self) -> AbstractContextManager:
        """Return a context in which this thread computes, and makes new arrays, on this device.

        Each thread has a current GPU of its own. In a new one it is GPU 0.
        """
        return nullcontext() if self.index is None else self.cupy.cuda.Device(self.index)

    def put(self, array):
        """Return a NumPy array as an array on this device."""
        if self.cupy is None:
            return array
        with self.selected():
            return self.cupy.asarray(array)

    def get(self, array):
        """Return an array on this device as a NumPy array."""
        return array if self.cupy is None else self.cupy.asnumpy(array)

    def synchronize(self):
        """Wait until everything begun on this device is done: a clock is read only after that."""
        if self.cupy is not None:
            with self.selected():
                self.cupy.cuda.get_current_stream().synchronize()

    def seconds(self, work) -> float:
        """Return for how long this device is busy with what a function begins: a GPU itself tells.

        Parameters
        ----------
        work : callable
            Called once, without arguments.
        """
        if self.cupy is None:
            start = perf_counter()
            work()
            return perf_counter() - start
        with self.selected():
            start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            work()
            end.record()
            end.synchronize()
            return self.cupy.cuda.get_elapsed_time(start, end) / 1000

    def memory(self):
        """Return the `Memory` of a GPU; None on the CPU, whose memory is that of the machine."""
        if self.cupy is None:
            return None
        with self.selected():
            free, total = self.cupy.cuda.runtime.memGetInfo()
            return Memory(self.cupy.get_default_memory_pool().used_bytes(), free, total)

    @contextmanager
    def range(self, name: str):
        """Give what a GPU is told to do inside a `with` block a name, for Nsight Systems to show."""
        if self.cupy is None:
            yield
        else:
            self.cupy.cuda.nvtx.RangePush(name)
            try:
                yield
            finally:
                self.cupy.cuda.nvtx.RangePop()

    @contextmanager
    def profiled(self, trace):
        """Yield a trace that names layers and attention for Nsight Systems, if this one is silent."""
        if self.cupy is None or trace is not silent:
            yield trace
        else:
            ranges = Ranges(self.cupy.cuda.nvtx)
            try:
                yield ranges
            finally:
                ranges.close()

    def cores(self, tokens: int) -> int:
        """Return how many cores of a CPU share a pass of so many tokens; 1 on a GPU."""
        return sharers(tokens) if self.cupy is None else 1

    def stand_ins(self, tokens: int) -> Mapping:
        """Return what stands in for replaceable functions in a pass of so many tokens.

        These are the kernels, and on a CPU `blocks` shared out over the cores, if the pass is long
        enough to gain by it.
        """
        cores = self.cores(tokens)
        shared = {"blocks": partial(shared_blocks, cores=cores)} if cores > 1 else {}
        return {**self.kernels, **shared}

    def threads(self, config: Config) -> AbstractContextManager:
        """Return a context for passes of a model: NumPy multiplies on one core if it is small.

        While OpenBLAS waits for a thread it spins, and what it waits for may be on a core that
        another program uses: a pass of the embedded model then takes 100 times as long.

        On a GPU it is the context that `selected` returns.
        """
        small = config.width * config.inner <= SMALL_MATRIX
        return one_core() if small and self.cupy is None else self.selected()


class Ranges(Silent):
    """A trace that keeps nothing, and tells a profiler where a layer and its attention begin."""

    def __init__(self, nvtx):
        self._nvtx, self._open = nvtx, 0

    def within(self, name):
        """Begin a layer."""
        self._begin("layer")
        return self

    def __call__(self, **values):
        """Begin attention where its input is made, and end what is at its end."""
        if "normed_1" in values:
            self._begin("attention")
        elif "mixed" in values or "after" in values:
            self._end()

    def close(self):
        """End what an error has left open."""
        while self._open:
            self._end()

    def _begin(self, name):
        self._nvtx.RangePush(name)
        self._open += 1

    def _end(self):
        self._nvtx.RangePop()
        self._open -= 1


def choose(name="auto", use_kernels=True):
    """Return a device that works, by name.

    A GPU becomes this thread's current one, so that new arrays are made there.

    Parameters
    ----------
    name : str
        "cpu"; "cuda", which is GPU 0; "cuda:1" for another GPU by its number; or "auto": "cuda"
        where it works, else the CPU.
    use_kernels : bool, optional
        Let fused kernels stand in for the functions they equal, on a GPU.

    Raises
    ------
    InputError
        If the name is none of these, or the GPU that is asked for does not work here.
    """
    if name == "cpu":
        return Device("cpu")
    numbered = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", str(name))
    if name != "auto" and not numbered:
        raise InputError(f"unknown device {name!r}: choose auto, cpu, cuda, or cuda:1 for GPU 1")
    index = int(numbered[1] or 0) if numbered else 0
    try:
        cupy = working_cupy(index)
    except InputError:
        raise
    except Exception as error:  # whatever CuPy, its libraries or the driver raise
        what, cure, said, _ = diagnose(error)
    else:
        cupy.cuda.Device(index).use()
        named = "cuda" if name in ("auto", "cuda") else f"cuda:{index}"
        stand_ins = kernels(cupy) if use_kernels else {}
        return Device(named, cupy=cupy, index=index, kernels=stand_ins)
    if name == "auto":
        said = shorten(said, 80, placeholder=" ...")
        return Device("cpu", why=f"no CUDA GPU in use: {what} ({said})")
    raise InputError(f"{name} does not work here: {what} ({said}); {cure}; or use --device cpu")


def working_cupy(index):
    """Import CuPy and try a kernel and a matmul on a GPU: counting GPUs proves neither.

    Raises
    ------
    InputError
        If there is no GPU of this number.
    Exception
        Whatever goes wrong; `diagnose` tells what it means.
    """
    cupy = import_cupy()
    if index:
        count = cupy.cuda.runtime.getDeviceCount()
        if index >= count:
            there = "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
            raise InputError(f"no cuda:{index}: this machine has {there}; choose one, or cpu")
    with cupy.cuda.Device(index):
        x = cupy.ones((8, 8), dtype=np.float32)
        if float((x @ x + x).sum()) != 8 * 8 * 9:
            raise RuntimeError("a first matmul gave a wrong result")
    return cupy


def import_cupy():
    """Return the module `cupy`, unless several packages have written it over one another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, at length, of what is said here in a line
        import cupy
    if len(wheels := cupy_wheels()) > 1:
        raise RuntimeError(f"{' and '.join(wheels)} lie side by side")
    return cupy


def cupy_wheels() -> list[str]:
    """Return the names of the installed packages that hold the module `cupy`."""
    return [name for name in CUPY_WHEELS if any(distributions(name=name))]


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA that the NVIDIA driver supports, such as (13, 0); None without one."""
    version = ctypes.c_int()
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
    major, rest = divmod(version.value, 1000)
    return (major, rest // 10) if version.value else None


def first_line(error: BaseException) -> str:
    """Return the first line that says something, of an error or of the one that caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if re.search(r"\w", line)), type(error).__name__)


def diagnose(error: BaseException) -> Trouble:
    """Return what an error of CuPy, its libraries or the driver means, and what to do about it."""
    said = first_line(error)
    wheels, driver = cupy_wheels(), driver_cuda()
    wheel = wheels[0] if wheels else "CuPy"

    def says(pattern):
        return re.search(pattern, f"{type(error).__name__}: {said}") is not None

    kinds = (
        (
            isinstance(error, ModuleNotFoundError) and error.name == "cupy" and not wheels,
            "CuPy is not installed",
            install_cupy(driver),
            True,
        ),
        (
            len(wheels) > 1,
            "CuPy is installed more than once, and each breaks the others",
            f"pip uninstall {' '.join(wheels)}, then {install_cupy(driver)}",
            False,
        ),
        (
            driver is None and says(r"InsufficientDriver|NoDevice|libcuda\.so|nvcuda"),
            "there is no NVIDIA driver",
            INSTALL_DRIVER,
            True,
        ),
        (
            says("InsufficientDriver|UnsupportedPtx|UNSUPPORTED_PTX"),
            f"the driver is too old for {wheel}",
            mend_driver(driver, wheel),
            False,
        ),
        (
            says("NoDevice"),
            "no GPU is to be seen",
            "look whether nvidia-smi lists one, and whether CUDA_VISIBLE_DEVICES hides it",
            True,
        ),
        (
            says(r"lib\w+\.so|\w+\.dll|open source file"),
            "a CUDA library is missing",
            install_libraries(wheel),
            False,
        ),
        (
            isinstance(error, (ImportError, AttributeError)),
            "files of CuPy are missing or broken",
            f"pip uninstall {wheel.lower()}, then {install_cupy(driver)}",
            False,
        ),
        (
            says("gpu-architecture|NoKernelImage|NO_BINARY"),
            f"{wheel} does not know this GPU",
            "an old GPU needs cupy-cuda12x[ctk] in place of cupy-cuda13x, a new one a newer CuPy",
            False,
        ),
        (
            says("(?i)out ?of ?memory"),
            "the memory of the GPU is full",
            "end what fills it: nvidia-smi lists that",
            False,
        ),
        (
            says("DevicesUnavailable"),
            "the GPU is busy",
            "end what keeps it busy: nvidia-smi lists that",
            False,
        ),
        (True, "the GPU fails", f"update the driver and {wheel}; minineo doctor tells more", False),
    )
    return next(
        Trouble(what, cure, said, missing) for applies, what, cure, missing in kinds if applies
    )


def install_cupy(driver) -> str:
    """Return how CuPy is installed beside a driver that supports this CUDA, or beside none yet."""
    if driver is None:
        return (
            "with an NVIDIA GPU and its driver, pip install 'cupy-cuda13x[ctk]', or cupy-cuda12x[ctk] "
            "where nvidia-smi names a CUDA below 13"
        )
    if driver < (12, 0):
        return "update the driver and pip install 'cupy-cuda13x[ctk]'"
    return f"pip install 'cupy-cuda{min(driver[0], 13)}x[ctk]'"


def mend_driver(driver, wheel) -> str:
    """Return what to do where a driver is too old for the package that holds CuPy."""
    if driver and driver[0] == 12 and wheel == "cupy-cuda13x":
        return f"update the driver, or pip uninstall {wheel} and {install_cupy(driver)}"
    return "update the driver"


def install_libraries(wheel) -> str:
    """Return how the CUDA libraries are installed that a package which holds CuPy needs."""
    if wheel.startswith("cupy-cuda"):
        return f"pip install '{wheel}[ctk]', which brings them all"
    return "install the CUDA Toolkit that this CuPy was made for"
