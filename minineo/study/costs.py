"""What a pass costs, counted from shapes alone: bytes read and operations done.

`pass_costs` counts what the code in `transformer/` really does. `least_flops` and its like count
what no implementation can do without; the difference is what blocks of queries and padding add.

Operations are those of matrix products: [m, k] @ [k, n] counts 2 m n k. Bytes are those of
weights, keys and values, each time that an operation reads them from memory or writes them there.
Vectors, scores and what is done to them number by number are left out: they are few, or stay in
the processor's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..cuda import kernels as gpu
from ..generation.batch import PATHS
from ..transformer import Config, InputError, attention
from ..transformer.cache import whole

NORM, SOFTMAX, GELU = 11, 5, 7  # operations on arrays in `layer_norm`, `softmax`, `gelu_new`


@dataclass(frozen=True)
class Operation:
    """What one operation of a pass costs, or several together.

    Attributes
    ----------
    name : str
        The name that the model's code has for its weights or its result; "extend" for the write
        into the cache.
    layer : int or None
        The number of its layer, from 0; None outside the layers.
    flops : int
        Floating-point operations in matrix products.
    weight_bytes : int
        Bytes of weights read: matrices, biases, norms, and rows looked up in the embeddings.
    key_value_bytes : int
        Bytes of keys and values read. A block of queries reads those that it may see once, for
        all of its queries.
    written_bytes : int
        Bytes of keys and values written into the cache.
    """

    name: str
    layer: int | None = None
    flops: int = 0
    weight_bytes: int = 0
    key_value_bytes: int = 0
    written_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All bytes read and written."""
        return self.weight_bytes + self.key_value_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: floating-point operations per byte.

        Below a processor's own ratio of the two, its memory is the limit, and above it its
        arithmetic: Williams, Waterman, Patterson (2009), Roofline, doi:10.1145/1498765.1498785.
        """
        return self.flops / self.bytes if self.bytes else 0.0


def total(operations: Sequence[Operation]) -> Operation:
    """Return what all these operations cost together."""
    return Operation(
        "total",
        flops=sum(operation.flops for operation in operations),
        weight_bytes=sum(operation.weight_bytes for operation in operations),
        key_value_bytes=sum(operation.key_value_bytes for operation in operations),
        written_bytes=sum(operation.written_bytes for operation in operations),
    )


def pass_costs(
    config: Config,
    fed: Sequence[int],
    held: Sequence[int] | None = None,
    *,
    capacity: int | None = None,
    itemsize: int = 4,
    last_only: bool = True,
) -> list[Operation]:
    """Return what each operation of one forward pass costs, in the order of the computation.

    Parameters
    ----------
    config : Config
    fed : sequence of int [batch]
        How many tokens are fed in each row. Shorter rows are padded to the longest, and padding
        costs what tokens do.
    held : sequence of int [batch], optional
        How many tokens the cache holds of each row before the pass; by default there is no cache,
        as on the naive path.
    capacity : int, optional
        Number of slots of each row in the cache; by default the whole context.
    itemsize : int, optional
        Bytes of one number.
    last_only : bool, optional
        Whether logits are made for the last token of each row alone.

    Raises
    ------
    InputError
        If the rows do not fit the model or each other.

    Examples
    --------
    >>> prefill = total(pass_costs(config, [300], [0]))
    >>> decode = total(pass_costs(config, [1], [300]))
    >>> prefill.flops / decode.flops, prefill.intensity / decode.intensity
    """
    cached = held is not None
    fed, held, capacity = _check_rows(config, fed, held, capacity)
    itemsize = whole(itemsize, "itemsize", 1)
    batch, new = len(fed), max(fed)
    vectors = batch * new
    width, inner = config.width, config.inner

    def norm(name, layer=None):
        return Operation(name, layer, weight_bytes=itemsize * 2 * width)  # scale and shift

    def linear(name, layer, inputs, outputs, bias=False):
        read = inputs * outputs + bias * outputs  # once, however many vectors there are
        flops = 2 * vectors * inputs * outputs
        return Operation(name, layer, flops, weight_bytes=itemsize * read)

    written = sum(min(new, capacity - length) for length in held) if cached else 0
    attended = {window: _attended(fed, held, window, capacity) for window in config.windows}

    positions = vectors if cached else new  # without a cache, all rows begin at position 0
    operations = [Operation("embed", weight_bytes=itemsize * (vectors + positions) * width)]
    for layer, window in enumerate(config.windows):
        pairs, slots = attended[window]
        flops = 2 * batch * pairs * width  # of a query with a key, and of a share with a value
        read = itemsize * batch * slots * width
        operations += [
            norm("norm_1", layer),
            linear("query", layer, width, width),
            linear("key", layer, width, width),
            linear("value", layer, width, width),
            Operation("extend", layer, written_bytes=itemsize * 2 * written * width),
            Operation("scores", layer, flops, key_value_bytes=read),
            Operation("mix", layer, flops, key_value_bytes=read),
            linear("output", layer, width, width, bias=True),
            norm("norm_2", layer),
            linear("up", layer, width, inner, bias=True),
            linear("down", layer, inner, width, bias=True),
        ]
    ends = batch if last_only else vectors
    unembedding = config.vocab * width
    operations += [
        norm("norm"),
        Operation("unembedding", None, 2 * ends * unembedding, itemsize * unembedding),
    ]
    return operations


def _check_rows(config, fed, held, capacity):
    """Return what is fed and held in each row, and the slots of each, or refuse them."""
    fed = _counts(fed, "fed", 1)
    capacity = config.context if capacity is None else whole(capacity, "capacity", 1)
    held = [0] * len(fed) if held is None else _counts(held, "held")
    if not fed or len(held) != len(fed):
        raise InputError(f"{len(fed)} rows are fed and {len(held)} held; give both, one or more")
    needed = max(new + old for new, old in zip(fed, held, strict=True))
    if needed > min(capacity, config.context):
        raise InputError(
            f"{needed} positions are needed; this pass has {min(capacity, config.context)}"
        )
    return fed, held, capacity


def _counts(counts, name, least=0):
    """Return a whole number for each row, or refuse them."""
    try:
        each = list(counts)
    except TypeError:
        raise InputError(
            f"{name} is {counts!r}; it must be a list, a number for each row"
        ) from None
    return [whole(count, name, least) for count in each]


def _attended(fed, held, window, capacity):
    """Return what `attend` works through in one layer, for each row of the batch.

    It takes `QUERY_ROWS` queries at a time, each time with all slots from the first to the last
    that one of them may see, in any row.

    Returns
    -------
    pairs : int
        How many queries are multiplied with how many keys, hidden ones included.
    slots : int
        How many keys are read: one that several blocks see counts for each.
    """
    new = max(fed)
    pairs = slots = 0
    for start in range(0, new, attention.QUERY_ROWS):
        stop = min(start + attention.QUERY_ROWS, new)
        first = max(0, min(held) + start - window + 1)
        seen = min(max(held) + stop, capacity) - first
        pairs += (stop - start) * seen
        slots += seen
    return pairs, slots


@dataclass(frozen=True)
class StepCosts:
    """What one step of `generate` costs, and all steps up to it.

    Attributes
    ----------
    index : int
        0 for the step that feeds the prompt and yields the first token, then 1, 2, ...
    fed : int
        How many tokens are fed; for each, a key and a value are made in every layer.
    remade : int
        For how many of them an earlier step had made these already.
    cost : Operation
    fed_so_far, remade_so_far : int
    cost_so_far : Operation
        This step and those before it.
    """

    index: int
    fed: int
    remade: int
    cost: Operation
    fed_so_far: int
    remade_so_far: int
    cost_so_far: Operation


def step_costs(
    config: Config,
    prompt: int,
    index: int,
    path: str = "cached",
    *,
    prefill_chunk: int | None = None,
    itemsize: int = 4,
) -> list[Operation]:
    """Return what each operation of one step of `generate` costs.

    Parameters
    ----------
    config : Config
    prompt : int
        Number of tokens in the prompt.
    index : int
        0 for the step that feeds the prompt, then 1, 2, ...
    path : "cached" or "naive", optional
    prefill_chunk : int, optional
        Feed at most so many tokens of the prompt in one pass, on the cached path. The first
        step then is several passes.
    itemsize : int, optional
        Bytes of one number.

    Raises
    ------
    InputError
        If there is no such step.
    """
    passes = _passes(prompt, index, path, prefill_chunk)
    return [
        operation
        for fed, held in passes
        for operation in pass_costs(config, fed, held, itemsize=itemsize)
    ]


def run_costs(
    config: Config,
    prompt: int,
    new: int,
    path: str = "cached",
    *,
    prefill_chunk: int | None = None,
    itemsize: int = 4,
) -> list[StepCosts]:
    """Return what each step costs of writing `new` tokens behind a prompt, and the sums so far.

    The prompt's own pass yields the first token, so n new tokens take n - 1 steps after it. In
    all, prompt + n - 1 tokens are fed on the cached path. On the naive path they are
    n prompt + n (n - 1) / 2, and of all those beyond, the keys have been made before.

    The parameters are those of `step_costs`; with a `new` of 0 there is no step.
    """
    costs, fed, remade = [], [], []
    for index in range(whole(new, "new")):
        operations = step_costs(
            config, prompt, index, path, prefill_chunk=prefill_chunk, itemsize=itemsize
        )
        costs.append(total(operations))
        fed.append(sum(rows[0] for rows, _ in _passes(prompt, index, path, prefill_chunk)))
        remade.append(fed[-1] - (1 if index else prompt))
    sums = accumulate(costs, lambda so_far, cost: total([so_far, cost]))
    columns = zip(fed, remade, costs, accumulate(fed), accumulate(remade), sums, strict=True)
    return [StepCosts(index, *column) for index, column in enumerate(columns)]


def _passes(prompt, index, path, prefill_chunk):
    """Return what each pass of a step of `generate` is fed and what its cache holds."""
    prompt, index = whole(prompt, "prompt", 1), whole(index, "index")
    if path not in PATHS:
        raise InputError(f"unknown path {path!r}: choose {' or '.join(PATHS)}")
    if prefill_chunk is not None and path == "naive":
        raise InputError("the naive path forgets every chunk: leave prefill_chunk out")
    if path == "naive":
        return [([prompt + index], None)]
    if index:
        return [([1], [prompt + index - 1])]
    chunk = prompt if prefill_chunk is None else whole(prefill_chunk, "prefill_chunk", 1)
    return [([min(chunk, prompt - held)], [held]) for held in range(0, prompt, chunk)]


def launches(config: Config, new: int, *, cached: bool = True, kernels: bool = False) -> int:
    """Return how many operations on arrays a pass of one row calls.

    On a GPU each is a kernel launched; the copies that CuPy's `matmul` makes of keys and values
    come on top, where there are several queries or no fused kernels.

    Parameters
    ----------
    config : Config
    new : int
        Number of tokens fed.
    cached : bool, optional
        Whether keys and values are written into a cache.
    kernels : bool, optional
        Whether fused kernels stand in for the functions they equal.
    """
    new = whole(new, "new", 1)
    if kernels:
        norm, projections, added, activated = 1, 3, 2, 2  # each product, and what follows at once
        append = int(cached)
        blocks = -(-new // gpu.QUERY_ROWS)
        attend = 1 if new == 1 else 4 * blocks  # scores, softmax, mix and where it goes
    else:
        norm, projections, added, activated = NORM, 3, 3, 2 + GELU
        append = 2 * cached
        whole_blocks, rest = divmod(new, attention.QUERY_ROWS)
        hiding = whole_blocks + (rest > 1)  # a query alone has nothing to hide
        blocks = whole_blocks + (rest > 0)
        attend = blocks * (1 + SOFTMAX + 2) + hiding
    layer = norm + projections + append + attend + added + norm + activated + added
    return 3 + config.n_layers * layer + 1 + norm + 1  # embed; the last token, norm, unembedding


def layer_matrices(config):
    """Return how many numbers the matrices of one layer hold."""
    return 4 * config.width**2 + 2 * config.width * config.inner


def matrices(config):
    """Return how many numbers all matrices hold that a token is multiplied by."""
    return config.n_layers * layer_matrices(config) + config.vocab * config.width


def weight_bytes(config, itemsize=4):
    """Return the bytes of weights that one decode step reads.

    They are all matrices, biases and norms. Of the token and the position table a step looks up
    one row each, which is not counted; but the unembedding is read whole.
    """
    biases_and_norms = config.inner + 6 * config.width  # two biases of width, two norms of two
    vectors = config.n_layers * biases_and_norms + 2 * config.width
    return itemsize * (matrices(config) + vectors)


def cache_bytes(config, length, itemsize=4, *, windowed=False):
    """Return the bytes of the keys and values of one row, in all layers.

    Parameters
    ----------
    config : Config
    length : int
        Number of tokens in the row.
    itemsize : int, optional
        Bytes of one number.
    windowed : bool, optional
        Count no more tokens in a layer than its window shows to one query.
    """
    tokens = sum(min(window, length) if windowed else length for window in config.windows)
    return 2 * itemsize * config.width * tokens


def cache_bytes_read(config, depth, itemsize=4):
    """Return the bytes of keys and values that one row's decode step looks at.

    Parameters
    ----------
    config : Config
    depth : int
        Number of tokens in the cache before the step; its query sees its own key too.
    itemsize : int, optional
        Bytes of one number.
    """
    return cache_bytes(config, depth + 1, itemsize, windowed=True)


def least_flops(config, fed, held=None):
    """Return the floating-point operations in matrix products that a pass cannot do without.

    Scores and mix count for what each query may see and no more, padding not at all, and the
    logits for the last token of each row alone, whatever an implementation does beyond that.

    Parameters
    ----------
    config : Config
    fed, held : sequence of int [batch]
        As in `pass_costs`.
    """
    fed, held, _ = _check_rows(config, fed, held, None)
    linear = 2 * sum(fed) * config.n_layers * layer_matrices(config)
    pairs = sum(
        visible_pairs(new, window, old)
        for new, old in zip(fed, held, strict=True)
        for window in config.windows
    )
    attention_flops = 2 * 2 * config.width * pairs  # queries @ keysᵀ, then pattern @ values
    unembedding = 2 * len(fed) * config.vocab * config.width
    return linear + attention_flops + unembedding


def prefill_flops(config, tokens):
    """Return the least floating-point operations of a prefill of one row, as `least_flops`."""
    return least_flops(config, [tokens])


def visible_pairs(new, window, held=0):
    """Return how many pairs of a new query and a key it may see are in a layer.

    Parameters
    ----------
    new : int
        Number of queries; they stand behind one another.
    window : int
    held : int, optional
        Number of tokens before them.
    """

    def up_to(length):
        growing = min(window, length)  # these queries see 1, 2, 3, ... keys, all others a window
        return growing * (growing + 1) // 2 + (length - growing) * window

    return up_to(held + new) - up_to(held)
