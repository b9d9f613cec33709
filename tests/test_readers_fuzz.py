"""Whatever a file of weights holds, it is read or refused in one line, with little memory."""

import functools
import io
import json
import pickletools
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from replicas import tensors_of, write_gpt_neo, write_tinystories

from minineo import Config, InputError
from minineo.checkpoints.read import read_weights

SMALL = {
    "vocab_size": 5,
    "max_position_embeddings": 4,
    "hidden_size": 4,
    "num_heads": 2,
    "num_layers": 1,
    "attention_types": [[["local"], 1]],
    "eos_token_id": 4,
}
OVERHEAD = 2**23  # bytes that reading takes whatever the file's size
SECONDS = 20  # a machine may be busy; a hang is for ever

NUMBERS = st.sampled_from([0, 1, 2, 3, 0x7F, 0x80, 0xFF, 2**16, 2**31 - 1, 2**32 - 1, 2**63])
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "copy", "cut", "number"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.binary(min_size=1, max_size=8),
        NUMBERS,
    ),
    min_size=1,
    max_size=6,
)


def mutate(content, changes):
    """Change some bytes here and there."""
    content = bytearray(content)
    for kind, here, there, new, number in changes:
        start, other = here % (len(content) + 1), there % (len(content) + 1)
        if kind == "set":
            content[start : start + len(new)] = new
        elif kind == "insert":
            content[start:start] = new
        elif kind == "delete":
            del content[start : start + there % 40]
        elif kind == "copy":
            content[start : start + len(new) * 4] = content[other : other + len(new) * 4]
        elif kind == "cut":
            del content[start:]
        else:
            content[start : start + 8] = struct.pack("<Q", number)[: 1 + there % 8]
    return bytes(content)


FILES = ("model.safetensors", "pytorch_model.bin")
PUBLIC_SMALL = {"model_type": "gpt_neo", "window_size": 2, "layer_norm_epsilon": 1e-5} | SMALL
CONFIG = Config.from_dict(PUBLIC_SMALL)


@functools.cache
def seed(name):
    """A whole file of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        write = write_gpt_neo if name == "model.safetensors" else write_tinystories
        write(Path(folder), PUBLIC_SMALL)
        return Path(folder, name).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def survives(folder, name, content):
    """Read a file; return whether it was taken for weights."""
    path = folder / name
    path.write_bytes(content)
    refusal = None
    tracemalloc.start()
    start = perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are no numbers, and of odd escapes
            read_weights(folder, CONFIG, np.dtype("float32"))
    except InputError as error:
        refusal = str(error)
    seconds, (_, peak) = perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < 2 * len(content) + OVERHEAD
    assert refusal is None or (str(folder) in refusal and refusal.isprintable()), refusal
    return refusal is None


def repacked_safetensors(content, changes):
    """Change the header, and give it the right length."""
    length = int.from_bytes(content[:8], "little")
    header = mutate(content[8 : 8 + length], changes)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def repacked_torch(content, changes):
    """Change the pickle, and give it the right length and checksum."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, mutate(data, changes) if name.endswith("data.pkl") else data)
    return packed.getvalue()


def whole(content, changes):
    return mutate(content, changes)


WAYS = [
    ("model.safetensors", whole),
    ("model.safetensors", repacked_safetensors),
    ("pytorch_model.bin", whole),
    ("pytorch_model.bin", repacked_torch),
]


def fuzz(scratch, way, changes):
    name, change = way
    survives(scratch, name, change(seed(name), changes))


relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}, {way[1].__name__}")
@given(changes=CHANGES)
@settings(relaxed, max_examples=60)
def test_a_changed_file_is_read_or_refused(scratch, way, changes):
    fuzz(scratch, way, changes)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]}, {way[1].__name__}")
@given(changes=CHANGES)
@settings(relaxed, max_examples=1_500)
def test_a_changed_file_is_read_or_refused_for_minutes(scratch, way, changes):
    fuzz(scratch, way, changes)


@given(content=st.binary(max_size=300))
@example(b"PK\5\6" + bytes(18))
@example(b"\x80\x02.")
@settings(relaxed, max_examples=60)
@pytest.mark.parametrize("name", FILES)
def test_any_bytes_are_refused(scratch, name, content):
    assert not survives(scratch, name, content)


@given(data=st.data())
@settings(relaxed, max_examples=40)
def test_any_header_is_read_or_refused(scratch, data):
    tensor = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "U8", "BOOL", "F8_E4M3", "X"]),
            "shape": st.lists(st.integers(-1, 5) | NUMBERS, max_size=3),
            "data_offsets": st.tuples(st.integers(0, 40) | NUMBERS, st.integers(0, 40) | NUMBERS),
        }
    )
    names = st.sampled_from([*tensors_of(CONFIG), "a", "__metadata__"])
    header = json.dumps(data.draw(st.dictionaries(names, tensor, max_size=4))).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(data.draw(st.integers(0, 50)))
    assert not survives(scratch, "model.safetensors", content)


@given(data=st.data())
@settings(relaxed, max_examples=60)
def test_any_pickle_is_read_or_refused(scratch, data):
    codes = [operation.code.encode("latin-1") for operation in pickletools.opcodes]
    parts = st.lists(st.sampled_from(codes) | st.binary(max_size=6), max_size=40)
    program = b"".join(data.draw(parts))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    assert not survives(scratch, "pytorch_model.bin", packed.getvalue())


@pytest.mark.parametrize("name", FILES)
def test_the_whole_files_are_taken(scratch, name):
    assert survives(scratch, name, seed(name))
