"""Numbers as JSON can hold them."""

import math


def number(value):
    """Return a number, or None when there is none or it is not finite."""
    return value if value is not None and math.isfinite(value) else None
