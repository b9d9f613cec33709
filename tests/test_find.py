import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, Hub
from replicas import write_gpt_neo, write_tinystories
from small import tiny_config

from minineo import InputError, load
from minineo.checkpoints import known_models
from minineo.checkpoints.find import find

NEO, STORIES = "EleutherAI/gpt-neo-125m", "roneneldan/TinyStories-33M"


def refused(name):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        find(name)
    return str(error.value)


@pytest.fixture(scope="module")
def neo_files(tmp_path_factory):
    """The files of a small gpt-neo-125m."""
    folder = tmp_path_factory.mktemp("neo")
    write_gpt_neo(folder)
    shutil.copy(find("tiny") / "tokenizer.json", folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def stories_files(tmp_path_factory):
    """The files of a small TinyStories."""
    folder = tmp_path_factory.mktemp("stories")
    write_tinystories(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub."""
    from huggingface_hub import constants

    folder = tmp_path / "hub cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def no_network(monkeypatch):
    def no_socket(*arguments, **options):
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, no_socket)


def write_cache(cache, repo, files, ref="main"):
    """What huggingface_hub leaves behind after a download."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for part in (folder / "refs", folder / "blobs", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(COMMIT)
    for name, content in files.items():
        blob = folder / "blobs" / Hub.tag(content)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


# names and folders


def test_an_embedded_name_goes_before_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    embedded = find("tiny")
    Path("tiny").mkdir()
    assert find("tiny") == find("TINY") == embedded
    for path in ("./tiny", "tiny/", str(tmp_path / "tiny"), Path("tiny")):
        assert find(path).resolve() == tmp_path / "tiny"


def test_a_short_name_goes_before_a_folder(tmp_path, monkeypatch, cache, neo_files, no_network):
    monkeypatch.chdir(tmp_path)
    snapshot = write_cache(cache, NEO, neo_files)
    Path("gpt-neo-125m").mkdir()
    assert find("gpt-neo-125m") == find("GPT-Neo-125M") == find("gpt-neo-125m@main") == snapshot
    assert find("./gpt-neo-125m") == Path("gpt-neo-125m")


def test_a_folder_goes_before_a_model_on_the_hub(tmp_path, monkeypatch, cache, no_network):
    monkeypatch.chdir(tmp_path)
    Path(NEO).mkdir(parents=True)
    assert "hides the model of that name on the hub" in refused(NEO)
    write_gpt_neo(Path(NEO))
    assert find(NEO) == Path(NEO)
    assert load(NEO, device="cpu").config == tiny_config()


@pytest.mark.parametrize("name", ["my modèl ☃", "a@b", "plain", "-dash", "tiny.backup", "a/b/c"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_may_have_any_name(tmp_path, monkeypatch, name, end):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    for path in (f"~/{name}{end}", f"{name}{end}", f"{tmp_path}/{name}{end}"):
        assert find(path).resolve() == tmp_path / name


def test_a_model_in_a_folder_may_look_like_a_revision_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("owner/name@")
    folder.mkdir(parents=True)
    write_gpt_neo(folder)
    assert find("owner/name@") == folder


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tinny", "did you mean 'tiny'?"),
        ("gpt-neo-125", "did you mean 'gpt-neo-125m'?"),
        ("gpt2", "minineo models"),
        ("", "unknown model ''"),
        ("no/such/folder", "unknown model"),
        ("./nothing", "unknown model './nothing'"),
        ("~/nothing/here", "unknown model"),
        ("a\0b", "unknown model"),
        ("a" * 5000, "unknown model"),
        ("owner/name\n", "unknown model"),
        ("owner/..", "unknown model"),
        (Path("owner/name"), "unknown model"),
        (NEO + "@", "is no revision"),
        (NEO + "@../../etc/passwd", "is no revision"),
        (NEO + "@a/../../b", "is no revision"),
        (NEO + "@a\nb", "is no revision"),
        ("owner/" + "n" * 97, "unknown model"),
        ("owner/name.git", "unknown model"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_model_is_refused_without_the_network(name, complaint, cache, no_network):
    assert complaint in refused(name)


# what is in the cache


@pytest.mark.parametrize("name", [NEO, NEO.lower(), "gpt-neo-125m"])
def test_a_model_in_the_cache_loads_without_the_network(name, cache, neo_files, no_network):
    write_cache(cache, NEO, neo_files)
    model = load(name, device="cpu")
    assert model.name == name
    assert model.config == tiny_config()
    assert model.tokenizer is not None


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_revision_in_the_cache_is_found(cache, neo_files, no_network, revision):
    snapshot = write_cache(cache, "some/model", neo_files, ref="v1")
    assert find(f"some/model@{revision}") == snapshot


def test_tinystories_uses_the_tokenizer_of_gpt_neo(cache, neo_files, stories_files, no_network):
    write_cache(cache, STORIES, stories_files)
    write_cache(cache, NEO, {"tokenizer.json": neo_files["tokenizer.json"]})
    assert load("tinystories-33m", device="cpu").tokenizer is not None


def test_ids_work_where_no_tokenizer_can_be_had(cache, stories_files, neo_files, monkeypatch):
    import huggingface_hub

    def fail(*arguments, **options):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    write_cache(cache, STORIES, stories_files)
    write_cache(cache, NEO, {n: c for n, c in neo_files.items() if n != "tokenizer.json"})
    for name in (STORIES, NEO):
        model = load(name, device="cpu")
        assert model.encode([1, 2]) == [1, 2]
        with pytest.raises(InputError, match=r"no tokenizer\.json; give the prompt as token ids"):
            model.encode("text")


def test_known_models_says_what_is_here(cache, neo_files, stories_files, no_network):
    write_cache(cache, NEO, neo_files)
    write_cache(cache, STORIES, {"config.json": stories_files["config.json"]})
    models = {model.name: model for model in known_models()}
    assert models["tiny"].place == "embedded"
    assert models["gpt-neo-125m"].place == "here"
    assert models["tinystories-33m"].place == "partly here"
    assert models["gpt-neo-2.7b"].place == "on the hub"
    assert models["gpt-neo-2.7b"].repo == "EleutherAI/gpt-neo-2.7B"
    assert models["gpt-neo-2.7b"].float32_bytes == 4 * models["gpt-neo-2.7b"].parameters
    assert len(models) == 9


# what has to be fetched


@pytest.fixture
def hub(cache, monkeypatch):
    """A hub on this machine, and huggingface_hub pointed at it."""
    import huggingface_hub

    download = huggingface_hub.snapshot_download
    with Hub() as hub:
        api = huggingface_hub.HfApi(endpoint=hub.url)
        monkeypatch.setattr(huggingface_hub, "model_info", api.model_info)
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", partial(download, endpoint=hub.url)
        )
        yield hub


def run_here(hub, cache, name, **environment):
    """Load a model in a process of its own; return what it says."""
    code = "import sys, minineo; print(minineo.load(sys.argv[1], device='cpu').config.width)"
    return subprocess.run(
        [sys.executable, "-c", code, name],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
        | environment,
    )


def files_in(snapshot):
    return sorted(file.name for file in snapshot.iterdir())


def test_only_the_needed_files_are_downloaded_and_the_next_load_needs_no_network(
    cache, neo_files, tmp_path
):
    others = {"flax_model.msgpack": b"a", "pytorch_model.bin": b"b", "rust_model.ot": b"c"}
    more = {"README.md": b"d", "vocab.json": b"{}", "merges.txt": b"e", "onnx/model.onnx": b"f"}
    with Hub() as hub:
        hub.repos[NEO] = neo_files | others | more
        done = run_here(hub, cache, NEO)
        assert done.stdout == "32\n", done.stderr
        assert "100%" in done.stderr, "a bar shows how far the download is"
        snapshot = next(cache.glob("*/snapshots/*"))
        assert files_in(snapshot) == ["config.json", "model.safetensors", "tokenizer.json"]
        hub.requests.clear()
        again = run_here(hub, cache, NEO, HF_HUB_OFFLINE="1")
        assert (again.stdout, again.stderr) == ("32\n", "")
        assert run_here(hub, cache, NEO).stdout == "32\n"
        assert hub.requests == []


def test_tinystories_is_downloaded_with_the_tokenizer_it_borrows(hub, neo_files, stories_files):
    hub.repos = {STORIES: stories_files, NEO: neo_files}
    model = load("tinystories-33m", device="cpu")
    assert model.tokenizer is not None
    fetched = {path.rsplit("/", 1)[1] for _, path in hub.requests if "/resolve/" in path}
    assert fetched == {"config.json", "pytorch_model.bin", "tokenizer.json"}


def test_shards_are_downloaded_with_their_index(hub, neo_files):
    import json

    from safetensors.numpy import load as parse
    from safetensors.numpy import save

    tensors = parse(neo_files["model.safetensors"])
    names = sorted(tensors)
    shards = {
        f"model-0000{part + 1}-of-00002.safetensors": {n: tensors[n] for n in names[part::2]}
        for part in range(2)
    }
    weight_map = {name: file for file, part in shards.items() for name in part}
    hub.repos["some/model"] = {
        "config.json": neo_files["config.json"],
        "tokenizer.json": neo_files["tokenizer.json"],
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "pytorch_model.bin": b"not this one",
    } | {file: save(part) for file, part in shards.items()}
    model = load("some/model@v1", device="cpu")
    np.testing.assert_array_equal(model.weights.token_embedding, tensors["transformer.wte.weight"])
    assert files_in(find("some/model@v1")) == [
        "config.json", *shards, "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    (find("some/model@v1") / "model-00002-of-00002.safetensors").resolve().unlink()
    assert load("some/model@v1", device="cpu").config == model.config, "the missing one is fetched"


def test_a_half_downloaded_model_is_completed(hub, cache, neo_files):
    hub.repos[NEO] = neo_files
    write_cache(cache, NEO, {"config.json": neo_files["config.json"]})
    assert load(NEO, device="cpu").tokenizer is not None


def test_a_dangling_link_counts_as_missing(hub, cache, neo_files):
    hub.repos[NEO] = neo_files
    snapshot = write_cache(cache, NEO, neo_files)
    (snapshot / "model.safetensors").resolve().unlink()
    assert load(NEO, device="cpu").config == tiny_config()


def test_offline_what_is_not_here_is_refused_with_the_reason(cache, neo_files):
    with Hub() as hub:
        hub.repos[NEO] = neo_files
        none = run_here(hub, cache, NEO, HF_HUB_OFFLINE="1").stderr.splitlines()[-1]
        write_cache(cache, NEO, {"config.json": neo_files["config.json"]})
        half = run_here(hub, cache, NEO, HF_HUB_OFFLINE="1").stderr.splitlines()[-1]
    assert f"{NEO} is not on this machine, and HF_HUB_OFFLINE keeps the network off" in none
    assert f"{NEO} is only partly on this machine, and HF_HUB_OFFLINE keeps" in half


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        ((401, "GatedRepo"), f"{NEO} is gated: accept its terms at https://huggingface.co/{NEO}"),
        ((401, "RepoNotFound"), f"there is no folder {NEO} here and no model {NEO} on the hub"),
        ((404, "RepoNotFound"), f"no model {NEO} on the hub"),
        ((404, "RevisionNotFound"), f"{NEO} has no revision 'x'"),
        ((500, ""), f"{NEO} is not on this machine, and cannot be downloaded (Server error '500"),
    ],
    ids=str,
)
def test_what_the_hub_refuses_is_told_in_one_line(hub, error, complaint):
    hub.errors[NEO] = error
    assert complaint in refused(f"{NEO}@x")


def test_an_unknown_revision_is_told(hub, neo_files):
    hub.repos[NEO] = neo_files
    assert f"{NEO} has no revision 'v9'" in refused(f"{NEO}@v9")


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "no model"),
        ("RevisionNotFoundError", "has no revision"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE keeps the network off"),
        ("LocalEntryNotFoundError", "cannot be downloaded (the reason)"),
        ("HfHubHTTPError", "cannot be downloaded (the reason)"),
    ],
)
@pytest.mark.parametrize("function", ["model_info", "snapshot_download"])
def test_whatever_huggingface_hub_raises_is_told_in_one_line(
    hub, neo_files, monkeypatch, function, error, complaint
):
    import huggingface_hub
    from huggingface_hub import errors

    def fail(*arguments, **options):
        kind = getattr(errors, error)
        raised = kind.__new__(kind)  # without the response that it is made from
        raised.args = ("the reason\nand more",)
        raise raised

    hub.repos[NEO] = neo_files
    monkeypatch.setattr(huggingface_hub, function, fail)
    assert complaint in refused(NEO)


def test_a_download_that_leaves_a_file_out_is_not_taken_for_whole(
    hub, cache, neo_files, monkeypatch
):
    import huggingface_hub

    hub.repos[NEO] = neo_files
    snapshot = write_cache(cache, NEO, {"config.json": neo_files["config.json"]})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: str(snapshot))
    assert "model.safetensors has not come" in refused(NEO)


def test_without_a_network_a_model_on_the_hub_is_refused_in_one_line(cache, monkeypatch):
    def no_route(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", no_route)
    monkeypatch.setattr(socket, "getaddrinfo", no_route)
    assert "cannot be downloaded ([Errno 101] Network is unreachable)" in refused(NEO)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["README.md", "model.safetensors"], "some/model has no config.json"),
        (["config.json", "tf_model.h5"], "some/model has no model.safetensors or pytorch_model"),
    ],
)
def test_a_repository_without_a_model_is_refused(hub, files, complaint):
    hub.repos["some/model"] = dict.fromkeys(files, b"{}")
    assert complaint in refused("some/model")


def test_importing_the_package_does_not_import_huggingface_hub():
    code = "import minineo, sys; minineo.load('tiny', device='cpu'); print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
