"""NVRTC, CUDA's compiler, takes the kernels for every GPU from the T4 on. It needs no GPU."""

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from minineo.cuda.kernels import SOURCE, TYPES, options

ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
KERNELS = {
    "layer_norm", "gelu_new", "linear", "linear_gelu", "add_linear", "append", "attend", "softmax",
}  # fmt: skip


def compilers():
    """Find NVRTC and CUDA's headers in the wheels of CUDA 12 and 13: their paths by name."""
    spec = find_spec("nvidia")
    for folder in map(Path, spec.submodule_search_locations if spec else []):
        for library, headers in (("cuda_nvrtc", "cuda_runtime"), ("cu13", "cu13")):
            for path in folder.glob(f"{library}/lib/libnvrtc.so.1?"):
                yield path.name, (path, folder / headers / "include")


FOUND = dict(compilers())

pytestmark = pytest.mark.skipif(not FOUND, reason="NVRTC is not here: pip install '.[cuda-test]'")


def compiled(compiler, architecture, dtype, code):
    """Compile as CuPy does, and return the PTX or raise what the compiler says."""
    library, headers = FOUND[compiler]
    nvrtc = ctypes.CDLL(library)
    more = (f"--gpu-architecture={architecture}", "--device-as-default-execution-space")
    flags = [option.encode() for option in (*options(dtype), *more, f"-I{headers}", "-ftz=true")]
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            raise ValueError(text(nvrtc, "ProgramLog", program))
        assert not text(nvrtc, "ProgramLog", program)  # no warning either
        return text(nvrtc, "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def text(nvrtc, name, program):
    """Return what NVRTC has to say under a name."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{name}")(program, buffer)
    return buffer.value.decode()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compiler", FOUND)
def test_every_kernel_compiles_for_every_gpu(compiler, architecture, dtype):
    code = SOURCE.read_text(encoding="utf-8")
    ptx = compiled(compiler, f"sm_{architecture}", dtype, code)
    assert set(re.findall(r"\.entry (\w+)", ptx)) == KERNELS


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("compiler", FOUND)
def test_nothing_is_computed_in_float64_by_accident(compiler, dtype):
    ptx = compiled(compiler, "compute_75", dtype, SOURCE.read_text(encoding="utf-8"))
    instructions = set(re.findall(r"^\s+(\w\S*\.f64\S*)", ptx, re.MULTILINE))
    assert instructions == {"ld.param.f64", "cvt.rn.ftz.f32.f64"}  # eps on its way to float32


@pytest.mark.parametrize("compiler", FOUND)
def test_what_is_no_cuda_is_refused(compiler):
    with pytest.raises(ValueError, match="error"):
        compiled(compiler, "sm_75", "float32", SOURCE.read_text(encoding="utf-8") + "wrong")
