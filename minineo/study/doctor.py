"""What works on this machine, what does not, and what to do about it: read or measured, each."""

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from statistics import median
from typing import Literal

import numpy as np
from threadpoolctl import threadpool_info

from ..checkpoints import load
from ..checkpoints.known import public_config
from ..device import (
    INSTALL_DRIVER,
    Device,
    Trouble,
    cupy_wheels,
    diagnose,
    driver_cuda,
    first_line,
    import_cupy,
    mend_driver,
    working_cupy,
)
from ..transformer import InputError
from . import hardware
from .compare import compare
from .gpus import measure_bandwidth, measure_flops, memory_bytes

State = Literal["ok", "missing", "wrong"]
PACKAGES = {
    "tokenizers": "text",
    "matplotlib": "--plot",
    "torch": "verify, and bench --against transformers,",
    "transformers": "verify, and bench --against transformers,",
}
SHAPE = "gpt-neo-125m"  # the public model with whose matrices the processor is measured
ROWS = 256  # of the product that shows its arithmetic
SIDE = 4096  # of the matrices that a GPU is measured with
REPEATS = 5


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    part : str
        "CPU", "extras" or "GPU": what needs it.
    name : str
    state : str
        "ok"; "missing" when it is not there, which is no fault; "wrong" when it is there and broken.
    found : str
        What was read or measured.
    cure : str
        What to do about it; empty where there is nothing to do.
    numbers : dict of str to float
        What was measured, in seconds, bytes, operations, and these per second.
    """

    part: str
    name: str
    state: State
    found: str
    cure: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def examine() -> list[Finding]:
    """Look at all that minineo needs or can use. It takes some two seconds."""
    return [*examine_cpu(), *examine_extras(), *examine_gpus()]


def healthy(findings: list[Finding]) -> bool:
    """Return whether nothing is broken. What is missing is no fault."""
    return all(finding.state != "wrong" for finding in findings)


def summary(findings: list[Finding]) -> str:
    """Return in one sentence what works."""
    paths = next(finding for finding in findings if finding.name == "both paths")
    if paths.state != "ok":
        return f"The CPU path does not work: {paths.found}."
    gpus = [finding for finding in findings if finding.part == "GPU"]
    working = [finding for finding in gpus if finding.name.startswith("cuda:") and works(finding)]
    if any(finding.name == "cuda:0" for finding in working):
        return "The CPU path works, and so does the GPU: --device auto uses cuda:0."
    why = next((each.found for each in gpus if not works(each)), "there is none")
    text = f"The CPU path works; a GPU is not in use because {why}"
    return f"{text}, but --device {working[0].name} works." if working else f"{text}."


def works(finding: Finding) -> bool:
    """Return whether a thing is there and not broken."""
    return finding.state == "ok"


def to_json(findings: list[Finding]) -> dict:
    """Return the findings as plain data."""
    return {
        "schema": 1,
        "healthy": healthy(findings),
        "summary": summary(findings),
        "findings": [asdict(finding) for finding in findings],
    }


# the processor, and what computes on it


def examine_cpu() -> Iterator[Finding]:
    """Yield what the CPU path stands on, how fast it is, and whether it works."""
    python = f"{platform.python_version()}, {sys.executable}"
    yield Finding("CPU", "Python", "ok", f"{python}; {platform.system()} {platform.machine()}")
    yield Finding("CPU", "minineo", "ok", version("minineo"))
    yield examine_numpy()
    yield examine_cores()
    yield examine_memory()
    yield examine_speed()
    yield examine_paths()


def examine_numpy() -> Finding:
    """Return which NumPy there is, and what it multiplies with."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    threads, cores = max((b["num_threads"] for b in libraries), default=0), hardware.cores()
    names = [
        f"{b['internal_api']} {b['version']} for {b.get('architecture', 'any processor')} on "
        f"{b['num_threads']} thread{'s' if b['num_threads'] > 1 else ''}"
        for b in libraries
    ]
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    return Finding(
        "CPU",
        "NumPy",
        "ok",
        f"{np.__version__}, multiplies with {', '.join(names) or built}",
        f"more threads than the {cores} cores here wait for each other: OPENBLAS_NUM_THREADS={cores}"
        if threads > cores
        else "",
        {"threads": threads} if libraries else {},
    )


def examine_cores() -> Finding:
    """Return how many cores there are, and how many others keep busy just now."""
    cores, busy = hardware.cores(), hardware.busy_cores(0.3)
    if busy is None:
        return Finding("CPU", "cores", "ok", f"{cores}", "", {"cores": cores})
    return Finding(
        "CPU",
        "cores",
        "ok",
        f"{cores}; other programs keep {busy:.1f} of them busy just now",
        "do not trust times taken now: end the other programs, or wait"
        if busy > hardware.BUSY_CORES
        else "",
        {"cores": cores, "busy": busy},
    )


def examine_memory() -> Finding:
    """Return how much memory there is."""
    try:
        size = memory_bytes()
    except InputError:
        return Finding("CPU", "memory", "ok", "this system does not tell how much there is")
    return Finding("CPU", "memory", "ok", gibibytes(size), "", {"bytes": size})


def examine_speed() -> Finding:
    """Measure how fast matrices are read and multiplied."""
    config = public_config(SHAPE)
    bandwidth, flops = (
        measure_bandwidth(config, "float32"),
        measure_flops(config, ROWS, "float32"),
    )
    return Finding(
        "CPU",
        "speed",
        "ok",
        f"reads matrices at {bandwidth / 1e9:.3g} GB/s, multiplies them with {ROWS} rows at "
        f"{flops / 1e9:.3g} GFLOP/s",
        "",
        {"bytes_per_second": bandwidth, "flops_per_second": flops},
    )


def examine_paths() -> Finding:
    """Run the embedded model down both paths."""
    try:
        comparison = compare(load("tiny", device="cpu"), "Once upon a time", max_new_tokens=4)
    except Exception as error:  # whatever is broken, it is to be said in a line
        return Finding(
            "CPU", "both paths", "wrong", first_line(error), "pip install --force-reinstall minineo"
        )
    if not comparison.agree:
        where = f"the cached and the naive path differ at {comparison.first_divergence}"
        return Finding("CPU", "both paths", "wrong", where, "run minineo compare: it tells more")
    seconds, tokens = comparison.total_seconds("cached"), len(comparison.pairs)
    return Finding(
        "CPU",
        "both paths",
        "ok",
        f"agree on the embedded model; the cached one writes {tokens} tokens in "
        f"{1000 * seconds:.3g} ms",
        "",
        {"seconds": seconds},
    )


# packages that some commands need


def examine_extras() -> Iterator[Finding]:
    """Yield which packages are there."""
    for package, user in PACKAGES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            cure = f"for {user.rstrip(',')}: pip install {package}"
            yield Finding("extras", package, "missing", f"{user} needs it", cure)
            continue
        if find_spec(package):
            yield Finding("extras", package, "ok", found)
        else:
            cure = f"pip install --force-reinstall {package}"
            yield Finding("extras", package, "wrong", f"{found}, but its files are gone", cure)


# GPUs, and what computes on them


def examine_gpus() -> Iterator[Finding]:
    """Yield what the GPU path stands on, and each GPU with its speed."""
    driver = driver_cuda()
    try:
        cupy = import_cupy()
        made_for = cuda_version(cupy.cuda.runtime.runtimeGetVersion())
        wheel = next(iter(cupy_wheels()), "CuPy")
        found = f"{cupy.__version__}, {wheel}, made for CUDA {dotted(made_for)}"
    except Exception as error:  # whatever a broken package raises
        yield troubled("CuPy", diagnose(error))
        yield examine_driver(driver, None)
        return
    yield Finding("GPU", "CuPy", "ok", found)
    yield examine_driver(driver, made_for)
    yield examine_nvrtc(cupy, driver, wheel)
    yield examine_cublas(cupy)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        if driver is not None:  # else that has been said
            yield troubled("GPU", diagnose(error))
        return
    for index in range(count):
        yield from examine_gpu(index)


def troubled(name: str, trouble: Trouble) -> Finding:
    """Return a finding of what is missing or broken."""
    state: State = "missing" if trouble.missing else "wrong"
    return Finding("GPU", name, state, f"{trouble.what} ({trouble.said})", trouble.cure)


def examine_driver(driver, made_for) -> Finding:
    """Return which CUDA the driver supports, beside the one that CuPy is made for."""
    if driver is None:
        return Finding("GPU", "driver", "missing", "there is no NVIDIA driver", INSTALL_DRIVER)
    supports = f"supports CUDA up to {dotted(driver)}"
    if made_for and made_for[0] > driver[0]:
        wheel = next(iter(cupy_wheels()), "CuPy")
        found = f"the driver {supports}, and is too old for {wheel}"
        return Finding("GPU", "driver", "wrong", found, mend_driver(driver, wheel))
    return Finding("GPU", "driver", "ok", supports)


def examine_nvrtc(cupy, driver, wheel) -> Finding:
    """Return which NVRTC, the compiler of kernels, there is, beside what the driver can load."""
    try:
        found = cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return troubled("NVRTC", diagnose(error))
    if driver and found[0] > driver[0]:
        text = f"NVRTC {dotted(found)} compiles for a newer CUDA than the driver supports"
        return Finding("GPU", "NVRTC", "wrong", text, mend_driver(driver, wheel))
    return Finding("GPU", "NVRTC", "ok", dotted(found))


def examine_cublas(cupy) -> Finding:
    """Return whether cuBLAS, which multiplies matrices, can be loaded."""
    try:
        cupy.cuda.cublas  # noqa: B018 - CuPy loads it when it is named
    except Exception as error:
        return troubled("cuBLAS", diagnose(error))
    return Finding("GPU", "cuBLAS", "ok", "can be loaded")


def examine_gpu(index: int) -> Iterator[Finding]:
    """Yield what a GPU is, and how fast it runs a kernel and a matmul, if it does."""
    name = f"cuda:{index}"
    try:
        cupy = working_cupy(index)
        device = Device(name, cupy=cupy, index=index)
        memory = device.memory()
        model = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        capability = ".".join(cupy.cuda.Device(index).compute_capability)
        kernel, matmul = gpu_seconds(device)
    except Exception as error:
        yield troubled(name, diagnose(error))
        return
    yield Finding(
        "GPU",
        name,
        "ok",
        f"{model}, compute capability {capability}, {gibibytes(memory.free)} free of "
        f"{gibibytes(memory.total)}",
        "",
        {"free_bytes": memory.free, "bytes": memory.total},
    )
    moved, flops = 2 * 4 * SIDE**2 / kernel, 2 * SIDE**3 / matmul
    for what, seconds, figure, number in (
        ("kernel", kernel, f"moves {moved / 1e9:.4g} GB/s", {"bytes_per_second": moved}),
        ("matmul", matmul, f"{flops / 1e12:.3g} TFLOP/s", {"flops_per_second": flops}),
    ):
        found = f"{1000 * seconds:.3g} ms for float32 [{SIDE}, {SIDE}]: {figure}"
        yield Finding("GPU", f"{name} {what}", "ok", found, "", {"seconds": seconds, **number})


def gpu_seconds(device: Device) -> tuple[float, float]:
    """Return the median times of a kernel that reads and writes each number, and of a matmul."""
    with device.selected():
        x = device.cupy.ones((SIDE, SIDE), dtype=np.float32)

        def time(work):
            work()  # compiles, or loads what is needed
            return median(device.seconds(work) for _ in range(REPEATS))

        return time(lambda: x + 1), time(lambda: x @ x)


def cuda_version(number: int) -> tuple[int, int]:
    """Return a version of CUDA as CUDA gives it, such as 13020, as (13, 2)."""
    major, rest = divmod(number, 1000)
    return major, rest // 10


def dotted(parts) -> str:
    """Return a version as a text."""
    return ".".join(map(str, parts))


def gibibytes(count: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"
