"""A model, ready to run: config, weights, tokenizer and device."""

from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from ..device import Device, choose
from ..transformer import Config, InputError, Weights, forward
from ..transformer.model import check_ids, whole_numbers
from ..transformer.replaceable import anything_replaced, replaced
from ..transformer.trace import Silent, silent
from . import hub
from .find import existing_folder, find, hub_name
from .read import read_config, read_weights
from .tokenizer import read_tokenizer

DTYPES = ("float32", "float64", "float16")


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
        None when the model has none: prompts must be ids then.
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

    def forward(self, tokens, cache, **options):
        """Make one pass of new tokens, as `minineo.forward` does, the way that suits the device.

        A pass that is traced, or in which anything is replaced already, runs as it is written:
        without kernels, and not shared out over cores.

        Parameters
        ----------
        tokens : array of int [batch, new]
        cache : Recompute or KVCache
        **options
            As of `minineo.forward`.

        Returns
        -------
        logits : array [batch, 1 or new, vocab]
        """
        trace = options.pop("trace", silent)
        plain = anything_replaced() or not isinstance(trace, Silent)
        tokens = whole_numbers(tokens, "token ids")
        stand_ins = {} if plain else self.device.stand_ins(tokens.size)
        with (
            self.device.threads(self.config),
            replaced(**stand_ins),
            self.device.profiled(trace) as trace,
        ):
            return forward(tokens, self.weights, self.config, cache, trace=trace, **options)

    def encode(self, prompt, special=True):
        """Turn a prompt into token ids.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or ids that are passed on.
        special : bool, optional
            Take ``<|endoftext|>`` and other special tokens in text for what they are. With False
            they are spelled out like any other text: for text that comes from others.

        Returns
        -------
        list of int

        Raises
        ------
        InputError
            If the prompt is empty, is longer than the context, or holds an id that is no token.
        """
        if isinstance(prompt, str):
            ids = self.encode_text(prompt, special)
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

    def encode_text(self, text, special=True):
        """Turn a text of any length into token ids.

        Raises
        ------
        InputError
            If the model has no tokenizer, the text cannot be written in UTF-8, or the tokenizer
            knows tokens that the model lacks.
        """
        if self.tokenizer is None:
            raise InputError(
                f"{self.name} has no tokenizer.json; give the prompt as token ids, or put the "
                "tokenizer.json it was trained with beside its weights"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not valid text: {error.reason}") from None
        self.tokenizer.encode_special_tokens = not special  # "encode" them like other text
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return check_ids(encoded.ids, self.config).tolist()


def load(name_or_path="tiny", device="auto", dtype="float32", use_kernels=True):
    """Load a model.

    Parameters
    ----------
    name_or_path : str or Path, optional
        "tiny", the small model that comes with minineo; the short name of a public model, such as
        "gpt-neo-125m"; a folder with config.json, model.safetensors or pytorch_model.bin and, for
        text, tokenizer.json; or a model on the hub, ``owner/name`` or ``owner/name@revision``. A
        folder that exists goes before a model on the hub, and a short name goes before a folder:
        write "./tiny" for that.
    device : str, optional
        "cpu", "cuda", or "auto": a CUDA GPU where one works, else the CPU.
    dtype : str, optional
        What is computed in, whatever the files hold: "float32", "float64" to tell rounding from
        a fault, or, on a GPU, "float16".
    use_kernels : bool, optional
        On a GPU, let fused kernels stand in for the functions they equal. Without them every
        operation of the NumPy code is a kernel of its own, so that the gain can be measured.

    Returns
    -------
    Model

    Raises
    ------
    InputError
        If there is no such model, it cannot be downloaded, its files are broken or foreign, or
        the device or dtype is not to be had.

    Warns
    -----
    UserWarning
        If weights are not finite, or contradict the config in whether the unembedding is tied.

    Examples
    --------
    >>> model = minineo.load("tiny")
    >>> model.config.windows
    (512, 64, 512, 64, 512, 64)
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose {', '.join(DTYPES)}")
    chosen = choose(device, use_kernels)
    if dtype == "float16" and chosen.name == "cpu":
        raise InputError(
            "float16 needs a GPU: BLAS, which multiplies matrices on a CPU, has no float16; "
            "choose float32, which reads files in float16 as well"
        )
    folder = find(name_or_path)
    config = read_config(folder)
    weights = read_weights(folder, config, np.dtype(dtype), chosen.put)
    config = replace(config, tied=weights.unembedding is weights.token_embedding)
    tokenizer = read_tokenizer(folder) or borrowed_tokenizer(name_or_path)
    return Model(str(name_or_path), config, weights, tokenizer, chosen)


def borrowed_tokenizer(name_or_path):
    """Return the tokenizer that a model on the hub was trained with, where it has none itself."""
    on_hub = None if existing_folder(name_or_path) else hub_name(name_or_path)
    if on_hub is None:
        return None
    folder = hub.fetch_tokenizer(on_hub[0])
    return None if folder is None else read_tokenizer(folder)
