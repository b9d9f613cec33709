"""Tokens become text as they come, in whole characters."""

from ..checkpoints import Model
from ..transformer import InputError

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
LONGEST = 4  # bytes of a character in UTF-8: so many tokens hold all of it


class TextStream:
    """The text of one prompt's tokens, piece by piece, up to a stop string.

    All pieces together are the text of prompt and tokens without the prompt's. A character whose
    bytes are spread over tokens comes whole, with the last of them: if its first bytes end the
    prompt, it comes as well.

    Parameters
    ----------
    model : Model
        One without a tokenizer has no text: all pieces are empty.
    prompt_ids : sequence of int
    stop : str or sequence of str, optional
        The text ends before the one that is complete first; of several that end with the same
        character, before the longest. They may be spread over tokens. The prompt is not searched.

    Attributes
    ----------
    stopped : str or None
        The stop string that ended the text.

    Raises
    ------
    InputError
        If a stop string is empty or no text, or there is one and the model has no tokenizer.

    Notes
    -----
    The `DecodeStream` of the tokenizers library cannot give out what it still holds when the text
    ends, gives out the prompt again when that ends in U+FFFD, and decodes more and more tokens
    again while bytes come that never become a character.

    Examples
    --------
    >>> model = minineo.load("tiny")
    >>> stream = TextStream(model, model.encode("A smile:"))
    >>> [stream.push(token) for token in model.encode(" 😀!")] + [stream.finish()]
    [' ', '', '', '', '😀', '!', '']
    """

    def __init__(self, model: Model, prompt_ids, stop=()):
        self.stopped: str | None = None
        self._model = model
        self._stops = checked(stop)
        self._over = False
        self._context = list(prompt_ids)  # tokens that those to come are decoded with
        has_text = model.tokenizer is not None or self._stops
        self._shown = model.decode(self._context) if has_text else ""  # given out of their text
        self._waiting: list[int] = []  # tokens whose text is not given out
        self._held = ""  # text that may begin a stop string

    def push(self, token) -> str:
        """Take the next token.

        Parameters
        ----------
        token : int

        Returns
        -------
        str
            The text that is now final. It may be empty: a character is not whole, a genuine
            U+FFFD may still turn out to be one, or a stop string may have begun. After a stop
            string, and after `finish`, it is always empty.
        """
        tokenizer = self._model.tokenizer
        if self._over or tokenizer is None or tokenizer.id_to_token(token) is None:
            return ""  # ids that only fill up a model's vocabulary have no text
        self._waiting.append(token)
        text = self._model.decode(self._context + self._waiting)
        unsure = text.endswith(BROKEN)
        if unsure and len(self._waiting) < LONGEST:
            return ""
        piece = self._unseen(text[: len(text) - unsure])
        self._context, self._waiting = self._waiting, []
        shown = self._model.decode(self._context)
        self._shown = shown[: len(shown) - unsure]
        return self._until_stop(piece)

    def finish(self) -> str:
        """End the text.

        Returns
        -------
        str
            What was held back. Bytes that became no character are U+FFFD, as in `Model.decode`.
        """
        if self._over or self._model.tokenizer is None:
            return ""
        piece = self._unseen(self._model.decode(self._context + self._waiting))
        piece = self._until_stop(piece) + self._held
        self._over, self._held = True, ""
        return piece

    def _unseen(self, text):
        """Return what a text of context and waiting tokens has behind what is given out."""
        shown = self._shown
        while not text.startswith(shown):  # the prompt ended inside of a character
            shown = shown[:-1]
        return text.removeprefix(shown)

    def _until_stop(self, piece):
        """Return what is final of held text and a piece: what can be in no stop string."""
        text = self._held + piece
        found = {stop: text.find(stop) for stop in self._stops if stop in text}
        if found:
            self.stopped = min(found, key=lambda stop: (found[stop] + len(stop), -len(stop)))
            self._over, self._held = True, ""
            return text[: found[self.stopped]]
        final = len(text) - begun(text, self._stops)
        self._held = text[final:]
        return text[:final]


def checked(stop):
    """Return stop strings as a list, or say which is none."""
    stops = [stop] if isinstance(stop, str) else stop
    try:
        stops = list(stops)
    except TypeError:
        raise InputError(f"stop is {stop!r}; give a string or a list of strings") from None
    for each in stops:
        if not isinstance(each, str) or not each:
            raise InputError(f"{each!r} is no stop string; give a text of 1 character or more")
    return stops


def begun(text, stops):
    """Return how many characters at the end of a text may begin a stop string that is not whole."""
    longest = max(map(len, stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
