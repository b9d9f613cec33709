"""`minineo generate`: text as it comes, and how fast it came."""

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..checkpoints import Model
from ..generation import Sampling, Step, TextStream, generate
from ..transformer import InputError
from .app import (
    DeviceOption,
    JsonOption,
    ModelOption,
    NoKernelsOption,
    Screen,
    app,
    check_writable,
    load_with,
    real_path,
    write_json,
)
from .text import computed_by, milliseconds, printable


@app.command(
    "generate", epilog='Example: minineo generate "Once upon a time" --temperature 0.8 --seed 3'
)
def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to write on from.")] = None,
    from_file: Annotated[
        str | None, typer.Option(help="A file that holds the prompt; - is the standard input.")
    ] = None,
    model: ModelOption = "tiny",
    new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text; may be given several times."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the best token; above, tokens are drawn.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the so many best tokens; 0 is all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the best tokens that add up to so much.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another one draws another text.")] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that were there become less likely.")
    ] = 1.0,
    path: Annotated[
        Literal["cached", "naive"], typer.Option(help="Keep keys and values, or make all anew.")
    ] = "cached",
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Feed the prompt so many tokens at a time, not all at once.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["float32", "float64", "float16"],
        typer.Option(help="The numbers it computes with; float16 needs a GPU."),
    ] = "float32",
    no_kernels: NoKernelsOption = False,
    json_file: JsonOption = None,
):
    """Write on from a prompt; say why it stopped, how fast it was and what the cache took.

    Prompt and new text go to the standard output, figures to the standard error.

    The prefill is timed cold: no pass runs before it.
    """
    check_writable(json_file)
    text = read_prompt(prompt, from_file, json_file)
    choose = sampling(temperature, repetition_penalty, top_k=top_k, top_p=top_p, seed=seed)
    loaded = load_with(model, device, dtype, no_kernels)
    ids, stops = loaded.encode(text), stop or []
    steps = generate(
        loaded,
        ids,
        path=path,
        max_new_tokens=new_tokens,
        stop=stops,
        choose=choose,
        prefill_chunk=prefill_chunk,
    )
    records = stream(text, steps, Screen(quiet=json_file == "-"))
    results = {
        "schema": 1,
        "model": loaded.name,
        "device": loaded.device.name,
        "kernels": bool(loaded.device.kernels),
        "dtype": loaded.dtype,
        "path": path,
        "prefill_chunk": prefill_chunk,
        "sampling": asdict(choose),
        **account(loaded, text, ids, stops, records),
    }
    if json_file != "-":
        print_figures(loaded, results, Screen(stderr=True, highlight=False))
    if json_file is not None:
        write_json(results, json_file)
    return 0


def read_prompt(prompt, from_file, json_file):
    """Return the prompt, exactly as it stands in the argument or the file."""
    if prompt is not None and from_file is not None:
        raise InputError("there is a prompt and --from-file; give one of them")
    if from_file is None:
        if prompt is None:
            raise InputError('give a prompt: minineo generate "Once upon a time", or --from-file')
        return prompt
    if from_file == "-":
        name, content = "the standard input", sys.stdin.buffer.read() if sys.stdin else b""
    elif json_file and real_path(from_file) == real_path(json_file):
        raise InputError(f"--json would write over the prompt in {from_file}; give another file")
    else:
        name, content = from_file, read_file(from_file)
    if not content:
        raise InputError(f"{name} is empty; give at least one character")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None


def read_file(file):
    """Return the bytes of a file or a pipe."""
    try:
        return Path(os.path.expanduser(file)).read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}; name a text file, or - for the standard input"
        ) from None


def sampling(temperature, repetition_penalty, **drawing):
    """Return how a token is chosen, and refuse options for drawing where none is drawn."""
    given = {name: value for name, value in drawing.items() if value is not None}
    choose = Sampling(temperature=temperature, repetition_penalty=repetition_penalty, **given)
    if temperature == 0 and given:
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InputError(
            f"temperature 0 always takes the best token, so {options} would do nothing; "
            "leave that out, or add --temperature 0.8"
        )
    return choose


def stream(prompt, steps: Iterable[Step], console: Console) -> list[dict]:
    """Print the prompt, and what each step adds to it as it comes; return what is kept of them."""
    records = []
    try:
        show(prompt, console, Style(dim=True))
        for step in steps:
            show(step.text, console)
            records.append(record(step))
    finally:
        show("\n", console)
    return records


def show(text, console: Console, style: Style | None = None):
    """Print a piece of text at once: whole, unwrapped, and unable to steer a terminal."""
    piece = printable(text) if console.is_terminal else text
    console.print(Segments([Segment(piece, style)]), soft_wrap=True)


def record(step: Step) -> dict:
    """Return what is kept of a step: its logits would fill the memory in a long text."""
    return {
        "index": step.index,
        "phase": step.phase,
        "token": step.token,
        "text": step.text,
        "logprob": step.logprob,
        "tokens_fed": step.fed,
        "keys_attended": step.length,
        "seconds": step.seconds,
        "cache_bytes": step.cache_bytes,
        "finish": step.finish,
    }


def account(model: Model, prompt, prompt_ids, stops, records: list[dict]) -> dict:
    """Return what was written, why it stopped, every step, and the times."""
    new_ids = [step["token"] for step in records]
    finish = records[-1]["finish"] if records else "length"
    return {
        "prompt": prompt,
        "text": "".join(step["text"] for step in records),
        "prompt_tokens": len(prompt_ids),
        "new_tokens": len(new_ids),
        "prompt_ids": prompt_ids,
        "new_ids": new_ids,
        "finish": finish,
        "stop": stop_string(model, prompt_ids, new_ids, stops) if finish == "stop" else None,
        "steps": records,
        "summary": summary(records),
    }


def stop_string(model: Model, prompt_ids, new_ids, stops) -> str | None:
    """Return which stop string ended the text: spell the tokens once more."""
    stream = TextStream(model, prompt_ids, stops)
    for token in new_ids:
        stream.push(token)
    stream.finish()
    return stream.stopped


def summary(records: list[dict]) -> dict:
    """Return times and speeds; None where nothing was timed."""
    seconds = [step["seconds"] for step in records]
    prefill = seconds[0] if records else None
    decode = median(seconds[1:]) if len(records) > 1 else None
    return {
        "ttft_seconds": prefill,
        "prefill_tokens_per_second": records[0]["tokens_fed"] / prefill if prefill else None,
        "decode_seconds_per_token": decode,
        "decode_tokens_per_second": 1 / decode if decode else None,
        "total_seconds": sum(seconds),
        "cache_bytes": records[-1]["cache_bytes"] if records else 0,
    }


def print_figures(model: Model, results: dict, console: Console):
    """Print on what it ran, why it stopped, how fast it was and what the cache took."""
    path = f" on the {results['path']} path; {computed_by(model)}"
    console.print()
    console.print(Text.assemble((model.name, "bold"), path))
    if model.device.why:
        console.print(Text(model.device.why, style="dim"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, figures in (
        ("stopped", why_stopped(model, results)),
        ("prompt", prefill_figures(results)),
        ("new", decode_figures(results)),
        ("cache", cache_figures(results)),
    ):
        table.add_row(label, Text(figures))
    console.print(table)


def why_stopped(model: Model, results: dict) -> str:
    """Return the reason in words."""
    return {
        "end": "the end-of-text token",
        "stop": f"the stop string {results['stop']!r}",
        "length": f"{counted(results['new_tokens'], 'token')}, as asked for",
        "context": f"the context of {model.config.context} tokens is full",
    }[results["finish"]]


def prefill_figures(results: dict) -> str:
    """Return the prompt's length and how fast it was fed."""
    prompt, seconds = results["prompt_tokens"], results["summary"]["ttft_seconds"]
    if seconds is None:
        return f"{counted(prompt, 'token')}, not fed"
    passes = -(-prompt // (results["prefill_chunk"] or prompt))
    return (
        f"{counted(prompt, 'token')}, "
        f"prefill at {speed(results['summary']['prefill_tokens_per_second'])} "
        f"({milliseconds(seconds)} ms, {counted(passes, 'pass', 'passes')})"
    )


def decode_figures(results: dict) -> str:
    """Return the number of new tokens and how fast those after the first came."""
    new = results["new_tokens"]
    if new == 1:
        return "1 token, that of the prefill: no decode step to time"
    if new == 0:
        return "0 tokens"
    return (
        f"{counted(new, 'token')}, decode at {speed(results['summary']['decode_tokens_per_second'])} "
        f"(median of {counted(new - 1, 'step')})"
    )


def cache_figures(results: dict) -> str:
    """Return what the cache holds at the end."""
    if results["path"] == "naive":
        return "none: the naive path keeps nothing"
    if not results["steps"]:
        return "empty"
    kibibytes = results["summary"]["cache_bytes"] / 1024
    return f"{kibibytes:,.0f} KiB for {counted(results['steps'][-1]['keys_attended'], 'token')}"


def counted(count, one, many=None):
    """Return a number of things in words."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def speed(rate):
    """Return tokens per second, with three digits at least."""
    if rate is None:
        return "a speed too high to time"
    return f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"
