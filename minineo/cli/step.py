"""`minineo step`: walk through attention pass by pass, both paths side by side."""

import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Annotated

import numpy as np
import typer
from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text

from ..checkpoints import load
from ..study.flow import Flow, FlowStep, PathFlow, flow, one_of
from ..study.lockstep import ROUNDING
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PlotOption,
    Screen,
    app,
    check_outputs,
    write_json,
    write_picture,
)
from .compare import PROMPT
from .generate import counted
from .text import computed_by, token_text

LABEL, SIDE = 8, 35  # columns: the name of a value, a path
NUMBERS, ROWS, KEYS, STRIP, MOST, BAR = 3, 2, 4, 28, 5, 16  # how many of these are shown
HEAT, HIDDEN = "▁▂▃▄▅▆▇█", "·"
ASCII = str.maketrans(f"{HEAT}{HIDDEN}×ᵀ…─", "_.:-=+#@xx'~-")
STYLES = {"cache": "cyan", "again": "yellow", "new": "bold green", "hidden": "dim"}
HELP = "Enter or n next, b back, j N jump to step N, l N layer, h N head, q quit"


@app.command("step", epilog='Example: minineo step "Once upon a time" --layer 1 --head 2')
def step_command(
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")] = PROMPT,
    layer: Annotated[int, typer.Option(help="The layer to look into, from 0.")] = 0,
    head: Annotated[int, typer.Option(help="The head of it to look at, from 0.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Number of tokens, 1 or more: a step each.")] = 6,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Feed the prompt so many tokens at a time, not all at once.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Begin at this step; without a terminal, show it alone.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print the steps one after the other, uncoloured.")
    ] = False,
    model: ModelOption = "tiny",
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
):
    """Walk through (Q × Kᵀ) × V of one layer and head, step by step, on both paths.

    A step is a pass. What is found in the cache, new, or made again is told apart.

    On a terminal it waits at each step; elsewhere, or with --plain, it prints all.

    The picture is that of --step, or of the last one.
    """
    check_outputs(json_file, plot_file)
    loaded = load(model, device=device)
    walk = flow(
        loaded,
        prompt,
        layer=layer,
        head=head,
        max_new_tokens=new_tokens,
        prefill_chunk=prefill_chunk,
    )
    if step is not None:
        step = one_of(len(walk), step, "step")
    shown: Iterable[FlowStep] = walk if step is None else [walk[step]]
    if json_file is not None:
        write_json(walk.to_json(shown), json_file)
    if plot_file is not None:
        from ..study.figures import plot_flow

        write_picture(plot_flow(walk[len(walk) - 1 if step is None else step]), plot_file)
    if json_file == "-":
        return 0
    console = Screen(highlight=False, color_system=None if plain else "auto")
    print_legend(walk, console)
    if not plain and has_terminal():
        walk_through(walk, step or 0, console)
    else:
        for each in shown:
            show(each, console)
    return 0


def print_legend(walk: Flow, console: Console):
    """Print what there is to look at, and what the marks mean."""
    model, config = walk.model, walk.model.config
    there = (
        f": steps 0 to {len(walk) - 1}, layers 0 to {config.n_layers - 1}, "
        f"heads 0 to {config.n_heads - 1}; {computed_by(model)}"
    )
    print_lines([Text.assemble((model.name, "bold"), there)], console)
    if model.device.why:
        console.print(Text(model.device.why, style="dim"))
    marks = (
        f"{HEAT} is low to high, {HIDDEN} hidden from the query; c is from the cache, a made again, "
        f"n new. Of a vector the first {min(NUMBERS, config.head_dim)} of {config.head_dim} numbers "
        "are shown."
    )
    print_lines([*Text(marks).wrap(console, 80), Text()], console)


def has_terminal() -> bool:
    """Return whether somebody is there to be waited for."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def walk_through(walk: Flow, index: int, console: Console):
    """Show a step, then do what the lines that are typed ask for, until they end."""
    show(walk[index], console)
    console.print(Text(HELP, style="dim"))
    while True:
        try:
            line = console.input(f"step {index} > ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        try:
            match line.lower().split():
                case ["q" | "quit"]:
                    return
                case [] | ["n" | "next"]:
                    index = one_of(len(walk), index + 1, "step")
                case ["b" | "back"]:
                    index = one_of(len(walk), index - 1, "step")
                case ["j" | "jump", number]:
                    index = one_of(len(walk), whole_number(number), "step")
                case ["l" | "layer", number]:
                    walk = walk.at(layer=whole_number(number))
                case ["h" | "head", number]:
                    walk = walk.at(head=whole_number(number))
                case _:
                    raise InputError(HELP)
        except InputError as error:
            console.print(Text(str(error)))
        else:
            show(walk[index], console)


def whole_number(text):
    """Return a text as a whole number where it is one, and as it is where not."""
    try:
        return int(text)
    except ValueError:
        return text


def show(step: FlowStep, console: Console):
    """Print a step."""
    print_lines(screen(step), console)


def print_lines(lines: Iterable[Text], console: Console):
    """Print lines as they are, in characters that the output can hold."""
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    try:
        f"{HEAT}{HIDDEN}ᵀ…─".encode(encoding)
        table = {}
    except UnicodeEncodeError:
        table = ASCII
    for line in lines:
        line.plain = line.plain.rstrip().translate(table)
        console.print(line, soft_wrap=True)


def screen(step: FlowStep) -> Iterator[Text]:
    """Yield the lines of a step, none wider than 80 columns."""
    yield heading(step)
    slots = newest(step, STRIP)
    start = f"\nslots\n{slots.start} on" if slots.start else ""
    for label, cells in (
        ("", lambda path: [Text("CACHED" if path is step.cached else "NAIVE", "bold")]),
        ("fed", lambda path: [fed(step, path)]),
        ("Q", lambda path: vectors(step, path, path.queries, queries=True)),
        ("Kᵀ", lambda path: key_columns(step, path)),
        (f"scores{start}", lambda path: strips(step, path, "scores")),
        ("mask", lambda path: [mask(path)]),
        ("pattern", lambda path: strips(step, path, "pattern")),
        ("V", lambda path: vectors(step, path, path.values, queries=False)),
        ("mixed", lambda path: vectors(step, path, path.mixed, queries=True)),
    ):
        yield from beside(label, cells(step.cached), cells(step.naive))
    yield Text()
    yield from newest_query(step)
    yield Text()
    for sentence in sense(step):
        yield from Text(sentence).wrap(Console(), 80)


def heading(step: FlowStep) -> Text:
    """Return which pass this is, and what of it is shown."""
    kind = f"local, window {step.window}" if step.kind == "local" else "global"
    line = Text.assemble(
        ("── ", "dim"),
        (f"Step {step.index}, {step.phase}", "bold"),
        f": layer {step.layer} ({kind}), head {step.head} ",
    )
    return line.append("─" * (80 - line.cell_len), "dim")


def beside(label: str, left: list[Text], right: list[Text]) -> Iterator[Text]:
    """Yield lines of a label, what belongs to the cached path, and what to the naive one."""
    for word, mine, other in zip_longest(label.split("\n"), left, right, fillvalue=Text()):
        line = Text.assemble((f"{word!s:<{LABEL}}", "bold"), mine)
        line.truncate(LABEL + SIDE, pad=True)
        line.append("  ").append_text(other)
        line.truncate(80)
        line.rstrip()
        yield line


def origin(step: FlowStep, path: PathFlow, slot: int) -> str:
    """Return where the query, key and value of a slot come from, in a word."""
    if slot < path.held:
        return "cache"
    return "again" if slot < step.cached.held else "new"


def marked(word: str, text: str | None = None) -> Text:
    """Return a text, or the word itself, in the style of what the word says."""
    return Text(word if text is None else text, STYLES[word])


def fed(step: FlowStep, path: PathFlow) -> Text:
    """Return the tokens that a path was fed."""
    tokens = [token_text(step.model, token) for token in step.ids[path.held :]]
    listed = Text(" ").join(tokens if len(tokens) < 3 else [tokens[0], Text("…"), tokens[-1]])
    return Text.assemble(f"{counted(path.made, 'token')}: ", listed)


def shape(step: FlowStep, path: PathFlow, array: np.ndarray, *, kept: bool) -> Text:
    """Return the shape of a value, and how much of it was there before: only `kept` values are."""
    words = " × ".join(map(str, array.shape))
    if kept and path.held:
        return marked("cache", f"{words}: {path.held} from the cache")
    if path is step.naive and step.cached.held:
        return marked("again", f"{words}: {step.cached.held} made again")
    return marked("new", f"{words}: all new")


def vectors(step: FlowStep, path: PathFlow, array: np.ndarray, *, queries: bool) -> list[Text]:
    """Return the shape of queries, values or mixed rows, and the first numbers of the newest."""
    first = path.held if queries else 0  # the position of the first row
    lines = [shape(step, path, array, kept=not queries)]
    for position in newest(step, ROWS):
        if position < first:
            lines.append(Text())  # so that rows of both paths stand side by side
            continue
        word = origin(step, path, position)
        numbers = "".join(map(short, array[position - first][:NUMBERS]))
        more = " …" if array.shape[1] > NUMBERS else ""
        lines.append(Text.assemble(f"{position:>4} ", marked(word, f"{word:<5}"), numbers, more))
    return lines


def key_columns(step: FlowStep, path: PathFlow) -> list[Text]:
    """Return the shape of the keys, and the first numbers of the newest: a column for each."""
    slots = newest(step, KEYS)
    words = [origin(step, path, slot) for slot in slots]
    return [
        shape(step, path, path.keys.T, kept=True),
        Text("slot  " + "".join(f"{slot:>7}" for slot in slots)),
        Text.assemble("from  ", *(marked(word, f"{word:>7}") for word in words)),
        *(
            Text(f"dim {row} " + "".join(short(path.keys[slot, row]) for slot in slots))
            for row in range(min(NUMBERS, path.keys.shape[1]))
        ),
    ]


def strips(step: FlowStep, path: PathFlow, name: str) -> list[Text]:
    """Return scores or pattern of the newest queries over the newest slots, a strip for each."""
    slots, rows = newest(step, STRIP), newest(step, ROWS)
    matrix, hidden = getattr(step.naive, name), step.naive.hidden
    seen = matrix[rows.start :, slots.start :][~hidden[rows.start :, slots.start :]]
    low, high = (seen.min(), seen.max()) if name == "scores" else (0.0, seen.max())
    scale = f"{HEAT[0]} {low:.2g} to {HEAT[-1]} {high:.2g}"
    lines = [Text(f"{path.made} × {len(path.keys)}, {scale}")]
    if name == "scores":
        words = [origin(step, path, slot) for slot in slots]
        lines.append(Text.assemble("from  ", *(marked(word, word[0]) for word in words)))
    for position in rows:
        row = position - path.held
        if row < 0:
            lines.append(Text())
            continue
        unseen = path.hidden[row, slots.start :]
        heights = np.where(unseen, low, getattr(path, name)[row, slots.start :]) - low
        levels = np.minimum(heights / ((high - low) or 1) * len(HEAT), len(HEAT) - 1).astype(int)
        cells = np.where(unseen, HIDDEN, np.array(list(HEAT))[levels])
        lines.append(Text(f"{position:>4}  {''.join(cells)}"))
    return lines


def mask(path: PathFlow) -> Text:
    """Return how many queries may not look at how many slots."""
    return Text(f"{path.hidden.sum():,} of {path.hidden.size:,} cells hidden")


def newest_query(step: FlowStep) -> Iterator[Text]:
    """Yield a table of what the newest query looks at most, and of what is left out of it."""
    cached, naive = step.cached, step.naive
    shares, hidden, last = cached.pattern[-1], cached.hidden[-1], len(step.ids) - 1
    visible = np.flatnonzero(~hidden)
    most = visible[np.argsort(-shares[visible], kind="stable")][:MOST]
    unseen = np.flatnonzero(hidden)[-1:]  # one slot that is hidden stands for all
    shown = sorted({*most.tolist(), *unseen.tolist(), last})

    token = token_text(step.model, step.ids[-1])
    yield Text.assemble("The newest query, ", (token.plain, "bold"), f" at position {last}:")
    yield Text(
        f"{'slot token':<16}{'cached':<7}{'score':>7}{'share':>7}{'':{BAR + 4}}"
        f"{'naive':<6}{'score':>7}{'share':>7}",
        "bold",
    )
    for slot in shown:
        token = set_cell_size(token_text(step.model, step.ids[slot]).plain, 10)
        line = Text(f"{slot:>4} {token} ")
        for path in (cached, naive):
            word = origin(step, path, slot)
            line.append_text(marked(word, f"{word:<6} "))
            if hidden[slot]:
                line.append_text(marked("hidden", f"{'hidden':>7}{'':7}"))
            else:
                line.append(f"{short(path.scores[-1, slot])}{path.pattern[-1, slot]:7.3f}")
            if path is cached:
                bar = "█" * round(BAR * float(shares[slot] / shares.max()))
                line.append(f"  {bar:<{BAR}}  ")
        line.rstrip()
        yield line
    rest = [slot for slot in visible.tolist() if slot not in shown]
    left_out = []
    if rest:
        left_out.append(f"{counted(len(rest), 'other slot')} share {shares[rest].sum():.3f}")
    if len(unseen):
        count = int(hidden.sum())
        left_out.append(f"{counted(count, 'slot')} before the window of {step.window} hidden")
    if left_out:
        yield Text(f"Left out: {'; '.join(left_out)}.", "dim")


def sense(step: FlowStep) -> Iterator[str]:
    """Yield what happened, whether both paths say the same, and what comes next."""
    made, held, total = step.cached.made, step.cached.held, len(step.ids)
    if held:
        yield (
            f"The cached path made the key and value of {counted(made, 'token')} and found those of "
            f"{held} in its cache; the naive path was fed all {total} and made those of {held} again."
        )
    else:
        yield (
            f"Nothing is in the cache yet: both paths were fed {counted(total, 'token')} and did "
            "the same work."
        )
    apart = step.differences["mixed"]
    size = max(1.0, float(np.abs(step.naive.mixed[-made:]).max()))
    if apart == 0:
        yield "The mixed rows are the same to the last bit."
    elif apart <= size * ROUNDING[step.model.dtype]:
        yield f"The mixed rows are the same but for {apart:.0e}, which is rounding."
    else:
        yield (
            f"The mixed rows differ by {apart:.0e}, which is no rounding: minineo compare finds "
            "where it begins."
        )
    if step.candidates:
        tokens = ", ".join(
            f"{token_text(step.model, token)} {probability:.2f}"
            for token, _, probability in step.candidates[:4]
        )
        yield f"Next token: {tokens}."
    else:
        yield "No next token yet: more of the prompt is to come."


def newest(step: FlowStep, count: int) -> range:
    """Return the newest positions, so many at most."""
    return range(max(0, len(step.ids) - count), len(step.ids))


def short(number) -> str:
    """Return a number in 7 columns."""
    return f"{number:7.2f}" if abs(number) < 1000 else f"{number:7.0e}"
