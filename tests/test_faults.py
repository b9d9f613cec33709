"""Real faults, put into a copy of the code: each must turn the suite red."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["functions", "attention", "config", "model", "cache", "paths_agree", "generate", "batch"]
SUITES = [SMALL, ["reference"]]  # the second takes seconds to start: only what passes the first
GPU = ["device", "float16", "costs"]  # what holds the rules of a GPU, first for faults named so
CORES = ["cores"]  # the same for passes that are shared out over the cores of a CPU

ATTENTION, CACHE, CONFIG, FUNCTIONS, MODEL = (
    f"transformer/{name}.py" for name in ("attention", "cache", "config", "functions", "model")
)
BATCH = "generation/batch.py"

# name: [(file, text, text in its place), ...]
FAULTS = {
    "cores: new keys and values overwrite those that another core still looks at": [
        ("cores.py", "keys, values = self._room[layer % 2]", "keys, values = self._room[0]"),
        ("cores.py", "*self._room[layer % 2]", "*self._room[0]"),
    ],
    "cores: later tokens are given the places of the first": [
        ("cores.py", "positions[:, share.part]\n", "positions\n"),
    ],
    "cores: every share multiplies on all cores": [
        ("cores.py", "    with one_core():\n", "    if True:\n"),
    ],
    "attention: window one too wide": [
        (
            ATTENTION,
            "first - window + 1), min(last + 1, all_slots))",
            "first - window), min(last + 1, all_slots))",
        ),
        (ATTENTION, "distance >= window", "distance > window"),
    ],
    "attention: window one too narrow": [
        (ATTENTION, "first - window + 1", "first - window + 2"),
        (ATTENTION, "distance >= window", "distance >= window - 1 + (window == 1)"),
    ],
    "attention: window measured from the chunk's first row": [
        (ATTENTION, "(distance >= window)", "(distance[:, :1] >= window)"),
    ],
    "attention: window ignored where several queries are fed": [
        (ATTENTION, "(distance < 0) | (distance >= window)", "distance < 0"),
    ],
    "attention: window ignored where one query is fed": [
        (ATTENTION, "max(0, first - window + 1)", "0"),
    ],
    "attention: local layers run as global": [
        (CONFIG, 'context if kind == "global" else local_window', "context"),
    ],
    "attention: layer pattern hard-coded as alternating": [
        (
            CONFIG,
            'context if kind == "global" else local_window for kind in kinds',
            "local_window if layer % 2 else context for layer in range(n_layers)",
        ),
    ],
    "attention: default scale": [
        (
            ATTENTION,
            "wide(keys[:, :, slots]).swapaxes(-1, -2)",
            "wide(keys[:, :, slots]).swapaxes(-1, -2) / queries.shape[-1] ** 0.5",
        ),
    ],
    "attention: no causal mask in a prefill": [
        (ATTENTION, "(distance < 0) | (distance >= window)", "distance >= window"),
    ],
    "attention: mask not offset on a warm cache": [
        (
            ATTENTION,
            "positions[:, rows, None] - np.arange",
            "positions[:, rows, None] - positions[:, :1, None] - np.arange",
        ),
    ],
    "attention: nothing hidden from single tokens of a ragged batch": [
        (ATTENTION, "if first < last:", "if new > 1:"),
    ],
    "attention: rows of a second block hidden as those of the first": [
        (
            ATTENTION,
            "distance = positions[:, rows, None]",
            "distance = positions[:, : rows.stop - rows.start, None]",
        ),
    ],
    "attention: heads interleaved": [
        (
            ATTENTION,
            "x.reshape(batch, new, n_heads, width // n_heads).swapaxes(1, 2)",
            "x.reshape(batch, new, width // n_heads, n_heads).transpose(0, 3, 1, 2)",
        ),
    ],
    "attention: output bias forgotten": [
        (MODEL, "attn.output, attn.output_bias)", "attn.output, 0)"),
    ],
    "attention: query bias invented": [
        (ATTENTION, "linear(x, weights.query)", "linear(x, weights.query, weights.output_bias)"),
    ],
    "attention: width not divisible by heads accepted": [
        (CONFIG, "if width % n_heads:", "if False:"),
    ],
    "mlp: up bias forgotten": [
        (MODEL, "mlp.up, mlp.up_bias", "mlp.up, 0"),
    ],
    "mlp: down bias forgotten": [
        (MODEL, "mlp.down, mlp.down_bias", "mlp.down, 0"),
    ],
    "mlp: sigmoid form of GELU": [
        (FUNCTIONS, "    y *= 0.044715 * a\n    y += a\n", "    y[...] = -1.702\n"),
    ],
    "mlp: GELU in float64": [
        (FUNCTIONS, "math.sqrt(2 / math.pi)", "np.sqrt(2 / np.pi)"),
        (FUNCTIONS, "    y = x * x ", "    y = x * x * (-a / -a) "),
    ],
    "norm: eps hard-coded": [
        (FUNCTIONS, "variance + eps", "variance + 1e-5"),
    ],
    "norm: variance of n - 1": [
        (
            FUNCTIONS,
            "(centered * centered).sum(axis=-1, keepdims=True) / width",
            "(centered * centered).sum(axis=-1, keepdims=True) / max(1, width - 1)",
        ),
    ],
    "softmax: largest score not subtracted": [
        (FUNCTIONS, "scores - scores.max(axis=-1, keepdims=True)", "scores.copy()"),
    ],
    "model: last column taken for the last real token": [
        (MODEL, "residual[row, count - 1 : count]", "residual[row, -1:]"),
    ],
    "model: untied head ignored": [
        (MODEL, "weights.unembedding", "weights.token_embedding"),
    ],
    "model: one position too many": [
        (MODEL, "if needed > config.context:", "if needed > config.context + 1:"),
    ],
    "model: last position unusable": [
        (MODEL, "if needed > config.context:", "if needed >= config.context:"),
    ],
    "model: padding past the last position not stopped": [
        (MODEL, "np.minimum(positions, config.context - 1)", "positions"),
    ],
    "cache: first decode position one too far": [
        (
            MODEL,
            "cache.lengths[:, None] + np.arange",
            "cache.lengths[:, None] + (cache.lengths[:, None] > 0) + np.arange",
        ),
    ],
    "cache: a write skipped": [
        (
            CACHE,
            "        values[row, :, length : length + new] = new_values[row, :, :room]\n",
            "",
        ),
    ],
    "cache: slot 0 never written": [
        (
            CACHE,
            "        return keys[:, :, :filled]",
            "        keys[:, :, 0] = 0\n        return keys[:, :, :filled]",
        ),
    ],
    "cache: length one too large": [
        (
            CACHE,
            "self.lengths += counts ",
            "self.lengths += counts + 1 ",
        ),
    ],
    "cache: newest key dropped": [
        (
            CACHE,
            "keys[:, :, :filled], values[:, :, :filled]",
            "keys[:, :, : filled - 1], values[:, :, : filled - 1]",
        ),
    ],
    "cache: slots behind the end returned": [
        (
            CACHE,
            "return keys[:, :, :filled], values[:, :, :filled]",
            "return keys, values",
        ),
        (ATTENTION, "min(last + 1, all_slots)", "all_slots"),
    ],
    "cache: keys and values swapped": [
        (
            CACHE,
            "return keys[:, :, :filled], values[:, :, :filled]",
            "return values[:, :, :filled], keys[:, :, :filled]",
        ),
    ],
    "cache: one layer's storage for all": [
        (CACHE, "for _ in range(config.n_layers)]", "for _ in range(1)] * config.n_layers"),
    ],
    "cache: padding counted": [
        (MODEL, "cache.advance(counts)", "cache.advance(tokens.shape[1])"),
    ],
    "cache: all rows as long as the longest": [
        (CACHE, "new_values, self.lengths)", "new_values, 0 * self.lengths + self.length)"),
    ],
    "cache: capacity held against the new tokens alone": [
        (CACHE, "int((self.lengths + counts).max())", "int(counts.max())"),
    ],
    "cache: crop does nothing": [
        (CACHE, "np.minimum(self.lengths, length, out=self.lengths)", "pass"),
    ],
    "cache: crop lengthens shorter rows": [
        (CACHE, "np.minimum(self.lengths, length, out=self.lengths)", "self.lengths[:] = length"),
    ],
    "cache: a copy shares memory": [
        (
            CACHE,
            "twin.values = [change(array) for array in self.values]",
            "twin.values = [array[: len(change(array))] for array in self.values]",
        ),
    ],
    "cache: a second prompt finds the first one's": [
        (
            BATCH,
            "    return KVCache(model.config, rows, capacity, like=model.weights.token_embedding)",
            "    kept = KVCache(model.config, rows, model.config.context, "
            "like=model.weights.token_embedding)\n"
            "    return model.__dict__.setdefault(f'kept {rows}', kept)",
        ),
    ],
    "cache: one of another model accepted": [
        (CACHE, "if made_for != asked:", "if False:"),
    ],
    "cache: a dropped row stays as long as it was": [
        (CACHE, "        self.lengths[last] = 0\n", ""),
    ],
    "cache: the row that moves keeps the length of the one before it": [
        (CACHE, "        self.lengths[row] = length\n", ""),
    ],
    "cache: the first row moves into the gap": [
        (CACHE, "array[last, :, :length]", "array[0, :, :length]"),
    ],
    "cache: a row moves without its keys and values": [
        (CACHE, "        if row < last:\n", "        if False:\n"),
    ],
    "cache: one slot too few moves": [
        (
            CACHE,
            "array[row, :, :length] = array[last, :, :length]",
            "array[row, :, : length - 1] = array[last, :, : length - 1]",
        ),
    ],
    "cache: rows have lengths apart from the cache's": [
        (
            CACHE,
            "twin.lengths = change(self.lengths)",
            "twin.lengths = change(self.lengths).copy()",
        ),
    ],
    "cache: rows are counted from the first": [
        (CACHE, "array[start:stop]", "array[: stop - start]"),
    ],
    "generation: last position unusable": [
        (BATCH, "len(self.ids) > self.config.context", "len(self.ids) >= self.config.context"),
    ],
    "generation: one token too many": [
        (BATCH, "if self.made == self.request", "if self.made > self.request"),
    ],
    "generation: one token too few": [
        (BATCH, "if self.made == self.request", "if self.made + 1 >= self.request"),
    ],
    "generation: end of text not heeded": [
        (BATCH, "if self.request.stop_at_end and", "if not self.request.stop_at_end and"),
    ],
    "generation: the end of text adds text": [
        (BATCH, 'self.finish = "end"', 'self.finish, text = "end", self.stream.push(token)'),
    ],
    "generation: what is held back is lost": [
        (BATCH, "            text += self.stream.finish()\n", "            pass\n"),
    ],
    "generation: a stop string is not heeded": [
        (BATCH, "if self.stream.stopped is not None", "if False"),
    ],
    "generation: passes of a prompt in chunks not added up": [
        (BATCH, "row.fed += new", "row.fed = new"),
    ],
    "batch: counts forgotten": [
        (BATCH, "counts=counts, ", ""),
    ],
    "batch: padded on the left": [
        (BATCH, "row[: len(ids)] = ids", "row[len(row) - len(ids) :] = ids"),
    ],
    "batch: the logits of row 0 for all": [
        (BATCH, "logits[place, -1]", "logits[0, -1]"),
    ],
    "batch: the choice is told a neighbour's tokens": [
        (BATCH, "choose(logits, tuple(self.ids))", "choose(logits, tuple(self.told))"),
        (
            BATCH,
            "            steps = []\n",
            "            steps = []\n            for row, other in zip(rows, rows[1:] + rows[:1]):\n"
            "                row.told = other.ids\n",
        ),
    ],
    "batch: the row that leaves is not the one that ended": [
        (
            BATCH,
            "place, last = self._rows.index(row), len(self._rows) - 1",
            "place, last = 0, len(self._rows) - 1",
        ),
    ],
    "batch: rows move and the cache does not": [
        (BATCH, "        self.cache.drop(place, last)\n", "        self.cache.drop(last, last)\n"),
    ],
    "batch: a row that ended stays": [
        (BATCH, "                if row.finish:\n", "                if False:\n"),
    ],
    "batch: one row that ended ends all": [
        (
            BATCH,
            "                if row.finish:\n",
            "                if any(r.finish for r in rows):\n",
        ),
    ],
    "batch: steps in the order of the cache": [
        ("generation/generate.py", "sorted(steps, key=lambda step: step.row)", "steps"),
    ],
    "batch: padding taken for the end by its id": [
        (
            BATCH,
            "counts = self.model, [len(ids) for ids in new_ids]",
            "counts = self.model, [len(ids) - (ids[-1] == 0 < len(ids) - 1) for ids in new_ids]",
        ),
    ],
    "batch: a request that can never fit waits": [
        (BATCH, "if request.slots(self.model.config.context) > self.capacity:", "if False:"),
    ],
    "batch: the last slot of a row unusable": [
        (BATCH, "max(self.max_new_tokens, 1) - 1", "self.max_new_tokens"),
    ],
    "gpu: an array becomes one of NumPy": [
        (ATTENTION, "pattern = softmax(scores)", "pattern = softmax(np.asarray(scores))"),
    ],
    "gpu: an array of NumPy is left in the weights": [
        ("checkpoints/read.py", "        return put(array)\n", "        return array\n"),
    ],
    "gpu: a layer waits for the device": [
        (MODEL, "    middle = add", "    found.sum().item()\n    middle = add"),
    ],
    "gpu: a step copies the cache": [
        (CACHE, "return keys[:, :, :filled],", "return keys[:, :, :filled].copy(),"),
    ],
    "gpu: scores are summed in float16": [
        (
            ATTENTION,
            "wide(queries[:, :, rows]) @ wide(keys[:, :, slots])",
            "queries[:, :, rows] @ keys[:, :, slots]",
        ),
    ],
    "gpu: a mean is summed in float16": [(FUNCTIONS, "wide(x).sum(", "x.sum(")],
    "batch: what broke off is gone on with": [
        (
            BATCH,
            "        if self._broken:\n            raise InputError(BROKEN_OFF)\n        self._broken",
            "        self._broken",
        ),
    ],
    "batch: rows that have tokens take part while others wait": [
        (BATCH, "        start = waiting.index(True)\n", "        start = 0\n"),
    ],
}


def put_in(fault, package):
    """Put a fault into the code in a folder."""
    for file, old, new in fault:
        path = package / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def suite(tmp_path):
    """A function that runs the small suite on a copy of the code, with a fault in it."""
    for folder in ("minineo", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def run(suites, fault=()):
        put_in(fault, tmp_path / "minineo")
        for names in suites:
            files = [f"tests/test_{name}.py" for name in names]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            if done.returncode:
                return done
        return done

    return run


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_place_in_the_code(name, tmp_path):
    files = {file for file, _, _ in FAULTS[name]}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "minineo" / file, tmp_path / file)
    put_in(FAULTS[name], tmp_path)
    for file in files:
        compile((tmp_path / file).read_text(encoding="utf-8"), file, "exec")


@pytest.mark.slow
def test_without_a_fault_the_suite_is_green(suite):
    done = suite([*SUITES, GPU, CORES])
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_the_suite_red(suite, name):
    first = {"gpu": [GPU, SMALL], "cores": [CORES]}.get(name.split(":")[0], SUITES)
    done = suite(first, FAULTS[name])
    assert done.returncode == 1, done.stdout
    assert " failed" in done.stdout
