"""The tensors of a file that torch.save wrote, left where they lie, without torch.

Such a file is a zip archive: one pickle, `data.pkl`, and the numbers of each storage in a file of
their own, not compressed. A pickle is a program, and the usual way of running it can do anything.
Here the few instructions that describe tensors are followed, names are compared and never
imported, and nothing is called.
"""

import io
import pickletools
import struct
import zipfile
from typing import NamedTuple

from ..transformer import InputError
from .files import LIMIT, check_content, map_file, one_line, stored

LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # a number pickled first
ORDERED_DICT = "collections OrderedDict"
REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
KINDS = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
NAMES = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER, *KINDS}
# what zipfile, pickletools and the code below raise where a file is damaged
DAMAGE = (
    zipfile.BadZipFile, struct.error, OSError, EOFError, ValueError, LookupError, TypeError,
    RuntimeError, OverflowError,
)  # fmt: skip


class NotWeightsError(Exception):
    """The file is whole, but holds no weights; the message goes on from its name."""


class Name(str):
    """What a pickle asks for, as "module name"."""


class Storage(NamedTuple):
    """What a pickle says of the numbers of a tensor."""

    kind: str
    key: str  # the part of the archive that holds them


class Tensor(NamedTuple):
    """What a pickle says of a tensor."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ShortReads(io.FileIO):
    """A file that is read in small pieces alone: lengths in a damaged archive may be absurd."""

    def read(self, size=-1):
        """Read some bytes, or all that are left."""
        if size is None or size < 0:
            size = LIMIT + 1
        if size > LIMIT + 1:
            raise ValueError(f"a part of it claims {size} bytes")
        return super().read(size)


def read_torch(path):
    """Return the name and place of every tensor in a file.

    Raises
    ------
    InputError
        If the file is damaged, of the kind from before torch 1.6, no state dict of tensors, or
        if its pickle asks for anything else than tensors.
    """
    check_content(path)
    try:
        mapped = map_file(path)
        if mapped[: len(LEGACY)] == LEGACY:
            raise NotWeightsError(
                "is of the kind from before torch 1.6; where torch is installed, run: "
                f'python -c "import torch; file = {str(path)!r}; '
                'torch.save(torch.load(file, weights_only=True), file)"'
            )
        with ShortReads(path) as file, zipfile.ZipFile(file) as archive:
            root, program = _program(archive)
            tensors = _state_dict(run(program))
            keys = {tensor.storage.key for tensor in tensors.values()}
            storages = {key: _storage(archive, f"{root}data/{key}", mapped) for key in keys}
        found = {
            name: stored(t.storage.kind, t.shape, storages[t.storage.key], t.offset, t.strides)
            for name, t in tensors.items()
        }
        if _total(found) > len(mapped):  # they would take more memory than the file's size tells
            raise ValueError("its tensors lie on top of each other")
        return found
    except NotWeightsError as error:
        raise InputError(f"{path} {one_line(error)}") from None
    except DAMAGE as error:
        reason = one_line(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {reason}; copy or download it again") from None


def _program(archive):
    """Return the archive's root folder and its pickle."""
    names = archive.namelist()
    if len(set(names)) < len(names):
        raise ValueError("it names a part twice")
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise NotWeightsError("is a zip archive, but holds no weights that torch saved")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise NotWeightsError(
            "has its numbers the other way round (big-endian); save it on another machine"
        )
    info = archive.getinfo(pickles[0])
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > LIMIT:
        raise ValueError(f"its pickle is compressed or larger than {LIMIT} bytes")
    return root, archive.read(info)


def _storage(archive, name, mapped):
    """Return the bytes of a storage, as a part of the mapped file."""
    info = archive.getinfo(name)
    start = info.header_offset
    signature, name_length, extra_length = struct.unpack("<4s22xHH", mapped[start : start + 30])
    start += 30 + name_length + extra_length
    if info.compress_type != zipfile.ZIP_STORED or signature != b"PK\3\4":
        raise ValueError(f"its part {name} is compressed or somewhere else")
    return mapped[start : start + info.file_size]


def _total(found):
    """Return the bytes of all tensors but the head, which may share those of the embedding."""
    arrays = [t.array for name, t in found.items() if not name.endswith("lm_head.weight")]
    return sum(array.nbytes for array in arrays if array is not None)


def _state_dict(value):
    """Return what a pickle made, if it is a dict of tensors."""
    if not isinstance(value, dict):
        raise NotWeightsError("holds no state dict; save model.state_dict() and nothing else")
    others = [name for name, item in value.items() if not isinstance(item, Tensor)]
    if others:
        raise NotWeightsError(
            f"holds {others[0]!r}, which is no tensor; save model.state_dict() and nothing else"
        )
    return value


def run(program):
    """Follow a pickle that describes tensors, and return what it makes.

    Raises
    ------
    NotWeightsError
        If it asks for anything that is no part of a tensor.
    ValueError, LookupError, TypeError
        If it is damaged.
    """
    stack, marks, memo = [], [], {}

    def take(count):
        if count > len(stack):
            raise IndexError("its pickle takes more than it has")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def take_marked():
        return take(len(stack) - marks.pop())

    for operation, argument, _ in pickletools.genops(program):
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[operation.name])
            case "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(take_marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(take(int(operation.name[-1]))))
            case "APPEND" | "APPENDS":
                items = take(1) if operation.name == "APPEND" else take_marked()
                _extend(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                items = take(2) if operation.name == "SETITEM" else take_marked()
                _set_items(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_name(argument))
            case "STACK_GLOBAL":
                stack.append(_name(" ".join(take(2))))
            case "BINPERSID":
                stack.append(_described_storage(stack.pop()))
            case "REDUCE":
                function, arguments = take(2)
                stack.append(_made(function, arguments))
            case "BUILD":
                stack.pop()  # attributes of a dict, such as the version of each module
            case "STOP":
                return stack.pop()
            case _:
                raise NotWeightsError(
                    f"holds the pickle instruction {operation.name} {argument or ''}, which no "
                    "weights need; do not trust it, and get the weights as safetensors"
                )
    raise ValueError("its pickle has no end")


def _name(text):
    if text not in NAMES:
        raise NotWeightsError(
            f"asks for {text.replace(' ', '.')!r}, which no weights need; do not trust it, and "
            "get the weights as safetensors"
        )
    return Name(text)


def _extend(target, items):
    if not isinstance(target, list):
        raise TypeError("its pickle appends to what is no list")
    target.extend(items)


def _set_items(target, items):
    keys, values = items[::2], items[1::2]
    if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in keys):
        raise TypeError("its pickle fills what is no dict, or by keys that are no names")
    for key, value in zip(keys, values, strict=True):
        if key in target:
            raise ValueError(f"it names {key!r} twice")
        target[key] = value


def _described_storage(described):
    word, kind, key, _, _ = described
    if word != "storage" or not isinstance(kind, Name) or not isinstance(key, str):
        raise TypeError("its pickle describes no storage")
    if kind not in KINDS:
        raise ValueError("its pickle describes no storage")
    return Storage(KINDS[kind], key)


def _made(function, arguments):
    """Return what a call would make, without the call."""
    if not isinstance(function, Name) or not isinstance(arguments, tuple):
        raise TypeError("its pickle calls what is no function")
    if function == ORDERED_DICT and arguments == ():
        return {}
    if function == REBUILD_PARAMETER and isinstance(arguments[0], Tensor):
        return arguments[0]
    if function == REBUILD_TENSOR and isinstance(arguments[0], Storage):
        storage, offset, shape, strides = arguments[:4]
        if all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
            return Tensor(storage, offset, tuple(shape), tuple(strides))
    raise ValueError(f"its pickle calls {function} as torch does not")
