"""When memory runs out: an error that says what to do, and a cache that is still exact."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from tiny import ByteStream, tiny_config, tiny_engine

from kvchat.engine.engine import Engine
from kvchat.engine.errors import OutOfMemoryError
from kvchat.engine.kv_cache import GROWTH, KVCache
from kvchat.engine.memory import memory_is_enough
from kvchat.engine.types import SamplingParams, TokenGenerated

GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=12)


def run(engine: Engine, ids: list[int]) -> list[int]:
    events = engine.generate(ids, lambda: GREEDY, ByteStream())
    return [event.id for event in events if isinstance(event, TokenGenerated)]


def gpu_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def machine_full() -> None:
    torch.empty(1 << 50)


def python_full() -> None:
    raise MemoryError


@pytest.mark.parametrize("fill", [gpu_full, machine_full, python_full])
def test_every_allocators_error_tells_the_remedy(fill) -> None:
    with pytest.raises(OutOfMemoryError, match="--ctx"), memory_is_enough():
        fill()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_is_enough():
        raise RuntimeError("shapes do not match")


class Scarce:
    """Fails one allocation of a tensor's `new_empty`, the nth from now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.calls = count()
        real = torch.Tensor.new_empty

        def new_empty(*args, **kwargs):
            if next(self.calls) == nth:
                gpu_full()
            return real(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.parametrize("nth", range(4))
def test_a_cache_that_could_not_grow_everywhere_grows_later(
    monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    config = tiny_config()
    cache = KVCache(config, max_seq_len=4 * GROWTH)
    Scarce(monkeypatch, nth)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(8)
    assert cache.length == 0
    cache.reserve(8)
    k = torch.ones(config.n_kv_heads, 8, config.head_dim)
    for layer in range(config.n_layers):
        keys, values = cache.append(layer, k, k)
        assert keys.shape == values.shape == k.shape


@pytest.mark.parametrize("nth", range(4))
def test_an_engine_goes_on_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    ids = list(range(GROWTH - 5))
    expected = run(tiny_engine(), ids)
    engine = tiny_engine()
    list(engine.prefill(ids))
    Scarce(monkeypatch, nth)
    held = []
    with pytest.raises(OutOfMemoryError):  # in decoding, when the cache has to grow
        for event in engine.generate(ids, lambda: GREEDY, ByteStream()):
            held += [event.id] if isinstance(event, TokenGenerated) else []
    assert held == expected[: len(held)]
    assert len(engine.ids) == engine._context.cache.length == GROWTH
    assert run(engine, [*ids, *held])[: 12 - len(held)] == expected[len(held) :]


def test_what_cannot_be_stashed_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    ids = list(range(50))
    list(engine.prefill(ids))
    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "copy_from", lambda *_: machine_full())
        engine.truncate(20)
    assert (list(engine.ids), engine.stash_bytes) == (ids[:20], 0)
    assert run(engine, ids) == run(tiny_engine(), ids)


@pytest.fixture
def spoilt() -> Iterator[Engine]:
    """An engine whose keys and values of late positions are NaN, as after a fault."""
    engine = tiny_engine()
    weight = engine.model.blocks[0].attention.wqkv.weight
    sound = weight.clone()
    weight[:] = float("nan")
    list(engine.prefill(list(range(60))))
    engine.truncate(30)
    weight.copy_(sound)
    yield engine


def test_nothing_that_may_be_nan_is_kept(spoilt: Engine) -> None:
    from kvchat.engine.errors import GenerationError

    with pytest.raises(GenerationError, match="not a number"):
        run(spoilt, list(range(70)))
    assert len(spoilt.ids) == spoilt.stash_bytes == 0
    assert run(spoilt, list(range(70))) == run(tiny_engine(), list(range(70)))
