"""Choose where arrays live and how they are computed. The only file that imports CuPy."""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .transformer import Config, InputError

# Below both, a product is too small to be shared out: on one core it takes less time than a thread
# may need to wake, and a hundredth of it where another program keeps a core busy.
SMALL_MATRIX = 2**19  # numbers: larger ones are read faster by several cores
SMALL_PRODUCT = 2**24  # multiplications


@dataclass(frozen=True)
class Device:
    """A place where arrays live and are computed.

    Attributes
    ----------
    name : str
        "cpu" or "cuda".
    why : str
        Why `auto` chose this device; empty when it was asked for by name.
    """

    name: str
    why: str = ""
    cupy: Any = None

    def put(self, array):
        """Return a NumPy array as an array on this device."""
        return array if self.cupy is None else self.cupy.asarray(array)

    def get(self, array):
        """Return an array on this device as a NumPy array."""
        return array if self.cupy is None else self.cupy.asnumpy(array)

    def synchronize(self):
        """Wait until everything begun on this device is done: a clock is read only after that."""
        if self.cupy is not None:
            self.cupy.cuda.get_current_stream().synchronize()

    def threads(self, config: Config, tokens: int) -> AbstractContextManager:
        """Return a context for a pass of so many tokens: NumPy uses one core if the pass is small.

        While OpenBLAS waits for a thread it spins, and what it waits for may be on a core that
        another program uses: a pass of the embedded model then takes 100 times as long.
        """
        matrix = config.width * config.inner
        small = matrix <= SMALL_MATRIX and matrix * tokens <= SMALL_PRODUCT
        return _one_core() if small and self.cupy is None else nullcontext()


@contextmanager
def _one_core():
    """Let NumPy multiply with one thread inside a `with` block."""
    libraries = _blas()  # asked directly: `ThreadpoolController.limit` takes a tenth of a pass
    before = [library.get_num_threads() for library in libraries]
    for library in libraries:
        library.set_num_threads(1)
    try:
        yield
    finally:
        for library, threads in zip(libraries, before, strict=True):
            library.set_num_threads(threads)


@cache
def _blas():
    """Return the libraries that NumPy multiplies with."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def choose(name="auto"):
    """Return a device that works, by name.

    Parameters
    ----------
    name : str
        "cpu", "cuda", or "auto": a CUDA GPU where one works, else the CPU.

    Raises
    ------
    InputError
        If the name is none of these, or `cuda` is asked for and does not work here.
    """
    if name == "cpu":
        return Device("cpu")
    if name not in ("auto", "cuda"):
        raise InputError(f"unknown device {name!r}: choose auto, cpu or cuda")
    try:
        return Device("cuda", cupy=_working_cupy())
    except Exception as error:  # whatever CuPy, its libraries or the driver raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if name == "cuda":
        raise InputError(
            f"cuda does not work here ({reason}); install minineo[cuda12] or minineo[cuda13] "
            "beside an NVIDIA driver, or use --device cpu"
        )
    return Device("cpu", why=f"no CUDA GPU in use: {reason}")


def _working_cupy():
    """Import CuPy and try one kernel and one matmul: counting devices proves neither."""
    import cupy

    x = cupy.ones((8, 8), dtype=np.float32)
    if float((x @ x + x).sum()) != 8 * 8 * 9:
        raise RuntimeError("a first matmul gave a wrong result")
    return cupy
