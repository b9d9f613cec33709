import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small import TINY, random_tensor, tiny_config

from minineo import InputError, load
from minineo.checkpoints.find import find
from minineo.checkpoints.read import expected_shapes


def tensors_of(config, prefix="transformer."):
    rng = np.random.default_rng(0)
    return {
        name if name.startswith("lm_head") else prefix + name: random_tensor(
            name, shape, config, rng
        ).astype("float32")
        for name, shape in expected_shapes(config).items()
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    save_file(tensors_of(tiny_config()), tmp_path / "model.safetensors")
    return tmp_path


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, **options):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        load(folder, device="cpu", **options)
    return str(error.value)


def test_the_embedded_model_loads_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = load("tiny")
    assert model.name == "tiny"
    assert model.config.context == 512
    assert {512, 64} == set(model.config.windows)
    assert 1e6 < sum(p.size for p in parameters(model.weights)) < 2e6


def test_the_embedded_model_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in find("tiny").iterdir()) < 8e6


def parameters(weights):
    if isinstance(weights, np.ndarray):
        return [weights]
    arrays = [array for part in weights for array in parameters(part)]
    return [array for i, array in enumerate(arrays) if not any(array is a for a in arrays[:i])]


def test_the_embedded_model_needs_no_network(monkeypatch):
    import socket

    def no_network(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    load("tiny")


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_may_have_a_prefix(folder, prefix):
    tensors = tensors_of(tiny_config(), prefix)
    save_file(tensors, folder / "model.safetensors")
    weights = load(folder).weights
    name = f"{prefix}h.3.attn.attention.k_proj.weight"
    np.testing.assert_array_equal(weights.blocks[3].attention.key, tensors[name])


def test_every_tensor_finds_its_place(folder):
    tensors = tensors_of(tiny_config(), "")
    weights = load(folder).weights
    assert weights.unembedding is weights.token_embedding
    found = [weights.token_embedding, weights.position_embedding, *weights.norm]
    for block in weights.blocks:
        found += [*block.norm_1, *block.norm_2, *block.attention, *block.mlp]
    assert len(found) == len(tensors)
    unplaced = list(tensors.values())
    for array in found:
        assert sum(array.shape == other.shape and (array == other).all() for other in unplaced) == 1


def test_an_untied_head_is_read(folder):
    fields = TINY | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(fields))
    assert "lm_head.weight is missing" in refused(folder)
    tensors = tensors_of(tiny_config(tie_word_embeddings=False))
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(load(folder).weights.unembedding, tensors["lm_head.weight"])


def test_a_tied_head_stored_twice_is_ignored(folder):
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
    weights = load(folder).weights
    assert weights.unembedding is weights.token_embedding


def test_mask_buffers_are_dropped_by_their_exact_names(folder):
    before = load(folder).weights.blocks[0].attention.output_bias
    buffers = {
        "transformer.h.0.attn.attention.bias": np.ones((1, 1, 32, 32), "uint8"),
        "transformer.h.3.attn.attention.masked_bias": np.array(-1e9, "float32"),
    }
    change_tensors(folder, lambda t: t.update(buffers))
    after = load(folder).weights.blocks[0].attention.output_bias
    np.testing.assert_array_equal(after, before)
    change_tensors(folder, lambda t: t.update({"transformer.h.4.attn.attention.bias": before}))
    assert "h.4.attn.attention.bias is unexpected" in refused(folder)


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "float64"])
def test_weights_get_the_dtype_asked_for(folder, stored, wanted):
    change_tensors(
        folder, lambda t: t.update({name: array.astype(stored) for name, array in t.items()})
    )
    model = load(folder, dtype=wanted)
    assert model.dtype == wanted
    assert {array.dtype for array in parameters(model.weights)} == {np.dtype(wanted)}


def test_all_wrong_tensors_are_named_in_one_message(folder):
    def spoil(tensors):
        del tensors["transformer.h.1.mlp.c_fc.bias"]
        tensors["transformer.extra"] = np.zeros(1, "float32")
        name = "transformer.h.0.mlp.c_fc.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    change_tensors(folder, spoil)
    message = refused(folder)
    assert "h.1.mlp.c_fc.bias is missing" in message
    assert "extra is unexpected" in message
    assert "h.0.mlp.c_fc.weight has the shape [32, 128], not [128, 32]" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 10**5])
def test_a_config_that_is_no_json_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refused(folder)


def test_a_foreign_config_is_refused_by_its_model_type(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "not a GPT-Neo: its model_type is 'gpt2'" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"has no {name}" in refused(folder)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"\xff" * 64]
)
def test_a_broken_weights_file_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert "cannot read" in refused(folder)


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_truncated_weights_file_is_refused(folder, kept):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(kept * len(content))])
    assert "cannot read" in refused(folder)


def test_bfloat16_is_refused_with_a_cure(folder):
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = load_torch(folder / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_torch(tensors, folder / "model.safetensors")
    assert "save it as float32" in refused(folder)


@pytest.mark.parametrize("name", ["tinny", "gpt2", "", "no/such/folder", "a\0b"])
def test_an_unknown_model_is_refused_by_name(name):
    assert "unknown model" in refused(name)


def test_an_unknown_dtype_is_refused(folder):
    assert "unknown dtype 'float16'" in refused(folder, dtype="float16")


def test_a_folder_may_have_any_name_and_a_tilde(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(folder, home / "my modèl ☃")
    monkeypatch.setenv("HOME", str(home))
    assert load("~/my modèl ☃/").config == tiny_config()


def test_without_a_tokenizer_ids_do_and_text_is_refused(folder):
    model = load(folder)
    assert model.encode([1, 2]) == [1, 2]
    with pytest.raises(InputError, match=r"no tokenizer\.json; give the prompt as token ids"):
        model.encode("text")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        model.decode([1])


def test_a_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(folder)


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(folder):
    shutil.copy(find("tiny") / "tokenizer.json", folder)
    with pytest.raises(InputError, match="is no token of this model"):
        load(folder).encode("Once upon a time, there was a little girl")


@pytest.mark.parametrize(
    "text", ["Hi", "a , b .", " leading", "café ☃ 👩‍🚀", "line\n\nline\t", "e\u0301"]
)
def test_decoding_gives_the_encoded_text_back(text):
    model = load("tiny")
    assert model.decode(model.encode(text)) == text


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("\ud800", "not valid text"),
        ([2048], "2048 is no token"),
        ([-1], "-1 is no token"),
        ([1.5], "whole numbers"),
        ([[1, 2]], "text or a list of token ids"),
        ([0] * 513, "the prompt has 513 tokens; this model reads 512 at most"),
        ("a b " * 600, "this model reads 512 at most"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(prompt, complaint):
    with pytest.raises(InputError, match=complaint):
        load("tiny").encode(prompt)


def test_end_of_text_in_a_prompt_is_the_special_token():
    model = load("tiny")
    assert model.encode("<|endoftext|>") == [model.config.end_token]
