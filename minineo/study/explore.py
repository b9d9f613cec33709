"""The attention flow as a page: one file that shows, step by step, what both paths really did."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

import numpy as np

from ..checkpoints import Model
from ..generation.batch import PATHS
from ..generation.sampling import log_probabilities
from ..generation.text import TextStream
from ..transformer import InputError, KVCache, Recompute, Trace, silent
from ..transformer.cache import whole
from ..transformer.replaceable import replaced
from . import costs
from .faults import OTHER_PROMPT, WHOLE, Fault, find_fault, run_fault, with_new_tokens, write
from .flow import NAMES
from .lockstep import HIDDEN, ROUNDING, Lockstep, Pass, distance, distances, lockstep, size_of
from .plain import number

SCRIPTS = (
    "data", "stage", "text", "time", "paint", "flow", "row", "point", "grid", "layers", "next", "tour"
)  # fmt: skip
LARGEST = 50e6  # bytes of a page: more is too slow to open
MOST = 8  # candidates for the next token that are shown of each path
UNIT, PER_DOUBLING = 200, 4  # of the code for differences: 2 ** ((code - UNIT) / PER_DOUBLING)
NO_NUMBER = 255


@dataclass(frozen=True)
class Exploration:
    """Both paths over the same tokens, with what every head of every layer did.

    In a notebook it shows itself, in a frame.

    Attributes
    ----------
    facts : dict
        Everything but the arrays, as plain values: the model, the tokens, and for every pass
        its times, costs and candidates.
    arrays : dict of str to NumPy array
        What the heads did; `docs/explore.md` says how they are laid out.
    """

    facts: dict
    arrays: dict[str, np.ndarray]

    @property
    def agree(self) -> bool:
        """Whether the paths differ by no more than rounding."""
        return self.facts["found"] is None

    @property
    def page(self) -> str:
        """The page: HTML that needs no other file, no server and no network."""
        folder = files(__package__) / "page"

        def source(name):
            return (folder / name).read_text(encoding="utf-8")

        data = {"facts": self.facts, "arrays": {n: packed(a) for n, a in self.arrays.items()}}
        text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no tag can begin in it
        page = source("page.html").replace("/* style */", source("page.css"))
        scripts = "\n".join(f"<script>\n{source(f'{name}.js')}</script>" for name in SCRIPTS)
        return page.replace("<!-- scripts -->", scripts).replace("<!-- data -->", text, 1)

    def save(self, file):
        """Write the page to a file."""
        Path(file).write_text(self.page, encoding="utf-8")

    def to_json(self) -> dict:
        """Return everything but the arrays as plain values."""
        return self.facts

    def _repr_html_(self):
        style = "width: 100%; height: 900px; border: 1px solid #8886; border-radius: 8px"
        return (
            f'<iframe title="The attention flow, step by step" style="{style}" '
            f'srcdoc="{escape(self.page)}"></iframe>'
        )


def explore(
    model: Model,
    prompt,
    *,
    max_new_tokens: int = 32,
    fault: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exploration:
    """Run the same tokens down both paths and keep what every head did, for a page to show.

    Both run three times: silently for the clock, in `lockstep` for the verdict, and traced for
    the values. The likeliest tokens are written, and the end of text does not stop it: there
    are as many steps as asked for, or as the context has room for.

    Parameters
    ----------
    model : Model
    prompt : str or sequence of int
        Text or token ids.
    max_new_tokens : int, optional
        How many tokens are written, 1 or more; with a fault, 2 or more.
    fault : str, optional
        The name of a fault of the fault lab to put into the cached path. Both paths are fed the
        right text, and the wrong one is told.
    progress : function, optional
        Called as ``progress(done, total)`` after each pass.

    Returns
    -------
    Exploration

    Raises
    ------
    InputError
        If the prompt or an option is not usable, or the page would be too large to open.

    Examples
    --------
    >>> explore(load("tiny"), "Once upon a time", max_new_tokens=8).save("explore.html")
    """
    ids, config = model.encode(prompt), model.config
    count = min(whole(max_new_tokens, "max_new_tokens", 1), config.context - len(ids) + 1)
    size = page_size(config, len(ids), count)
    if size > LARGEST:
        raise InputError(
            f"the page would take {size / 1e6:,.0f} MB, and browsers are slow beyond "
            f"{LARGEST / 1e6:.0f}; ask for fewer new tokens, or give a shorter prompt"
        )

    if fault is None:
        bug, lab, row = None, None, 0
        prompt_passes = WHOLE.feed(ids)
        written = write(model, prompt_passes, count)
        passes = with_new_tokens(prompt_passes, written)
        found = lockstep(model, passes, progress=lambda done: progress(done, 2 * len(passes)))
    else:
        bug = find_fault(fault)
        lab = run_fault(
            model,
            fault,
            ids,
            max_new_tokens=max_new_tokens,
            progress=lambda done, of: progress(done, 2 * of),
        )
        found = lab.lockstep
        prompt_passes = bug.scenario.feed(ids)
        written = write(model, prompt_passes, len(lab.right_ids))
        passes = with_new_tokens(prompt_passes, written)
        lengths = np.sum([each.counts for each in prompt_passes], axis=0).tolist()
        row = lengths.index(len(lab.prompt_ids))

    runs = Runs(model, passes, len(prompt_passes), row, bug)
    seconds = runs.clock()
    record = Record(runs, found)
    breakdown = None
    try:
        for done in record.take():
            progress(len(passes) + done, 2 * len(passes))
    except Exception as error:  # what a fault breaks is its own to show
        if bug is None:
            raise
        breakdown = str(error) or type(error).__name__
    if not record.steps:
        raise InputError(f"with {fault} the first pass breaks down: {breakdown}; nothing to show")

    steps = record.steps
    for step in steps:
        step["seconds"] = {path: seconds[path][step["index"]] for path in PATHS}
    tokens = [*runs.ids, written[-1][row]][: steps[-1]["end"] + 1]
    facts = {
        "schema": 1,
        "model": model.name,
        "device": model.device.name,
        "dtype": model.dtype,
        "context": config.context,
        "windows": list(config.windows),
        "heads": config.n_heads,
        "head_dim": config.head_dim,
        "weight_bytes": costs.weight_bytes(config, model.weights.token_embedding.itemsize),
        "prompt_tokens": runs.prompt,
        "tokens": spelled(model, tokens),
        "steps": steps,
        "values": record.names,
        "values_compared": found.values,
        "rounding": ROUNDING[model.dtype],
        "largest_difference": number(found.largest_difference),
        "found": None if found.divergence is None else found.divergence.to_json(),
        "cell": record.first_cell,
        "breakdown": breakdown,
        "fault": None if lab is None else fault_facts(lab, len(prompt_passes)),
    }
    return Exploration(facts, record.arrays())


def page_size(config, prompt, count):
    """Return about how many bytes the page of so many steps takes."""
    tokens = prompt + count - 1
    cells = prompt * prompt + (count - 1) * (prompt + tokens + 1) // 2  # of scores, for one head
    kept = 4 * tokens * config.head_dim + 2 * cells  # numbers, for one head and path
    coded = len(NAMES) * count * (prompt + tokens) // 2
    heads = config.n_layers * config.n_heads
    return 100e3 + 4 / 3 * heads * (4 * kept + 1.3 * kept + coded)


def spelled(model, ids):
    """Return each token with its own text, and with what it adds to the text of all."""
    if model.tokenizer is None:
        return [{"id": token, "text": str(token), "piece": f" {token}"} for token in ids]
    stream = TextStream(model, [])
    pieces = [stream.push(token) for token in ids]
    pieces[-1] += stream.finish()
    return [
        {"id": token, "text": model.decode([token]), "piece": piece}
        for token, piece in zip(ids, pieces, strict=True)
    ]


def fault_facts(lab, prompt_passes):
    """Return what a fault is and does to the text, as plain values."""
    facts = lab.to_json()
    kept = ("fault", "what", "scenario", "needs", "reference", "first_wrong_token")
    wrong = lab.first_wrong
    return {name: facts[name] for name in kept} | {
        "wrong_step": None if wrong is None else prompt_passes - 1 + wrong,
        "right": spelled(lab.model, lab.right_ids),
        "wrong": spelled(lab.model, lab.wrong_ids) if lab.wrong_ids else [],
        "new_tokens_needed": lab.needed,
    }


class Runs:
    """The passes of one text on both paths, with a fault in the cached one or without.

    Attributes
    ----------
    row : int
        The row that is looked at, where a fault takes a batch to show.
    ids : list of int
        All tokens that are fed in this row.
    ends : list of int
        How many of them have been fed at the end of each pass.
    prompt : int
        How many of them are the prompt's.
    """

    def __init__(
        self, model: Model, passes: list[Pass], prompt: int, row: int, fault: Fault | None
    ):
        self.model, self.passes, self.row, self.fault = model, passes, row, fault
        self.ids = [t for each in passes for t in each.tokens[row, : each.counts[row]].tolist()]
        self.ends = list(accumulate(each.counts[row] for each in passes))
        self.prompt = self.ends[prompt - 1]  # from so many passes on, a step writes a token

    def on(self, path: str) -> Iterator[tuple[KVCache | Recompute, Callable]]:
        """Yield for each pass the cache, as it is before the pass, and a function that makes it."""
        fault, naive = self.fault, path == "naive"
        cache = Recompute() if naive else self._new_cache()
        functions = fault.functions if fault and not naive else {}
        for step, each in enumerate(self.passes):
            fed = self._so_far(step) if naive else each
            yield cache, partial(self._make, fed, cache, functions)

    def clock(self) -> dict[str, list[float]]:
        """Return the seconds of each pass on both paths; a path that breaks down ends early."""
        seconds: dict[str, list[float]] = {}
        for path in PATHS:
            seconds[path] = []
            with suppress(Exception):  # they will be met again when the passes are traced
                for _, (_, make) in zip(range(2), self.on(path), strict=False):
                    make()  # warm up: first passes allocate and wake threads
            with suppress(Exception):
                for _, make in self.on(path):
                    seconds[path].append(self.model.device.seconds(make))
        return seconds

    def _new_cache(self):
        config, most = self.model.config, int(np.sum([p.counts for p in self.passes], 0).max())
        kind = KVCache if self.fault is None else self.fault.cache
        capacity = min(most + OTHER_PROMPT, config.context)
        batch = len(self.passes[0].counts)
        cache = kind(config, batch, capacity, like=self.model.weights.token_embedding)
        if self.fault is not None:
            self.fault.scenario.prepare(self.model, cache)
        return cache

    def _so_far(self, step):
        parts = self.passes[: step + 1]
        return Pass.of(
            *(
                [t for each in parts for t in each.tokens[row, : each.counts[row]].tolist()]
                for row in range(len(parts[0].counts))
            )
        )

    def _make(self, fed, cache, functions, trace=silent):
        with replaced(**functions):
            return self.model.forward(fed.tokens, cache, counts=fed.counts, trace=trace)


class Record:
    """What is kept of the traced passes.

    A key and a value are kept once for each token and layer, as they were made. Of every pass it
    is kept where in these the content of each slot of the cache is found; where it is not, the
    content is kept too. The naive path's rows are kept as they are when it makes them first, and
    of every row that it makes again, how far it lies from that of the cached path.
    """

    def __init__(self, runs: Runs, found: Lockstep):
        self.runs, self.found = runs, found
        self.steps: list[dict] = []
        self.names: list[str] = []
        self.first_cell: dict | None = None
        config, tokens = runs.model.config, len(runs.ids)
        self.heads = config.n_layers, config.n_heads
        dim, dtype = config.head_dim, runs.model.dtype
        lowest = float(np.finfo(dtype).min)

        def rows(length, filled=0.0):
            return np.full((*self.heads, tokens, length), filled, dtype)

        # of the cached path [layers, heads, tokens, ...], in the order of the text
        self.queries, self.mixed = rows(dim), rows(dim)
        self.scores, self.pattern = rows(tokens, lowest), rows(tokens)
        self.made = np.zeros((tokens, *self.heads, 2 * dim), np.float32)  # keys, then values
        self.naive_made = np.zeros_like(self.made)
        self.naive_queries, self.naive_mixed = rows(dim), rows(dim)
        self.slots = np.full(tokens, -1)  # where the cached path has put each token
        self.places: dict[bytes, int] = {}
        self.others: list[bytes] = []  # what slots hold that no token's key and value are
        self.parts: dict[str, list[np.ndarray]] = {}  # flat pieces, one or more for each pass

    def take(self) -> Iterator[int]:
        """Make all passes, traced, and yield how many are made."""
        get, row = self.runs.model.device.get, self.runs.row
        start = 0
        for index, (ours, theirs) in enumerate(
            zip(self.runs.on("cached"), self.runs.on("naive"), strict=True)
        ):
            end = self.runs.ends[index]
            held = int(ours[0].lengths[row])
            traces = []
            for _, make in (ours, theirs):
                trace = Trace()
                make(trace=trace)
                traces.append({name: get(value)[row] for name, value in trace.items()})
            self._keep(index, start, end, held, *traces)
            yield index + 1
            start = end

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything as flat or shaped arrays, ready to be packed."""
        made = self.steps[-1]["end"]
        others = np.frombuffer(b"".join(self.others), np.float32)
        pool = np.concatenate([self.made[:made].ravel(), others])
        kept = {
            "cached.queries": self.queries[:, :, :made],
            "cached.mixed": self.mixed[:, :, :made],
            "naive.queries": self.naive_queries[:, :, :made],
            "naive.mixed": self.naive_mixed[:, :, :made],
        }
        arrays = {name: shown(array) for name, array in kept.items()}
        parts = {name: np.concatenate(pieces) for name, pieces in self.parts.items()}
        arrays |= parts | {"pool": pool, "naive.pool": self.naive_made[:made].ravel()}
        for name in ("queries", "mixed", "scores", "pattern", "pool"):
            theirs = arrays[f"naive.{name}"]
            base = pool[: theirs.size] if name == "pool" else arrays[f"cached.{name}"]
            if base.shape == theirs.shape:  # else a fault has changed the shapes
                arrays[f"naive.{name}"] = differences(theirs, base)
        # the content of slots counts on behind the tokens' own
        index = arrays["index"]
        beyond = index >= len(self.made) * self.heads[0]
        index = np.where(beyond, index - (len(self.made) - made) * self.heads[0], index)
        arrays["index"] = index.astype(np.uint16 if index.max(initial=0) < 2**16 else np.uint32)
        return arrays

    def _keep(self, index, start, end, held, ours, theirs):
        """Keep what is shown of one pass."""
        layers, count = self.heads[0], end - start
        self.slots[start:end] = held + np.arange(count)
        slots = ours["block0.keys"].shape[1]
        shares = {}
        for layer in range(layers):
            mine = self._of_layer(ours, layer)
            other = self._of_layer(theirs, layer)
            mine = {n: v if n in ("keys", "values") else v[:, :count] for n, v in mine.items()}
            other = {n: v[:, :end] for n, v in other.items()}
            other |= {n: other[n][:, :, :end] for n in ("scores", "pattern")}
            self._keep_cached(layer, start, end, mine, ours)
            self._keep_naive(layer, start, end, other)
            self._hold(index, layer, start, end, mine, other)
        for name in ours:
            shares[name] = self._share(name, start, end, ours[name], theirs.get(name))
        inside = [n.removeprefix("block0.") for n in ours if n.startswith("block0.")]
        self.names = [*inside, "final", "logits"]
        ladder = [[shares[f"block{layer}.{name}"] for name in inside] for layer in range(layers)]
        self._add("ladder", np.array(ladder, np.float32))
        self._add("ladder.end", np.array([shares["final"], shares["logits"]], np.float32))
        self.steps.append(self._facts(index, start, end, held, slots, ours, theirs))

    def _of_layer(self, values, layer):
        return {name: values[f"block{layer}.{name}"] for name in NAMES}

    def _keep_cached(self, layer, start, end, mine, ours):
        """Keep the rows that the cached path has made, and where its slots' content is found."""
        layers, _ = self.heads
        count, slots = end - start, mine["keys"].shape[1]
        self.queries[layer][:, start:end] = mine["queries"]
        self.mixed[layer][:, start:end] = mine["mixed"]
        for name in ("scores", "pattern"):
            self._add(f"cached.{name}", shown(mine[name]))
        new = [ours[f"block{layer}.new_{name}"][:, :count] for name in ("keys", "values")]
        both = np.concatenate(new, axis=-1).swapaxes(0, 1).astype(np.float32)
        for token, content in zip(range(start, end), both, strict=True):
            self.made[token, layer] = content
            self.places.setdefault(content.tobytes(), token * layers + layer)
        held = np.concatenate([mine["keys"], mine["values"]], axis=-1).swapaxes(0, 1)
        held = np.ascontiguousarray(held, np.float32)
        found = np.empty(slots, np.uint32)
        for slot, content in enumerate(held):
            key = content.tobytes()
            if key not in self.places:
                self.places[key] = len(self.made) * layers + len(self.others)
                self.others.append(key)
            found[slot] = self.places[key]
        self._add("index", found)

        known = self._known(slots, end)  # tokens that have a slot here, up to the newest
        for name in ("scores", "pattern"):
            aligned = getattr(self, name)[layer]
            for token in range(start, end):
                aligned[:, token, known] = mine[name][:, token - start, self.slots[known]]

    def _known(self, slots, end):
        tokens = np.arange(end)
        return tokens[(self.slots[:end] >= 0) & (self.slots[:end] < slots)]

    def _keep_naive(self, layer, start, end, other):
        """Keep the rows that the naive path makes for the first time."""
        self.naive_queries[layer][:, start:end] = other["queries"][:, start:]
        self.naive_mixed[layer][:, start:end] = other["mixed"][:, start:]
        for name in ("scores", "pattern"):
            self._add(f"naive.{name}", shown(other[name][:, start:]))
        new = np.concatenate([other["keys"], other["values"]], axis=-1)[:, start:]
        self.naive_made[start:end, layer] = new.swapaxes(0, 1)

    def _hold(self, index, layer, start, end, mine, other):
        """Keep how far every row of the naive path lies from that of the cached path."""
        slots = mine["keys"].shape[1]
        known = self._known(slots, end)
        apart, limits = [], []
        for name in NAMES:
            if name in ("keys", "values"):
                ours = np.full_like(other[name], np.nan)
                ours[:, known] = mine[name][:, self.slots[known]]
            else:
                ours = getattr(self, name)[layer][:, :end]
                ours = ours[:, :, :end] if name in ("scores", "pattern") else ours
            cells = cells_apart(ours, other[name])
            apart.append(cells.max(axis=-1))
            limits.append(self._allowed(name) * size_of(other[name]))
            found = self.found.divergence
            if found and (found.step, found.layer, found.value) == (index, layer, name):
                fresh = slice(0 if name in ("keys", "values") else start, end)
                beyond = np.argwhere(~(cells[:, fresh] <= limits[-1]))
                if len(beyond):
                    head, at, column = beyond[0].tolist()
                    self.first_cell = {"head": head, "row": at + fresh.start, "column": column}
        self._add("apart", coded(np.stack(apart, axis=1)))  # [heads, names, tokens]
        self._add("limits", coded(np.array(limits)))

    def _allowed(self, name):
        """Return what counts as rounding: as for lockstep, or twice what was judged to be it."""
        return max(ROUNDING[self.runs.model.dtype], 2 * self.found.largest.get(name, 0))

    def _share(self, name, start, end, ours, theirs):
        """Return how far a value differs, as lockstep says it: NaN where it cannot be said."""
        bare = name.rpartition(".")[2]
        if bare in ("keys", "values"):
            ours, theirs = ours[:, :end], theirs[:, :end]
        elif bare not in ("final", "logits"):
            ours, theirs = ours[..., : end - start, :], theirs[..., start:end, :]
        if bare in ("scores", "pattern"):
            theirs = theirs[..., :end]
            widened = np.full_like(theirs, np.finfo(theirs.dtype).min if bare == "scores" else 0)
            width = min(ours.shape[-1], end)
            widened[..., :width] = ours[..., :width]
            ours = widened
        share = distance([ours], [theirs])
        return np.nan if share is None else min(share, HIDDEN)

    def _facts(self, index, start, end, held, slots, ours, theirs):
        """Return what is said of a pass, as plain values."""
        runs, logits = self.runs, [ours["logits"][0], theirs["logits"][0]]
        config, itemsize = runs.model.config, runs.model.weights.token_embedding.itemsize
        passes = {"cached": ([end - start], [start]), "naive": ([end], None)}
        yields = end >= runs.prompt
        return {
            "index": index,
            "phase": "decode" if start >= runs.prompt else "prefill",
            "start": start,
            "end": end,
            "held": held,
            "slots": slots,
            "yields": yields,
            "cache_bytes": costs.cache_bytes(config, end, itemsize),
            "costs": {
                path: cost_facts(costs.pass_costs(config, *fed, itemsize=itemsize), config)
                for path, fed in passes.items()
            },
            "difference": number(float(np.abs(logits[0] - logits[1]).max())),
            "best": [int(np.argmax(each)) for each in logits],
            "candidates": candidates(runs.model, *logits) if yields else [],
        }

    def _add(self, name, piece):
        self.parts.setdefault(name, []).append(piece.ravel())


def cost_facts(operations, config):
    """Return what a pass costs, and each of its layers."""

    def plain(some):
        each = costs.total(some)
        return {"flops": each.flops, "bytes": each.bytes}

    layers = [[o for o in operations if o.layer == layer] for layer in range(config.n_layers)]
    return plain(operations) | {"layers": [plain(each) for each in layers]}


def candidates(model, cached, naive):
    """Return the likeliest next tokens of both paths, with their probabilities on each."""
    found = [log_probabilities(logits) for logits in (cached, naive)]
    best = [np.argsort(-each, kind="stable")[:MOST].tolist() for each in found]
    shown = dict.fromkeys([*best[0], *best[1][:1]])
    return [
        {
            "id": token,
            "text": str(token) if model.tokenizer is None else model.decode([token]),
            "cached": number(float(np.exp(found[0][token]))),
            "naive": number(float(np.exp(found[1][token]))),
        }
        for token in shown
    ]


def shown(array):
    """Return numbers as they are kept for the page: in float32, in which hidden scores may be -inf."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def cells_apart(ours, theirs):
    """Return how far each cell differs; a score that one path alone hides lies infinitely far."""
    apart = distances(ours, theirs)
    return np.where(apart > HIDDEN, np.inf, apart)


def coded(apart):
    """Return differences as one byte each: 0 for none, else the next step up of a fine scale.

    A code c stands for a difference of up to ``2 ** ((c - UNIT) / PER_DOUBLING)``, and `NO_NUMBER`
    for what is larger than the scale, or no number.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        code = np.clip(np.ceil(PER_DOUBLING * np.log2(apart)) + UNIT, 1, NO_NUMBER)
    code = np.where(apart == 0, 0, code)
    return np.where(np.isnan(apart), NO_NUMBER, code).astype(np.uint8)


class Differences(np.ndarray):
    """Bytes that say how float32 numbers differ from others, exactly."""


def differences(values, base):
    """Return float32 numbers as their distance from others, in few bytes where these are close.

    The bits are taken for whole numbers. Their difference, with the sign in its lowest bit, is
    written 7 bits at a time, the lowest first, in bytes of which all but the last are above 127.
    """
    bits = [np.ascontiguousarray(a, np.float32).ravel().view(np.int32) for a in (values, base)]
    apart = bits[0] - bits[1]  # modulo 2 ** 32
    unsigned = ((apart << 1) ^ (apart >> 31)).view(np.uint32)
    shifts = np.arange(0, 32, 7, dtype=np.uint32)
    groups = unsigned[:, None] >> shifts
    more = np.concatenate([groups[:, 1:] > 0, np.zeros((len(groups), 1), bool)], axis=1)
    needed = np.concatenate([np.ones((len(groups), 1), bool), groups[:, 1:] > 0], axis=1)
    return ((groups & 127) | more * 128).astype(np.uint8)[needed].view(Differences)


def packed(array):
    """Return an array as its kind and its bytes in base64, little-endian."""
    kind = "differences" if isinstance(array, Differences) else str(array.dtype)
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return {"kind": kind, "bytes": b64encode(little.tobytes()).decode("ascii")}
