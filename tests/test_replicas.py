"""The public models in their full shapes: files as on the hub, with random weights."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from replicas import flat, in_order, write_gpt_neo, write_tinystories

from minineo import load
from minineo.checkpoints.known import parameters, public_config
from minineo.study.shapes import shape_fields, write_random_model

pytestmark = pytest.mark.slow

MIB = 2**20
MEASURE = """
import json, sys, threading, time
import minineo

def own_memory():  # of this process alone: mapped files can be dropped at any time
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

peak, done = own_memory(), False
def watch():
    global peak
    while not done:
        peak = max(peak, own_memory())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
model = minineo.load(sys.argv[1], device="cpu", dtype=sys.argv[2])
seconds = time.perf_counter() - start
done = True
watcher.join()
print(json.dumps({"peak": peak, "seconds": seconds}))
"""


def read_seconds(path):
    """Return how long it takes to read a file into memory, and nothing else."""
    start = time.perf_counter()
    np.fromfile(path, "uint8")
    return time.perf_counter() - start


def measure(folder, dtype="float32"):
    command = [sys.executable, "-c", MEASURE, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def report(name, path, measured, weights):
    read = min(read_seconds(path) for _ in range(3))
    print(
        f"\n{name}: peak {measured['peak'] / MIB:,.0f} MiB for {weights / MIB:,.0f} MiB of weights; "
        f"load {measured['seconds']:.2f} s, the file alone {read:.2f} s"
    )
    return read


@pytest.mark.parametrize(
    ("name", "shape", "write", "file"),
    [
        ("gpt-neo-125m", "125m", write_gpt_neo, "model.safetensors"),
        ("tinystories-33m", "tinystories-33m", write_tinystories, "pytorch_model.bin"),
    ],
)
def test_a_replica_in_full_shape_loads_exactly(tmp_path, name, shape, write, file):
    stored = write(tmp_path, shape_fields(shape), draw=flat)
    model = load(tmp_path, device="cpu")
    assert model.config == public_config(name)
    assert sum(array.size for array in in_order(model.weights)) == parameters(model.config)
    weights = model.weights
    assert weights.unembedding is weights.token_embedding
    np.testing.assert_array_equal(weights.token_embedding, stored["transformer.wte.weight"])
    last = model.config.n_layers - 1
    name_of_last = f"transformer.h.{last}.mlp.c_proj.weight"
    np.testing.assert_array_equal(weights.blocks[last].mlp.down, stored[name_of_last])
    size = 4 * parameters(model.config)
    measured = measure(tmp_path)
    report(name, tmp_path / file, measured, size)
    assert measured["peak"] <= 1.15 * size + 200 * MIB


def test_loading_the_1_3b_shape_stays_in_its_memory(tmp_path):
    write_random_model(tmp_path, shape_fields("1.3b"))
    size = 4 * parameters(public_config("gpt-neo-1.3b"))
    measured = min((measure(tmp_path) for _ in range(2)), key=lambda m: m["seconds"])
    read = report("1.3b", tmp_path / "model.safetensors", measured, size)
    assert measured["peak"] <= 1.15 * size + 200 * MIB
    assert measured["seconds"] <= 2 * read + 2, "close to reading the file"
