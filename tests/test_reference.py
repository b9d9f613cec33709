"""Every number against Hugging Face transformers."""

import numpy as np
import pytest
import torch
import transformers
from small import TINY, random_ids, random_tensor, run, tiny_config

from minineo import KVCache, Recompute, Trace, generate, load
from minineo.checkpoints.read import expected_shapes

SHAPES = {
    "tiny": {},
    "head_dim 4": {"hidden_size": 64, "num_heads": 16},
    "head_dim 16": {"hidden_size": 64, "num_heads": 4},
    "head_dim 64": {"hidden_size": 256, "num_heads": 4, "num_layers": 2},
    "head_dim 128": {"hidden_size": 256, "num_heads": 2, "num_layers": 2},
    "width 768": {"hidden_size": 768, "num_heads": 12, "num_layers": 2},
    "one head": {"num_heads": 1},
    "odd sizes": {"hidden_size": 21, "num_heads": 3, "intermediate_size": 35, "vocab_size": 103},
    "local first": {"num_layers": 3, "attention_types": [[["local"], 1], [["global"], 2]]},
    "all local": {"attention_types": [[["local"], 4]]},
    "all global": {"attention_types": [[["global"], 4]]},
    "untied": {"tie_word_embeddings": False},
    "window 1": {"window_size": 1},
    "window above the context": {"window_size": 99},
    "another eps": {"layer_norm_epsilon": 0.1},
    "long": {"max_position_embeddings": 300, "window_size": 70, "num_layers": 2},
}
for name in ("head_dim 64", "head_dim 128", "width 768", "long"):
    SHAPES[name]["attention_types"] = [[["global", "local"], 1]]


@pytest.fixture(scope="module", params=SHAPES)
def twins(request, tmp_path_factory):
    """The same random model, saved by transformers and opened by both."""
    fields = TINY | SHAPES[request.param]
    config = tiny_config(**SHAPES[request.param])
    reference = transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(**fields, attn_implementation="eager")
    ).eval()
    rng = np.random.default_rng(0)
    state = {
        name if name.startswith("lm_head") else f"transformer.{name}": torch.tensor(
            random_tensor(name, shape, config, rng), dtype=torch.float32
        )
        for name, shape in expected_shapes(config).items()
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith(("lm_head.weight", "attention.bias")) for name in missing)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return load(folder, device="cpu"), reference


def close(got, want):
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-4)


@torch.no_grad()
def ask(reference, tokens, **options):
    tokens = torch.tensor(tokens)
    positions = torch.arange(tokens.shape[1])[None]
    return reference(tokens, position_ids=positions, **options)


@pytest.mark.parametrize("length", [1, 2, 31, "all"])
def test_logits_agree_at_every_position_on_both_paths(twins, length):
    model, reference = twins
    length = model.config.context if length == "all" else length
    tokens = random_ids(model.config, 2, length)
    want = ask(reference, tokens).logits
    close(run(model, tokens, Recompute(), last_only=False), want)
    cache = KVCache(model.config, 2, length, like=model.weights.token_embedding)
    begun = (length + 1) // 2
    close(run(model, tokens[:, :begun], cache, last_only=False), want[:, :begun])
    for position in range(begun, length):
        fed = tokens[:, position : position + 1]
        close(run(model, fed, cache), want[:, position : position + 1])


def test_every_hidden_state_and_pattern_agrees(twins):
    model, reference = twins
    tokens, trace = random_ids(model.config, 2, model.config.context), Trace()
    run(model, tokens, Recompute(), last_only=False, trace=trace)
    want = ask(reference, tokens, output_hidden_states=True, output_attentions=True)
    assert len(want.hidden_states) == model.config.n_layers + 1
    assert len(want.attentions) == model.config.n_layers
    for layer in range(model.config.n_layers):
        close(trace[f"block{layer}.before"], want.hidden_states[layer])
        close(trace[f"block{layer}.pattern"], want.attentions[layer])
    close(trace["final"], want.hidden_states[-1])


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_greedy_text_agrees_with_generate(twins, path):
    model, reference = twins
    prompt = random_ids(model.config, 7).tolist()
    want = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 7),
        max_new_tokens=25,
        do_sample=False,
        pad_token_id=0,
    )[0, 7:].tolist()
    assert [step.token for step in generate(model, prompt, path=path, max_new_tokens=25)] == want


# The embedded model


@pytest.fixture(scope="module")
def embedded():
    from minineo.checkpoints.find import find

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        find("tiny"), dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(find("tiny"))
    return load("tiny", device="cpu"), reference.eval(), tokenizer


STORY = "One day, a boy named Tim found a big red box in the park. He wanted to open it."
TEXTS = [STORY, "", " ", "café ☃ 👩‍🚀 ,", "a\n\n  b\t<|endoftext|>c", "x" * 300]


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_tokenizer_agrees_and_gives_the_text_back(embedded, text):
    model, _, tokenizer = embedded
    ids = model.tokenizer.encode(text).ids
    assert ids == tokenizer(text)["input_ids"]
    assert model.decode(ids) == text


def test_the_embedded_model_agrees_over_its_whole_context_on_both_paths(embedded):
    model, reference, _ = embedded
    ids = model.encode(STORY)
    tokens = np.array([(ids * 40)[: model.config.context]])
    want = ask(reference, tokens, output_hidden_states=True, output_attentions=True)
    trace = Trace(["before", "pattern"])
    close(run(model, tokens, Recompute(), last_only=False, trace=trace), want.logits)
    for layer in range(model.config.n_layers):
        close(trace[f"block{layer}.before"], want.hidden_states[layer])
        close(trace[f"block{layer}.pattern"], want.attentions[layer])
    cache = KVCache(model.config, 1, model.config.context, like=model.weights.token_embedding)
    close(run(model, tokens[:, :400], cache, last_only=False), want.logits[:, :400])
    for position in range(400, model.config.context):
        fed = tokens[:, position : position + 1]
        close(run(model, fed, cache), want.logits[:, position : position + 1])


@pytest.mark.parametrize("path", ["cached", "naive"])
def test_the_embedded_model_tells_the_story_that_transformers_tells(embedded, path):
    model, reference, tokenizer = embedded
    inputs = tokenizer(STORY, return_tensors="pt")
    want = reference.generate(**inputs, max_new_tokens=120, do_sample=False, pad_token_id=0)
    steps = list(generate(model, STORY, path=path, max_new_tokens=120))
    assert [step.token for step in steps] == want[0, inputs["input_ids"].shape[1] :].tolist()
