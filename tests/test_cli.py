import json
import os
import subprocess
import sys
import warnings

import pytest

from minineo import InputError, KVCache, cli, load
from minineo.cli import app

STORY = "Once upon a time"


def minineo(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "minineo.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def call(capsys, *arguments):
    """Run the command in this process; return its exit status and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["minineo", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out, printed.err


def test_compare_prints_the_ledger_the_verdict_and_the_text(capsys):
    status, out, err = call(capsys, "compare", STORY, "--new-tokens", "5", "--device", "cpu")
    assert status == 0
    assert err == ""
    ledger = [line for line in out.splitlines() if "prefill" in line or "decode" in line]
    assert [line.split()[0] for line in ledger] == ["0", "1", "2", "3", "4"]
    assert "Both paths say the same: 5 of 5 tokens equal" in " ".join(out.split())
    assert STORY in out
    assert max(map(len, out.splitlines())) <= 80
    assert all(line.rstrip().endswith("yes") for line in ledger), "no column is cut off"


def test_compare_without_arguments_runs_the_embedded_model(capsys):
    status, out, _ = call(capsys, "compare")
    assert status == 0
    assert out.startswith("tiny: 6 layers")
    assert cli.compare.PROMPT.split()[0] in out


def test_compare_writes_numbers_and_a_picture(capsys, tmp_path):
    numbers, picture = tmp_path / "out.json", tmp_path / "my picture.png"
    status, *_ = call(
        capsys,
        "compare",
        STORY,
        "--new-tokens",
        "4",
        "--json",
        str(numbers),
        "--plot",
        str(picture),
    )
    assert status == 0
    assert json.loads(numbers.read_text())["new_tokens"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [picture, numbers], "nothing else is left behind"


def test_json_to_the_standard_output_is_all_that_stands_there(capsys):
    status, out, err = call(capsys, "compare", STORY, "--new-tokens", "2", "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out)["model"] == "tiny"


def test_float64_agrees_to_1e_10(capsys):
    status, out, _ = call(
        capsys, "compare", STORY, "--new-tokens", "70", "--dtype", "float64", "--json", "-"
    )
    data = json.loads(out)
    assert status == 0
    assert data["dtype"] == "float64"
    assert data["summary"]["max_abs_logit_diff"] < 1e-10


def test_a_fault_in_the_cache_gives_status_1_and_says_where(capsys, monkeypatch):
    extend = KVCache.extend

    def fault(cache, layer, new_keys, new_values):
        keys, values = extend(cache, layer, new_keys, new_values)
        return (keys * 2 if layer == 3 else keys), values

    monkeypatch.setattr(KVCache, "extend", fault)
    status, out, _ = call(capsys, "compare", STORY, "--new-tokens", "3")
    assert status == 1
    assert "first at step 0, layer 3, keys" in " ".join(out.split())


def test_a_cache_that_breaks_down_at_once_gives_status_1_and_says_so(capsys, monkeypatch):
    def fault(cache, layer, new_keys, new_values):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(KVCache, "extend", fault)
    status, out, _ = call(capsys, "compare", STORY, "--new-tokens", "3")
    assert status == 1
    assert "the cached path broke down: shapes do not fit" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["compare", ""], "the prompt is empty"),
        (["compare", "a b " * 600], "this model reads 512 at most"),
        (["compare", "\udcff"], "not valid text"),
        (["compare", "--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["compare", "--model", "tests"], "no config.json"),
        (["compare", "--new-tokens", "0"], "max_new_tokens is 0"),
        (["compare", "--new-tokens", "x"], "--new-tokens"),
        (["compare", "--dtype", "float16"], "float16 needs a GPU"),
        (["compare", "--device", "tpu"], "unknown device 'tpu'"),
        (["compare", "--json", "no/such/folder/out.json"], "no/such/folder does not exist"),
        (["compare", "--json", "."], ". is a folder"),
        (["compare", "--plot", "picture.bmp"], ".png, .svg or .pdf"),
        (["compare", "--plot", "no/such/folder/p.png"], "no/such/folder does not exist"),
        (["compare", "--no-such-option"], "No such option: --no-such-option"),
        (["compare", "two", "prompts"], "unexpected extra argument"),
        (["verify", "--length", "0"], "give whole numbers from 1 to 512"),
        (["verify", "--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["no-such-command"], "No such command 'no-such-command'"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(capsys, arguments, complaint, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    status, out, err = call(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("minineo: ")
    assert err.count("\n") == 1
    assert complaint in err


def test_an_unwritable_folder_is_refused_before_any_work(capsys, tmp_path, monkeypatch):
    if os.geteuid() == 0:  # root may write anywhere: ask the system to say no

        def refuse(**options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(app.tempfile, "TemporaryFile", refuse)
    else:
        tmp_path.chmod(0o500)
    monkeypatch.setattr(cli.app, "load", None)
    status, _, err = call(capsys, "compare", "--json", str(tmp_path / "out.json"))
    assert status == 2
    assert "Permission denied" in err


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    with pytest.raises(TypeError):
        app.write_json({"a": object()}, str(file))
    with pytest.raises(ValueError, match="nan"):
        app.write_json({"a": float("nan")}, str(file))
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_help_of_every_command_shows_an_example(capsys):
    _, out, _ = call(capsys, "--help")
    for command in app.app.registered_commands:
        assert command.name in out
        _, text, _ = call(capsys, command.name, "--help")
        assert f"Example: minineo {command.name}" in " ".join(text.split())


def test_the_version_is_that_of_the_package(capsys):
    from minineo import __version__

    assert call(capsys, "--version") == (0, f"{__version__}\n", "")


def test_the_command_runs_as_a_program_of_its_own(tmp_path):
    done = minineo("compare", STORY, "--new-tokens", "2", "--json", "out.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "out.json").read_text())["summary"]["agree"] is True


def test_without_a_display_a_picture_is_drawn_all_the_same(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    done = minineo(
        "compare", STORY, "--new-tokens", "2", "--plot", "p.svg", cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()


def test_an_interrupt_is_quiet_and_leaves_nothing(capsys, monkeypatch, tmp_path):
    def interrupted(*args, progress, **options):
        progress(1, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.compare, "compare", interrupted)
    status, out, err = call(capsys, "compare", "--json", str(tmp_path / "out.json"))
    assert (status, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_the_help_is_shown(capsys):
    status, out, err = call(capsys)
    assert (status, err) == (2, "")
    assert "compare" in out


def test_verify_prints_a_row_for_every_layer_and_the_verdict(capsys):
    status, out, err = call(capsys, "verify", "--length", "5", "--length", "66")
    assert (status, err) == (0, "")
    labels = [" ".join(line.split()[:2]) for line in out.splitlines()]
    assert [label for label in labels if label.startswith("layer ")] == [
        f"layer {layer}" for layer in range(load("tiny").config.n_layers)
    ]
    assert "15 of 15 values agree" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_verify_to_the_standard_output_writes_numbers_alone(capsys):
    status, out, err = call(capsys, "verify", "--length", "3", "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out)["passed"] is True


def test_a_fault_gives_verify_status_1_and_says_where(capsys, monkeypatch):
    extend = KVCache.extend

    def fault(cache, layer, new_keys, new_values):
        keys, values = extend(cache, layer, new_keys, new_values)
        return (keys * 2 if layer == 3 else keys), values

    monkeypatch.setattr(KVCache, "extend", fault)
    status, out, _ = call(capsys, "verify", "--length", "4")
    assert status == 1
    text = " ".join(out.split())
    assert "first in layer 3, pattern (" in text
    assert max(map(len, out.splitlines())) <= 80


def test_without_transformers_verify_gives_status_2_and_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr("minineo.study.verify.find_spec", lambda name: None)
    status, out, err = call(capsys, "verify")
    assert (status, out) == (2, "")
    assert "pip install torch transformers" in err
    assert err.count("\n") == 1


def test_models_lists_what_can_be_loaded_by_name(capsys):
    status, out, err = call(capsys, "models")
    assert (status, err) == (0, "")
    assert "tiny" in out
    assert "EleutherAI/gpt-neo-2.7B" in out
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = call(capsys, "models", "--json", "-")
    names = {model["name"]: model for model in json.loads(out)["models"]}
    assert names["gpt-neo-1.3b"]["parameters"] == 1_315_575_808
    assert names["tiny"]["place"] == "embedded"


def test_a_warning_is_one_line(capsys, monkeypatch):
    def warns(*args, **options):
        warnings.warn("these weights\nare odd", stacklevel=2)
        raise InputError("enough")

    monkeypatch.setattr(cli.app, "load", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, _, err = call(capsys, "compare")
    assert err == "minineo: these weights are odd\nminineo: enough\n"


def test_a_device_or_a_pipe_is_refused_and_left_alone(capsys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, err = call(capsys, "compare", "--json", str(pipe))
    assert status == 2
    assert "is a device or a pipe" in err
    assert pipe.is_fifo()


def test_a_link_is_followed_and_a_mode_kept(tmp_path):
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    app.write_json({"a": 1}, str(link))
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"a": 1}
    assert file.stat().st_mode & 0o777 == 0o600


def test_two_results_in_one_file_are_refused(capsys, tmp_path):
    file = str(tmp_path / "a.png")
    status, _, err = call(capsys, "compare", "--json", file, "--plot", file)
    assert status == 2
    assert "give two files" in err


def test_the_home_of_nobody_is_no_folder(capsys):
    status, _, err = call(capsys, "compare", "--json", "~no-such-user/out.json")
    assert status == 2
    assert "does not exist" in err


def test_an_output_that_cannot_show_every_character_is_no_failure(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = minineo("compare", "héé 🎉", "--new-tokens", "2", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_reader_who_has_seen_enough_is_no_difference(options):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "minineo.cli", "compare", STORY, "--new-tokens", "2", *options],
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, b"")


def test_a_picture_needs_no_backend_of_a_notebook(tmp_path):
    environment = os.environ | {"MPLBACKEND": "module://no_such_backend"}
    done = minineo(
        "compare", STORY, "--new-tokens", "2", "--plot", "p.png", cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "p.png").exists()


def test_a_prompt_cannot_steer_the_terminal(capsys):
    _, out, _ = call(capsys, "compare", "a\x1b[31mb", "--new-tokens", "2")
    assert "\x1b" not in out


def test_no_column_is_cut_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = call(capsys, "compare", STORY, "--new-tokens", "2")
    assert all(word in out for word in ("differ", "lead", "same", "yes"))
