"""The public models in their full shapes: files as on the hub, with random weights."""

import json
import struct
import subprocess
import sys
import time
from math import prod

import numpy as np
import pytest
from replicas import PUBLIC, flat, in_order, write_gpt_neo, write_tinystories

from minineo import Config, load
from minineo.checkpoints.known import parameters, public_config
from minineo.checkpoints.read import expected_shapes

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
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
times = []
for _ in range(2):  # the system may have to find the memory first
    start, worked = time.perf_counter(), time.process_time()
    model = minineo.load(sys.argv[1], device="cpu")
    times.append((time.perf_counter() - start, time.process_time() - worked))
    del model
done = True
watcher.join()
print(json.dumps({"peak": peak, "times": times}))
"""


def read_times(path):
    """Return the seconds and the processor's seconds it takes to read a file into memory."""
    start, worked = time.perf_counter(), time.process_time()
    np.fromfile(path, "uint8")
    return time.perf_counter() - start, time.process_time() - worked


def check(name, path, weights):
    """Load a model in a process of its own, and hold its memory against its bound.

    The time it takes is printed beside that of reading the file alone, and not judged.
    """
    command = [sys.executable, "-c", MEASURE, str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    load = json.loads(done.stdout)
    taken, worked = min(load["times"])
    seconds, processor = min(read_times(path) for _ in range(2))
    print(
        f"\n{name}: peak {load['peak'] / MIB:,.0f} MiB for {weights / MIB:,.0f} MiB of weights; "
        f"load {taken:.2f} s (processor {worked:.2f} s), "
        f"the file alone {seconds:.2f} s ({processor:.2f} s)"
    )
    assert load["peak"] <= 1.15 * weights + 200 * MIB


def write_hollow(folder, fields):
    """Write a model whose weights are a hole in the file: zeros that take no room on the disk."""
    (folder / "config.json").write_text(json.dumps(fields))
    header, end = {}, 0
    for name, shape in expected_shapes(Config.from_dict(fields)).items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("gpt-neo-125m", write_gpt_neo, "model.safetensors"),
        ("tinystories-33m", write_tinystories, "pytorch_model.bin"),
    ],
)
def test_a_replica_in_full_shape_loads_exactly(tmp_path, name, write, file):
    stored = write(tmp_path, full_fields(name), draw=flat)
    model = load(tmp_path, device="cpu")
    assert model.config == public_config(name)
    weights = model.weights
    assert weights.unembedding is weights.token_embedding
    np.testing.assert_array_equal(weights.token_embedding, stored["transformer.wte.weight"])
    last = model.config.n_layers - 1
    name_of_last = f"transformer.h.{last}.mlp.c_proj.weight"
    np.testing.assert_array_equal(weights.blocks[last].mlp.down, stored[name_of_last])
    size = 4 * sum(array.size for array in in_order(weights))
    assert size == 4 * parameters(model.config)
    check(name, tmp_path / file, size)


def test_loading_the_1_3b_shape_stays_in_its_memory(tmp_path):
    name = "gpt-neo-1.3b"
    size = 4 * parameters(public_config(name))
    if size > free_memory():
        pytest.skip(f"{size / MIB:,.0f} MiB are not free here")
    write_hollow(tmp_path, full_fields(name))
    check(name, tmp_path / "model.safetensors", size)


def full_fields(name):
    """What the config.json of a public model says of its shape."""
    config = public_config(name)
    return PUBLIC | {
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_layers": config.n_layers,
        "num_heads": config.n_heads,
        "attention_types": [[["global", "local"], config.n_layers // 2]],
        "attention_layers": ["global", "local"] * (config.n_layers // 2),
        "window_size": 256,
        "bos_token_id": config.end_token,
        "eos_token_id": config.end_token,
    }


def free_memory():
    """Return the bytes that this machine can still give, twice: the file is read as well."""
    with open("/proc/meminfo") as file:
        free = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
    return int(free) * 1024 // 2
