"""From files to a model."""

from .load import Model, load

__all__ = ["Model", "load"]
