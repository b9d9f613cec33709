"""From a prompt to text, one token per step."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..checkpoints import Model
from ..transformer import InputError, silent
from ..transformer.cache import whole
from .batch import Batch, Choose, Request, Step
from .sampling import greedy


def generate(
    model: Model,
    prompt,
    *,
    path: str = "cached",
    max_new_tokens: int = 64,
    stop_at_end: bool = True,
    stop: str | Sequence[str] = (),
    choose: Choose = greedy,
    prefill_chunk: int | None = None,
    trace=silent,
) -> Iterator[Step]:
    """Write on from a prompt, one token per step.

    A sequence can be as long as the model's context: generation ends with the token that the
    last position yields.

    Parameters
    ----------
    model : Model
    prompt : str or sequence of int
        Text or token ids.
    path : "cached" or "naive", optional
        Keep keys and values and feed only new tokens, or feed the whole sequence every time.
    max_new_tokens : int, optional
        Stop after so many tokens. With 0 nothing is computed.
    stop_at_end : bool, optional
        Stop after the end-of-text token.
    stop : str or sequence of str, optional
        Stop at the first of these strings in the new text, which then ends before it.
    choose : function, optional
        From logits [vocab] and the ids of all tokens so far to the next token: a `Sampling`, or
        by default the most likely token.
    prefill_chunk : int, optional
        Feed at most so many tokens of the prompt in one pass, on the cached path; by default all
        of them. The passes are counted into the first step.
    trace : Trace, optional
        Sees the values of every pass; those of the latest stay.

    Yields
    ------
    Step

    Raises
    ------
    InputError
        If the prompt or an option is not usable. Raised at once, not at the first step.

    Examples
    --------
    >>> for step in generate(model, "Once upon a time", max_new_tokens=5):
    ...     print(step.phase, step.fed, step.text)
    """
    passes = generate_batch(
        model,
        [prompt],
        path=path,
        max_new_tokens=max_new_tokens,
        stop_at_end=stop_at_end,
        stop=stop,
        choose=choose,
        prefill_chunk=prefill_chunk,
        trace=trace,
    )
    return (step for steps in passes for step in steps)


def generate_batch(
    model: Model,
    prompts: Sequence,
    *,
    path: str = "cached",
    max_new_tokens: int = 64,
    stop_at_end: bool = True,
    stop: str | Sequence[str] = (),
    choose: Choose | Sequence[Choose] = greedy,
    prefill_chunk: int | None = None,
    trace=silent,
) -> Iterator[list[Step]]:
    """Write on from several prompts at once: each as `generate` does it alone.

    Parameters
    ----------
    model : Model
    prompts : sequence of str or of sequences of int
    choose : function or sequence of functions, optional
        One for all prompts, or one for each.

    The others are those of `generate`.

    Yields
    ------
    list of Step
        The steps of one pass, in the order of the prompts: those of rows that have left are
        missing, and `Step.row` tells whose each is.

    Raises
    ------
    InputError
        If a prompt or an option is not usable. Raised at once, not at the first step.

    Examples
    --------
    >>> texts = ["", ""]
    >>> for steps in generate_batch(model, ["Once upon a time", "One day"]):
    ...     for step in steps:
    ...         texts[step.row] += step.text
    """
    if (
        not isinstance(prompts, Sequence | np.ndarray)
        or isinstance(prompts, str)
        or not len(prompts)
    ):
        raise InputError("prompts must be a list of one prompt or more")
    if callable(choose) or not isinstance(choose, Sequence):
        choose = [choose] * len(prompts)
    if len(choose) != len(prompts):
        raise InputError(f"choose has {len(choose)} functions; there are {len(prompts)} prompts")
    new = whole(max_new_tokens, "max_new_tokens")
    requests = [
        Request(model.encode(prompt), new, stop_at_end, stop, each)
        for prompt, each in zip(prompts, choose, strict=True)
    ]
    capacity = max(request.slots(model.config.context) for request in requests)
    batch = Batch(
        model, len(requests), capacity, path=path, prefill_chunk=prefill_chunk, trace=trace
    )
    for request in requests:
        batch.join(request)
    return _run(batch)


def _run(batch):
    """Yield the steps of each pass that yields any, until every row has left."""
    while batch:
        if steps := batch.step():
            yield sorted(steps, key=lambda step: step.row)
