"""What can be loaded by name, how large it is, and what of it is on this machine."""

from dataclasses import dataclass

from . import hub
from .find import embedded_folder
from .known import EMBEDDED, PUBLIC, parameters, public_config
from .read import read_config


@dataclass(frozen=True)
class KnownModel:
    """A model that can be loaded by its name alone.

    Attributes
    ----------
    name : str
        The short name.
    repo : str or None
        Its name on the hub; None for an embedded model.
    parameters : int
    float32_bytes : int
        The size of its weights in float32.
    place : str
        "embedded" in minineo, "here" or "partly here" in the hub's cache on this machine, or
        "on the hub".
    """

    name: str
    repo: str | None
    parameters: int
    float32_bytes: int
    place: str


def known_models():
    """Return every model that has a short name, and look which of them are on this machine.

    The network is not used.

    Returns
    -------
    list of KnownModel
    """
    models = []
    for name in EMBEDDED:
        count = parameters(read_config(embedded_folder(name)))
        models.append(KnownModel(name, None, count, 4 * count, "embedded"))
    for name, shape in PUBLIC.items():
        count = parameters(public_config(name))
        models.append(KnownModel(name, shape.repo, count, 4 * count, hub.place(shape.repo)))
    return models
