"""The fault lab: bugs that caches really had, put into the cached run alone.

None of them is known to a line of the model: each is a cache of another class, or stands in for a
replaceable function. Where it must first show follows from what it does and from the shapes.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

from ..checkpoints import Model
from ..transformer import Config, InputError, KVCache, forward, silent
from ..transformer.attention import QUERY_ROWS, hide
from ..transformer.cache import whole
from ..transformer.functions import softmax, wide
from ..transformer.replaceable import replaced
from .lockstep import Divergence, Lockstep, Pass, Place, lockstep
from .plain import number

PAST_THE_WINDOW = "a text that is longer than the window of a local layer"
CHUNKS = 3  # parts that a prompt is fed in
OTHER_PROMPT = 5  # tokens of the prompt that came before


@dataclass(frozen=True)
class Scenario:
    """How a prompt is fed, so that a kind of fault can show.

    Attributes
    ----------
    what : str
    feed : function
        From the prompt's ids to the passes that feed them.
    second : bool
        Whether the cache has held another prompt before, and was cropped to nothing.
    """

    what: str
    feed: Callable[[list[int]], list[Pass]]
    second: bool = False

    def prepare(self, model: Model, cache: KVCache):
        """Do to an empty cache what comes before the prompt."""
        if self.second:
            other = np.arange(OTHER_PROMPT)[None] % model.config.vocab
            forward(other, model.weights, model.config, cache)
            cache.crop(0)


def in_chunks(ids):
    """Return the passes that feed a prompt in parts."""
    parts = [part.tolist() for part in np.array_split(ids, min(CHUNKS, len(ids)))]
    return [Pass.of(part) for part in parts]


WHOLE = Scenario("a prompt in one pass, then token by token", lambda ids: [Pass.of(ids)])
IN_CHUNKS = Scenario(f"a prompt in {CHUNKS} parts, then token by token", in_chunks)
SECOND = Scenario(
    "a prompt in a cache that has held another one",
    lambda ids: [Pass.of(ids)],
    second=True,
)
RAGGED = Scenario(
    "a batch of the prompt and of its first half, padded",
    lambda ids: [Pass.of(ids, ids[: (len(ids) + 1) // 2])],
)


@dataclass(frozen=True)
class Fault:
    """A bug that can be put into the cached run.

    Attributes
    ----------
    name : str
    what : str
        What goes wrong, in a sentence.
    reference : str
        Where a program really had it.
    scenario : Scenario
    place : function
        From a config and the passes to the first value that goes wrong, or None where these
        passes leave it hidden.
    cache : class
        Of the faulty cache.
    functions : dict of str to function
        What stands in for replaceable functions.
    needs : str
        What model and text must have for the fault to show; empty where it always does.
    """

    name: str
    what: str
    reference: str
    scenario: Scenario
    place: Callable[[Config, Sequence[Pass]], Place | None]
    cache: type[KVCache] = KVCache
    functions: dict[str, Callable] = field(default_factory=dict)
    needs: str = ""

    def to_json(self) -> dict:
        """Return what it is, in words."""
        return {
            "fault": self.name,
            "what": self.what,
            "scenario": self.scenario.what,
            "needs": self.needs,
            "reference": self.reference,
        }


# Caches


class FirstPositionTooFar(KVCache):
    """Counts one token too many after the first pass."""

    def advance(self, counts):
        super().advance(np.asarray(counts) + (self.lengths == 0))


class SlotZeroUnwritten(KVCache):
    """Never keeps the first token."""

    def extend(self, layer, new_keys, new_values):
        keys, values = super().extend(layer, new_keys, new_values)
        keys[:, :, 0] = values[:, :, 0] = 0
        return keys, values


class NewestDropped(KVCache):
    """Returns what it held before the newest token came."""

    def extend(self, layer, new_keys, new_values):
        keys, values = super().extend(layer, new_keys, new_values)
        return keys[:, :, :-1], values[:, :, :-1]


class KeysAndValuesSwapped(KVCache):
    """Takes one for the other."""

    def extend(self, layer, new_keys, new_values):
        return super().extend(layer, new_values, new_keys)


class OneStorageForAllLayers(KVCache):
    """Writes every layer over the one before it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.keys, self.values = self.keys[:1] * len(self.keys), self.values[:1] * len(self.values)


class KeptInFloat16(KVCache):
    """Keeps fewer digits than the model computes with."""

    def extend(self, layer, new_keys, new_values):
        def round_off(new):
            return new.astype(np.float16).astype(new.dtype)

        return super().extend(layer, round_off(new_keys), round_off(new_values))


class PaddingCounted(KVCache):
    """Takes the padding of shorter rows for tokens."""

    def advance(self, counts):
        super().advance(np.full_like(counts, np.max(counts)))


class NothingForgotten(KVCache):
    """Is not emptied by a crop."""

    def crop(self, length):
        pass


# Functions


def attend_where(sees, scale=lambda queries: 1):
    """Return an `attend` that looks at the slots that ``sees(distance, window, positions)`` says.

    `distance` [batch, rows, all] is how far a slot lies before a query, `positions` are those of
    all queries of the pass. For the rest it is what it stands in for.
    """

    def attend(queries, keys, values, positions, window, trace=silent):
        new, all_slots = queries.shape[2], keys.shape[2]
        mixed = np.empty_like(queries)
        for start in range(0, new, QUERY_ROWS):
            rows = slice(start, min(start + QUERY_ROWS, new))
            distance = positions[:, rows, None] - np.arange(all_slots)
            seen = sees(distance, window, positions)
            used = np.flatnonzero(seen.any(axis=(0, 1))).tolist()
            slots = slice(used[0], used[-1] + 1)
            scaled = scale(queries) * wide(queries[:, :, rows])
            scores = scaled @ wide(keys[:, :, slots]).swapaxes(-1, -2)
            hide(scores, ~seen[:, :, slots])
            pattern = softmax(scores)
            mixed[:, :, rows] = pattern @ wide(values[:, :, slots])
            trace.tile(rows, slots, (new, all_slots), scores=scores, pattern=pattern)
        return mixed

    return attend


def in_window(distance, window, positions):
    """What is right: the query's own slot and those before it, as far as the window goes."""
    return (distance >= 0) & (distance < window)


def future_too(distance, window, positions):
    """See what comes later as well, in a pass of several tokens."""
    return distance < window if positions.shape[1] > 1 else in_window(distance, window, positions)


def from_slot_0(distance, window, positions):
    """Take the first query of a pass for the first token of the text."""
    return in_window(distance - positions[:, :1, None], window, positions)


def one_too_many(distance, window, positions):
    """See one slot more than the window holds."""
    return in_window(distance, window + 1, positions)


def no_window_in_decode(distance, window, positions):
    """Forget the window in passes of one token."""
    return distance >= 0 if positions.shape[1] == 1 else in_window(distance, window, positions)


def padding_in_decode(distance, window, positions):
    """See all slots up to the end of the longest row, in passes of one token."""
    return distance < window if positions.shape[1] == 1 else in_window(distance, window, positions)


def exact_gelu(x):
    """The activation by its definition, x Φ(x), of which GPT-Neo uses an approximation."""
    z = np.abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)  # erf as in Abramowitz, Stegun (1964), 7.1.26, to seven digits
    t *= np.exp(-z * z) * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return x * (1 + np.copysign(1 - t, x)) / 2


def sample_variance_norm(x, scale, shift, eps):
    """Layer norm with the variance of a sample: divided by width - 1."""
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered * centered).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
    return centered / np.sqrt(variance + eps) * scale + shift


# Places


def always(step, layer, value):
    """Return the place of a fault that shows wherever there is such a step and layer."""

    def place(config, passes):
        there = step < len(passes) and layer < config.n_layers
        return Place(step, layer, value) if there else None

    return place


def first_pass(passes, shows):
    """Return the number of the first pass for which ``shows(counts, ends)``, or None."""
    ends = np.cumsum([each.counts for each in passes], axis=0)
    for step, (each, end) in enumerate(zip(passes, ends, strict=True)):
        if shows(np.array(each.counts), end):
            return step
    return None


def in_a_pass_of_several(config, passes):
    """A future is there to be seen where a row is fed two tokens or more."""
    step = first_pass(passes, lambda counts, ends: counts.max() > 1)
    return None if step is None else Place(step, 0, "scores")


def past_the_window(passes_of):
    """A window matters from the first query on that has it behind itself in full."""

    def place(config, passes):
        smallest = min(config.windows)
        step = first_pass(passes, lambda counts, ends: passes_of(counts) and ends.max() > smallest)
        if step is None:
            return None
        end = sum(np.array(each.counts) for each in passes[: step + 1]).max()
        return Place(step, next(n for n, w in enumerate(config.windows) if end > w), "scores")

    return place


def where_rows_differ(step, value):
    """There is padding where rows of a batch have different lengths."""

    def place(config, passes):
        ragged = len(set(passes[0].counts)) > 1 and step < len(passes)
        return Place(step, 0, value) if ragged else None

    return place


def where_scores_are_sums(config, passes):
    """The root of 1 is 1: heads must be wider than one number."""
    return Place(0, 0, "scores") if config.head_dim > 1 else None


def in_more_layers(config, passes):
    """A layer must be there whose keys lie over those of layer 0."""
    return Place(1, 0, "keys") if config.n_layers > 1 and len(passes) > 1 else None


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "first-position",
            "The first token after the prompt gets a position one too far.",
            "https://github.com/microsoft/onnxruntime-genai/pull/2354",
            WHOLE,
            always(1, 0, "before"),
            cache=FirstPositionTooFar,
        ),
        Fault(
            "slot-zero",
            "The key and value of the first token are never kept.",
            "https://github.com/tenstorrent/tt-metal/issues/54413",
            WHOLE,
            always(0, 0, "keys"),
            cache=SlotZeroUnwritten,
        ),
        Fault(
            "newest-dropped",
            "The cache is read before the newest token is in it.",
            "https://github.com/harvard-edge/cs249r_book/pull/1953",
            WHOLE,
            always(0, 0, "keys"),
            cache=NewestDropped,
        ),
        Fault(
            "no-causal-mask",
            "In a pass of several tokens each sees those that come after it.",
            "https://github.com/Mikyx-1/TinyLLM/issues/17",
            WHOLE,
            in_a_pass_of_several,
            functions={"attend": attend_where(future_too)},
        ),
        Fault(
            "mask-not-offset",
            "The first token of a later pass is taken for the first of the text.",
            "https://github.com/pytorch/executorch/pull/21749",
            IN_CHUNKS,
            always(1, 0, "scores"),
            functions={"attend": attend_where(from_slot_0)},
        ),
        Fault(
            "window-too-wide",
            "Local layers see one token more than their window holds.",
            "https://github.com/huggingface/transformers/issues/39408",
            WHOLE,
            past_the_window(lambda counts: True),
            functions={"attend": attend_where(one_too_many)},
            needs=PAST_THE_WINDOW,
        ),
        Fault(
            "window-ignored",
            "Local layers see everything once tokens come one by one.",
            "https://github.com/karpathy/nanochat/issues/452",
            WHOLE,
            past_the_window(lambda counts: counts.max() == 1),
            functions={"attend": attend_where(no_window_in_decode)},
            needs=PAST_THE_WINDOW,
        ),
        Fault(
            "default-scale",
            "Scores are divided by √head_dim, as most models do and GPT-Neo does not.",
            "https://github.com/huggingface/transformers/issues/20828",
            WHOLE,
            where_scores_are_sums,
            functions={
                "attend": attend_where(in_window, lambda queries: queries.shape[-1] ** -0.5)
            },
            needs="heads that are wider than one number",
        ),
        Fault(
            "padding-counted",
            "Padding counts as tokens, so that shorter rows go on too far to the right.",
            "https://github.com/ndif-team/nnsight/pull/673",
            RAGGED,
            where_rows_differ(1, "before"),
            cache=PaddingCounted,
        ),
        Fault(
            "padding-attended",
            "After the first pass shorter rows see the padding behind them.",
            "https://github.com/OpenNMT/OpenNMT-py/pull/2532",
            RAGGED,
            where_rows_differ(1, "pattern"),
            functions={"attend": attend_where(padding_in_decode)},
        ),
        Fault(
            "stale-cache",
            "The tokens of the prompt before are still there.",
            "https://github.com/mudler/LocalAI/issues/6747",
            SECOND,
            always(0, 0, "before"),
            cache=NothingForgotten,
        ),
        Fault(
            "shared-storage",
            "All layers keep their keys and values in the same place.",
            "https://github.com/vllm-project/vllm/pull/41657",
            WHOLE,
            in_more_layers,
            cache=OneStorageForAllLayers,
            needs="two layers or more",
        ),
        Fault(
            "keys-values-swapped",
            "Keys are taken for values, and values for keys.",
            "https://github.com/tenstorrent/tt-mlir/issues/8958",
            WHOLE,
            always(0, 0, "keys"),
            cache=KeysAndValuesSwapped,
        ),
        Fault(
            "float16-cache",
            "Keys and values are rounded to float16.",
            "https://github.com/huggingface/transformers/issues/25420",
            WHOLE,
            always(0, 0, "keys"),
            cache=KeptInFloat16,
        ),
        Fault(
            "gelu-variant",
            "The exact GELU takes the place of its tanh form.",
            "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
            WHOLE,
            always(0, 0, "after"),
            functions={"gelu_new": exact_gelu},
        ),
        Fault(
            "norm-variance",
            "Layer norm divides the variance by width - 1.",
            "https://github.com/LBANN/lbann/pull/2024",
            WHOLE,
            always(0, 0, "normed_1"),
            functions={"layer_norm": sample_variance_norm},
        ),
    )
}


@dataclass(frozen=True)
class FaultRun:
    """What a fault does to a text.

    Attributes
    ----------
    fault : Fault
    model : Model
    prompt_ids : list of int
        Of the row that is shown: the one whose text goes wrong first.
    lockstep : Lockstep
        Over the tokens of the right text.
    expected : Place or None
        Where the fault must first show; None if this prompt leaves it hidden.
    needed : int or None
        With how many new tokens a fault that this text leaves hidden would show; None if it shows,
        or with no number of them.
    right_ids, wrong_ids : list of int
        What the model writes without the fault and with it. The latter ends early where the
        cached path breaks down.
    """

    fault: Fault
    model: Model
    prompt_ids: list[int]
    lockstep: Lockstep
    expected: Place | None
    needed: int | None
    right_ids: list[int]
    wrong_ids: list[int]

    @property
    def found(self) -> Divergence | None:
        """The first value that differs by more than rounding."""
        return self.lockstep.divergence

    @property
    def as_expected(self) -> bool:
        """Whether the fault shows first where it must, or nowhere if it is hidden."""
        return (self.found and self.found.place) == self.expected

    @property
    def first_wrong(self) -> int | None:
        """The number of the first new token that is not the right one."""
        for index, right in enumerate(self.right_ids):
            if index >= len(self.wrong_ids) or self.wrong_ids[index] != right:
                return index
        return None

    def to_json(self) -> dict:
        """Return everything as plain values."""
        texts = {
            f"{name}_text": None if self.model.tokenizer is None else self.model.decode(ids)
            for name, ids in (("right", self.right_ids), ("wrong", self.wrong_ids))
        }
        return {
            "schema": 1,
            "model": self.model.name,
            "device": self.model.device.name,
            "dtype": self.model.dtype,
            **self.fault.to_json(),
            "prompt_ids": self.prompt_ids,
            "right_ids": self.right_ids,
            "wrong_ids": self.wrong_ids,
            **texts,
            "first_wrong_token": self.first_wrong,
            "first_divergence": None if self.found is None else self.found.to_json(),
            "expected": None if self.expected is None else vars(self.expected),
            "as_expected": self.as_expected,
            "new_tokens_needed": self.needed,
            "values_compared": self.lockstep.values,
            "largest_difference_before": number(self.lockstep.largest_difference),
        }


def run_fault(
    model: Model,
    name: str,
    prompt,
    *,
    max_new_tokens: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FaultRun:
    """Put a fault into the cached run and hold it against the naive path.

    Parameters
    ----------
    model : Model
    name : str
        One of `FAULTS`.
    prompt : str or sequence of int
        Text or token ids. A fault of the window needs a text that is longer than it.
    max_new_tokens : int, optional
        How many tokens are written, 2 or more.
    progress : function, optional
        Called as ``progress(done, total)`` after each step.

    Returns
    -------
    FaultRun

    Raises
    ------
    InputError
        If there is no such fault, or the prompt leaves no room for it.
    """
    fault, ids = find_fault(name), model.encode(prompt)
    context = model.config.context
    if context < OTHER_PROMPT + 4:
        raise InputError(
            f"a fault needs a context of {OTHER_PROMPT + 4} or more; this is {context}"
        )
    room = context - len(ids) - OTHER_PROMPT
    count = min(whole(max_new_tokens, "max_new_tokens"), room)
    if count < 2 or len(ids) < 2:
        raise InputError(
            f"a fault needs a prompt of 2 to {context - OTHER_PROMPT - 2} tokens and "
            f"2 new ones to show; these are {len(ids)} and {max_new_tokens}"
        )
    prompt_passes = fault.scenario.feed(ids)
    right = write(model, prompt_passes, count)
    wrong = write(model, prompt_passes, count, fault)
    passes = with_new_tokens(prompt_passes, right)
    expected = fault.place(model.config, passes)
    found = lockstep(
        model,
        passes,
        cache=fault.cache,
        change=lambda: replaced(**fault.functions),
        prepare=fault.scenario.prepare,
        spare=OTHER_PROMPT,
        progress=lambda done: progress(done, len(passes)),
    )
    rows = range(len(prompt_passes[0].counts))
    row = min(rows, key=lambda row: agreement(right, wrong, row))
    return FaultRun(
        fault,
        model,
        [i for each in prompt_passes for i in each.tokens[row, : each.counts[row]].tolist()],
        found,
        expected,
        None if expected else new_tokens_needed(fault, model, prompt_passes, room),
        [tokens[row] for tokens in right],
        [tokens[row] for tokens in wrong],
    )


def find_fault(name: str) -> Fault:
    """Return the fault of this name.

    Raises
    ------
    InputError
        If there is none.
    """
    if name not in FAULTS:
        close = get_close_matches(name, FAULTS)
        guess = f"did you mean {' or '.join(close)}? " if close else ""
        raise InputError(f"unknown fault {name!r}; {guess}`minineo faults` lists all")
    return FAULTS[name]


def with_new_tokens(prompt_passes, written):
    """Return the passes of a prompt and of what was written after it but for the last tokens."""
    return [*prompt_passes, *(Pass.of(*([token] for token in tokens)) for tokens in written[:-1])]


def new_tokens_needed(fault, model, prompt_passes, most):
    """Return the smallest number of new tokens with which a fault shows, or None."""
    some = [[0] * len(prompt_passes[0].counts)] * most

    def shows(count):
        return fault.place(model.config, with_new_tokens(prompt_passes, some[:count])) is not None

    return bisect(range(most), False, key=shows) if shows(most) else None


def agreement(right, wrong, row):
    """Return how many tokens of a row are right before the first wrong one."""
    for index, tokens in enumerate(right):
        if index >= len(wrong) or wrong[index][row] != tokens[row]:
            return index
    return len(right)


def write(model, prompt_passes, count, fault=None):
    """Write the likeliest tokens, with a fault or without: one list of ids for each step."""
    batch = len(prompt_passes[0].counts)
    capacity = min(
        model.config.context,
        sum(each.tokens.shape[1] for each in prompt_passes) + count + OTHER_PROMPT,
    )
    new_cache = KVCache if fault is None else fault.cache
    cache = new_cache(model.config, batch, capacity, like=model.weights.token_embedding)
    written: list[list[int]] = []
    try:
        if fault is not None:
            fault.scenario.prepare(model, cache)
        passes = list(prompt_passes)
        with replaced(**(fault.functions if fault else {})):
            while len(written) < count:
                for each in passes:
                    logits = model.forward(each.tokens, cache, counts=each.counts)
                tokens = np.argmax(model.device.get(logits[:, -1]), axis=-1).tolist()
                written.append(tokens)
                passes = [Pass.of(*([token] for token in tokens))]
    except Exception:  # what a fault breaks is its own to show
        if fault is None:
            raise
    return written
