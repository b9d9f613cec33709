import json
import struct
import tracemalloc

import numpy as np
import pytest
from replicas import parameters, write_gpt_neo
from safetensors.numpy import load_file, save_file

from minineo import InputError, load
from minineo.checkpoints.safetensors_file import read_safetensors


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def refused(path):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        read_safetensors(path)
    assert str(path) in str(error.value)
    return str(error.value)


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(start, end, shape, kind="F32"):
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_a_tensor_of_any_shape_is_read(path, shape, kind):
    array = np.random.default_rng(0).normal(size=shape).astype(kind)
    save_file({"before": np.ones(3, "uint8"), "a": array, "behind": np.ones(1)}, path)
    found = read_safetensors(path)["a"]
    assert found.shape == shape
    np.testing.assert_array_equal(found.array, array)


def test_a_file_whose_numbers_begin_at_an_odd_byte_is_read(path):
    numbers = np.arange(3, dtype="float32")
    header = json.dumps({"a": entry(0, 12, [3])}).encode()
    header += b" " * (1 - len(header) % 2)
    write(path, header, numbers.tobytes())
    assert read_safetensors(path)["a"].array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),  # on top of each other
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),  # a hole between
        ({"a": entry(0, 4, [2])}, bytes(4)),  # a shape too large
        ({"a": entry(0, 4, [1])}, bytes(5)),  # bytes left over
        ({"a": entry(0, 4, [1])}, bytes(3)),
        ({"a": entry(4, 0, [1])}, bytes(4)),
        ({"a": entry(0, 2**62, [2**60])}, bytes(4)),
        ({"a": entry(0, 0, [2**63, 2**63])}, b""),
        ({"a": entry(-4, 0, [1])}, bytes(4)),
        ({"a": entry(0, 4, [-1])}, bytes(4)),
        ({"a": entry(0, 4, [1.0])}, bytes(4)),
        ({"a": entry(0, 4, [1], "F99")}, bytes(4)),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        ({"a": None}, b""),
        ([], b""),
        (b"", b""),
        (b"{", b""),
        (b"\xff\xfe", b""),
        (b'{"a": ' + b"[" * 10**5, b""),
        (b'{"__metadata__": 3}', b""),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_header_that_lies_is_refused(path, header, data):
    write(path, header, data)
    assert "cannot read" in refused(path)


def test_a_name_that_stands_twice_is_refused(path):
    one = json.dumps(entry(0, 4, [1]))
    write(path, f'{{"a": {one}, "a": {one}}}'.encode(), bytes(4))
    assert "names 'a' twice" in refused(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**8, 0, 1])
def test_an_absurd_length_is_refused_with_little_memory(path, length):
    write(path, {"a": entry(0, 4, [1])}, bytes(4), length)
    tracemalloc.start()
    refused(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**6


def test_a_header_far_larger_than_any_model_has_is_refused_with_little_memory(path):
    write(path, {f"{i}": entry(0, 0, [0]) for i in range(30_000)})
    tracemalloc.start()
    message = refused(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "its header has" in message
    assert peak < path.stat().st_size


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"", "it is empty; copy or download"),
        (b"\xff" * 99, "cut short or no safetensors file"),
        (b"{}", "cut short or no safetensors file"),
    ],
)
def test_another_file_under_this_name_is_refused_as_what_it_is(path, content, complaint):
    path.write_bytes(content)
    assert complaint in refused(path)


@pytest.mark.parametrize("kept", [7, 8, 9, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, path, kept):
    write_gpt_neo(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else kept])
    assert "cannot read" in refused(path)


# shards


@pytest.fixture
def sharded(tmp_path):
    """A model in two shards, and the index that names them."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    write_gpt_neo(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "whole")
    names, weight_map = sorted(tensors), {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    write_index(folder, weight_map)
    return folder


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def folder_refused(folder):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        load(folder, device="cpu")
    return str(error.value)


def test_shards_are_put_together(sharded, tmp_path):
    tensors = load_file(tmp_path / "whole")
    arrays = parameters(load(sharded, device="cpu").weights)
    stored = {array.tobytes() for array in tensors.values()}
    assert len(arrays) == sum(
        "masked" not in n and not n.endswith("attention.bias") for n in tensors
    )
    assert all(array.tobytes() in stored for array in arrays)


def test_a_shard_that_the_index_does_not_name_is_left_alone(sharded):
    stray = {name: np.asarray(array + 1) for name, array in load_file(sharded / SHARD).items()}
    before = parameters(load(sharded, device="cpu").weights)
    save_file(stray, sharded / "model-00003-of-00003.safetensors")
    after = parameters(load(sharded, device="cpu").weights)
    assert all((one == other).all() for one, other in zip(before, after, strict=True))


SHARD = "model-00001-of-00002.safetensors"


def test_missing_shards_are_named(sharded):
    (sharded / SHARD).unlink()
    message = folder_refused(sharded)
    assert f"lacks {SHARD}; copy or download it again" in message


def test_shards_without_their_index_are_refused_by_name(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert f"has {SHARD}, but no index" in folder_refused(sharded)


def test_an_index_that_lies_is_refused_with_every_lie(sharded):
    weight_map = read_index(sharded)
    first, second = list(weight_map)[:2]
    assert weight_map[first] == SHARD
    other = weight_map[list(weight_map)[-1]]
    weight_map[first] = other
    del weight_map[second]
    weight_map["transformer.ghost"] = SHARD
    write_index(sharded, weight_map)
    message = folder_refused(sharded)
    assert f"{first} is not in {other}" in message
    assert f"{SHARD} holds {first} as well" in message
    assert f"{SHARD} holds {second} as well" in message
    assert f"transformer.ghost is not in {SHARD}" in message


@pytest.mark.parametrize(
    "file",
    ["../whole", "..", "/etc/passwd", "a/../../whole", "C:\\whole", "..\\whole", "", None, "a\0"],
)
def test_an_index_that_points_outside_is_refused(sharded, file):
    weight_map = read_index(sharded)
    write_index(sharded, weight_map | {next(iter(weight_map)): file})
    assert "no file of its own folder" in folder_refused(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map_is_refused(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no weight_map" in folder_refused(sharded)


def test_a_broken_shard_is_named(sharded):
    (sharded / SHARD).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = folder_refused(sharded)
    assert SHARD in message
    assert "git-lfs pointer" in message


def test_a_name_with_and_without_prefix_is_refused(tmp_path, path):
    write_gpt_neo(tmp_path)
    tensors = load_file(path)
    save_file(tensors | {"ln_f.bias": tensors["transformer.ln_f.bias"]}, path)
    assert "with and without prefix: ln_f.bias" in folder_refused(tmp_path)


def test_a_name_of_several_lines_is_told_in_one(tmp_path, path):
    write_gpt_neo(tmp_path)
    save_file(load_file(path) | {"a\nb\x1b[1m": np.zeros(1)}, path)
    assert "a b [1m is unexpected" in folder_refused(tmp_path)
