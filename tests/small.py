"""Small models with random weights, drawn so that a fault moves the logits."""

import math

import numpy as np

from minineo import Config, Model, forward
from minineo.checkpoints.read import assemble, expected_shapes
from minineo.device import choose

TINY = {
    "model_type": "gpt_neo",
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": None,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 4,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 100,
}


def tiny_config(**changes):
    return Config.from_dict(TINY | changes)


def random_tensor(name, shape, config, rng):
    """Scores of a few units and a busy GELU: with std 0.02 most faults would stay unseen."""
    if name.endswith(".bias"):
        return rng.normal(0, 0.3, shape)
    if len(shape) == 1:  # the scale of a layer norm
        return rng.normal(1, 0.3, shape)
    return rng.normal(0, math.sqrt(8.15 / (config.width * math.sqrt(config.head_dim))), shape)


def random_weights(config, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    tensors = {
        name: random_tensor(name, shape, config, rng).astype(dtype)
        for name, shape in expected_shapes(config).items()
    }
    return assemble(tensors.__getitem__, config)


def random_model(dtype="float64", seed=0, **changes):
    config = tiny_config(**changes)
    return Model("small", config, random_weights(config, dtype, seed), None, choose("cpu"))


def random_ids(config, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab, shape)


def run(model, tokens, cache, **options):
    return forward(tokens, model.weights, model.config, cache, **options)
