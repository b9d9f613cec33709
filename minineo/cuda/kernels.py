"""Call the kernels of kernels.cu in place of the functions they are named after.

CuPy is handed in, never imported. Nothing here waits for the device or brings an array to it or
from it: positions travel with a launch, by value.
"""

from functools import cache
from pathlib import Path

import numpy as np

from ..transformer import attention, functions
from ..transformer import cache as kv_cache
from ..transformer.trace import Silent, silent

SOURCE = Path(__file__).with_name("kernels.cu")
THREADS = 256  # in a block; a power of two
ATTEND_THREADS = 512  # in a block of `attend`, of which there are few: one for each head and row
MAX_ROWS = 256  # of a batch, whose positions travel with one launch: 2 of the 4 KiB it may bring
SHARED_BYTES = 48 * 1024  # what every GPU gives a block
QUERY_ROWS = 256  # queries attended for at once: fewer launches than on a CPU
TYPES = {  # of the arrays, and of sums
    "float16": ("__half", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}
POSITIONS = np.dtype([("of", np.int64, MAX_ROWS)])


def options(dtype):
    """Return the options that kernels.cu is compiled with, for arrays of a dtype.

    Parameters
    ----------
    dtype : str
        "float16", "float32" or "float64".
    """
    real, total = TYPES[dtype]
    return ("-std=c++17", f"-DREAL={real}", f"-DTOTAL={total}", f"-DMAX_ROWS={MAX_ROWS}")


def kernels(cupy):
    """Return functions that compute the same as the replaceable ones, with kernels.

    Parameters
    ----------
    cupy : module

    Returns
    -------
    dict
        Functions by name, to be put in with ``replaced(**kernels(cupy))``. Each takes and returns
        what the function of this name in `transformer` does, in CuPy arrays. Kernels are compiled
        when they are first called, and kept by CuPy from one run to the next.
    """
    stand_ins = Kernels(cupy)
    names = ("layer_norm", "gelu_new", "linear", "linear_gelu", "add_linear", "append", "attend")
    return {name: getattr(stand_ins, name) for name in names}


class Kernels:
    """The functions, over one CuPy."""

    def __init__(self, cupy):
        code = SOURCE.read_text(encoding="utf-8")
        module = cache(lambda dtype: cupy.RawModule(code=code, options=options(dtype)))
        self._kernel = cache(lambda name, dtype: module(dtype).get_function(name))

    def _launch(self, name, like, blocks, threads, arguments, more=0):
        """Launch the kernel for the dtype of `like`.

        A block's shared memory holds a sum for each thread, and as many `more`.
        """
        shared_mem = (threads + more) * total_dtype(like).itemsize
        self._kernel(name, str(like.dtype))(blocks, (threads,), arguments, shared_mem=shared_mem)

    def _each(self, name, result, *arguments):
        """Launch a kernel with one thread for each number of a result."""
        blocks = -(-result.size // THREADS)
        self._launch(name, result, (blocks,), THREADS, (*arguments, result.size))
        return result

    def layer_norm(self, x, scale, shift, eps):
        """`functions.layer_norm` in one launch."""
        x, width = in_rows(x), x.shape[-1]
        result = np.empty_like(x)
        arguments = (x, scale, shift, result, width, float(eps))
        self._launch("layer_norm", x, (x.size // width,), THREADS, arguments)
        return result

    def gelu_new(self, x):
        """`functions.gelu_new` in one launch."""
        x = in_rows(x)
        result = np.empty_like(x)
        return self._each("gelu_new", result, x, result)

    def linear(self, x, weight, bias=None):
        """`functions.linear`: a product, and one launch that adds the bias in place."""
        products = plain_linear(x, weight)
        if bias is None:
            return products
        return self._each("linear", products, products, bias, len(bias))

    def linear_gelu(self, x, weight, bias):
        """`gelu_new(linear(x, weight, bias))`: a product and one launch."""
        products = plain_linear(x, weight)
        return self._each("linear_gelu", products, products, bias, len(bias))

    def add_linear(self, residual, x, weight, bias):
        """`residual + linear(x, weight, bias)`: a product and one launch."""
        products = plain_linear(x, weight)
        return self._each("add_linear", products, in_rows(residual), products, bias, len(bias))

    def append(self, keys, values, new_keys, new_values, lengths):
        """`cache.append` in one launch, if keys and values are laid out alike."""
        if keys.strides != values.strides or new_keys.strides != new_values.strides:
            return plain_append(keys, values, new_keys, new_values, lengths)
        batch, heads, new, head_dim = new_keys.shape
        for start in range(0, batch, MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            part = (keys[rows], values[rows], new_keys[rows], new_values[rows])
            sizes = (keys.shape[2], heads, new, head_dim)
            of_slot, of_new, size = strides(keys)[:3], strides(new_keys)[:3], part[2].size
            arguments = (*part, by_value(lengths[rows]), *sizes, *of_slot, *of_new, size)
            self._launch("append", keys, (-(-size // THREADS),), THREADS, arguments)
        return None

    def attend(self, queries, keys, values, positions, window, trace=silent):
        """`attention.attend`: for one query in a row in one launch, else in blocks of queries.

        A trace sees scores and pattern of the plain function, which one launch never stores.
        """
        if not isinstance(trace, Silent):
            return plain_attend(queries, keys, values, positions, window, trace)
        batch, _, new, head_dim = queries.shape
        seen = min(window, int(positions.max()) + 1)  # slots that one query sees, at most
        more = head_dim + seen  # of numbers in shared memory
        alone = (
            new == 1
            and head_dim <= ATTEND_THREADS
            and (ATTEND_THREADS + more) * total_dtype(queries).itemsize <= SHARED_BYTES
            and keys.strides == values.strides
        )
        mixed = np.empty_like(queries)
        positions = np.broadcast_to(positions, (batch, new))
        for start in range(0, batch, MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            part = (queries[rows], keys[rows], values[rows], mixed[rows], positions[rows], window)
            if alone:
                self._attend_alone(*part, more)
            else:
                self._attend_blocks(*part)
        return mixed

    def _attend_alone(self, queries, keys, values, mixed, positions, window, more):
        """Mix the values for one query in each row."""
        batch, heads, _, head_dim = queries.shape
        of_query, of_mixed, of_slot = strides(queries)[:2], strides(mixed)[:2], strides(keys)[:3]
        arrays = (queries, keys, values, mixed)
        sizes = (window, head_dim, *of_query, *of_mixed, *of_slot)
        arguments = (*arrays, by_value(positions[:, 0]), *sizes)
        self._launch("attend", queries, (heads, batch), ATTEND_THREADS, arguments, more)

    def _attend_blocks(self, queries, keys, values, mixed, positions, window):
        """Mix the values for any number of queries, as `attention.attend` does.

        Scores and pattern are kept in the type of sums: unscaled scores overflow float16.
        """
        batch, heads, new, _ = queries.shape
        total = total_dtype(queries)
        for start in range(0, new, QUERY_ROWS):
            rows = slice(start, min(start + QUERY_ROWS, new))
            firsts = positions[:, rows.start]
            first, last = int(firsts.min()), int(positions[:, rows.stop - 1].max())
            slots = slice(max(0, first - window + 1), min(last + 1, keys.shape[2]))

            # scores, which become the pattern, are [batch, heads, rows, slots]
            wide_keys = keys[:, :, slots].astype(total, copy=False)
            scores = queries[:, :, rows].astype(total, copy=False) @ wide_keys.swapaxes(-1, -2)
            sizes = (last, slots.start, slots.stop - slots.start, window)
            blocks = (rows.stop - rows.start, heads, batch)
            arguments = (scores, by_value(firsts), *sizes)
            self._launch("softmax", queries, blocks, THREADS, arguments)
            mixed[:, :, rows] = scores @ values[:, :, slots].astype(total, copy=False)


plain_linear = functions.linear.__wrapped__
plain_attend = attention.attend.__wrapped__
plain_append = kv_cache.append.__wrapped__


def total_dtype(array):
    """The dtype that sums over an array are kept in."""
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def in_rows(array):
    """Return an array laid out row by row, copied if need be."""
    return array if array.flags.c_contiguous else array.copy()


def strides(array):
    """Strides in numbers."""
    return [stride // array.itemsize for stride in array.strides]


def by_value(positions):
    """Return positions, a NumPy array [batch], as an argument that travels with a launch."""
    argument = np.zeros(1, POSITIONS)  # CuPy passes by value what has one element
    argument["of"][0, : len(positions)] = positions
    return argument
