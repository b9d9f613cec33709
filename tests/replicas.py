"""Folders as the public models have them: file names, tensor names, dtypes and stray buffers."""

import json
from collections import OrderedDict

import numpy as np
from safetensors.numpy import save_file
from small import TINY, random_tensor

from minineo import Config
from minineo.checkpoints.read import expected_shapes

# what else the public config files say
PUBLIC = TINY | {
    "architectures": ["GPTNeoForCausalLM"],
    "attention_dropout": 0,
    "attention_layers": ["global", "local"] * 2,
    "activation_function": "gelu_new",
    "bos_token_id": 100,
    "embed_dropout": 0,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "resid_dropout": 0,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.9.0.dev0",
    "use_cache": True,
}


def tensors_of(config, prefix="transformer.", draw=random_tensor):
    rng = np.random.default_rng(0)
    return {
        name if name.startswith("lm_head") else prefix + name: draw(
            name, shape, config, rng
        ).astype("float32")
        for name, shape in expected_shapes(config).items()
    }


def flat(name, shape, config, rng):
    """As in a model before training: quick to draw in large shapes."""
    drawn = rng.standard_normal(shape, dtype="float32") * np.float32(0.02)
    return drawn + np.float32(".ln_" in f".{name}" and name.endswith("weight"))


def mask_buffers(config):
    mask = np.tril(np.ones((1, 1, config.context, config.context), "uint8"))
    for layer in range(config.n_layers):
        name = f"transformer.h.{layer}.attn.attention."
        yield f"{name}bias", mask
        yield f"{name}masked_bias", np.array(-1e9, "float32")


def write_gpt_neo(folder, fields=PUBLIC, draw=random_tensor):
    """EleutherAI/gpt-neo-125m: safetensors, prefix, mask buffers in U8 and F32."""
    config = Config.from_dict(fields)
    tensors = tensors_of(config, draw=draw)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors | dict(mask_buffers(config)), folder / "model.safetensors", {"format": "pt"})
    return tensors


def write_tinystories(folder, fields=PUBLIC, draw=random_tensor, **options):
    """roneneldan/TinyStories-33M: pytorch_model.bin alone, mask buffers, a head that is an alias."""
    import torch

    config = Config.from_dict(fields)
    tensors = tensors_of(config, draw=draw)
    (folder / "config.json").write_text(json.dumps(fields))
    state = OrderedDict((name, torch.from_numpy(array)) for name, array in tensors.items())
    for name, array in mask_buffers(config):
        state[name] = torch.from_numpy(array).to(torch.float32 if array.ndim == 0 else torch.bool)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    state._metadata = OrderedDict({"": {"version": 1}, "transformer": {"version": 1}})
    torch.save(state, folder / "pytorch_model.bin", **options)
    return tensors


def parameters(weights):
    """All arrays of a model, each once."""
    if isinstance(weights, np.ndarray):
        return [weights]
    arrays = [array for part in weights for array in parameters(part)]
    return [array for i, array in enumerate(arrays) if not any(array is a for a in arrays[:i])]


def in_order(weights):
    """All arrays of a model in the order of `expected_shapes`."""
    arrays = [weights.token_embedding, weights.position_embedding, *weights.norm]
    for block in weights.blocks:
        arrays += [*block.norm_1, *block.norm_2, *block.attention, *block.mlp]
    return arrays
