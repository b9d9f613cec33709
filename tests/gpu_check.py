"""Settle on a CUDA GPU, in under five minutes, what cannot be proven without one.

    .venv/bin/python tests/gpu_check.py > gpu.json

It runs from the source tree: NumPy, CuPy, torch and transformers must be there, minineo need not be
installed, and nothing is downloaded. A table goes to stderr as it grows, and all figures as one
JSON to stdout, in seconds, bytes and operations. The exit status is 0 if all holds, 1 if anything
failed, 2 where it cannot begin, such as without a GPU, and 130 if Ctrl-C ends it: the JSON then
holds what there was until then.
"""

import argparse
import faulthandler
import gc
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from threading import Timer
from time import perf_counter
from types import SimpleNamespace

PACKAGES = {  # what it needs, and how pip calls it
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "cupy": "'cupy-cuda13x[ctk]'",
}


def missing_packages():
    """Return in a line which packages are missing, and how to install them; None if none is.

    Of CuPy alone nothing is said here: the search for a GPU says it, and which one the driver needs.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing in ([], ["cupy"]):
        return None
    line = f"{sys.executable} -m pip install {' '.join(PACKAGES[name] for name in missing)}"
    other = " (cupy-cuda12x where nvidia-smi names a CUDA below 13)" if "cupy" in missing else ""
    return f"not installed: {', '.join(missing)}; {line}{other}"


if __name__ == "__main__" and (trouble := missing_packages()):
    print(trouble, file=sys.stderr)
    sys.exit(2)

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
BESIDE = tempfile.TemporaryDirectory()  # what an install would have brought, until this ends


def complete_source_tree(folder):
    """Let minineo be imported where pip has not installed it, nor what it needs besides NumPy."""
    try:
        version("minineo")
    except PackageNotFoundError:
        info = Path(folder, "minineo-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: minineo\nVersion: 0+source\n")
    if find_spec("threadpoolctl") is None:  # it only limits the threads of small passes on the CPU
        Path(folder, "threadpoolctl.py").write_text(
            "class ThreadpoolController:\n"
            "    lib_controllers = ()\n"
            "    def select(self, **wanted):\n"
            "        return self\n"
            "def threadpool_info():\n"
            "    return []\n"
        )


complete_source_tree(BESIDE.name)
sys.path.insert(0, str(ROOT))
sys.path.append(BESIDE.name)

from small import TINY, random_weights  # noqa: E402

from minineo import Config, InputError, KVCache, Model, Recompute, compare, load  # noqa: E402
from minineo.checkpoints.find import embedded_folder  # noqa: E402
from minineo.checkpoints.read import assemble, expected_shapes  # noqa: E402
from minineo.cuda.kernels import kernels  # noqa: E402
from minineo.device import choose, first_line  # noqa: E402
from minineo.study import contestants, costs  # noqa: E402
from minineo.study.shapes import shape_fields  # noqa: E402

# Seconds of each section. One may take what those before it have left, and no more.
SECONDS = {"environment": 10, "parity": 120, "counts": 15, "speed": 105, "paths": 35}
ALARM = 298  # seconds after which the whole ends, wherever it is

STEPS = 6  # tokens fed one by one at the end of a sequence
TOLERANCE = {"float32": 1e-4}  # of logits, absolute
ROUNDINGS = 32  # of the largest logit, in float16
NAMES = ("minineo", "minineo without kernels", "transformers")
RACES = [  # what is left out first, should time be short, comes last
    ("125m", "float32"),
    ("125m", "float16"),
    ("1.3b", "float32"),
    ("1.3b", "float16"),
    ("2.7b", "float16"),
    ("2.7b", "float32"),
]
AIM = "125m"  # of which a decode step shall take half of the time of transformers
PREFILLS, DEPTHS = (64, 512, 2000), (64, 1024)
LENGTHS, BATCHES, BATCH_DEPTH = (64, 128, 256, 512, 1024, 2048), (1, 4, 16, 64), 64
ROUNDS = 3
WARM, FEWEST, MOST, BUDGET = 2, 3, 10, 0.25  # passes: untimed, timed, at most; or so many seconds
ROOM = 4 * 10**9  # bytes of a GPU that a race takes besides: what CUDA keeps, limits, and scores
COPIED, SIDE = 2**29, 8192  # bytes copied, and rows of a square matrix, to measure the GPU's limits


def say(text):
    """Print a line of the table."""
    print(text, file=sys.stderr, flush=True)


class Findings:
    """What a section has found: plain data, and what speaks against it.

    Parameters
    ----------
    end : float, optional
        When the section's time is over.
    """

    def __init__(self, end=float("inf")):
        self.data, self.faults, self.left_out, self.end = {}, [], [], end
        self.seconds = None  # that it took, once it is over

    def left(self):
        """Return how many seconds are left."""
        return self.end - perf_counter()

    def expect(self, holds, what):
        """Note a fault unless something holds. Nothing that is not a number holds."""
        if not holds:
            self.faults.append(what)
            say(f"FAILED: {what}")

    def attempt(self, what, work, *arguments, optional=False, begun=False):
        """Do a part of the section; what it raises is a fault, and the next part is done.

        What has begun elsewhere is waited for, time or no time.
        """
        if self.left() <= 0 and not begun:
            self.left_out.append(what)
            self.expect(optional, f"{what}: no time was left")
            return
        try:
            work(*arguments)
        except Exception:
            self.expect(False, f"{what}: {traceback.format_exc()}")

    def to_json(self):
        """Return all as plain data."""
        over = self.seconds is not None
        return {
            "status": "ok" if over and not self.faults else "failed",
            "seconds": self.seconds,
            "faults": self.faults if over else [*self.faults, "it has not come to its end"],
            "left_out": self.left_out,
            **self.data,
        }


# environment


def environment(found, device):
    """Say what this is measured on."""
    found.data["versions"] = {
        name: version(name) for name in ("minineo", "numpy", "torch", "transformers")
    }
    found.data["python"] = platform.python_version()
    cupy = device.cupy
    runtime, memory = cupy.cuda.runtime, device.memory()
    found.data |= {
        "gpu": runtime.getDeviceProperties(device.index)["name"].decode(),
        "compute_capability": cupy.cuda.Device(device.index).compute_capability,
        "driver": driver(),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "memory_bytes": memory.total,
        "free_bytes": memory.free,
    }
    found.data["versions"]["cupy"] = cupy.__version__
    import torch

    found.data["torch_cuda"] = torch.version.cuda
    say(f"{found.data['gpu']}, driver {found.data['driver']}, {found.data['versions']}")
    found.expect(torch.cuda.is_available(), "torch does not see the GPU")


def driver():
    """Return the version of the driver, or None where nvidia-smi does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return first_line_of(command)


def revision():
    """Return the revision of the source tree, or None where git does not tell it."""
    return first_line_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])


def first_line_of(command):
    """Return the first line that a program prints, or None."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip().splitlines()[0] if ran.returncode == 0 and ran.stdout else None


# parity


@dataclass(frozen=True)
class Case:
    """A model to hold against itself in float64 and against transformers.

    Attributes
    ----------
    name : str
    fields : dict
        What its config.json holds.
    model : Model
        In float64, on the CPU.
    """

    name: str
    fields: dict
    model: Model

    @property
    def ids(self):
        """Token ids that reach past the local window."""
        config = self.model.config
        length = min(2 * min(config.windows), 256) + STEPS + 3
        return np.random.default_rng(1).integers(config.vocab, size=length)


def tiny_shapes():
    """A few numbers in the shapes that the tests use."""
    return random_case("tiny shapes", TINY)


def embedded():
    """The model that comes with minineo."""
    fields = json.loads((embedded_folder("tiny") / "config.json").read_text(encoding="utf-8"))
    return Case("embedded", fields, load("tiny", device="cpu", dtype="float64"))


def shape_125m():
    """The shape of GPT-Neo 125M, with weights that let a fault show."""
    return random_case("125m", shape_fields("125m"))


def random_case(name, fields):
    """A model with random weights."""
    config = Config.from_dict(fields)
    return Case(name, fields, Model(name, config, random_weights(config), None, choose("cpu")))


CASES = {"tiny shapes": tiny_shapes, "embedded": embedded, "125m": shape_125m}


def placed(model, device, dtype):
    """Return a model on a device."""
    made = {}

    def change(part):
        if isinstance(part, tuple):
            return getattr(type(part), "_make", tuple)(map(change, part))
        if id(part) not in made:  # the unembedding may be the token embedding
            made[id(part)] = device.put(part.astype(dtype))
        return made[id(part)]

    return replace(model, weights=change(model.weights), device=device)


def leaves(part):
    """Yield the tensors of weights."""
    if isinstance(part, tuple):
        for each in part:
            yield from leaves(each)
    else:
        yield part


def logits_of(model, tokens, cache, **options):
    """Return the logits of a pass on the host, in float64: [batch, positions, vocab]."""
    logits = model.forward(np.asarray(tokens), cache, **options)
    return model.device.get(logits).astype("float64")


def ways(model, ids):
    """Feed a sequence, and parts of it, in every way.

    Yields
    ------
    way : str
    positions : sequence of int
    logits : NumPy array [positions, vocab]
        A model sees no token behind a position, so that they are those of any pass over it.
    """
    like, end = model.weights.token_embedding, len(ids)
    start = end - STEPS
    yield "naive", range(end), logits_of(model, [ids], Recompute(), last_only=False)[0]
    cache = KVCache(model.config, 1, end, like=like)
    yield "prefill", range(start), logits_of(model, [ids[:start]], cache, last_only=False)[0]
    for position in range(start, end):
        yield "decode", [position], logits_of(model, [[ids[position]]], cache)[0]
    cache.crop(start)
    yield "chunk", range(start, end), logits_of(model, [ids[start:]], cache, last_only=False)[0]

    held = np.array([start, start // 2, 1])
    tokens = np.zeros((len(held), start), dtype=int)
    for row, length in zip(tokens, held, strict=True):
        row[:length] = ids[:length]
    cache = KVCache(model.config, len(held), end, like=like)
    yield "ragged prefill", held - 1, logits_of(model, tokens, cache, counts=held)[:, 0]
    for step in range(STEPS):
        at = held + step
        yield "ragged decode", at, logits_of(model, ids[at][:, None], cache)[:, 0]


def transformers_logits(case, place):
    """Return the logits of transformers in float32: [positions, vocab]."""
    import torch
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config, weights = case.model.config, case.model.weights
    names = leaves(assemble(lambda name: name, config))
    state = {
        name if name.startswith("lm_head") else f"transformer.{name}": torch.tensor(tensor)
        for name, tensor in zip(names, leaves(weights), strict=True)
    }
    state["lm_head.weight"] = torch.tensor(weights.unembedding)
    torch.set_float32_matmul_precision("highest")  # no TF32
    reference = GPTNeoForCausalLM(GPTNeoConfig.from_dict(dict(case.fields)))
    reference.load_state_dict(state)
    reference.float().to(place).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor(case.ids[None], device=place), use_cache=False).logits
    return logits[0].double().cpu().numpy()


def hold(case, model, exact, theirs):
    """Hold a model against logits in float64 and those of transformers.

    Parameters
    ----------
    case : Case
    model : Model
        That of the case, on a device.
    exact : NumPy array [positions, vocab]
    theirs : NumPy array [positions, vocab] or None

    Returns
    -------
    dict
    """
    differences, to_theirs = {}, []
    for way, positions, logits in ways(model, case.ids):
        away = float(np.abs(logits - exact[positions]).max())
        differences[way] = max(away, differences.get(way, away), key=rank)
        if theirs is not None and model.dtype == "float32":
            to_theirs.append(float(np.abs(logits - theirs[positions]).max()))
    largest = float(np.abs(exact).max())
    rounding = float(np.finfo(model.dtype).eps) * largest
    tolerance = TOLERANCE.get(model.dtype, ROUNDINGS * rounding)
    prompt = case.ids[: len(case.ids) - STEPS].tolist()
    comparison = compare(model, prompt, max_new_tokens=4)
    divergence = comparison.first_divergence
    worst = max([*differences.values(), *to_theirs], key=rank)
    return {
        "model": case.name,
        "dtype": model.dtype,
        "kernels": bool(model.device.kernels),
        "positions": len(case.ids),
        "largest_logit": largest,
        "tolerance": tolerance,
        "differences": differences,
        "transformers_difference": max(to_theirs, key=rank, default=None),
        "paths_agree": comparison.agree,
        "first_divergence": None if divergence is None else str(divergence),
        "holds": bool(worst <= tolerance and comparison.agree),
    }


def rank(number):
    """What is not a number is larger than all that are."""
    return float("inf") if np.isnan(number) else number


def parity(found, devices, place, cases=CASES):
    """Hold every case in float32 and float16, with kernels and without.

    Parameters
    ----------
    found : Findings
    devices : sequence of Device
    place : str
        Where transformers runs: "cuda" or "cpu".
    cases : dict of str to function
    """
    rows = found.data["rows"] = []
    for name, make in cases.items():
        found.attempt(f"parity of {name}", parity_of, found, make, devices, place, rows)


def parity_of(found, make, devices, place, rows):
    """Hold a case in every way that there is."""
    case = make()
    exact = logits_of(case.model, [case.ids], Recompute(), last_only=False)[0]
    theirs = None

    def ask():
        nonlocal theirs
        theirs = transformers_logits(case, place)

    found.attempt(f"transformers with {case.name}", ask)
    if theirs is not None:
        apart = float(np.abs(theirs - exact).max())
        say(f"parity  {case.name:12} transformers, float32: {apart:.1e} from float64")
        found.data.setdefault("transformers_from_float64", {})[case.name] = apart
    for dtype in ("float32", "float16"):
        for device in devices:

            def one(dtype=dtype, device=device):
                row = hold(case, placed(case.model, device, dtype), exact, theirs)
                rows.append(row)
                say(parity_line(row))
                found.expect(row["holds"], f"parity: {row}")

            kind = "kernels" if device.kernels else "no kernels"
            found.attempt(f"{case.name}, {dtype}, {kind}", one)


def parity_line(row):
    """Return a row as a line of the table."""
    worst = max(row["differences"], key=lambda way: rank(row["differences"][way]))
    against = row["transformers_difference"]
    return (
        f"parity  {row['model']:12} {row['dtype']} {'kernels' if row['kernels'] else 'plain':8}"
        f"{row['differences'][worst]:.1e} from float64 ({worst}), "
        + ("" if against is None else f"{against:.1e} from transformers, ")
        + f"{row['tolerance']:.1e} allowed; paths {'agree' if row['paths_agree'] else 'DIFFER'}"
    )


# counts


def counting_kernels(cupy):
    """Return kernels that count their launches, and the counter."""
    counts = Counter()

    def raw_module(**options):
        module = cupy.RawModule(**options)

        def get_function(name):
            kernel = module.get_function(name)

            def launch(*arguments, **more):
                counts[name] += 1
                kernel(*arguments, **more)

            return launch

        return SimpleNamespace(get_function=get_function)

    return kernels(SimpleNamespace(RawModule=raw_module)), counts


def own_launches(n_layers):
    """Return how often a decode step launches each kernel of minineo."""
    return {
        "layer_norm": 2 * n_layers + 1,
        "append": n_layers,
        "attend": n_layers,
        "add_linear": 2 * n_layers,
        "linear_gelu": n_layers,
    }


def launches(found, device, fields, profiled):
    """Count what a decode step launches.

    Parameters
    ----------
    found : Findings
    device : Device
    fields : dict
        The shape of the model.
    profiled : function
        Returns how often each kernel ran during a call.
    """
    stand_ins, counts = counting_kernels(device.cupy)
    contestant = Minineo(fields, "float32", replace(device, kernels=stand_ins))
    config = contestant.model.config
    _, cache = contestant.prefill(contestants.tokens(contestant, 3))
    token = contestants.tokens(contestant, 1)
    counts.clear()
    contestant.decode(token, cache)
    contestant.undo(cache)
    predicted = costs.launches(config, 1, kernels=True)
    found.data |= {
        "layers": config.n_layers,
        "predicted": predicted,
        "own": dict(counts),
        "matrix_products": 6 * config.n_layers + 1,
    }
    expected = own_launches(config.n_layers)
    found.expect(counts == expected, f"launches of kernels: {dict(counts)}, not {expected}")
    say(f"counts  a decode step of {config.n_layers} layers: {predicted} launches predicted, "
        f"{sum(counts.values())} of them own kernels, as counted")  # fmt: skip

    def profile():
        seen = profiled(lambda: contestant.decode(token, cache), contestant.synchronize)
        found.data["profiled"] = dict(seen)
        found.data["profiled_total"] = total = sum(seen.values())
        say(f"counts  the profiler saw {total} kernels; cuBLAS may need two for a product")

    found.data["profiled_total"] = None
    try:
        profile()
    except Exception as error:  # a profiler may be forbidden here, which is no fault of the code
        found.left_out.append(f"profiler: {first_line(error)}")


def profiled(work, synchronize):
    """Return how often each kernel ran on the GPU during a call, of whatever library it is."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    on_gpu = [event.name for event in seen.events() if event.device_type == gpu]
    return Counter(name for name in on_gpu if not name.startswith(("Memcpy", "Memset")))


# speed: the contestants, each in a process of its own


class Minineo(contestants.Minineo):
    """A model with random weights on a device.

    In memory the layers are each other's copies: time does not depend on numbers.

    Parameters
    ----------
    fields : dict
    dtype : str
    device : Device
    """

    def __init__(self, fields, dtype, device):
        config = Config.from_dict(fields)
        numbers = np.random.default_rng(0).normal(0, 0.02, 2**20).astype(dtype)
        shapes, first = expected_shapes(config), {}

        def tensor(name):
            kind = re.sub(r"^h\.\d+\.", "", name)
            if kind in first:
                return first[kind].copy()
            first[kind] = device.put(np.resize(numbers, shapes[name]))
            return first[kind]

        self.model = Model("random", config, assemble(tensor, config), None, device)
        self.vocab = config.vocab
        self.synchronize = device.synchronize
        tf32 = os.environ.get("CUPY_TF32", "0") != "0"
        self.about = {"kernels": bool(device.kernels), "tf32": tf32}

    def limits(self, copied=COPIED, side=SIDE):
        """Measure what the device can do: bytes moved by a copy, and operations of a product.

        Returns
        -------
        dict
            Per second. Of a copy, bytes read and bytes written count.
        """
        device, dtype = self.model.device, self.model.dtype
        source = device.put(np.ones(copied, np.uint8))
        target = np.empty_like(source)
        numbers = np.random.default_rng(0).normal(size=2**20).astype(dtype)
        matrix = device.put(np.resize(numbers, (side, side)))
        device.synchronize()

        def rate(amount, work):
            work()
            return amount / median(device.seconds(work) for _ in range(5))

        return {
            "bytes_per_second": rate(2 * copied, lambda: np.copyto(target, source)),
            "flops_per_second": rate(2 * side**3, lambda: matrix @ matrix),
        }


class Transformers(contestants.Transformers):
    """The same shape in transformers, with its default attention.

    Parameters
    ----------
    fields : dict
    dtype : str
    place : str
        "cuda" or "cpu".
    """

    def __init__(self, fields, dtype, place):
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache, GPTNeoConfig

        torch.set_float32_matmul_precision("highest")  # no TF32, as in CuPy
        config = GPTNeoConfig.from_dict(dict(fields))
        with torch.device(place):  # in this dtype at once: changed later, it would take more memory
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.model, self.place = model.eval(), place
        self.vocab = model.config.vocab_size
        self.torch, self.new_cache = torch, DynamicCache
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        tf32 = torch.backends.cuda.matmul.allow_tf32
        self.about = {"attention": model.config._attn_implementation, "tf32": tf32}

    def tokens(self, ids):
        """Return token ids as a pass takes them."""
        return self.torch.tensor(ids, device=self.place)

    def synchronize(self):
        """Wait until everything begun is done."""
        if self.place != "cpu":
            self.torch.cuda.synchronize()


def contestant_maker(name):
    """Return a function that makes a contestant of a shape and dtype on the GPU."""
    if name == "transformers":
        return lambda fields, dtype: Transformers(fields, dtype, "cuda")
    device = choose("cuda", use_kernels=name == "minineo")
    return lambda fields, dtype: Minineo(fields, dtype, device)


def timed(contestant, work, undo=lambda: None):
    """Warm up, then return the seconds of several calls, each between two waits for the device."""
    taken = []
    while len(taken) < WARM + FEWEST or (len(taken) < WARM + MOST and sum(taken[WARM:]) < BUDGET):
        contestant.synchronize()
        start = perf_counter()
        work()
        contestant.synchronize()
        taken.append(perf_counter() - start)
        undo()
    return taken[WARM:]


def answer(make, kept, task):
    """Do one task of a contestant.

    Parameters
    ----------
    make : function
        Makes the contestant of some fields and dtype.
    kept : dict
        Keeps it from one task to the next.
    task : dict
        "measure", and what it needs.

    Returns
    -------
    list of float or dict
    """
    measure = task["measure"]
    if measure == "drop":
        kept.clear()
        free()
        return {}
    if measure == "load":
        kept["contestant"] = make(task["fields"], task["dtype"])
        return kept["contestant"].about
    contestant = kept["contestant"]
    if measure == "limits":
        return contestant.limits()
    tokens = contestants.tokens(contestant, task["size"], task.get("batch", 1))
    if measure == "decode":
        _, cache = contestant.prefill(tokens)
        new = contestants.tokens(contestant, 1, task.get("batch", 1))
        return timed(
            contestant, lambda: contestant.decode(new, cache), lambda: contestant.undo(cache)
        )
    work = {"prefill": contestant.prefill, "naive": contestant.naive}[measure]
    return timed(contestant, lambda: work(tokens))


def serve(name):
    """Answer tasks, a line of JSON each, until there are no more."""
    answers, kept, make = sys.stdout, {}, None
    with redirect_stdout(sys.stderr):  # whatever a library prints is no answer
        for line in sys.stdin:
            try:
                make = make or contestant_maker(name)
                reply = {"value": answer(make, kept, json.loads(line))}
            except Exception:
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=answers, flush=True)


class Process:
    """A contestant in a process of its own. It sleeps between its tasks.

    Parameters
    ----------
    name : str
    end : float
        When it is ended, whatever it does.
    """

    def __init__(self, name, end):
        self.name = name
        command = [sys.executable, str(Path(__file__).resolve()), "--contestant", name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )  # in a session of its own, where Ctrl-C does not reach it
        self.alarm = Timer(max(0, end - perf_counter()), self.process.kill)
        self.alarm.daemon = True
        self.alarm.start()

    def begin(self, task):
        """Give it a task."""
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def result(self):
        """Wait for the result of the task."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended, or ran out of time")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]

    def close(self):
        """End it."""
        self.alarm.cancel()
        self.process.kill()
        with suppress(OSError), self.process:  # closes its pipes, and waits
            pass


def race(found, askers, fields, dtype, tasks, rounds=ROUNDS):
    """Let contestants do the same tasks, in turn, several times.

    Parameters
    ----------
    found : Findings
    askers : dict of str to Process
    fields : dict
    dtype : str
    tasks : list of dict
        For every contestant, but "limits", which minineo measures.
    rounds : int, optional

    Returns
    -------
    samples : dict of int to dict of str to list
        For each task by its number, what each contestant took, all rounds together.
    """
    load = {"measure": "load", "fields": fields, "dtype": dtype}
    begun, ready, samples = {}, {}, {number: {} for number in range(len(tasks))}
    for name, asker in askers.items():

        def begin(name=name, asker=asker):
            asker.begin(load)
            begun[name] = asker

        found.attempt("a task", begin)
    for name, asker in begun.items():

        def wait(name=name, asker=asker):
            about = asker.result()
            ready[name] = asker
            found.data.setdefault("contestants", {})[name] = about
            found.expect(about["tf32"] is False, f"{name} multiplies in TF32")

        found.attempt(f"{name} makes the model", wait, begun=True)
    for _ in range(rounds):
        for number, task in enumerate(tasks):
            for name, asker in list(ready.items()):
                if task["measure"] == "limits" and name != "minineo":
                    continue

                def ask(number=number, task=task, name=name, asker=asker):
                    asker.begin(task)
                    value = asker.result()
                    value = value if isinstance(value, list) else [value]
                    samples[number].setdefault(name, []).extend(value)

                before = len(found.faults)
                found.attempt(f"{name}, {task}", ask, optional=True)
                if len(found.faults) > before:  # one that has failed is asked no more
                    del ready[name]
    for asker in begun.values():  # whoever comes next needs the memory
        with suppress(OSError, RuntimeError):  # it has ended, and so holds none
            asker.begin({"measure": "drop"})
            asker.result()
    return samples


def too_little_memory(device, fields, dtype):
    """Return in a sentence why a race does not fit into the free memory of a GPU, or None.

    Every contestant holds the weights, and the keys and values of the longest prefill.
    """
    memory = device.memory()
    if memory is None:
        return None
    config, itemsize = Config.from_dict(fields), np.dtype(dtype).itemsize
    each = costs.weight_bytes(config, itemsize)
    each += costs.cache_bytes(config, max(PREFILLS) + 1, itemsize)
    needed = len(NAMES) * each + ROOM
    if needed <= memory.free:
        return None
    return (
        f"{len(NAMES)} such models at once need {needed / 1e9:.1f} GB of the GPU's memory, "
        f"and {memory.free / 1e9:.1f} GB are free"
    )


def speed(found, askers, device, races, prefills=PREFILLS, depths=DEPTHS, rounds=ROUNDS):
    """Time prefill and decode of all contestants at several shapes.

    Parameters
    ----------
    found : Findings
    askers : dict of str to Process
    device : Device
        What does not fit into its free memory is left out.
    races : list of (name, fields, dtype)
    prefills, depths : tuple of int, optional
    rounds : int, optional
    """
    found.data |= {"rounds": rounds, "rows": [], "limits": []}
    for name, fields, dtype in races:
        what = f"speed of {name} in {dtype}"
        if reason := too_little_memory(device, fields, dtype):
            found.left_out.append(f"{what}: {reason}")
            continue
        found.attempt(
            what, speed_of, found, askers, name, fields, dtype, prefills, depths, rounds,
            optional=True,
        )  # fmt: skip
    steps = [r for r in found.data["rows"] if r["model"] == AIM and r["measure"] == "decode"]
    ours = [row["contestants"].get("minineo", {}) for row in steps]
    known = [each["ratio_to_transformers"] for each in ours if each.get("ratio_to_transformers")]
    found.data["decode_within_half_of_transformers"] = max(known) <= 0.5 if known else None
    say(f"speed   decode of {AIM} in times of transformers: {known}; the aim is 0.5 at most")


def speed_of(found, askers, name, fields, dtype, prefills, depths, rounds):
    """Time one shape in one dtype."""
    config, itemsize = Config.from_dict(fields), np.dtype(dtype).itemsize
    tasks = [{"measure": "limits"}]
    tasks += [{"measure": "prefill", "size": size} for size in prefills]
    tasks += [{"measure": "decode", "size": size} for size in depths]
    samples = race(found, askers, fields, dtype, tasks, rounds)
    measured = samples[0].get("minineo", [])
    limits = {
        key: median(each[key] for each in measured)
        for key in ("bytes_per_second", "flops_per_second")
        if measured
    }
    found.data["limits"].append({"model": name, "dtype": dtype, **limits})
    for number, task in list(enumerate(tasks))[1:]:
        size = task["size"]
        if task["measure"] == "prefill":
            kind, amount = "flops_per_second", costs.prefill_flops(config, size)
        else:
            kind = "bytes_per_second"
            amount = costs.weight_bytes(config, itemsize)
            amount += costs.cache_bytes_read(config, size, itemsize)
        row = {
            "model": name,
            "dtype": dtype,
            "measure": task["measure"],
            "size": size,
            "least_flops" if kind == "flops_per_second" else "least_bytes": amount,
            "contestants": figures(samples[number], amount, limits.get(kind)),
        }
        found.data["rows"].append(row)
        say(speed_line(row))


def figures(samples, amount=None, limit=None):
    """Return the medians of contestants, beside transformers and beside the GPU's limit.

    Parameters
    ----------
    samples : dict of str to list of float
    amount : int, optional
        Bytes or operations that it takes at least.
    limit : float, optional
        How many of them the GPU was seen to do in a second.
    """
    theirs = samples.get("transformers")
    return {
        name: {
            "seconds": median(taken),
            "ratio_to_transformers": median(taken) / median(theirs) if theirs else None,
            "share_of_limit": amount / median(taken) / limit if limit else None,
            "samples": taken,
        }
        for name, taken in samples.items()
    }


def speed_line(row):
    """Return a row as a line of the table."""

    def cell(name, each):
        ratio, share = each["ratio_to_transformers"], each["share_of_limit"]
        text = f"{name} {1000 * each['seconds']:.3f} ms"
        text += "" if ratio is None else f" ({ratio:.2f} x)"
        return text + ("" if share is None else f" {share:.0%} of the limit")

    cells = [cell(name, each) for name, each in row["contestants"].items()]
    head = f"{row['model']} {row['dtype']} {row['measure']} {row['size']}"
    return f"speed   {head:28} " + " | ".join(cells)


# paths, batches, memory


def paths(found, askers, device, fields, lengths=LENGTHS, batches=BATCHES, depth=BATCH_DEPTH):
    """Time the naive and the cached step, and batches; hold the cache's memory against its bytes.

    Parameters
    ----------
    found : Findings
    askers : dict of str to Process
    device : Device
    fields : dict
        The shape of the model.
    lengths, batches : tuple of int, optional
    depth : int, optional
        Tokens in the cache of each row of a batch.
    """
    found.attempt("memory", cache_memory, found, device, fields)
    tasks = [
        {"measure": measure, "size": length - (measure == "decode")}
        for length in lengths
        for measure in ("naive", "decode")
    ]
    ours = {name: asker for name, asker in askers.items() if name != "transformers"}
    samples = race(found, ours, fields, "float32", tasks, rounds=1)
    pairs = list(zip(range(0, len(tasks), 2), lengths, strict=True))
    for name in ours:
        steps = [
            {
                "length": length,
                "naive_seconds": median(samples[number][name]),
                "cached_seconds": median(samples[number + 1][name]),
            }
            for number, length in pairs
            if name in samples[number] and name in samples[number + 1]
        ]
        found.data.setdefault("steps", {})[name] = steps
        found.data.setdefault("cached_faster_from", {})[name] = crossover(steps)
        for step in steps:
            say(f"paths   {name}, length {step['length']}: naive {1e3 * step['naive_seconds']:.3f}"
                f" ms, cached {1e3 * step['cached_seconds']:.3f} ms")  # fmt: skip
        say(f"paths   {name}: the cached step is the faster one from {crossover(steps)}")

    tasks = [{"measure": "decode", "size": depth, "batch": rows} for rows in batches]
    samples = race(found, askers, fields, "float32", tasks, rounds=1)
    found.data["batches"] = []
    for number, rows in enumerate(batches):
        row = {"batch": rows, "depth": depth, "contestants": figures(samples[number])}
        for each in row["contestants"].values():
            each["tokens_per_second"] = rows / each["seconds"]
        found.data["batches"].append(row)
        rates = (f"{n} {e['tokens_per_second']:.0f}" for n, e in row["contestants"].items())
        say(f"batch   {rows} rows, tokens per second: " + " | ".join(rates))


def crossover(steps):
    """Return the length from which on the cached step is always the faster one, or None."""
    faster = None
    for step in reversed(steps):
        if step["cached_seconds"] >= step["naive_seconds"]:
            break
        faster = step["length"]
    return faster


def cache_memory(found, device, fields, rows=4):
    """Hold the bytes of a cache, as predicted, against those that the device has given away."""
    config = Config.from_dict(fields)
    like = device.put(np.zeros(1, "float32"))
    before = device.memory()
    cache = KVCache(config, rows, config.context, like=like)
    after = device.memory()
    predicted = rows * costs.cache_bytes(config, config.context)
    measured = None if before is None else after.used - before.used
    found.data["cache_memory"] = {
        "rows": rows,
        "slots": config.context,
        "predicted_bytes": predicted,
        "array_bytes": cache.nbytes,
        "measured_bytes": measured,
    }
    say(f"memory  cache of {rows} x {config.context}: {predicted} bytes predicted, {measured} used")
    found.expect(cache.nbytes == predicted, "the cache has other bytes than predicted")
    most = predicted + 512 * 2 * config.n_layers  # the pool gives memory in pieces of 512 bytes
    found.expect(
        measured is None or predicted <= measured <= most, "the pool gave more bytes or fewer"
    )


# all of it


def examine(device, results, only=None):
    """Run all sections, or one of them.

    Parameters
    ----------
    device : Device
    results : dict
        Gets the findings of each section by its name, as soon as it begins.
    only : str, optional
    """
    start = perf_counter()
    later = dict(zip(SECONDS, [*np.cumsum([*SECONDS.values()]).tolist()], strict=True))
    devices = [device, replace(device, kernels={})]
    shape = shape_fields("125m")
    races = [(name, shape_fields(name), dtype) for name, dtype in RACES]
    askers = {}
    sections = {
        "environment": lambda found: environment(found, device),
        "parity": lambda found: parity(found, devices, "cuda"),
        "counts": lambda found: launches(found, device, shape, profiled),
        "speed": lambda found: speed(found, askers, device, races),
        "paths": lambda found: paths(found, askers, device, shape),
    }
    with ExitStack() as stack:
        for name, section in sections.items():
            if only not in (None, name):
                continue
            if name in ("speed", "paths") and not askers:
                free()
                for each in NAMES:
                    askers[each] = Process(each, start + later["paths"])
                    stack.callback(askers[each].close)
            began = perf_counter()
            found = results[name] = Findings(start + later[name])
            found.attempt(name, section, found)
            found.seconds = perf_counter() - began
            left_out = f", left out: {found.left_out}" if found.left_out else ""
            say(f"{name}: {found.to_json()['status']} in {found.seconds:.0f} s{left_out}")


def free():
    """Give back the memory of the GPU that this process keeps for later, since others need it."""
    gc.collect()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def plain(value):
    """Return data with None in place of what is not a finite number: JSON has no word for that."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def not_writable(file):
    """Return in a line why a file cannot be written, or None."""
    if file.is_dir():
        return f"{file} is a folder; give a file's name"
    if not file.parent.is_dir():
        return f"{file.parent} does not exist; make it first, or write elsewhere"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"cannot write {file}"
    return None


def main():
    """Examine the GPU, or be a contestant of the examination."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*SECONDS], help="run one section alone")
    parser.add_argument("--out", type=Path, help="write the JSON into a file as well")
    parser.add_argument("--contestant", choices=NAMES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contestant:
        serve(asked.contestant)
        return 0
    if asked.out and (trouble := not_writable(asked.out)):
        say(trouble)
        return 2
    try:
        device = choose("cuda")
    except InputError as error:
        say(str(error).removesuffix("; or use --device cpu"))  # there is no such option here
        return 2
    start, answers, results = perf_counter(), sys.stdout, {}

    def report(ended=""):  # what has ended it too early
        sections = {name: found.to_json() for name, found in results.items()}
        passed = not ended and all(section["status"] == "ok" for section in sections.values())
        seconds = perf_counter() - start
        text = json.dumps(
            {
                "schema": 1,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "revision": revision(),
                "passed": passed,
                "seconds": seconds,
                "sections": plain(sections),
            },
            allow_nan=False,
        )
        print(text, file=answers, flush=True)
        if asked.out:
            asked.out.write_text(text + "\n", encoding="utf-8")
        say(f"{ended or ('all holds' if passed else 'FAILED')} after {seconds:.0f} s")
        return 0 if passed else 1

    def give_up():
        faulthandler.dump_traceback(sys.__stderr__)  # where it hangs
        report("FAILED: stopped")
        os._exit(1)

    alarm = Timer(ALARM, give_up)
    alarm.daemon = True
    alarm.start()
    try:
        with redirect_stdout(sys.stderr):
            examine(device, results, asked.only)
    except KeyboardInterrupt:
        alarm.cancel()
        report("interrupted")
        return 130
    alarm.cancel()
    return report()


if __name__ == "__main__":
    sys.exit(main())
