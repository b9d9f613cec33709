"""A model, ready to run: config, weights, tokenizer and device."""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from ..device import Device, choose
from ..transformer import Config, InputError, Weights
from ..transformer.model import check_ids
from .find import find
from .read import read_config, read_weights

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Model:
    """A GPT-Neo with its tokenizer, on a device.

    Attributes
    ----------
    name : str
        The name or path it was loaded by.
    config : Config
    weights : Weights
    tokenizer : tokenizers.Tokenizer or None
        None when the model's folder has no tokenizer.json: prompts must be ids then.
    device : Device
    """

    name: str
    config: Config
    weights: Weights
    tokenizer: Tokenizer | None
    device: Device

    @property
    def dtype(self) -> str:
        """The dtype of the weights and of everything computed from them."""
        return str(self.weights.token_embedding.dtype)

    def encode(self, prompt):
        """Turn a prompt into token ids.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or ids that are passed on. The model's own special tokens, such as
            ``<|endoftext|>``, are recognised in text.

        Returns
        -------
        list of int

        Raises
        ------
        InputError
            If the prompt is empty, is longer than the context, or holds an id that is no token.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        else:
            checked = check_ids(prompt, self.config)
            if checked.ndim != 1:
                raise InputError("a prompt must be text or a list of token ids")
            ids = checked.tolist()
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        if len(ids) > self.config.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens; this model reads {self.config.context} at most"
            )
        return ids

    def decode(self, ids):
        """Turn token ids into text, special tokens included.

        Raises
        ------
        InputError
            If the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer.json, so ids cannot become text")
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _encode_text(self, text):
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer.json; give the prompt as token ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not valid text: {error.reason}") from None
        return check_ids(self.tokenizer.encode(text).ids, self.config).tolist()


def load(name_or_path="tiny", device="auto", dtype="float32"):
    """Load a model.

    Parameters
    ----------
    name_or_path : str or Path, optional
        "tiny", the small model that comes with minineo, or a folder with config.json,
        model.safetensors and, for text, tokenizer.json.
    device : str, optional
        "cpu", "cuda", or "auto": a CUDA GPU where one works, else the CPU.
    dtype : str, optional
        "float32", or "float64" to tell rounding from a fault.

    Returns
    -------
    Model

    Raises
    ------
    InputError
        If there is no such model, its files are broken or foreign, or the device or dtype is
        not to be had.

    Examples
    --------
    >>> model = minineo.load("tiny")
    >>> model.config.windows
    (512, 64, 512, 64, 512, 64)
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose {' or '.join(DTYPES)}")
    chosen = choose(device)
    folder = find(name_or_path)
    config = read_config(folder)
    weights = read_weights(folder, config, np.dtype(dtype), chosen.put)
    return Model(str(name_or_path), config, weights, read_tokenizer(folder), chosen)


def read_tokenizer(folder):
    """Read `tokenizer.json`, or return None where there is none.

    Raises
    ------
    InputError
        If the file is broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputError(f"cannot read {path}: {error}") from None
