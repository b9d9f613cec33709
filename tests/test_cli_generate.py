"""`minineo generate`: what it prints where, why it stops, and what it refuses."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from statistics import median

import pytest
from small import random_model
from test_cli import STORY, call

import minineo
from minineo import cli, load
from minineo.generation import Sampling

command = cli.generate


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(autouse=True)
def loaded_once(tiny, monkeypatch):
    """Every command of this file has the same model, and no terminal."""
    monkeypatch.setattr(cli.app, "load", lambda name, **options: tiny)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def numbers(capsys, *arguments):
    """What the command writes as JSON, to the standard output alone."""
    status, out, err = call(capsys, "generate", *arguments, "--json", "-")
    assert (status, err) == (0, "")
    return json.loads(out)


def figures(err):
    """The labelled lines of what goes to the standard error."""
    return {line.split()[0]: " ".join(line.split()[1:]) for line in err.splitlines() if line}


def let_it_write(monkeypatch, tiny, text):
    """Let the tokens of a text be chosen, one after the other."""
    tokens = iter(tiny.encode(text))

    class Given(Sampling):
        def __call__(self, logits, ids):
            return next(tokens)

    monkeypatch.setattr(command, "Sampling", Given)


def watch(monkeypatch, capsys, after=None):
    """Return a list of what each step prints; raise something after the third if asked to."""
    seen = []

    def watched(*arguments, **options):
        for step in minineo.generate(*arguments, **options):
            yield step
            seen.append(capsys.readouterr().out)
            if after is not None and len(seen) == 3:
                raise after

    monkeypatch.setattr(command, "generate", watched)
    return seen


# Text and figures


def test_text_goes_to_the_output_and_figures_to_the_error(capsys, tiny):
    status, out, err = call(capsys, "generate", STORY, "--new-tokens", "9")
    new = [step.token for step in minineo.generate(tiny, STORY, max_new_tokens=9)]
    assert status == 0
    assert out == tiny.decode(tiny.encode(STORY) + new) + "\n"
    assert err.startswith("\ntiny on the cached path; cpu, float32\n")
    lines = figures(err)
    assert lines["stopped"] == "9 tokens, as asked for"
    assert lines["prompt"].startswith("4 tokens, prefill at ")
    assert lines["prompt"].endswith(" ms, 1 pass)")
    assert lines["new"].startswith("9 tokens, decode at ")
    assert lines["new"].endswith(" tokens/s (median of 8 steps)")
    assert lines["cache"] == "72 KiB for 12 tokens", "the last token is never fed"
    assert max(map(len, err.splitlines())) <= 80


def test_each_piece_is_there_when_its_token_is(capsys, monkeypatch):
    seen = watch(monkeypatch, capsys)
    _, out, _ = call(capsys, "generate", STORY, "--new-tokens", "4")
    assert seen == ["Once upon a time,", " there", " was", " a"]
    assert out == "\n"


def test_characters_spread_over_tokens_come_whole(capsys, monkeypatch, tiny):
    text = " 😀 é ☃!"
    let_it_write(monkeypatch, tiny, text)
    seen = watch(monkeypatch, capsys)
    call(capsys, "generate", "Hi", "--new-tokens", str(len(tiny.encode(text))))
    assert "😀" in seen
    assert "".join(seen) == "Hi" + text


def test_a_text_is_neither_wrapped_nor_marked_up(capsys, tiny, monkeypatch):
    text = " [bold]:smile:[/bold]\t" + "a" * 100 + " \x0b"
    let_it_write(monkeypatch, tiny, text)
    prompt = "[red]" + "b" * 100 + "\r\n"
    _, out, _ = call(capsys, "generate", prompt, "--new-tokens", str(len(tiny.encode(text))))
    assert out == f"{prompt}{text}\n"


def test_on_a_terminal_the_prompt_is_dim_and_nothing_can_steer(capsys, monkeypatch, tiny):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    let_it_write(monkeypatch, tiny, "\x1b[31m!")
    count = len(tiny.encode("\x1b[31m!"))
    _, out, _ = call(capsys, "generate", "a\x1b]0;b\r", "--new-tokens", str(count))
    assert out == "\x1b[2ma\ufffd]0;b\ufffd\x1b[0m\ufffd[31m!\n"


def test_colours_can_be_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    _, out, err = call(capsys, "generate", STORY, "--new-tokens", "2")
    assert "\x1b" not in out + err


def test_the_device_is_explained_where_it_was_chosen(capsys, monkeypatch, tiny):
    device = replace(tiny.device, why="no CUDA GPU in use: none here")
    monkeypatch.setattr(cli.app, "load", lambda name, **options: replace(tiny, device=device))
    _, _, err = call(capsys, "generate", STORY, "--new-tokens", "1")
    assert "\nno CUDA GPU in use: none here\n" in err


def test_device_and_dtype_reach_the_loader(capsys, monkeypatch, tiny):
    asked = {}
    monkeypatch.setattr(cli.app, "load", lambda name, **others: asked.update(others) or tiny)
    numbers(capsys, "x", "--device", "cuda", "--dtype", "float64", "--new-tokens", "0")
    assert asked == {"device": "cuda", "dtype": "float64", "use_kernels": True}
    call(capsys, "generate", "x", "--no-kernels", "--new-tokens", "0")
    assert asked == {"device": "auto", "dtype": "float32", "use_kernels": False}


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_without_a_gpu_there_are_no_kernels_to_leave_out(capsys, command):
    code, _, err = call(
        capsys, command, "Tom", "--no-kernels", "--new-tokens", "1", "--device", "cpu"
    )
    assert code == 0
    assert "minineo: --no-kernels changes nothing on cpu: it has none\n" in err


# Why it stops


def test_it_stops_at_the_end_of_text(capsys, monkeypatch, tiny):
    let_it_write(monkeypatch, tiny, " Bye.<|endoftext|>")
    status, out, err = call(capsys, "generate", STORY)
    assert (status, out) == (0, f"{STORY} Bye.\n")
    assert figures(err)["stopped"] == "the end-of-text token"


def test_it_stops_at_the_first_stop_string_and_names_it(capsys):
    arguments = ["generate", STORY, "--stop", "mom", "--stop", " girl\x1b", "--stop", "le g"]
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (0, f"{STORY}, there was a litt\n")
    assert figures(err)["stopped"] == "the stop string 'le g'"
    data = numbers(capsys, *arguments[1:])
    assert (data["finish"], data["stop"], data["text"]) == ("stop", "le g", ", there was a litt")


def test_a_stop_string_is_shown_on_one_line_and_cannot_steer(capsys, monkeypatch, tiny):
    let_it_write(monkeypatch, tiny, "a\n[b]\x1b[31m")
    _, _, err = call(capsys, "generate", STORY, "--stop", "\n[b]\x1b[31m")
    assert figures(err)["stopped"] == r"the stop string '\n[b]\x1b[31m'"


def test_the_end_of_text_is_no_stop_string(capsys, monkeypatch, tiny):
    let_it_write(monkeypatch, tiny, " Bye.<|endoftext|>")
    data = numbers(capsys, STORY, "--stop", "<|end")
    assert (data["finish"], data["stop"], data["text"]) == ("end", None, " Bye.")


def test_it_stops_where_the_context_is_full(capsys, tiny):
    prompt = "a" + " a" * 508
    assert len(tiny.encode(prompt)) == 509
    _, _, err = call(capsys, "generate", prompt, "--repetition-penalty", "2")
    assert figures(err)["stopped"] == "the context of 512 tokens is full"
    assert figures(err)["cache"] == "3,072 KiB for 512 tokens"


def test_a_prompt_as_long_as_the_context_yields_the_token_of_the_last_position(capsys, tiny):
    data = numbers(capsys, "a" + " a" * 511)
    assert (data["prompt_tokens"], data["new_tokens"], data["finish"]) == (512, 1, "context")
    status, out, err = call(capsys, "generate", "a" + " a" * 512)
    assert (status, out) == (2, "")
    assert err == "minineo: the prompt has 513 tokens; this model reads 512 at most\n"


# Few steps, both paths, chunks


def test_no_new_token_is_no_step_and_no_speed(capsys):
    status, out, err = call(capsys, "generate", STORY, "--new-tokens", "0")
    assert (status, out) == (0, f"{STORY}\n")
    lines = figures(err)
    del lines["tiny"]
    assert lines == {
        "stopped": "0 tokens, as asked for",
        "prompt": "4 tokens, not fed",
        "new": "0 tokens",
        "cache": "empty",
    }
    data = numbers(capsys, STORY, "--new-tokens", "0")
    assert (data["steps"], data["text"], data["finish"]) == ([], "", "length")
    assert data["summary"] == {
        "ttft_seconds": None,
        "prefill_tokens_per_second": None,
        "decode_seconds_per_token": None,
        "decode_tokens_per_second": None,
        "total_seconds": 0,
        "cache_bytes": 0,
    }


def test_a_single_new_token_has_a_prefill_and_no_decode_speed(capsys):
    _, _, err = call(capsys, "generate", STORY, "--new-tokens", "1")
    assert figures(err)["stopped"] == "1 token, as asked for"
    assert figures(err)["new"] == "1 token, that of the prefill: no decode step to time"
    summary = numbers(capsys, STORY, "--new-tokens", "1")["summary"]
    assert summary["ttft_seconds"] > 0
    assert summary["decode_tokens_per_second"] is None


def test_a_clock_that_stands_still_is_no_division_by_zero(capsys, monkeypatch):
    def timeless(*arguments, **options):
        return (replace(step, seconds=0.0) for step in minineo.generate(*arguments, **options))

    monkeypatch.setattr(command, "generate", timeless)
    status, _, err = call(capsys, "generate", STORY, "--new-tokens", "3")
    assert status == 0
    assert "prefill at a speed too high to time" in err
    assert "decode at a speed too high to time" in err


def test_speeds_keep_prompt_and_new_tokens_apart():
    seconds = [2.0, 0.1, 0.3, 0.4]
    steps = [
        {"seconds": s, "tokens_fed": 1, "cache_bytes": 7 * (9 + i)} for i, s in enumerate(seconds)
    ]
    steps[0]["tokens_fed"] = 9
    assert command.summary(steps) == {
        "ttft_seconds": 2.0,
        "prefill_tokens_per_second": 4.5,
        "decode_seconds_per_token": 0.3,
        "decode_tokens_per_second": 1 / 0.3,
        "total_seconds": pytest.approx(2.8),
        "cache_bytes": 84,
    }


@pytest.mark.parametrize(
    ("rate", "text"), [(12345.6, "12,346"), (100, "100"), (56.71, "56.7"), (0.0432, "0.0432")]
)
def test_slow_models_have_a_speed_too(rate, text):
    assert command.speed(rate) == f"{text} tokens/s"


def test_both_paths_write_the_same_and_the_naive_one_keeps_nothing(capsys):
    cached = numbers(capsys, STORY, "--new-tokens", "8")
    naive = numbers(capsys, STORY, "--new-tokens", "8", "--path", "naive")
    assert naive["new_ids"] == cached["new_ids"]
    assert [step["tokens_fed"] for step in cached["steps"]] == [4] + [1] * 7
    assert [step["tokens_fed"] for step in naive["steps"]] == list(range(4, 12))
    assert naive["summary"]["cache_bytes"] == 0
    _, _, err = call(capsys, "generate", STORY, "--new-tokens", "2", "--path", "naive")
    assert "tiny on the naive path" in err
    assert figures(err)["cache"] == "none: the naive path keeps nothing"


@pytest.mark.parametrize(("chunk", "passes"), [(1, "4 passes"), (3, "2 passes"), (9, "1 pass")])
def test_a_prompt_fed_in_chunks_gives_the_same_text(capsys, chunk, passes):
    options = ["--new-tokens", "8", "--prefill-chunk", str(chunk)]
    data = numbers(capsys, STORY, *options)
    assert data["new_ids"] == numbers(capsys, STORY, "--new-tokens", "8")["new_ids"]
    assert data["steps"][0]["tokens_fed"] == 4
    assert data["prefill_chunk"] == chunk
    _, _, err = call(capsys, "generate", STORY, *options)
    assert figures(err)["prompt"].endswith(f" ms, {passes})")


# Sampling


def test_the_best_token_is_the_default_and_so_the_text_is_always_the_same(capsys, tiny):
    greedy = [step.token for step in minineo.generate(tiny, STORY, max_new_tokens=12)]
    data = numbers(capsys, STORY, "--new-tokens", "12")
    assert data["new_ids"] == greedy
    assert data["sampling"] == asdict(Sampling(temperature=0))


def test_all_options_reach_the_sampling(capsys, tiny):
    options = {
        "temperature": 1.5, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 4,
    }  # fmt: skip
    words = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    data = numbers(capsys, STORY, "--new-tokens", "12", *words)
    steps = minineo.generate(tiny, STORY, max_new_tokens=12, choose=Sampling(**options))
    assert data["sampling"] == options
    assert data["new_ids"] == [step.token for step in steps]


def test_another_seed_draws_another_text_and_the_same_one_the_same(capsys):
    def drawn(seed):
        options = ["--new-tokens", "20", "--temperature", "1.5", "--seed", seed]
        return numbers(capsys, STORY, *options)["new_ids"]

    assert drawn("1") == drawn("1") != drawn("2")


def test_the_repetition_penalty_works_without_temperature(capsys):
    options = [STORY, "--new-tokens", "40"]
    plain = numbers(capsys, *options)["new_ids"]
    assert numbers(capsys, *options, "--repetition-penalty", "2")["new_ids"] != plain


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--top-k", "5"], "--top-k"),
        (["--top-p", "1"], "--top-p"),
        (["--seed", "0"], "--seed"),
        (["--seed", "3", "--top-k", "5", "--temperature", "0"], "--top-k and --seed"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(capsys, options, names):
    status, out, err = call(capsys, "generate", STORY, *options)
    assert (status, out) == (2, "")
    assert err == (
        f"minineo: temperature 0 always takes the best token, so {names} would do nothing; "
        "leave that out, or add --temperature 0.8\n"
    )


# JSON


def test_json_holds_every_number(capsys, tiny):
    data = numbers(capsys, STORY, "--new-tokens", "5")
    steps = list(minineo.generate(tiny, STORY, max_new_tokens=5))
    assert data["schema"] == 1
    assert (data["model"], data["device"], data["dtype"]) == ("tiny", "cpu", "float32")
    assert (data["path"], data["prefill_chunk"], data["stop"]) == ("cached", None, None)
    assert (data["prompt"], data["prompt_ids"]) == (STORY, tiny.encode(STORY))
    assert (data["prompt_tokens"], data["new_tokens"]) == (4, 5)
    assert data["text"] == "".join(step.text for step in steps)
    assert data["new_ids"] == [step.token for step in steps]
    assert data["finish"] == "length"
    for got, step in zip(data["steps"], steps, strict=True):
        assert got.pop("seconds") > 0
        assert got == {
            "index": step.index,
            "phase": step.phase,
            "token": step.token,
            "text": step.text,
            "logprob": step.logprob,
            "tokens_fed": step.fed,
            "keys_attended": step.length,
            "cache_bytes": step.cache_bytes,
            "finish": step.finish,
        }


def test_the_summary_is_that_of_the_steps(capsys):
    data = numbers(capsys, STORY, "--new-tokens", "6")
    seconds = [step["seconds"] for step in data["steps"]]
    assert data["summary"] == {
        "ttft_seconds": seconds[0],
        "prefill_tokens_per_second": 4 / seconds[0],
        "decode_seconds_per_token": median(seconds[1:]),
        "decode_tokens_per_second": 1 / median(seconds[1:]),
        "total_seconds": sum(seconds),
        "cache_bytes": 9 * 6144,
    }


def test_json_to_a_file_leaves_text_and_figures_where_they_are(capsys, tmp_path):
    file = tmp_path / "out.json"
    status, out, err = call(capsys, "generate", STORY, "--new-tokens", "3", "--json", str(file))
    data = json.loads(file.read_text())
    assert status == 0
    assert out == data["prompt"] + data["text"] + "\n"
    assert figures(err)["stopped"] == "3 tokens, as asked for"


# Prompts from files


@pytest.mark.parametrize("text", ["One day\n", "\ufeffOne\r\nday 😀\r\n", " ", "a\x00b"])
def test_a_file_is_the_prompt_exactly(capsys, tmp_path, text):
    file = tmp_path / "my prompt.txt"
    file.write_bytes(text.encode())
    options = ["--new-tokens", "1"]
    data = numbers(capsys, "--from-file", str(file), *options)
    assert data["prompt"] == text
    assert data == numbers(capsys, text, *options) | {
        name: data[name]
        for name in ("steps", "summary")  # times differ
    }


def test_the_standard_input_is_a_prompt_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("One\r\n é".encode()), "ascii"))
    assert numbers(capsys, "--from-file", "-", "--new-tokens", "1")["prompt"] == "One\r\n é"


def test_a_pipe_can_be_read(capsys):
    read, write = os.pipe()
    os.write(write, b"One day")
    os.close(write)
    data = numbers(capsys, "--from-file", f"/dev/fd/{read}", "--new-tokens", "1")
    os.close(read)
    assert data["prompt"] == "One day"


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(b""))])
def test_an_input_that_is_closed_or_empty_is_refused(capsys, monkeypatch, stream):
    monkeypatch.setattr(sys, "stdin", stream)
    status, out, err = call(capsys, "generate", "--from-file", "-")
    assert (status, out) == (2, "")
    assert err == "minineo: the standard input is empty; give at least one character\n"


def test_the_numbers_never_write_over_the_prompt(capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("One day")
    status, out, err = call(capsys, "generate", "--from-file", str(file), "--json", str(file))
    assert (status, out) == (2, "")
    assert "--json would write over the prompt" in err
    assert file.read_text() == "One day"


# What is refused


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], 'give a prompt: minineo generate "Once upon a time", or --from-file'),
        ([""], "the prompt is empty"),
        (["\udcff"], "not valid text"),
        (["two", "prompts"], "unexpected extra argument"),
        ([STORY, "--from-file", "x"], "there is a prompt and --from-file; give one of them"),
        (["--from-file", "missing.txt"], "cannot read missing.txt: No such file or directory"),
        (["--from-file", "~no-such-user/x"], "cannot read ~no-such-user/x"),
        (["--from-file", "."], "cannot read .: Is a directory; name a text file"),
        (["--from-file", "latin.txt"], "latin.txt is not UTF-8: unexpected end of data at byte 3"),
        (["--from-file", "empty.txt"], "empty.txt is empty"),
        ([STORY, "--new-tokens", "-1"], "max_new_tokens is -1"),
        ([STORY, "--new-tokens", "x"], "--new-tokens"),
        ([STORY, "--temperature", "-1"], "temperature is -1.0; it must be a number from 0"),
        ([STORY, "--temperature", "nan"], "temperature is nan"),
        ([STORY, "--temperature", "1", "--top-p", "2"], "top_p is 2.0; it must be a number from 0"),
        ([STORY, "--temperature", "1", "--top-k", "-2"], "top_k is -2"),
        ([STORY, "--temperature", "1", "--seed", "-1"], "seed is -1"),
        ([STORY, "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        ([STORY, "--stop", ""], "'' is no stop string"),
        ([STORY, "--path", "fast"], "'fast' is not one of 'cached', 'naive'"),
        ([STORY, "--prefill-chunk", "0"], "prefill_chunk is 0"),
        ([STORY, "--prefill-chunk", "2", "--path", "naive"], "leave prefill_chunk out"),
        (
            [STORY, "--dtype", "bfloat16"],
            "'bfloat16' is not one of 'float32', 'float64', 'float16'",
        ),
        ([STORY, "--json", "no/such/folder/out.json"], "no/such/folder does not exist"),
        ([STORY, "--json", "."], ". is a folder"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(capsys, arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    status, out, err = call(capsys, "generate", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_a_model_that_cannot_be_loaded_gives_one_line(capsys, monkeypatch, arguments, complaint):
    monkeypatch.setattr(cli.app, "load", load)
    status, out, err = call(capsys, "generate", STORY, *arguments)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_model_without_a_tokenizer_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(cli.app, "load", lambda name, **options: random_model())
    status, out, err = call(capsys, "generate", STORY)
    assert (status, out) == (2, "")
    assert "no tokenizer.json" in err
    assert err.count("\n") == 1


def test_what_is_wrong_with_the_call_is_said_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(cli.app, "load", None)
    for arguments in ([], ["--from-file", "missing.txt"], [STORY, "--seed", "1"]):
        assert call(capsys, "generate", *arguments)[0] == 2


# What breaks in on it


def test_an_interrupt_keeps_the_text_so_far_and_is_quiet(capsys, monkeypatch, tmp_path):
    seen = watch(monkeypatch, capsys, after=KeyboardInterrupt)
    file = tmp_path / "out.json"
    status, out, err = call(capsys, "generate", STORY, "--json", str(file))
    assert (status, out, err) == (130, "\n", "")
    assert "".join(seen) == f"{STORY}, there was"
    assert not file.exists()


def test_a_failure_on_the_way_keeps_the_text_so_far_and_is_one_line(capsys, monkeypatch):
    watch(monkeypatch, capsys, after=minineo.InputError("the logits are not finite numbers"))
    status, out, err = call(capsys, "generate", STORY)
    assert (status, out) == (2, "\n")
    assert err == "minineo: the logits are not finite numbers\n"


def run(*arguments, **options):
    """Start the command as a program of its own, with one thread, that Ctrl-C reaches.

    A shell lets what it starts in the background ignore Ctrl-C, and with it what that starts.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "minineo.cli", "generate", STORY, *arguments],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.mark.parametrize("json_", [[], ["--json", "-"]])
def test_a_reader_who_has_seen_enough_is_no_difference(json_):
    read, write = os.pipe()
    os.close(read)
    process = run("--new-tokens", "3", *json_, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, b"")


def test_text_comes_through_a_pipe_at_once_and_ctrl_c_ends_it(capsys):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = run(
        "--new-tokens", "500", "--path", "naive", "--repetition-penalty", "1.5", **options
    )
    first = os.read(process.stdout.fileno(), len(STORY))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, first, err) == (130, STORY.encode(), b"")
    assert out.endswith(b"\n")
