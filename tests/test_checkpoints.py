import json
import shutil
import sys
import warnings

import numpy as np
import pytest
from replicas import PUBLIC, in_order, parameters, tensors_of, write_gpt_neo
from safetensors.numpy import load_file, save_file
from small import TINY, tiny_config

from minineo import InputError, Recompute, load
from minineo.checkpoints.find import find
from minineo.checkpoints.known import PUBLIC as PUBLIC_MODELS
from minineo.checkpoints.known import parameters as count_parameters
from minineo.checkpoints.known import public_config
from minineo.device import Device


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
    found = in_order(weights)
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


def test_a_head_stored_twice_is_one_array(folder):
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"]}))
    for tied in (True, False):
        (folder / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": tied}))
        model = load(folder)
        assert model.weights.unembedding is model.weights.token_embedding
        assert model.config.tied


def test_a_head_of_its_own_is_used_and_told_where_the_config_ties_it(folder):
    head = tensors_of(tiny_config())["transformer.wte.weight"] + 1
    change_tensors(folder, lambda t: t.update({"lm_head.weight": head}))
    with pytest.warns(UserWarning, match=r"lm_head\.weight that differs from wte\.weight") as told:
        model = load(folder)
    assert [warning.filename for warning in told] == [__file__]
    np.testing.assert_array_equal(model.weights.unembedding, head)
    assert not model.config.tied


def test_a_tied_head_stored_alone_is_the_embedding(folder):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    before = load(folder).weights.token_embedding
    change_tensors(folder, rename)
    weights = load(folder).weights
    np.testing.assert_array_equal(weights.token_embedding, before)
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
        tensors["transformer.h.2.ln_1.bias"] = np.zeros(32, "int32")

    change_tensors(folder, spoil)
    message = refused(folder)
    assert "h.1.mlp.c_fc.bias is missing" in message
    assert "h.2.ln_1.bias is stored as I32" in message
    assert "extra is unexpected" in message
    assert "h.0.mlp.c_fc.weight has the shape [32, 128], not [128, 32]" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 10**5])
def test_a_config_that_is_no_json_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refused(folder)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gptj", None])
def test_a_foreign_config_is_refused_by_its_model_type(folder, kind):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    assert f"not a GPT-Neo: its model_type is {kind!r}" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attention_types": [[["global", "sparse"], 2]]}, "attention kind 'sparse'"),
        ({"attention_types": [[["global", "local"], 3]]}, "names 6 layers, num_layers 4"),
        ({"num_layers": 6}, "names 4 layers, num_layers 6"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_with_its_file(folder, changes, complaint):
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    message = refused(folder)
    assert complaint in message
    assert str(folder / "config.json") in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<!doctype html>", "web page"),
        (b"", "empty"),
        (b'{"model_type": "gpt_neo", "model_type": "gpt2"}', "names 'model_type' twice"),
        (b'{"a": "' + b"a" * 2**20 + b'"}', "larger than"),
    ],
)
def test_a_config_that_is_another_file_is_refused_as_what_it_is(folder, content, complaint):
    (folder / "config.json").write_bytes(content)
    assert complaint in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"has no {name}" in refused(folder)


def test_bfloat16_is_read_exactly(folder):
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = load_torch(folder / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    tensors["transformer.h.1.mlp.c_proj.weight"] *= 1e38  # float16 holds no such number
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"].float()  # mixed
    save_torch(tensors, folder / "model.safetensors")
    for dtype in ("float32", "float64"):
        weights = load(folder, dtype=dtype).weights
        expected = tensors["transformer.h.1.mlp.c_proj.weight"].double().numpy()
        np.testing.assert_array_equal(weights.blocks[1].mlp.down, expected)
        np.testing.assert_array_equal(weights.norm.shift, tensors["transformer.ln_f.bias"].numpy())


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_told_once_by_name(folder, number):
    def spoil(tensors):
        tensors["transformer.h.2.ln_2.bias"][3] = number
        tensors["transformer.wpe.weight"][-1, -1] = number

    change_tensors(folder, spoil)
    with pytest.warns(UserWarning, match="no finite float32 numbers") as told:
        load(folder)
    assert len(told) == 1
    assert told[0].filename == __file__, "the warning points at the call of load"
    assert "wpe.weight, h.2.ln_2.bias" in str(told[0].message)


def test_a_number_that_is_not_finite_is_found_in_every_part_of_a_tensor(folder, monkeypatch):
    monkeypatch.setattr("minineo.checkpoints.read.CHUNK", 64)
    for row in (0, 16, -1):
        tensors = tensors_of(tiny_config())
        tensors["transformer.wpe.weight"][row, 0] = np.nan
        save_file(tensors, folder / "model.safetensors")
        with pytest.warns(UserWarning, match=r"numbers: wpe\.weight$"):
            load(folder)


def test_weights_too_large_for_the_dtype_are_told(folder, monkeypatch):
    module = sys.modules[load.__module__]
    monkeypatch.setattr(module, "choose", lambda name, use_kernels: Device("cuda"))
    load(folder, dtype="float16")
    change_tensors(folder, lambda t: t["transformer.ln_f.weight"].fill(1e6))
    with pytest.warns(UserWarning, match=r"no finite float16 numbers: ln_f\.weight"):
        load(folder, dtype="float16")


def test_finite_weights_are_read_without_a_warning(folder):
    change_tensors(folder, lambda t: t["transformer.ln_f.weight"].fill(3e38))  # their sum is not
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)


@pytest.mark.parametrize("name", ["tinny", "gpt2", "", "no/such/folder", "a\0b"])
def test_an_unknown_model_is_refused_by_name(name):
    assert "unknown model" in refused(name)


def test_an_unknown_dtype_is_refused(folder):
    assert "unknown dtype 'bfloat16'" in refused(folder, dtype="bfloat16")


def test_float16_on_a_cpu_is_refused_with_the_reason(folder):
    assert "float16 needs a GPU: BLAS" in refused(folder, dtype="float16")


def test_a_folder_may_have_any_name_and_a_tilde(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(folder, home / "my modèl ☃")
    monkeypatch.setenv("HOME", str(home))
    assert load("~/my modèl ☃/").config == tiny_config()


def test_a_replica_of_gpt_neo_125m_loads(tmp_path):
    stored = write_gpt_neo(tmp_path, PUBLIC)
    weights = load(tmp_path).weights
    assert weights.unembedding is weights.token_embedding
    for array in parameters(weights):
        assert sum(array.tobytes() == other.tobytes() for other in stored.values()) == 1
        assert array.base is None, "the file is not held on to"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-neo-125m", 125_198_592),
        ("gpt-neo-1.3b", 1_315_575_808),
        ("gpt-neo-2.7b", 2_651_307_520),
        ("tinystories-33m", 68_514_048),
    ],
)
def test_parameters_are_counted_from_the_shapes(name, count):
    assert count_parameters(public_config(name)) == count


def test_every_public_model_has_a_config_that_holds_together():
    for name, shape in PUBLIC_MODELS.items():
        config = public_config(name)
        assert len(config.windows) == config.n_layers
        assert config.width % config.n_heads == 0
        assert shape.repo.lower().endswith(name)


def test_a_loaded_model_refuses_rows_of_different_lengths():
    with pytest.raises(InputError, match="rows of one length"):
        load("tiny", device="cpu").forward([[1, 2], [3]], Recompute())
