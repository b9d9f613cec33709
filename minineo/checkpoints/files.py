"""Look at files that come from elsewhere before anything is made of them."""

import json
import mmap
from typing import Any, NamedTuple

import numpy as np

from ..transformer import InputError

LIMIT = 2**20  # bytes of a config, an index or a header; real ones have a tenth of it
BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # NumPy has no such dtype: its bits under that name
FLOATS = {"F16": "<f2", "BF16": BFLOAT16, "F32": "<f4", "F64": "<f8"}


class Stored(NamedTuple):
    """A tensor that still lies in its file."""

    kind: str  # its dtype, in safetensors' words
    shape: tuple[int, ...]
    array: Any  # a view of the mapped file; None when the dtype is no float


def stored(kind, shape, buffer, offset=0, strides=None):
    """Return a tensor that lies in a buffer.

    Parameters
    ----------
    kind : str
    shape : tuple of int
    buffer : buffer
        All that belongs to the tensor: it cannot reach beyond.
    offset : int, optional
        Where it begins, in elements.
    strides : tuple of int, optional
        How many elements to go for the next index of each axis; by default it is contiguous.

    Raises
    ------
    ValueError
        If the tensor reaches beyond the buffer, or there can be no such tensor.
    """
    if kind not in FLOATS:
        return Stored(kind, shape, None)
    dtype = np.dtype(FLOATS[kind])
    if strides is not None:
        strides = tuple(stride * dtype.itemsize for stride in strides)
    array = np.ndarray(shape, dtype, buffer, offset * dtype.itemsize, strides)
    return Stored(kind, shape, array)


def one_line(text, most=1000):
    """Return text from a file or a library as one line that can be printed, and not too long."""
    text = "".join(c if c.isprintable() else " " for c in str(text)[: most + 1])
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ..."


def check_content(path):
    """Refuse what is often found under the name of a file that it is not.

    Raises
    ------
    InputError
        If the file is empty, a git-lfs pointer or a web page, or cannot be read at all.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if not start:
        raise InputError(f"cannot read {path}: it is empty; copy or download it again")
    if start.startswith(b"version https://git-lfs"):
        raise InputError(
            f"cannot read {path}: it is a git-lfs pointer, not the file itself; "
            "run 'git lfs pull' in its folder"
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise InputError(
            f"cannot read {path}: it is a web page, not the file itself; download the raw file"
        )


def read_json(path):
    """Return the object in a JSON file.

    Raises
    ------
    InputError
        If the file is no JSON object, names a key twice, or is far larger than it can have to be.
    """
    check_content(path)
    try:
        with open(path, "rb") as file:
            return parse_json(file.read(LIMIT + 1))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {path}: {one_line(error)}; copy it from the model's source"
        ) from None


def parse_json(text):
    """Return the object in some JSON, or raise ValueError."""
    if len(text) > LIMIT:
        raise ValueError(f"it is larger than {LIMIT} bytes")
    fields = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    if not isinstance(fields, dict):
        raise ValueError("it holds no JSON object")
    return fields


def _object(pairs):
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {max(names, key=names.count)!r} twice")
    return fields


def map_file(path):
    """Return a file's bytes as memory that is read when it is touched.

    Raises
    ------
    OSError, ValueError
        If there is nothing to map.
    """
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
