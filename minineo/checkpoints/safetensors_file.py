"""The tensors of a .safetensors file, left where they lie.

The safetensors library checks the file, and NumPy reads it: the library has no bfloat16 for
NumPy, and copies what it returns.
"""

from safetensors import SafetensorError, safe_open

from ..transformer import InputError
from .files import LIMIT, check_content, map_file, one_line, parse_json, stored


def read_safetensors(path):
    """Return the name and place of every tensor in a file.

    Raises
    ------
    InputError
        If the file is damaged, or its header says what cannot be.
    """
    check_content(path)
    try:
        mapped = map_file(path)
        length = int.from_bytes(mapped[:8], "little")
        if length > min(LIMIT, len(mapped)):
            raise ValueError(
                f"it is cut short or no safetensors file; its header has {length} bytes"
            )
        with safe_open(path, framework="numpy"):
            pass  # lengths, dtypes and offsets are in order, and no tensor overlaps another
        header, data = parse_json(bytes(mapped[8 : 8 + length])), mapped[8 + length :]
        header.pop("__metadata__", None)
        return {name: _tensor(entry, data) for name, entry in header.items()}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {path}: {one_line(error)}; copy or download it again"
        ) from None


def _tensor(entry, data):
    start, end = entry["data_offsets"]
    return stored(entry["dtype"], tuple(entry["shape"]), data[start:end])
