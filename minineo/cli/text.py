"""Pieces of text that several commands print."""

import unicodedata

from rich.text import Text

DIRECTIONS = (
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # overrides of bidirectional text
)


def token_text(model, token):
    """Return a token as a short piece of quoted text."""
    if model.tokenizer is None:
        return Text(str(token))
    text = repr(model.decode([token]))
    return Text(text if len(text) <= 9 else f"{text[:8]}…")


def computed_by(model):
    """Return the device and the dtype, and whether a GPU runs the plain operations."""
    plain = model.device.cupy is not None and not model.device.kernels
    return f"{model.device.name}{' without fused kernels' if plain else ''}, {model.dtype}"


def milliseconds(seconds):
    """Return a time in milliseconds, with two decimals where they mean something."""
    return f"{1000 * seconds:.2f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def mebibytes(count):
    """Return a number of bytes in MiB."""
    return "unknown" if count is None else f"{count / 2**20:,.0f} MiB"


def printable(text):
    """Return a text without the characters that steer a terminal or turn the direction of text."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if steers(character) else character for character in text
    )


def steers(character):
    """Return whether a character does something to a terminal besides being shown."""
    control = (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character not in "\n\t"
    )
    return control or character in DIRECTIONS
