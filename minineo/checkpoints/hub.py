"""Models on the Hugging Face hub: what is here already, and what has to be fetched.

The only file that imports huggingface_hub, and only when it is used: the import takes time, and
the library reads HF_HUB_OFFLINE, HF_HOME and the like while it is imported.
"""

from pathlib import Path

from ..transformer import InputError
from .read import INDEX, READERS, read_index

TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # in order of preference
BORROWED_TOKENIZER = {"roneneldan/tinystories-": "EleutherAI/gpt-neo-125m"}  # by the repo's start


def fetch(repo, revision=None):
    """Return the folder of a model on the hub.

    What is in the hub's cache is used as it is, and the network is not asked whether it is still
    the newest. Otherwise the files that are needed are downloaded, those alone.

    Parameters
    ----------
    repo : str
        Such as "EleutherAI/gpt-neo-125m".
    revision : str, optional
        A branch, a tag or a commit; by default "main".

    Returns
    -------
    Path

    Raises
    ------
    InputError
        If it is not here and cannot be had: there is no such model or revision, it is gated or
        no GPT-Neo checkpoint, or the network is off.
    """
    folder = cached_folder(repo, revision)
    whole = folder is not None and is_whole(folder)
    if whole and (has_tokenizer(folder) or lender(repo)):
        return folder
    try:
        return download(repo, revision, needed_files, partly=folder is not None)
    except InputError:
        if whole:  # only its tokenizer is missing: ids can be used without
            return folder
        raise


def fetch_tokenizer(repo):
    """Return the folder of the tokenizer that a model without one was trained with, or None."""
    other = lender(repo)
    if other is None:
        return None
    folder = cached_folder(other, None)
    if folder is not None and has_tokenizer(folder):
        return folder
    try:
        return download(other, None, tokenizer_files)
    except InputError:  # ids can be used without
        return None


def lender(repo):
    """Return the model whose tokenizer a model uses when it has none of its own, or None."""
    for start, other in BORROWED_TOKENIZER.items():
        if repo.lower().startswith(start):
            return other
    return None


def place(repo):
    """Return "here", "partly here" or "on the hub"."""
    folder = cached_folder(repo, None)
    if folder is None:
        return "on the hub"
    return "here" if is_whole(folder) else "partly here"


def cached_folder(repo, revision):
    """Return the folder in the hub's cache that holds a model, whole or not, or None."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        for name in ("config.json", "tokenizer.json", "vocab.json", *READERS):
            file = try_to_load_from_cache(repo, name, revision=revision)
            if isinstance(file, str):
                return Path(file).parent
    except errors.HFValidationError:
        raise InputError(
            f"unknown model {repo!r}: no model on the hub can have that name"
        ) from None
    return None


def is_whole(folder):
    """Return whether a folder holds a config and all files of weights."""
    if not (folder / "config.json").is_file():
        return False
    for name in READERS:
        index = folder / (name + INDEX)
        if (folder / name).is_file():
            return True
        if index.is_file():
            try:
                return all((folder / shard).is_file() for shard in read_index(index).values())
            except InputError:  # it came broken
                return False
    return False


def has_tokenizer(folder):
    """Return whether a folder holds the files of a tokenizer."""
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES)


def needed_files(names):
    """Choose the files of a repository that make a model.

    Raises
    ------
    InputError
        If there is no config or there are no weights among them; the message goes on from the
        repository's name.
    """
    if "config.json" not in names:
        raise InputError("has no config.json; it is no model")
    for name in READERS:
        if name in names:
            weights = [name]
        elif name + INDEX in names:
            stem, suffix = name.split(".")
            start = (f"{stem}-", f"{name}{INDEX}")
            weights = [n for n in names if n.startswith(start) and n.endswith((suffix, INDEX))]
        else:
            continue
        return ["config.json", *weights, *tokenizer_files(names)]
    raise InputError(f"has no {' or '.join(READERS)}; look for a copy that has")


def tokenizer_files(names):
    """Choose the files of a repository that make a tokenizer."""
    for files in TOKENIZER_FILES:
        if set(files) <= set(names):
            return list(files)
    return []


def download(repo, revision, choose, partly=False):
    """Download some files of a repository to the hub's cache, and show how far it is.

    Parameters
    ----------
    repo : str
    revision : str or None
    choose : function
        From the names of all files to those to download.
    partly : bool, optional
        Whether a part of them is here.

    Returns
    -------
    Path
        The folder that holds them.
    """
    from huggingface_hub import errors, model_info, snapshot_download

    where = f"{repo} is only partly on this machine" if partly else f"{repo} is not on this machine"
    try:
        siblings = model_info(repo, revision=revision).siblings or []
        files = choose([sibling.rfilename for sibling in siblings])
        if not files:
            raise InputError("has none of the files that are needed")
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=files))
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise ConnectionError(f"{missing[0]} has not come")
        return folder
    except InputError as error:
        raise InputError(f"{repo} {error}") from None
    except errors.GatedRepoError:
        raise InputError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then run "
            "'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"there is no folder {repo} here and no model {repo} on the hub; check the name, or "
            "run 'hf auth login' if the model is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"{repo} has no revision {revision!r}; see https://huggingface.co/{repo}/tree/main"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise InputError(
            f"{where}, and HF_HUB_OFFLINE keeps the network off; unset it once to download it"
        ) from None
    except Exception as error:  # whatever the network, the disk or their libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{where}, and cannot be downloaded ({reason}); connect to the network, or give a "
            "folder"
        ) from None
