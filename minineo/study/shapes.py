"""The shapes of the public models, and folders with random weights of such a shape."""

import json
import os
import struct
from pathlib import Path

import numpy as np

from ..checkpoints.known import CONTEXT, END_TOKEN, PUBLIC, VOCAB, WINDOW
from ..checkpoints.read import expected_shapes
from ..transformer import Config, InputError

SHAPES = {name.removeprefix("gpt-neo-"): shape for name, shape in PUBLIC.items()}


def shape_fields(name):
    """Return what the config.json of a public model says of its shape.

    Raises
    ------
    InputError
        If there is no such shape.
    """
    if name not in SHAPES:
        raise InputError(f"unknown shape {name!r}: choose {', '.join(SHAPES)}")
    _, width, n_layers, n_heads = SHAPES[name]
    return {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "hidden_size": width,
        "intermediate_size": None,
        "num_layers": n_layers,
        "num_heads": n_heads,
        "attention_types": [[["global", "local"], n_layers // 2]],
        "window_size": WINDOW,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": END_TOKEN,
        "eos_token_id": END_TOKEN,
        "tie_word_embeddings": True,
    }


def write_random_model(folder, fields, seed=0):
    """Write a model of this shape with random weights in float32, in Hugging Face's layout.

    Tensors are drawn and written one at a time: a large model need not fit into memory twice.

    Parameters
    ----------
    folder : Path
    fields : dict
        What its config.json shall hold.
    seed : int, optional
    """
    Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
    shapes = expected_shapes(Config.from_dict(fields))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        full_name = name if name.startswith("lm_head") else f"transformer.{name}"
        start, end = end, end + 4 * int(np.prod(shape))
        header[full_name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes

    random = np.random.default_rng(seed)
    with open(Path(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            tensor = random.standard_normal(shape, dtype=np.float32)
            tensor *= 0.02  # small, as in training: scores and logits stay in their usual range
            if ".ln_" in f".{name}" and name.endswith("weight"):
                tensor += 1
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())  # or the system writes to the disk while a clock runs
