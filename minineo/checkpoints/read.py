"""From files in Hugging Face's layout to `Config` and `Weights`."""

import json

import numpy as np
from safetensors import SafetensorError, safe_open

from ..transformer import Config, InputError, Weights
from ..transformer.weights import Attention, Block, Mlp, Norm


def read_config(folder):
    """Read `config.json`.

    Raises
    ------
    InputError
        If it is missing, is not JSON, or is not that of a GPT-Neo.
    """
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} has no config.json; is it a model's folder?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path} holds no JSON object; copy the file from the model's source")
    try:
        return Config.from_dict(fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_weights(folder, config, dtype, put=lambda array: array):
    """Read `model.safetensors`, one tensor at a time.

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
        If the file is missing or broken, or its tensors are not those of the config: all that
        are missing, unexpected or of another shape are named in one message.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{folder} has no model.safetensors; copy it there")
    shapes = expected_shapes(config)
    try:
        with safe_open(path, framework="numpy") as file:
            stored = {plain_name(name): name for name in file.keys()}  # noqa: SIM118 - no dict
            shapes_found = {
                plain: tuple(file.get_slice(name).get_shape()) for plain, name in stored.items()
            }
            check_shapes(path, shapes_found, shapes, config)

            def tensor(name):
                array = file.get_tensor(stored[name]).astype(dtype, copy=False)
                return put(np.ascontiguousarray(array))

            return assemble(tensor, config)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    except TypeError as error:  # a dtype without a NumPy counterpart
        raise InputError(f"cannot read {path}: {error}; save it as float32") from None


def plain_name(name):
    """Return a tensor's name without the prefix that some files have."""
    return name.removeprefix("transformer.")


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


def check_shapes(path, found, expected, config):
    """Compare names and shapes, and name everything that is wrong in one message."""
    ignored = {
        f"h.{layer}.attn.attention.{mask}"  # mask buffers that old files carry
        for layer in range(config.n_layers)
        for mask in ("bias", "masked_bias")
    }
    if config.tied:
        ignored.add("lm_head.weight")  # the token embedding, stored twice
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is unexpected" for name in found if name not in {*expected, *ignored}]
    faults += [
        f"{name} has the shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise InputError(f"{path} does not fit its config.json: {'; '.join(faults)}")


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
