"""From a model's name to the folder with its files."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from ..transformer import InputError
from . import hub
from .known import EMBEDDED, PUBLIC

PACKAGE = Path(__file__).resolve().parent.parent
REPO = re.compile(r"[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*", re.ASCII)
REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)


def find(name_or_path):
    """Return the folder of a model, and download it first where that is needed.

    A name is looked up in this order, and the first that fits is taken:

    1. An embedded model ("tiny") or a short name ("gpt-neo-125m"), in small letters or capitals.
       A folder of that name is meant by "./tiny", or by a Path.
    2. A folder that exists.
    3. A model on the hub: "owner/name", or "owner/name@revision".

    Parameters
    ----------
    name_or_path : str or Path

    Returns
    -------
    Path

    Raises
    ------
    InputError
        If nothing fits, or a model on the hub cannot be had.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise InputError(f"{name_or_path!r} is no model's name; give text or a Path")
    name = str(name_or_path)
    if isinstance(name_or_path, str) and name.lower() in EMBEDDED:
        return embedded_folder(name.lower())
    folder = existing_folder(name_or_path)
    if folder and (folder / "config.json").is_file():
        return folder
    on_hub = hub_name(name_or_path)
    if folder and on_hub:
        raise InputError(
            f"the folder {name} has no config.json, and hides the model of that name on the hub; "
            "rename it, or run elsewhere"
        )
    if folder:
        return folder
    if on_hub:
        return hub.fetch(*on_hub)
    raise InputError(f"unknown model {name!r}: {suggestion(name)}")


def embedded_folder(name):
    """Return the folder of a model that comes with minineo."""
    # inside an installed package, or beside it in a checkout
    for weights in (PACKAGE / "weights", PACKAGE.parent / "weights"):
        if (weights / name).is_dir():
            return weights / name
    raise InputError(f"the embedded model {name!r} is missing; install minineo again")


def existing_folder(name_or_path):
    """Return the folder that a name stands for, or None when it is a short name or no folder."""
    if isinstance(name_or_path, str) and name_or_path.partition("@")[0].lower() in PUBLIC:
        return None
    folder = os.path.expanduser(name_or_path)
    return Path(folder) if os.path.isdir(folder) else None


def hub_name(name_or_path):
    """Return the repository and the revision that a name stands for on the hub, or None.

    Raises
    ------
    InputError
        If the revision cannot be one.
    """
    if not isinstance(name_or_path, str):
        return None
    name, at, revision = name_or_path.partition("@")
    repos = {shape.repo.lower(): shape.repo for shape in PUBLIC.values()}
    if name.lower() in PUBLIC:
        repo = PUBLIC[name.lower()].repo
    elif REPO.fullmatch(name) and "--" not in name and ".." not in name:
        repo = repos.get(name.lower(), name)
    else:
        return None
    if at and (not REVISION.fullmatch(revision) or ".." in revision):
        raise InputError(f"{revision!r} is no revision; give a branch, a tag or a commit after @")
    return repo, revision or None


def suggestion(name):
    """Return what could have been meant, or what there is."""
    close = get_close_matches(name.lower(), [*EMBEDDED, *PUBLIC], n=1, cutoff=0.75)
    if close:
        return f"did you mean {close[0]!r}?"
    return (
        f"give 'tiny', a folder with config.json, a name such as {', '.join(list(PUBLIC)[:2])} "
        "('minineo models' lists them), or owner/name on the hub"
    )
