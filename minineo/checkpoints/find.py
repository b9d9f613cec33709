"""From a model's name to the folder with its files."""

from pathlib import Path

from ..transformer import InputError

EMBEDDED = ("tiny",)
PACKAGE = Path(__file__).resolve().parent.parent


def find(name_or_path):
    """Return the folder of a model.

    Parameters
    ----------
    name_or_path : str or Path
        "tiny", the embedded model, or the path of a folder in Hugging Face's layout.

    Raises
    ------
    InputError
        If there is no such folder.
    """
    name = str(name_or_path)
    if name in EMBEDDED:
        # inside an installed package, or beside it in a checkout
        for weights in (PACKAGE / "weights", PACKAGE.parent / "weights"):
            if (weights / name).is_dir():
                return weights / name
        raise InputError(f"the embedded model {name!r} is missing; install minineo again")
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        raise InputError(
            f"unknown model {name!r}: give 'tiny' or a folder with config.json, "
            "model.safetensors and tokenizer.json"
        )
    return folder
