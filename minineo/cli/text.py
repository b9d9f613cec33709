"""Pieces of text that several commands print."""

from rich.text import Text


def token_text(model, token):
    """Return a token as a short piece of quoted text."""
    if model.tokenizer is None:
        return Text(str(token))
    text = repr(model.decode([token]))
    return Text(text if len(text) <= 9 else f"{text[:8]}…")


def milliseconds(seconds):
    """Return a time in milliseconds, with two decimals where they mean something."""
    return f"{1000 * seconds:.2f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def mebibytes(count):
    """Return a number of bytes in MiB."""
    return "unknown" if count is None else f"{count / 2**20:,.0f} MiB"


def printable(text):
    """Return a text without the characters that steer a terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
