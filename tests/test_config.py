import pytest
from small import TINY, tiny_config

from minineo import Config, InputError


def test_global_layers_see_the_whole_context_and_local_ones_their_window():
    assert tiny_config().windows == (32, 4, 32, 4)


def test_layer_kinds_are_expanded_in_order():
    config = tiny_config(
        attention_types=[[["local"], 1], [["global", "local"], 1], [["global"], 1]]
    )
    assert config.windows == (4, 32, 4, 32)


def test_a_window_above_the_context_is_the_context():
    assert tiny_config(window_size=1000).windows == (32, 32, 32, 32)


def test_the_inner_width_is_four_times_the_width_unless_given():
    assert tiny_config().inner == 128
    assert tiny_config(intermediate_size=77).inner == 77


def test_fields_that_old_configs_carry_are_ignored():
    assert tiny_config(attention_layers=["global"] * 9, resid_dropout=0.5) == tiny_config()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": None}, "model_type is None"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"num_heads": 5}, "hidden_size 32 cannot be split into num_heads 5"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_layers": "4"}, "num_layers is '4'"),
        ({"num_layers": True}, "num_layers is True"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"window_size": 0}, "window_size is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"attention_types": [[["global"], 3]]}, "names 3 layers, num_layers 4"),
        ({"attention_types": [[["global", "sparse"], 2]]}, "'sparse'"),
        ({"attention_types": None}, "attention_types is None"),
        ({"attention_types": [["global", "local"]]}, "attention_types is"),
        ({"eos_token_id": 101}, "eos_token_id is 101"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0"),
        ({"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon is inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"attention_types": [[["global"], 10**12]]}, "more than 1000 layers"),
        ({"attention_types": [[[], 10**12], [["global"], 3]]}, "names 3 layers, num_layers 4"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, complaint):
    with pytest.raises(InputError, match=r"^[^\n]+$") as error:
        Config.from_dict(TINY | changes)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    "name", ["vocab_size", "max_position_embeddings", "hidden_size", "num_layers", "num_heads"]
)
def test_a_missing_field_is_named(name):
    with pytest.raises(InputError, match=f"{name} is None"):
        Config.from_dict({key: value for key, value in TINY.items() if key != name})
