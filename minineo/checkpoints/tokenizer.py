"""From a folder to its tokenizer."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..transformer import InputError
from .files import check_content, one_line

END_OF_TEXT = "<|endoftext|>"


def read_tokenizer(folder):
    """Read `tokenizer.json`, or `vocab.json` and `merges.txt`, or return None.

    Text that is too long is never cut, and nothing is added to it, whatever the file says.

    Raises
    ------
    InputError
        If a file is broken.
    """
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        tokenizer = _read(whole, lambda: Tokenizer.from_file(str(whole)))
    elif vocab.is_file() and merges.is_file():
        check_content(merges)
        tokenizer = _read(vocab, lambda: byte_level(vocab, merges))
    else:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def byte_level(vocab, merges):
    """Return GPT-2's kind of tokenizer: byte pairs, merged inside of words."""
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _read(path, read):
    check_content(path)
    try:
        return read()
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputError(
            f"cannot read {path}: {one_line(error)}; copy it from the model's source"
        ) from None
