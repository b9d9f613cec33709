"""A strict stand-in for CuPy: arrays that refuse what CuPy's refuse, and count what they do.

CuPy has no emulation on a CPU. A `CountingArray` lies over a NumPy array and obeys the rules of
`cupy.ndarray` as they stand in the source of CuPy 14.1.1 (`cupy/_core/core.pyx`, `_kernel.pyx`,
`_routines_linalg.pyx`, `_routines_indexing.pyx`). Where it differs it is stricter: what is not
written out here is refused, even where CuPy has it, and may be added when the model needs it.

`Counts` is the device: it takes arrays in, and keeps a list of all kernels launched. Bytes are
told apart by the tag of the array they belong to: "weights", "keys", "values" or "other". A view
has the tag of what it is a view of.
"""

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from minineo.transformer.trace import Silent

# Functions of `cupy` and their parameters; those behind the star are given by name alone. These
# tables were read off CuPy 14.1.1 (its wheel can be imported without a GPU) with
# `inspect.signature` and `hasattr`, and are the same for 14.2.0. `test_costs.py` holds them
# against the CuPy that is installed, where one is.
FUNCTIONS = {
    "arange": "start stop step dtype",
    "argmax": "a axis dtype out keepdims",
    "array": "obj dtype copy order subok ndmin * blocking",
    "asarray": "a dtype order * copy blocking",
    "concatenate": "tup axis out * dtype casting",
    "copyto": "dst src casting where",
    "empty": "shape dtype order",
    "empty_like": "prototype dtype order subok shape",
    "full": "shape fill_value dtype order",
    "full_like": "a fill_value dtype order subok shape",
    "max": "a axis out keepdims",
    "min": "a axis out keepdims",
    "ones": "shape dtype order",
    "stack": "tup axis out * dtype casting",
    "sum": "a axis dtype out keepdims",
    "where": "condition x y",
    "zeros": "shape dtype order",
    "zeros_like": "a dtype order subok shape",
}
CREATE = {"arange", "empty", "empty_like", "full", "full_like", "ones", "zeros", "zeros_like"}
LACKING_UFUNCS = {"isnat", "matvec", "spacing", "vecdot", "vecmat"}  # CuPy has all others
UFUNC_OPTIONS = {"casting", "dtype"}  # of `ufunc.__call__` in _kernel.pyx, besides out: no where
SCALARS = {bool, int, float, complex} | {np.dtype(code).type for code in "?bhilqBHILQefdFD"}


class Launch(NamedTuple):
    """A kernel that was launched."""

    name: str
    flops: int  # 2 m n k of a matrix product, 0 of all else
    read: Counter  # bytes by tag
    written: Counter  # bytes by tag


class Counts:
    """A device that counts: arrays are put on it, and all they do there is written down.

    Attributes
    ----------
    launches : list of Launch
        In order. A matrix product that copies an operand first launches a "copy" for it.
    ranges : list of str
        The names of ranges begun, for a profiler, and "" for each that ended.
    uploads, downloads : int
        How often an array was brought from NumPy, or to it.
    synchronisations : int
        How often the program waited for the device.
    """

    def __init__(self):
        self.clear()

    def clear(self):
        """Begin to count at 0."""
        self.launches, self.ranges = [], []
        self.uploads = self.downloads = self.synchronisations = 0

    def put(self, array, tag="other"):
        """Return a NumPy array, or what can become one, as an array on this device."""
        self.uploads += 1
        return CountingArray(np.array(array, order="K"), self, tag)

    def named(self, name):
        """Return the launches of one kind."""
        return [launch for launch in self.launches if launch.name == name]

    @property
    def flops(self):
        """Floating-point operations in matrix products."""
        return sum(launch.flops for launch in self.launches)

    def copied(self, tag):
        """Return the bytes of arrays of this tag that matrix products copied."""
        return sum(launch.read[tag] for launch in self.named("copy"))

    def wait(self):
        """Wait for all kernels."""
        self.synchronisations += 1

    @property
    def cupy(self):
        """What `device.py` needs of the module `cupy`, for this device."""
        stream = SimpleNamespace(synchronize=self.wait)
        nvtx = SimpleNamespace(
            RangePush=lambda name: self.ranges.append(name),
            RangePop=lambda: self.ranges.append(""),
        )
        cuda = SimpleNamespace(get_current_stream=lambda: stream, nvtx=nvtx)
        return SimpleNamespace(asarray=self.put, asnumpy=_asnumpy, cuda=cuda)

    def launch(self, name, inputs, output, flops=0):
        """Write down a kernel that reads each of these arrays once and writes one."""
        read = Counter()
        for array in inputs:
            read[array.tag] += array.nbytes
        self.launches.append(Launch(name, flops, read, Counter({output.tag: output.nbytes})))


class CountingArray(NDArrayOperatorsMixin):
    """An array that behaves as CuPy's does, and counts. Its operators are NumPy's ufuncs."""

    def __init__(self, data, counts, tag="other"):
        self._data, self.counts, self.tag = data, counts, tag

    shape = property(lambda self: self._data.shape)
    strides = property(lambda self: self._data.strides)
    ndim = property(lambda self: self._data.ndim)
    size = property(lambda self: self._data.size)
    dtype = property(lambda self: self._data.dtype)
    itemsize = property(lambda self: self._data.itemsize)
    nbytes = property(lambda self: self._data.nbytes)
    flags = property(lambda self: self._data.flags)
    T = property(lambda self: self._wrap("copy", self._data.T))

    # NumPy's protocols

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        out = options.pop("out", ())
        if method != "__call__" or ufunc.nout > 1 or ufunc.__name__ in LACKING_UFUNCS:
            return NotImplemented
        if not options.keys() <= UFUNC_OPTIONS:
            raise TypeError(f"Wrong arguments {options}")
        for value in (*inputs, *out):
            if not isinstance(value, CountingArray) and type(value) not in SCALARS:
                raise TypeError(f"Unsupported type {type(value)}")
        if ufunc is np.matmul:
            return self._matmul(*inputs, *out, **options)
        options["order"] = "C"  # NumPy would lay a new result out as the inputs are
        made = ufunc(*map(_data, inputs), out=_data(out) or None, **options)
        result = self._new(made, *out)
        self.counts.launch(ufunc.__name__, _arrays(inputs), result)
        return result

    def __array_function__(self, function, types, arguments, options):
        name = function.__name__
        known = all(issubclass(kind, (CountingArray, np.ndarray)) for kind in types)
        if function.__module__ != "numpy" or name not in FUNCTIONS or not known:
            return NotImplemented
        positional, _, by_name = FUNCTIONS[name].partition(" * ")
        unknown = options.keys() - {*positional.split(), *by_name.split()}
        if unknown or len(arguments) > len(positional.split()):
            raise TypeError(f"{name}() of cupy takes {FUNCTIONS[name]}, not {unknown or arguments}")
        if name in ("array", "asarray"):
            made = function(_data(arguments[0], host=True), *arguments[1:], **options)
            if isinstance(arguments[0], CountingArray):
                return arguments[0]._wrap("copy", made)
            return self.counts.put(made)
        arrays = list(_arrays([*arguments, *options.values()]))
        made = function(*map(_data, arguments), **{key: _data(options[key]) for key in options})
        if name == "copyto":
            target, *arrays = arrays
            self.counts.launch(name, arrays, target)
            return None
        result = self._new(made, *filter(None, [options.get("out")]))
        if name not in ("empty", "empty_like"):
            self.counts.launch(name, [] if name in CREATE else arrays, result)
        return result

    # methods, with the parameters that CuPy has for them

    def __getitem__(self, key):
        key, advanced = self._index(key)
        if not advanced:
            return CountingArray(self._data[key], self.counts, self.tag)
        taken = CountingArray(self._data[key].copy(), self.counts, self.tag)  # what is read of it
        result = self._new(taken._data)
        self.counts.launch("take", [taken], result)
        return result

    def __setitem__(self, key, value):
        if not isinstance(value, CountingArray) and np.ndim(value):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        key, _ = self._index(key)
        target = CountingArray(self._data[key], self.counts, self.tag)
        self._data[key] = _data(value)
        self.counts.launch("setitem", _arrays([value]), target)

    def __len__(self):
        return len(self._data)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        return f"CountingArray({self.shape}, {self.dtype}, {self.tag})"

    def reshape(self, *shape, order="C"):
        return self._wrap("copy", self._data.reshape(*shape, order=order))

    def swapaxes(self, axis1, axis2):
        return self._wrap("copy", self._data.swapaxes(axis1, axis2))

    def transpose(self, *axes):
        return self._wrap("copy", self._data.transpose(*axes))

    def copy(self, order="C"):
        return self._wrap("copy", self._data.copy(order=order))

    def astype(self, dtype, order="K", casting="unsafe", copy=True):
        return self._wrap("astype", self._data.astype(dtype, order, casting, copy=copy))

    def sum(self, axis=None, dtype=None, keepdims=False):
        return self._wrap("sum", self._data.sum(axis=axis, dtype=dtype, keepdims=keepdims))

    def max(self, axis=None, keepdims=False):
        return self._wrap("max", self._data.max(axis=axis, keepdims=keepdims))

    def min(self, axis=None, keepdims=False):
        return self._wrap("min", self._data.min(axis=axis, keepdims=keepdims))

    def argmax(self, axis=None, keepdims=False):
        return self._wrap("argmax", self._data.argmax(axis=axis, keepdims=keepdims))

    def fill(self, value):
        self[...] = value

    # what waits for the device

    def get(self):
        self.counts.downloads += 1
        self.counts.wait()
        return self._data.copy()

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __bool__(self):
        return bool(self.get())

    # helpers

    def _new(self, data, out=None):
        """Return a new array, of 0 dimensions where NumPy has a number, or `out`."""
        return CountingArray(np.asarray(data), self.counts) if out is None else out

    def _wrap(self, name, data):
        """Return a view of this array, or else the result of a kernel that has read it."""
        if np.may_share_memory(data, self._data):
            return CountingArray(data, self.counts, self.tag)
        result = self._new(data)
        self.counts.launch(name, [self], result)
        return result

    def _index(self, key):
        """Return a key for NumPy's array that always gives an array, and whether that is new.

        Arrays of NumPy and lists may index: they are uploaded. A mask has to be counted first.
        """
        parts = key if isinstance(key, tuple) else (key,)
        arrays = [part for part in parts if isinstance(part, (CountingArray, np.ndarray, list))]
        self.counts.uploads += sum(not isinstance(part, CountingArray) for part in arrays)
        if any(np.asarray(_data(part, host=True)).dtype == bool for part in arrays):
            self.counts.wait()
        end = () if any(part is Ellipsis for part in parts) else (...,)
        return (*(_data(part, host=True) for part in parts), *end), bool(arrays)

    def _matmul(self, a, b, out=None, **options):
        """Multiply, and copy what `matmul` of _routines_linalg.pyx copies.

        With more than two dimensions these are operands that are not laid out row by row, those
        in float16, and a result whose place is not laid out row by row. With two, an operand
        may also be laid out column by column.
        """
        batched = max(a.ndim, b.ndim) > 2
        for operand in (a, b):
            flags = operand.flags
            fits = flags.c_contiguous or (flags.f_contiguous and not batched)
            if not fits or (batched and operand.dtype == np.float16):
                self.counts.launch("copy", [operand], self._new(operand._data))
        result = self._new(np.matmul(a._data, b._data, out=_data(out), order="C", **options), out)
        self.counts.launch("matmul", [a, b], result, flops=2 * result.size * a.shape[-1])
        if not result.flags.c_contiguous:
            self.counts.launch("copy", [self._new(result._data)], result)
        return result


def _asnumpy(array):
    return array.get() if isinstance(array, CountingArray) else np.asarray(array)


def _data(value, host=False):
    """Return what NumPy shall compute with in place of an argument; arrays of NumPy if `host`."""
    if isinstance(value, CountingArray):
        return value._data
    if isinstance(value, np.ndarray) and not host:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (list, tuple)):
        return type(value)(_data(each, host) for each in value)
    return value


def _arrays(arguments):
    """Find the arrays in a function's arguments."""
    for value in arguments:
        if isinstance(value, CountingArray):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _arrays(value)


# a model on such a device


def put_weights(weights, counts):
    """Return weights, or a part of them, on the device, tagged."""
    if isinstance(weights, tuple):
        make = getattr(type(weights), "_make", tuple)
        return make(put_weights(part, counts) for part in weights)
    return counts.put(weights, "weights")


class TagKeysAndValues(Silent):
    """A trace that tags the keys and values which each layer attends to, on either path."""

    def __call__(self, **values):
        for name in values.keys() & {"keys", "values"}:
            values[name].tag = name


def tag_cache(cache):
    """Tag the storage of a cache."""
    for name in ("keys", "values"):
        for array in getattr(cache, name):
            array.tag = name
    return cache
