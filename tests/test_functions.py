import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minineo.transformer.functions import gelu_new, layer_norm, linear, softmax

DTYPES = ["float32", "float64"]
numbers = st.floats(-50, 50, width=32)
matrices = arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=numbers)


def test_gelu_is_the_tanh_form():
    got = gelu_new(np.array([-2.0, -1, 0, 1, 2]))
    want = [-0.045402305912, -0.158808009392, 0, 0.841191990608, 1.954597694088]
    np.testing.assert_allclose(got, want, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_has_its_limits_at_both_ends_without_a_warning(dtype):
    x = np.array([-1e4, -50, -11, 11, 50, 1e4], dtype)
    np.testing.assert_allclose(gelu_new(x), [0, 0, 0, 11, 50, 1e4], atol=1e-6)


@given(matrices)
def test_softmax_gives_positive_shares_that_add_up_to_one(scores):
    shares = softmax(scores)
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    want = [[math.exp(s - max(row)) for s in row] for row in scores.tolist()]
    want = [[e / sum(row) for e in row] for row in want]
    np.testing.assert_allclose(shares, want, rtol=1e-4, atol=1e-30)


def test_softmax_of_huge_scores_does_not_overflow():
    np.testing.assert_array_equal(softmax(np.float32([[3e38, 3e38, 0]])), [[0.5, 0.5, 0]])


@given(matrices)
def test_layer_norm_has_mean_zero_and_variance_one_then_scale_and_shift(x):
    width = x.shape[-1]
    scale, shift = np.float32(np.arange(1, width + 1)), np.float32(np.arange(width))
    rows = x.astype("float64")
    deviation = np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    want = (rows - rows.mean(-1, keepdims=True)) / deviation * scale + shift
    np.testing.assert_allclose(layer_norm(x, scale, shift, 1e-5), want, rtol=1e-3, atol=1e-2)


def test_layer_norm_of_a_constant_vector_is_the_shift():
    x, shift = np.full((1, 8), 7.0), np.arange(8.0)
    np.testing.assert_array_equal(layer_norm(x, np.ones(8), shift, 1e-5), [shift])


def test_linear_multiplies_by_the_stored_matrix_transposed_and_adds_the_bias():
    x, weight = np.arange(6.0).reshape(1, 2, 3), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(linear(x, weight), np.einsum("bni,oi->bno", x, weight))
    np.testing.assert_array_equal(linear(x, weight, np.ones(4)), linear(x, weight) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_function_keeps_the_dtype_and_its_input(dtype):
    x, vector = np.linspace(-3, 3, 12, dtype=dtype).reshape(1, 3, 4), np.ones(4, dtype)
    before = x.copy()
    for result in (
        linear(x, np.ones((5, 4), dtype), np.ones(5, dtype)),
        layer_norm(x, vector, vector, 1e-5),
        gelu_new(x),
        softmax(x),
    ):
        assert result.dtype == dtype
    np.testing.assert_array_equal(x, before)
