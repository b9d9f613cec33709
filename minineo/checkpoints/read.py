"""From files in Hugging Face's layout to `Config` and `Weights`."""

import warnings
from dataclasses import replace

import numpy as np

from ..transformer import Config, InputError, Weights
from ..transformer.weights import Attention, Block, Mlp, Norm
from .files import BFLOAT16, FLOATS, one_line, read_json
from .safetensors_file import read_safetensors
from .torch_file import read_torch

READERS = {"model.safetensors": read_safetensors, "pytorch_model.bin": read_torch}
INDEX = ".index.json"  # behind the name of a file that is stored in parts, its shards
CHUNK = 2**18  # so many numbers are converted, and looked through while they are at hand
ALL = 10**5  # characters: what is wrong is named in full, unless somebody means to flood us
EMBEDDING, HEAD = "wte.weight", "lm_head.weight"


def read_config(folder):
    """Read `config.json`.

    Raises
    ------
    InputError
        If it is missing, is not JSON, or is not that of a GPT-Neo.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json; is it a model's folder?")
    fields = read_json(path)
    try:
        return Config.from_dict(fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_weights(folder, config, dtype, put=lambda array: array):
    """Read the weights, one tensor at a time.

    They are in `model.safetensors` or `pytorch_model.bin`, or in the shards that an index beside
    them names; the first of these that is there is read.

    Parameters
    ----------
    folder : Path
    config : Config
    dtype : str
        The dtype the weights get, whatever the file's is.
    put : function, optional
        Moves a NumPy array to the device.

    Returns
    -------
    Weights

    Raises
    ------
    InputError
        If a file is missing or broken, or its tensors are not those of the config: all that
        are missing, unexpected or of another shape or kind are named in one message.

    Warns
    -----
    UserWarning
        If weights are not finite, or the file has an unembedding of its own though the config
        says that the token embedding is used.
    """
    path, found = find_tensors(folder)
    tied_in_words = config.tied
    config = settle_head(found, config)
    check_tensors(path, found, config)
    broken = []

    def tensor(name):
        array, finite = read_tensor(found[name].array, dtype)
        if not finite:
            broken.append(name)
        return put(array)

    weights = assemble(tensor, config)
    if tied_in_words and not config.tied:
        warnings.warn(
            f"{path} holds a {HEAD} that differs from {EMBEDDING}, though its config.json ties "
            "them; it is used as it is stored",
            stacklevel=3,
        )
    if broken:
        warnings.warn(
            f"{path} holds weights that are no finite {dtype} numbers: {', '.join(broken)}",
            stacklevel=3,
        )
    return weights


def find_tensors(folder):
    """Return the file that was read, or its index, and the place of every tensor by plain name.

    Raises
    ------
    InputError
        If there are no weights, or a file is missing or broken.
    """
    for name, reader in READERS.items():
        path, index = folder / name, folder / (name + INDEX)
        if path.is_file():
            return path, plain_names(path, reader(path))
        if index.is_file():
            return index, plain_names(index, read_shards(index, reader))
    names = " or ".join(READERS)
    if parts := sorted(file.name for file in folder.glob("*-of-*.*")):
        raise InputError(
            f"{folder} has {parts[0]}, but no index that names the shards; copy it too"
        )
    raise InputError(f"{folder} has no {names}; copy the model's weights there")


def read_shards(index, reader):
    """Return the place of every tensor in the shards that an index names.

    Raises
    ------
    InputError
        If a shard is missing, or the index and the shards do not say the same.
    """
    promised, folder = read_index(index), index.parent
    shards = sorted(set(promised.values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise InputError(
            f"{folder} lacks {one_line(', '.join(missing), ALL)}; copy or download it again"
        )
    found, lies = {}, []
    for shard in shards:
        tensors = reader(folder / shard)
        names = {name for name, file in promised.items() if file == shard}
        lies += [f"{name} is not in {shard}" for name in sorted(names - tensors.keys())]
        lies += [f"{shard} holds {name} as well" for name in sorted(tensors.keys() - names)]
        found |= tensors
    if lies:
        raise InputError(f"{index} does not fit its shards: {one_line('; '.join(lies), ALL)}")
    return found


def read_index(path):
    """Return the file in which each tensor is, by name.

    Raises
    ------
    InputError
        If it is no index, or names what is no file of its own folder.
    """
    promised = read_json(path).get("weight_map")
    if not isinstance(promised, dict) or not promised:
        raise InputError(f"{path} has no weight_map; copy it from the model's source")
    for file in promised.values():
        if not isinstance(file, str) or not file or set(file) & set("/\\:\0") or file == "..":
            raise InputError(f"{path} names {file!r}, which is no file of its own folder")
    return promised


def plain_names(path, tensors):
    """Return tensors by name without the prefix that some files have."""
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    if len(plain) < len(tensors):
        twice = sorted(name for name in tensors if f"transformer.{name}" in tensors)
        raise InputError(f"{path} holds with and without prefix: {one_line(', '.join(twice), ALL)}")
    return plain


def settle_head(found, config):
    """Return the config with `tied` as the weights are.

    A head that is stored with the numbers of the token embedding is the token embedding, and a
    head that is stored alone is the token embedding too when the config says so.
    """
    if config.tied and EMBEDDING not in found and HEAD in found:
        found[EMBEDDING] = found[HEAD]
    if EMBEDDING not in found or HEAD not in found:
        return config
    return replace(config, tied=same_numbers(found[EMBEDDING], found[HEAD]))


def same_numbers(one, other):
    """Return whether two tensors hold the same."""
    if one.kind != other.kind or one.shape != other.shape or one.array is None:
        return False
    places = [tensor.array.__array_interface__ for tensor in (one, other)]
    if all(places[0][key] == places[1][key] for key in ("data", "strides")):
        return True
    bits = f"u{one.array.itemsize}"  # so that a NaN equals itself
    one, other = one.array.view(bits), other.array.view(bits)
    return all((one[rows] == other[rows]).all() for rows in chunks(one))


def read_tensor(array, dtype):
    """Read a tensor off its file, through a small window.

    Parameters
    ----------
    array : array
        A view of the mapped file.
    dtype : str

    Returns
    -------
    NumPy array
        A contiguous copy in memory.
    bool
        Whether all numbers are finite.
    """
    copy, finite = np.empty(array.shape, dtype), True
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in chunks(array):
            part = array[rows]
            if part.dtype == BFLOAT16:  # the upper half of a float32
                part = (part["bfloat16"].astype("<u4") << 16).view("<f4")
            copy[rows] = part
            finite = finite and bool(np.isfinite(copy[rows]).all())
    return copy, finite


def chunks(array):
    """Return slices of the first axis, of some `CHUNK` numbers each."""
    rows = max(1, CHUNK * len(array) // array.size)
    return [slice(start, start + rows) for start in range(0, len(array), rows)]


def expected_shapes(config):
    """Return the name and shape of every tensor that a model of this config has."""
    width, inner = config.width, config.inner
    shapes = {
        "wte.weight": (config.vocab, width),
        "wpe.weight": (config.context, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for layer in range(config.n_layers):
        block = f"h.{layer}."
        for norm in ("ln_1", "ln_2"):
            shapes[f"{block}{norm}.weight"] = shapes[f"{block}{norm}.bias"] = (width,)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{block}attn.attention.{projection}.weight"] = (width, width)
        shapes[f"{block}attn.attention.out_proj.bias"] = (width,)
        shapes[f"{block}mlp.c_fc.weight"] = (inner, width)
        shapes[f"{block}mlp.c_fc.bias"] = (inner,)
        shapes[f"{block}mlp.c_proj.weight"] = (width, inner)
        shapes[f"{block}mlp.c_proj.bias"] = (width,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, width)
    return shapes


def check_tensors(path, found, config):
    """Compare names, shapes and kinds, and name everything that is wrong in one message."""
    expected = expected_shapes(config)
    ignored = {
        f"h.{layer}.attn.attention.{mask}"  # mask buffers that old files carry
        for layer in range(config.n_layers)
        for mask in ("bias", "masked_bias")
    }
    ignored.add(HEAD)  # not expected: it is the token embedding
    faults = [f"{name} is missing" for name in expected if name not in found]
    known = {*expected, *ignored}
    faults += [f"{name} is unexpected" for name in found if name not in known]
    faults += [
        f"{name} has the shape {list(found[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    faults += [
        f"{name} is stored as {found[name].kind}, not as one of {', '.join(FLOATS)}"
        for name in expected
        if name in found and found[name].kind not in FLOATS
    ]
    if faults:
        raise InputError(f"{path} does not fit its config.json: {one_line('; '.join(faults), ALL)}")


def assemble(tensor, config):
    """Build `Weights` by asking for one tensor after the other."""

    def norm(name):
        return Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"))

    def block(layer):
        name = f"h.{layer}"
        attention = f"{name}.attn.attention"
        return Block(
            norm_1=norm(f"{name}.ln_1"),
            attention=Attention(
                query=tensor(f"{attention}.q_proj.weight"),
                key=tensor(f"{attention}.k_proj.weight"),
                value=tensor(f"{attention}.v_proj.weight"),
                output=tensor(f"{attention}.out_proj.weight"),
                output_bias=tensor(f"{attention}.out_proj.bias"),
            ),
            norm_2=norm(f"{name}.ln_2"),
            mlp=Mlp(
                up=tensor(f"{name}.mlp.c_fc.weight"),
                up_bias=tensor(f"{name}.mlp.c_fc.bias"),
                down=tensor(f"{name}.mlp.c_proj.weight"),
                down_bias=tensor(f"{name}.mlp.c_proj.bias"),
            ),
        )

    token_embedding = tensor("wte.weight")
    return Weights(
        token_embedding=token_embedding,
        position_embedding=tensor("wpe.weight"),
        blocks=tuple(block(layer) for layer in range(config.n_layers)),
        norm=norm("ln_f"),
        unembedding=token_embedding if config.tied else tensor("lm_head.weight"),
    )
