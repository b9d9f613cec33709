"""The shape of a GPT-Neo: what its config.json says, in the words of this code."""

from dataclasses import dataclass
from itertools import islice
from math import inf

MOST_LAYERS = 1000  # the largest model has 32; more is a slip, and costs time to find out


class InputError(ValueError):
    """Something given from outside is wrong; the message is one line and says what to do."""


@dataclass(frozen=True)
class Config:
    """The shape of a GPT-Neo.

    Attributes
    ----------
    vocab : int
        Number of different tokens.
    context : int
        Number of positions: the longest sequence the model can read.
    width : int
        Length of the vector that stands for one token between the blocks.
    inner : int
        Length of that vector inside the mlp.
    n_layers, n_heads : int
        Number of blocks, and of attention heads in each.
    windows : tuple of int
        For each layer, how many positions a query sees: its own and those just before it.
        A global layer's window is the whole context.
    eps : float
        Added to the variance in layer norm.
    tied : bool
        Whether the unembedding is the token embedding itself.
    end_token : int or None
        The token that ends a text.
    """

    vocab: int
    context: int
    width: int
    inner: int
    n_layers: int
    n_heads: int
    windows: tuple[int, ...]
    eps: float = 1e-5
    tied: bool = True
    end_token: int | None = None

    @property
    def head_dim(self) -> int:
        """Length of one head's queries, keys and values."""
        return self.width // self.n_heads

    @classmethod
    def from_dict(cls, fields: dict) -> "Config":
        """Read the fields of a Hugging Face `config.json`.

        Raises
        ------
        InputError
            If the fields are not those of a GPT-Neo, or contradict each other.
        """
        kind = fields.get("model_type")
        if kind != "gpt_neo":
            raise InputError(f"this is not a GPT-Neo: its model_type is {kind!r}, not 'gpt_neo'")
        activation = fields.get("activation_function", "gelu_new")
        if activation != "gelu_new":
            raise InputError(f"activation_function is {activation!r}; only 'gelu_new' is known")

        def count(name):
            value = fields.get(name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number from 1")
            return value

        vocab, context = count("vocab_size"), count("max_position_embeddings")
        width, n_layers, n_heads = count("hidden_size"), count("num_layers"), count("num_heads")
        if width % n_heads:
            raise InputError(f"hidden_size {width} cannot be split into num_heads {n_heads}")
        tied = fields.get("tie_word_embeddings", True)
        if type(tied) is not bool:
            raise InputError(f"tie_word_embeddings is {tied!r}; it must be true or false")
        inner = 4 * width if fields.get("intermediate_size") is None else count("intermediate_size")

        kinds = _attention_kinds(fields)
        if len(kinds) > MOST_LAYERS:
            raise InputError(f"attention_types names more than {MOST_LAYERS} layers")
        if len(kinds) != n_layers:
            raise InputError(f"attention_types names {len(kinds)} layers, num_layers {n_layers}")
        for attention_kind in kinds:
            if attention_kind not in ("global", "local"):
                raise InputError(f"attention kind {attention_kind!r} is not 'global' or 'local'")
        local_window = min(count("window_size"), context) if "local" in kinds else context

        end_token = fields.get("eos_token_id")
        if end_token is not None and (type(end_token) is not int or end_token not in range(vocab)):
            raise InputError(f"eos_token_id is {end_token!r}, but tokens are 0 to {vocab - 1}")
        eps = fields.get("layer_norm_epsilon", 1e-5)
        if not (isinstance(eps, float) and 0 < eps < inf):
            raise InputError(f"layer_norm_epsilon is {eps!r}; it must be a number above 0")
        return cls(
            vocab=vocab,
            context=context,
            width=width,
            inner=inner,
            n_layers=n_layers,
            n_heads=n_heads,
            windows=tuple(context if kind == "global" else local_window for kind in kinds),
            eps=eps,
            tied=tied,
            end_token=end_token,
        )


def _attention_kinds(fields):
    """Expand `[[["global", "local"], 3]]` to one kind per layer."""
    types = fields.get("attention_types")
    try:
        runs = ((kinds, repeat) for kinds, repeat in types if kinds)
        expanded = (kind for kinds, repeat in runs for _ in range(repeat) for kind in kinds)
        return list(islice(expanded, MOST_LAYERS + 1))
    except (TypeError, ValueError):
        raise InputError(
            f'attention_types is {types!r}; it must look like [[["global", "local"], 3]]'
        ) from None
