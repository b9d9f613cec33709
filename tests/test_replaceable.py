"""Functions that something else may stand in for."""

from threading import Thread

import numpy as np
import pytest

from minineo import InputError
from minineo.transformer.functions import gelu_new, softmax
from minineo.transformer.replaceable import replaced

X = np.array([-1.0, 0.5, 2.0])
RIGHT = gelu_new(X)


def returning(value):
    return lambda x: np.full_like(x, value)


def test_another_function_stands_in_inside_the_block_and_nowhere_else():
    with replaced(gelu_new=returning(7)):
        assert (gelu_new(X) == 7).all()
    np.testing.assert_array_equal(gelu_new(X), RIGHT)


def test_the_original_is_back_after_an_exception():
    with pytest.raises(RuntimeError), replaced(gelu_new=returning(7)):
        raise RuntimeError
    np.testing.assert_array_equal(gelu_new(X), RIGHT)


def test_blocks_nest_and_the_inner_one_goes_first():
    seven, eight = replaced(gelu_new=returning(7)), replaced(gelu_new=returning(8))
    with seven, replaced(layer_norm=lambda *inputs: inputs[0]):
        with eight:
            assert (gelu_new(X) == 8).all()
        assert (gelu_new(X) == 7).all()
    np.testing.assert_array_equal(gelu_new(X), RIGHT)


def test_it_holds_for_one_thread_alone():
    seen = []
    with replaced(gelu_new=returning(7)):
        thread = Thread(target=lambda: seen.append(gelu_new(X)))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(seen, [RIGHT])


@pytest.mark.parametrize("name", ["softmax", "forward", "gelu"])
def test_what_cannot_be_replaced_is_refused_and_what_can_is_named(name):
    can = "add_linear, append, attend, blocks, gelu_new, layer_norm, linear, linear_gelu"
    with (
        pytest.raises(InputError, match=f"^{name} cannot be replaced; {can} can$"),
        replaced(gelu_new=returning(7), **{name: softmax}),
    ):
        pass
    np.testing.assert_array_equal(gelu_new(X), RIGHT)


def test_a_replaceable_function_keeps_its_name_and_its_words():
    assert gelu_new.__name__ == "gelu_new"
    assert gelu_new.__doc__.startswith("The activation of GPT-2")
