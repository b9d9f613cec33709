"""A pass that is shared out over the cores of a CPU is the pass that one core makes."""

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import random_ids, random_model, tiny_config
from threadpoolctl import threadpool_limits

from minineo import KVCache, Recompute, Trace, cores, device, forward, load
from minineo.transformer.attention import attend
from minineo.transformer.replaceable import replaced
from minineo.transformer.trace import Silent

MODEL = random_model()
CONTEXT = MODEL.config.context


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shares may begin at every second token, so that short prompts have several."""
    monkeypatch.setattr(cores, "QUERY_ROWS", 2)


def shared(number):
    return replaced(blocks=partial(cores.shared_blocks, cores=number))


def threads():
    return len(sys._current_frames())


def ended_down_to(number):
    """Whether no more threads than these go on; one in the midst of a layer needs a moment."""
    for _ in range(200):
        if threads() <= number:
            return True
        time.sleep(0.05)
    return False


def passes(cache, chunks, counts=None, model=MODEL):
    """The logits of all tokens of passes, one after the other."""
    return [
        forward(chunk, model.weights, model.config, cache, counts=counts, last_only=False)
        for chunk in chunks
    ]


@given(
    st.sampled_from(["cached", "naive"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, CONTEXT // 2), min_size=1, max_size=2),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_shared_passes_say_what_one_core_says(path, number, batch, lengths, seed):
    chunks = [random_ids(MODEL.config, batch, length, seed=seed) for length in lengths]
    caches = [
        KVCache(MODEL.config, batch, CONTEXT, like=MODEL.weights.token_embedding)
        if path == "cached"
        else Recompute()
        for _ in range(2)
    ]
    alone = passes(caches[0], chunks)
    with shared(number):
        together = passes(caches[1], chunks)
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
    if path == "cached":
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
        for name in ("keys", "values"):
            for ours, theirs in zip(*(getattr(cache, name) for cache in caches), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_ragged_rows_can_be_shared(counts, number):
    tokens = random_ids(MODEL.config, len(counts), max(counts))
    results = []
    for sharing in (1, number):
        cache = KVCache(MODEL.config, len(counts), CONTEXT, like=MODEL.weights.token_embedding)
        with shared(sharing):
            (logits,) = passes(cache, [tokens], counts)
            (after,) = passes(cache, [tokens[:, :1]])  # the second pass begins at ragged lengths
        results.append(([row[:count] for row, count in zip(logits, counts, strict=True)], after))
    for ours, theirs in zip(*(rows for rows, _ in results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_core_that_is_ahead_leaves_the_keys_and_values_that_others_look_at(slow):
    """On the naive path nothing but the meeting holds them."""
    ids = random_ids(MODEL.config, 1, 16)
    (alone,) = passes(Recompute(), [ids])

    def late(queries, keys, values, positions, *rest):
        if (positions[0, 0] > 0) == slow:
            time.sleep(0.02)
        return attend.__wrapped__(queries, keys, values, positions, *rest)

    with shared(2), replaced(attend=late):
        (together,) = passes(Recompute(), [ids])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-10)


def test_each_core_multiplies_by_itself():
    """Threads of NumPy's own beside those of the shares would wait for one another."""
    seen = []

    def look(queries, *rest):
        seen.append((threading.get_ident(), one_thread()))
        return attend.__wrapped__(queries, *rest)

    with threadpool_limits(2), shared(2), replaced(attend=look):
        passes(Recompute(), [random_ids(MODEL.config, 1, 16)])
        assert not one_thread()
    layers = MODEL.config.n_layers
    assert len({thread for thread, _ in seen}) == 2
    assert [alone for _, alone in seen] == [True] * 2 * layers


def test_threads_of_a_program_leave_one_core_in_any_order():
    with threadpool_limits(2):
        first, second = cores.one_core(), cores.one_core()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert one_thread()
        second.__exit__(None, None, None)
        assert not one_thread()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", [0, 1])
def test_an_error_on_one_core_ends_the_pass_on_all(error, where):
    ids = random_ids(MODEL.config, 1, 16)
    cache = KVCache(MODEL.config, 1, CONTEXT, like=MODEL.weights.token_embedding)

    def broken(queries, keys, values, positions, *rest):
        if (positions[0, 0] > 0) == where:
            raise error("no more")
        return attend.__wrapped__(queries, keys, values, positions, *rest)

    before = threads()
    with pytest.raises(error, match="no more"), shared(3), replaced(attend=broken):
        passes(cache, [ids])
    assert ended_down_to(before)
    assert cache.length == 0  # as if the pass had not been


@given(st.integers(1, 600), st.integers(0, 400), st.integers(1, 8), st.sampled_from([2, 64]))
def test_shares_are_all_tokens_once_in_order_at_blocks_of_query_rows(new, first, number, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "QUERY_ROWS", rows)
        positions = np.arange(first, first + new)[None]
        parts = cores.shares(tiny_config(max_position_embeddings=1000), positions, number)
    assert 1 <= len(parts) <= number
    assert [i for part in parts for i in range(new)[part]] == list(range(new))
    assert all(part.start % rows == 0 and part.start < part.stop for part in parts)


class Full(KVCache):
    """A cache for which there is not enough memory in the third layer."""

    def extend(self, layer, *new):
        if layer == 2:
            raise MemoryError("full")
        return super().extend(layer, *new)


def test_an_error_of_the_cache_comes_through_as_it_is():
    for _ in range(20):
        cache = Full(MODEL.config, 1, CONTEXT, like=MODEL.weights.token_embedding)
        with pytest.raises(MemoryError, match="full"), shared(3):
            passes(cache, [random_ids(MODEL.config, 1, 16)])
        assert cache.length == 0


@pytest.mark.parametrize("kind", [KVCache, Full])
def test_a_pass_leaves_nothing_behind_that_holds_the_cache(kind):
    gc.collect()
    gc.disable()  # what only a collection frees would stay
    try:
        cache = kind(MODEL.config, 1, CONTEXT, like=MODEL.weights.token_embedding)
        held = weakref.ref(cache)
        with suppress(MemoryError), shared(3):
            passes(cache, [random_ids(MODEL.config, 1, 16)])
        del cache
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer sends signals here")
def test_ctrl_c_at_any_moment_ends_the_pass_and_nothing_hangs():
    ids = random_ids(MODEL.config, 1, 16)
    (right,) = passes(Recompute(), [ids])
    before, running = signal.signal(signal.SIGALRM, signal.default_int_handler), threads()
    ended = 0
    try:
        for moment in np.linspace(0.0001, 0.004, 200):
            with suppress(KeyboardInterrupt):
                with shared(2):
                    signal.setitimer(signal.ITIMER_REAL, moment)
                    passes(Recompute(), [ids])
                signal.setitimer(signal.ITIMER_REAL, 0)
                continue
            ended += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended > 10
    assert ended_down_to(running)
    with shared(2):
        (after,) = passes(Recompute(), [ids])
    np.testing.assert_allclose(after, right, rtol=0, atol=1e-10)


AT_THE_END = """
import atexit, sys, threading, numpy as np
from threadpoolctl import threadpool_limits
from minineo import Recompute, load
threadpool_limits(2)
model = load("tiny", device="cpu")
def work():
    print([model.forward(np.arange(300)[None], Recompute()).shape for _ in range(9)][-1])
"""


@pytest.mark.parametrize("how", ["threading.Thread(target=work).start()", "atexit.register(work)"])
def test_passes_at_the_end_of_a_program_are_made(how):
    done = subprocess.run([sys.executable, "-c", AT_THE_END + how], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(1, 1, 2048)\n", "")


def test_where_no_thread_can_begin_the_pass_is_made_in_one_piece(monkeypatch):
    ids = random_ids(MODEL.config, 1, 16)
    begun = []

    def begin(*thread):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(*thread)

    start, before = cores.start_new_thread, threads()
    (alone,) = passes(Recompute(), [ids])
    monkeypatch.setattr(cores, "start_new_thread", begin)
    with shared(3):
        (together,) = passes(Recompute(), [ids])
    assert len(begun) == 1
    assert ended_down_to(before)
    np.testing.assert_array_equal(together, alone)


def test_what_makes_only_one_share_multiplies_on_all_cores(monkeypatch):
    monkeypatch.setattr(cores, "one_core", None)  # not even looked at
    with shared(4):
        passes(Recompute(), [random_ids(MODEL.config, 8, 1)])


def test_a_trace_of_ones_own_sees_every_layer():
    class Layers(Silent):
        def __init__(self):
            self.names = []

        def within(self, name):
            self.names.append(name)
            return self

    layers = Layers()
    with threadpool_limits(2):
        load("tiny", device="cpu").forward(np.arange(300)[None], Recompute(), trace=layers)
    assert layers.names == [f"block{layer}" for layer in range(6)]


def test_later_tokens_see_more_so_that_their_share_is_smaller():
    config = tiny_config(max_position_embeddings=2000)
    sizes = [part.stop - part.start for part in cores.shares(config, np.arange(2000)[None], 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[-1]


def test_a_warm_cache_is_seen_when_shares_are_made():
    """Behind a long prompt all new tokens see about as much."""
    config = tiny_config(max_position_embeddings=10_000)
    parts = cores.shares(config, np.arange(9000, 9100)[None], 2)
    assert parts[0].stop in (50, 52)


@pytest.mark.parametrize(
    ("tokens", "threads", "expected"),
    [(255, 2, 1), (256, 2, 2), (256, 3, 1), (384, 3, 3), (10_000, 1, 1), (1, 1, 1)],
)
def test_cores_share_a_pass_only_if_each_gets_enough(tokens, threads, expected):
    if sys.gettrace():
        pytest.skip("somebody looks on")
    with threadpool_limits(threads):
        assert cores.sharers(tokens) == expected


def test_a_debugger_or_profiler_sees_everything_on_one_thread(monkeypatch):
    with threadpool_limits(2):
        assert cores.sharers(1000) == 2
        monkeypatch.setattr(sys, "getprofile", lambda: print)
        assert cores.sharers(1000) == 1
        monkeypatch.undo()
        monkeypatch.setattr(sys, "gettrace", lambda: print)
        assert cores.sharers(1000) == 1


@pytest.mark.parametrize("tool", [0, 2, None])
def test_the_debuggers_of_newer_pythons_are_seen(monkeypatch, tool):
    tools = SimpleNamespace(DEBUGGER_ID=0, PROFILER_ID=2, get_tool={tool: "tool"}.get)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)
    assert cores.watched() is (tool is not None)


def calls(monkeypatch, model, ids, **options):
    """How often a pass was shared out; NumPy's threads are as before."""
    shared_out = []

    def counted(*args, **named):
        shared_out.append(named["cores"])
        assert model.config.width * model.config.inner > device.SMALL_MATRIX or one_thread()
        return cores.shared_blocks(*args, **named)

    monkeypatch.setattr(device, "shared_blocks", counted)
    with threadpool_limits(2):
        model.forward(ids, Recompute(), **options)
        assert not one_thread()
    return shared_out


def one_thread():
    return all(library.get_num_threads() == 1 for library in cores.blas())


def test_a_long_pass_of_a_loaded_model_is_shared_and_a_short_or_traced_one_is_not(monkeypatch):
    tiny = load("tiny", device="cpu")
    ids = random_ids(tiny.config, 1, 300)
    assert calls(monkeypatch, tiny, ids) == [2]
    assert calls(monkeypatch, tiny, ids[:, :255]) == []
    assert calls(monkeypatch, tiny, ids, trace=Trace(names=["after"])) == []
    with replaced(gelu_new=lambda x: x):
        assert calls(monkeypatch, tiny, ids) == []


def test_a_gpu_shares_nothing_out_over_the_cores_of_the_host():
    gpu = device.Device("cuda", cupy=object(), kernels={"attend": print})
    with threadpool_limits(2):
        assert gpu.stand_ins(1000) == {"attend": print}
        assert device.choose("cpu").stand_ins(1000).keys() == {"blocks"}


def test_the_embedded_model_says_the_same_shared_and_not():
    tiny = load("tiny", device="cpu")
    ids = random_ids(tiny.config, 1, 500)
    logits = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            logits.append(tiny.forward(ids, Recompute(), last_only=False))
    assert abs(logits[0] - logits[1]).max() < 1e-4
