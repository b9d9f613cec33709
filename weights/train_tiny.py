"""Train the embedded model: a small GPT-Neo that tells children's stories.

    python weights/train_tiny.py CORPUS --out weights/tiny --minutes 85
    python weights/train_tiny.py CORPUS --out weights/tiny --minutes 20 --resume
    python weights/train_tiny.py CORPUS --out weights/tiny --evaluate

CORPUS is a folder with the files named in `TRAINING` and `VALIDATION` (sources and licences:
weights/README.md). The result is a folder in Hugging Face's layout: config.json, model.safetensors,
tokenizer.json. Needs the extra `train`.

The length of the training is given in minutes, and the learning rate follows the clock, so that a
slower or a busy machine sees fewer tokens but still ends at a learning rate of zero.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: the machine stays usable

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F

TRAINING = ["tinystories_v1_train_part1_cased.txt", "tinystories_v1_train_part2_truecased.txt"]
VALIDATION = "tinystories_v1_valid_prefix.txt"
END = "<|endoftext|>"

VOCAB, WIDTH, LAYERS, HEADS, CONTEXT, WINDOW = 2048, 128, 6, 4, 512, 64

BATCH = 8  # rows of CONTEXT tokens
DROPOUT = 0.2
MATRIX_RATE, MATRIX_DECAY = 0.006, 0.1  # Muon: the matrices inside the blocks
OTHER_RATE, OTHER_DECAY = 2e-3, 0.1  # AdamW: embeddings (decayed), biases and norms (not decayed)
WARM_UP = 0.03  # share of the time in which the rate rises; then it falls in a straight line to 0


# The model, with the tensor names of Hugging Face's GPT-Neo


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self.attend(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


def attend_globally(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def attend_locally(q, k, v):
    """Each run of WINDOW queries against its own keys and those of the run before."""
    batch, heads, length, head_dim = q.shape
    padding = -length % WINDOW
    runs = (length + padding) // WINDOW

    def in_runs(a):
        return F.pad(a, (0, 0, 0, padding)).view(batch, heads, runs, WINDOW, head_dim)

    def with_run_before(a):
        a = in_runs(a)
        before = F.pad(a, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        return torch.cat([before, a], dim=3).flatten(1, 2)

    distance = torch.arange(WINDOW)[:, None] - torch.arange(-WINDOW, WINDOW)
    seen = ((distance >= 0) & (distance < WINDOW)).repeat(heads, runs, 1, 1)
    seen[:, 0, :, :WINDOW] = False  # there is no run before the first
    q, k, v = in_runs(q).flatten(1, 2), with_run_before(k), with_run_before(v)
    mask = seen.flatten(0, 1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return mixed.reshape(batch, heads, length + padding, head_dim)[:, :, :length]


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"attention": Attention(attend)})
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x):
        x = x + F.dropout(self.attn["attention"](self.ln_1(x)), DROPOUT, self.training)
        inner = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.mlp["c_proj"](inner), DROPOUT, self.training)


class GPTNeo(nn.Module):
    def __init__(self):
        super().__init__()
        layer_kinds = [attend_globally, attend_locally] * (LAYERS // 2)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(map(Block, layer_kinds)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("out_proj.weight", "c_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"].weight[: tokens.shape[1]]
        x = F.dropout(x, DROPOUT, self.training)
        for block in parts["h"]:
            x = block(x)
        return F.linear(parts["ln_f"](x), parts["wte"].weight)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Matrices of one shape are stacked, so that few large products do the work of many small ones.
    """

    def __init__(self, params, lr, weight_decay, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for (rows, columns), params in by_shape.items():
                for p in params:
                    state = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    state.lerp_(p.grad, 1 - group["momentum"])
                updates = torch.stack(
                    [p.grad.lerp(self.state[p]["momentum"], group["momentum"]) for p in params]
                )
                updates = orthogonalized(updates) * max(1, rows / columns) ** 0.5
                for p, update in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def orthogonalized(g):
    """Push the singular values of each matrix towards one: five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = g.shape[1] > g.shape[2]
    x = g.mT if wide else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if wide else x


# Text


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def stories_of(corpus):
    texts = [(corpus / name).read_text(encoding="ascii") for name in TRAINING]
    return [story.strip() for text in texts for story in text.split(END) if story.strip()]


def random_batch(tokens, plain, starts, rng):
    """A quarter of the rows begin anywhere, a quarter with a story, so that position 0 looks like
    the start of one, and half of them come from text whose stories a line break alone separates, as
    in the validation text.
    """
    rows = [
        tokens[s : s + CONTEXT + 1]
        for s in (
            *rng.integers(0, len(tokens) - CONTEXT - 1, BATCH // 4),
            *rng.choice(starts, BATCH // 4),
        )
    ]
    rows += [
        plain[s : s + CONTEXT + 1] for s in rng.integers(0, len(plain) - CONTEXT - 1, BATCH // 2)
    ]
    rows = torch.from_numpy(np.stack(rows))
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def bits_per_byte(model, tokenizer, corpus, part=slice(None)):
    """Cross-entropy on the validation text, in bits per byte of that text.

    Rows of CONTEXT tokens that overlap by half: every token is scored once, with at least
    CONTEXT / 2 tokens before it (the first row's excepted).
    """
    text = (corpus / VALIDATION).read_text(encoding="ascii")[part]
    ids = torch.tensor(tokenizer.encode(text).ids)
    model.eval()
    nats, stride = 0.0, CONTEXT // 2
    for start in range(0, len(ids) - 1, stride):
        row = ids[start : start + CONTEXT + 1]
        logits = model(row[None, :-1])[0]
        losses = F.cross_entropy(logits, row[1:], reduction="none")
        nats += losses[0 if start == 0 else stride :].sum().item()
        if start + CONTEXT >= len(ids) - 1:
            break
    model.train()
    return nats / math.log(2) / len(text.encode())


# Training


def train(corpus, out, minutes, seed, resume):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    stories = stories_of(corpus)
    tokenizer = train_tokenizer(stories)
    end = tokenizer.token_to_id(END)
    encoded = [[*e.ids, end] for e in tokenizer.encode_batch(stories)]
    tokens = np.array([t for story in encoded for t in story])
    plain = np.array(tokenizer.encode("\n".join(stories)).ids)
    starts = np.cumsum([0] + [len(story) for story in encoded])[:-1]
    starts = starts[starts < len(tokens) - CONTEXT - 1]
    model = GPTNeo()
    if resume:
        model.load_state_dict(load_file(out / "model.safetensors"))
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(stories)} stories, {len(tokens)} tokens, {size} parameters", flush=True)

    blocks = dict(model.transformer["h"].named_parameters())
    matrices = [p for p in blocks.values() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    embeddings = [model.transformer["wte"].weight, model.transformer["wpe"].weight]
    groups = [
        {"params": embeddings, "weight_decay": OTHER_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers = [
        (Muon(matrices, MATRIX_RATE, MATRIX_DECAY), MATRIX_RATE),
        (torch.optim.AdamW(groups, OTHER_RATE, betas=(0.9, 0.98), fused=True), OTHER_RATE),
    ]

    begin, step, reported = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - begin) / (60 * minutes)) < 1:
        rate = min(done / WARM_UP, 1 - done)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        inputs, targets = random_batch(tokens, plain, starts, rng)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        step += 1
        if done - reported >= 0.05 or step == 100:
            reported = done
            save(model, tokenizer, out)
            seen = step * BATCH * CONTEXT
            bits = bits_per_byte(model, tokenizer, corpus, slice(300_000, 400_000))
            report = {
                "minutes": round(done * minutes, 1),
                "step": step,
                "tokens_seen": seen,
                "training_loss": round(loss.item(), 4),
                "bits_per_byte": round(bits, 4),  # of a part of the validation text
            }
            print(json.dumps(report), flush=True)
    save(model, tokenizer, out)
    print(f"{step} steps, {step * BATCH * CONTEXT} tokens seen", flush=True)
    print(f"{bits_per_byte(model, tokenizer, corpus):.4f} bits per byte", flush=True)


def save(model, tokenizer, out):
    """Write the folder that `transformers` and `minineo` open alike."""
    out.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "intermediate_size": None,
        "attention_types": [[["global", "local"], LAYERS // 2]],
        "window_size": WINDOW,
        "max_position_embeddings": CONTEXT,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def evaluate(corpus, folder):
    model = GPTNeo()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    print(f"{bits_per_byte(model, tokenizer, corpus):.4f} bits per byte")


def main():
    parser = argparse.ArgumentParser(description="Train or evaluate the embedded model.")
    parser.add_argument("corpus", type=Path, help="the folder with the text")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--minutes", type=float, default=85)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the model in --out")
    parser.add_argument("--evaluate", action="store_true", help="evaluate only, train nothing")
    args = parser.parse_args()
    if args.evaluate:
        evaluate(args.corpus, args.out)
    else:
        train(args.corpus, args.out, args.minutes, args.seed, args.resume)


if __name__ == "__main__":
    main()
