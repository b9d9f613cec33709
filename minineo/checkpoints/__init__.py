"""From files to a model."""

from .load import Model, load
from .models import KnownModel, known_models

__all__ = ["KnownModel", "Model", "known_models", "load"]
