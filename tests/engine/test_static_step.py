"""The step over memory that stays where it is, against the eager one: on a CPU, in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB, ByteStream, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvchat.engine.engine import Engine
from kvchat.engine.kv_cache import KVCache
from kvchat.engine.model import Transformer
from kvchat.engine.static_step import Recorder, StaticStep, Work, span_for
from kvchat.engine.step import DecodeStep, EagerStep
from kvchat.engine.types import SamplingParams, TokenGenerated

SHAPES = [
    {},
    {"qk_norm": True},
    {"sliding_windows": (4, None)},
    {"sliding_windows": (300, 7)},
    {"tied_embeddings": True},
    {"n_heads": 9, "n_kv_heads": 3},
    {"n_heads": 4, "n_kv_heads": 4},
]


class CallRecorder(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the same operators on the same memory, and nothing else.

    Whatever a step takes from anywhere but memory stays as it was when it was recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def tensors(out: Any) -> list[torch.Tensor]:
    outs = out if isinstance(out, tuple | list) else [out]
    return [t for t in outs if isinstance(t, torch.Tensor) and t.numel()]


class Records:
    """Records steps for `StaticStep`, and counts."""

    def __init__(self) -> None:
        self.places = 0
        self.spans = 0

    def __call__(self) -> Recorder:
        self.places += 1
        return self.record

    def record(self, work: Work) -> Work:
        self.spans += 1
        work()  # warm-up
        with CallRecorder() as recorder:
            work()
        return recorder.replay


def run(step: DecodeStep, cache: KVCache, ids: list[int]) -> torch.Tensor:
    return torch.stack([step(i, cache) for i in ids])


def random_ids(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("recorded", [False, True], ids=["as it is", "replayed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_eager_step(shape: dict[str, Any], recorded: bool) -> None:
    """Across spans and growing memory, and after a cut."""
    model = tiny_model(1, **shape)
    static = StaticStep(model, Records()) if recorded else StaticStep(model)
    ours, theirs = model.new_cache(), model.new_cache()
    ids = random_ids(500)
    assert_same(run(static, ours, ids[:300]), run(EagerStep(model), theirs, ids[:300]))
    for cache in (ours, theirs):
        cache.truncate(200)
    assert_same(run(static, ours, ids[300:]), run(EagerStep(model), theirs, ids[300:]))
    assert ours.length == theirs.length == 400


def test_what_was_recorded_is_replayed_while_the_cache_stays() -> None:
    model = tiny_model(max_seq_len=1024)
    records = Records()
    step, cache = StaticStep(model, records), model.new_cache()
    model(torch.tensor([random_ids(250)]), cache, 0)
    run(step, cache, random_ids(6))
    assert (records.places, records.spans) == (1, 1)
    run(step, cache, random_ids(10))
    assert (records.places, records.spans, cache.capacity) == (2, 2, 512)
    cache.truncate(10)
    run(step, cache, random_ids(20))
    assert (records.places, records.spans) == (2, 3)
    run(step, cache, random_ids(20))
    cache.truncate(0)
    run(step, cache, random_ids(20))
    assert (records.places, records.spans) == (2, 3)


def test_prefill_and_steps_take_turns() -> None:
    model = tiny_model(2, max_seq_len=2048, sliding_windows=(64, None))
    static, eager = StaticStep(model, Records()), EagerStep(model)
    ours, theirs = model.new_cache(), model.new_cache()
    for seed, n in enumerate((100, 400, 30, 700)):
        chunk = torch.tensor([random_ids(n, seed)])
        for cache in (ours, theirs):
            model(chunk, cache, cache.length)
        ids = random_ids(15, seed + 9)
        assert_same(run(static, ours, ids), run(eager, theirs, ids))


def test_two_caches_in_turn() -> None:
    model = tiny_model()
    step, eager = StaticStep(model, Records()), EagerStep(model)
    caches = [model.new_cache() for _ in range(4)]
    for token in random_ids(4):
        for ours, theirs in (caches[:2], caches[2:]):
            assert_same(step(token, ours)[None], eager(token, theirs)[None])


def test_memory_that_was_never_written_does_not_matter() -> None:
    model = tiny_model(max_seq_len=300)
    cache = model.new_cache()
    cache.reserve(1)
    for t in (*cache.keys, *cache.values):
        t.fill_(torch.nan)
    logits = run(StaticStep(model), cache, random_ids(3))
    assert_same(logits, run(EagerStep(model), model.new_cache(), random_ids(3)))


def test_logits_outlive_the_next_step() -> None:
    model = tiny_model()
    step, cache = StaticStep(model), model.new_cache()
    first = step(1, cache)
    kept = first.clone()
    step(2, cache)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000, 2048, 2049, 5000, 100_000])
def test_spans_cover_with_little_to_spare(n: int) -> None:
    span = span_for(n, 1 << 20)
    assert n <= span < n + max(256, n / 4 + 1)
    assert span % 256 == 0
    assert span_for(n, n) == n


def test_spans_are_few() -> None:
    assert len({span_for(n, 131_072) for n in range(1, 131_073)}) == 8 + 6 * 4


def reply(model: Transformer, step: DecodeStep) -> list[int]:
    engine = Engine(model, step=step, chunk_size=64)
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=120)
    events = engine.generate(random_ids(200), lambda: params, ByteStream())
    return [event.id for event in events if isinstance(event, TokenGenerated)]


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_same_greedy_text(shape: dict[str, Any]) -> None:
    model = tiny_model(3, **shape)
    assert reply(model, StaticStep(model, Records())) == reply(model, EagerStep(model))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "no room for a captured step"),
        (RuntimeError("operation not permitted\nwhen stream is capturing"), "not permitted)"),
        (AssertionError("driver"), "driver"),
    ],
)
def test_it_goes_on_eagerly_where_recording_fails(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()

    def refuse(work: Work) -> Work:
        work()
        raise error

    with caplog.at_level(logging.WARNING):
        ids = reply(model, StaticStep(model, lambda: refuse))
    assert ids == reply(model, EagerStep(model))
    assert len(caplog.records) == 1 and said in caplog.text
