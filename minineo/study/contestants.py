"""What runs inside the process of one contestant of `bench`: load a model, then time passes.

Both contestants go through the same measures, and both make the logits of the last token alone.
Started as ``python -m minineo.study.contestants JOB``, where the job is JSON and names the
contestant, the model's folder and the measures. Each measure is answered by one line of JSON.
"""

import contextlib
import gc
import inspect
import json
import sys
from time import perf_counter

import numpy as np

from ..checkpoints import load
from ..transformer import InputError, KVCache, Recompute
from . import hardware

DECODE_STEPS = 16
BUDGET_SECONDS = 1.0  # long passes are timed twice, short ones up to ten times
LOGITS = 16  # that many are told to the other side, as a sample


class Minineo:
    """A model in NumPy.

    Parameters
    ----------
    folder : str
    """

    def __init__(self, folder):
        start = perf_counter()
        self.model = load(folder, device="cpu")
        self.load_seconds = perf_counter() - start
        self.vocab = self.model.config.vocab

    def tokens(self, ids):
        """Return token ids as a pass takes them."""
        return ids

    def prefill(self, tokens):
        """Return the logits of the last token, and a cache that holds all and has room for one."""
        weights, config = self.model.weights, self.model.config
        batch, new = tokens.shape
        cache = KVCache(config, batch, min(new + 1, config.context), like=weights.token_embedding)
        return self.model.forward(tokens, cache), cache

    def decode(self, tokens, cache):
        """Return the logits of one more token in each row."""
        return self.model.forward(tokens, cache)

    def undo(self, cache):
        """Take the newest token of each row out of the cache."""
        cache.crop(cache.length - 1)

    def naive(self, tokens):
        """Return the logits of the last token, with nothing remembered."""
        return self.model.forward(tokens, Recompute())


class Transformers:
    """The same model in Hugging Face's transformers, on all cores.

    Parameters
    ----------
    folder : str
    """

    def __init__(self, folder):
        import torch
        from transformers import DynamicCache, GPTNeoForCausalLM

        torch.set_num_threads(hardware.cores())
        start = perf_counter()
        self.model = GPTNeoForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        for parameter in self.model.parameters():  # off the mapped file, into memory
            parameter.data = parameter.data.clone()
        self.load_seconds = perf_counter() - start
        self.vocab = self.model.config.vocab_size
        self.torch, self.new_cache = torch, DynamicCache
        accepted = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"

    def tokens(self, ids):
        """Return token ids as a pass takes them."""
        return self.torch.tensor(ids)

    def prefill(self, tokens):
        """Return the logits of the last token, and a cache that holds all."""
        cache = self.new_cache(config=self.model.config)
        return self.decode(tokens, cache), cache

    def decode(self, tokens, cache):
        """Return the logits of one more token in each row."""
        return self._forward(tokens, use_cache=True, **{self.cache_name: cache})

    def undo(self, cache):
        """Take the newest token of each row out of the cache."""
        cache.crop(-1)

    def naive(self, tokens):
        """Return the logits of the last token, with nothing remembered."""
        return self._forward(tokens, use_cache=False)

    def _forward(self, tokens, **options):
        with self.torch.inference_mode():
            return self.model(tokens, logits_to_keep=1, **options).logits


CONTESTANTS = {"minineo": Minineo, "transformers": Transformers}


def tokens(contestant, length, batch=1):
    """Draw tokens [batch, length], the same in every process."""
    ids = np.random.default_rng(length).integers(contestant.vocab, size=(batch, length))
    return contestant.tokens(ids)


def seconds(run):
    """Return how long a call takes."""
    start = perf_counter()
    run()
    return perf_counter() - start


def repeat(run):
    """Warm up, then time a call several times."""
    run()
    samples = [seconds(run), seconds(run)]
    while len(samples) < 10 and sum(samples) < BUDGET_SECONDS:
        samples.append(seconds(run))
    return samples


def time_load(contestant):
    """Return how long it took to read the model, without imports."""
    return [contestant.load_seconds]


def time_cold(contestant, length):
    """Time the first pass of the process."""
    prompt = tokens(contestant, length)
    return [seconds(lambda: contestant.prefill(prompt))]


def sample_logits(contestant, length):
    """Return some of the last token's logits, to be held against the other contestant's."""
    logits, _ = contestant.prefill(tokens(contestant, length))
    return [float(value) for value in logits[0, -1][:: max(1, contestant.vocab // LOGITS)]]


def time_prefill(contestant, length):
    """Time passes over a prompt, into a new cache each."""
    prompt = tokens(contestant, length)
    return repeat(lambda: contestant.prefill(prompt))


def time_naive(contestant, length):
    """Time passes over a whole sequence with nothing remembered."""
    sequence = tokens(contestant, length)
    return repeat(lambda: contestant.naive(sequence))


def time_decode(contestant, depth, batch=1):
    """Time passes of one token in each row, every one with `depth` tokens in the cache."""
    _, cache = contestant.prefill(tokens(contestant, depth, batch))
    new = tokens(contestant, 1, batch)

    def step():
        taken = seconds(lambda: contestant.decode(new, cache))
        contestant.undo(cache)
        return taken

    return [step() for _ in range(2 + DECODE_STEPS)][2:]  # the first two warm up


def time_batch(contestant, batch, depth):
    """Time decode passes of several rows."""
    return time_decode(contestant, depth, batch)


def time_matvec(contestant):
    """Time products of one row with the same weights."""
    return hardware.matvec_seconds(contestant.model.weights, DECODE_STEPS)


def time_matmul(contestant, rows):
    """Time products of many rows with each layer's weights."""
    return hardware.matmul_seconds(contestant.model.weights, rows)


def share_granted(contestant):
    """Return the share of the processor time asked for that was given."""
    return [hardware.granted_share()]


def weigh_loaded(contestant):
    """Return the memory in use once the weights are there and all of them have been read."""
    contestant.naive(tokens(contestant, 1))
    gc.collect()
    return numbers(hardware.resident_bytes())


def weigh_peak(contestant, length):
    """Return the most memory in use during a prefill."""
    prompt = tokens(contestant, length)
    hardware.reset_peak()
    contestant.prefill(prompt)
    return numbers(hardware.peak_bytes())


def numbers(value):
    """Return what was measured as a list: empty where this machine does not tell."""
    return [] if value is None else [value]


MEASURES = {
    "load": time_load,
    "cold": time_cold,
    "logits": sample_logits,
    "prefill": time_prefill,
    "naive": time_naive,
    "decode": time_decode,
    "batch": time_batch,
    "matvec": time_matvec,
    "matmul": time_matmul,
    "granted": share_granted,
    "loaded": weigh_loaded,
    "peak": weigh_peak,
}


def main():
    """Do the job, one line of JSON for each measure."""
    job, answers = json.loads(sys.argv[1]), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints is no answer
        contestant = CONTESTANTS[job["contestant"]](job["folder"])
        for name, *sizes in job["measures"]:
            samples = MEASURES[name](contestant, *sizes)
            print(json.dumps({"measure": name, "sizes": sizes, "samples": samples}), file=answers)
            answers.flush()


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError, MemoryError, ImportError) as error:
        sys.exit(str(error) or "there is not enough memory")
