"""A mark for functions that something else may stand in for."""

from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps

from .config import InputError

_replacements: ContextVar[dict] = ContextVar("replacements")
_names: set[str] = set()


def replaceable(function):
    """Mark a function as one that `replaced` can put another in place of, by name.

    The function that is marked says what any other must compute: a GPU kernel computes the same
    faster, and a fault of the fault lab something else on purpose.
    """
    name = function.__name__
    _names.add(name)

    @wraps(function)
    def call(*args, **options):
        return _replacements.get({}).get(name, function)(*args, **options)

    return call


def anything_replaced():
    """Whether anything stands in for a function, in this thread."""
    return bool(_replacements.get({}))


@contextmanager
def replaced(**functions):
    """Put other functions in the places of replaceable ones, inside a `with` block.

    It holds for the thread that enters the block, and for no other.

    Parameters
    ----------
    **functions : function
        Each under the name of the one it stands in for. One that calls the original calls its
        ``__wrapped__``, such as ``linear.__wrapped__``: `linear` would be itself.

    Raises
    ------
    InputError
        If a name is not that of a replaceable function.

    Examples
    --------
    >>> with replaced(gelu_new=lambda x: np.maximum(x, 0)):
    ...     logits = forward(tokens, weights, config, cache)
    """
    unknown = functions.keys() - _names
    if unknown:
        raise InputError(f"{min(unknown)} cannot be replaced; {', '.join(sorted(_names))} can")
    for name, function in functions.items():
        if not callable(function):
            raise InputError(f"{name} is replaced by {function!r}; give a function")
    token = _replacements.set(_replacements.get({}) | functions)
    try:
        yield
    finally:
        _replacements.reset(token)
