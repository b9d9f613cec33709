"""The functions that a GPT-Neo is made of, besides attention.

They accept NumPy or CuPy arrays and keep the dtype they are given.
"""

import math

import numpy as np

from .replaceable import replaceable


def wide(x):
    """Return an array in float32 if it is in float16: sums outgrow that, which ends at 65,504."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


@replaceable
def linear(x, weight, bias=None):
    """Multiply every vector of `x` by a matrix: `x @ weightᵀ + bias`.

    Parameters
    ----------
    x : array [..., in]
    weight : array [out, in]
    bias : array [out], optional

    Returns
    -------
    array [..., out]
    """
    vectors = x.reshape(-1, x.shape[-1])  # one 2-D product reads the weight once for all vectors
    products = vectors @ weight.T
    if bias is not None:
        products += bias
    return products.reshape(*x.shape[:-1], weight.shape[0])


@replaceable
def layer_norm(x, scale, shift, eps):
    """Bring every vector of `x` to mean 0 and variance 1, then scale and shift it.

    Parameters
    ----------
    x : array [..., width]
    scale, shift : array [width]
    eps : float
        Added to the variance, so that a constant vector is not divided by zero.

    Returns
    -------
    array [..., width]

    References
    ----------
    Ba, Kiros, Hinton (2016), Layer Normalization, arXiv:1607.06450.
    """
    width = x.shape[-1]
    mean = wide(x).sum(axis=-1, keepdims=True) / width
    centered = x - mean
    variance = (centered * centered).sum(axis=-1, keepdims=True) / width
    normed = centered / np.sqrt(variance + eps) * scale + shift
    return normed.astype(x.dtype, copy=False)


@replaceable
@np.errstate(over="ignore")  # far below 0 the exp is inf, and x / inf is the right limit: 0
def gelu_new(x):
    """The activation of GPT-2 and GPT-Neo, of every number in `x`.

    It is defined as ``0.5 x (1 + tanh(u))`` with ``u = √(2/π) (x + 0.044715 x³)``. Since
    ``(1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))``, it is computed as ``x / (1 + exp(-2u))``:
    the same function, with one exp in place of the slower tanh.

    Parameters
    ----------
    x : array

    Returns
    -------
    array
        Of the shape of `x`.

    References
    ----------
    Hendrycks, Gimpel (2016), Gaussian Error Linear Units, arXiv:1606.08415, the tanh form.
    """
    a = -2 * math.sqrt(2 / math.pi)  # a Python float: NumPy's would turn float32 into float64
    y = x * x  # y goes through the steps in place: one array is made instead of six
    y *= 0.044715 * a
    y += a
    y *= x  # -2u = a (x + 0.044715 x³)
    np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


@replaceable
def linear_gelu(x, weight, bias):
    """Multiply every vector by a matrix, and keep what the activation lets through.

    Parameters and result are those of `linear`. This function and `add_linear` have names of
    their own because a GPU adds the bias and does what follows at once.
    """
    return gelu_new(linear(x, weight, bias))


@replaceable
def add_linear(residual, x, weight, bias):
    """Multiply every vector by a matrix, and add the result to the residual [..., out]."""
    return residual + linear(x, weight, bias)


def softmax(scores):
    """Turn every row of scores into shares that are positive and add up to 1.

    Parameters
    ----------
    scores : array [..., all]

    Returns
    -------
    array [..., all]
        ``exp(score) / Σ exp(scores)``. The row's largest score is subtracted first, which
        changes nothing but keeps exp from overflowing.
    """
    shares = scores - scores.max(axis=-1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares
