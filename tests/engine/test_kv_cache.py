from __future__ import annotations

import pytest
import torch
from tiny import tiny_config

from kvchat.engine import KVCache
from kvchat.engine.errors import ContextOverflowError


def fill(cache: KVCache, n: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache.reserve(n)
    for layer in range(len(cache.keys)):
        k = torch.randn(2, n, 8, generator=generator)
        cache.append(layer, k, k + 1)
    cache.advance(n)


def test_a_fresh_cache_takes_no_memory_for_the_window():
    cache = KVCache(tiny_config(max_seq_len=100_000))
    assert (cache.length, cache.nbytes) == (0, 0)
    fill(cache, 1)
    assert cache.capacity == 256
    assert cache.nbytes == 2 * 2 * 2 * 256 * 8 * 4


def test_growing_keeps_what_was_there():
    cache = KVCache(tiny_config(max_seq_len=5000))
    fill(cache, 200)
    before = [k[:, :200].clone() for k in cache.keys]
    fill(cache, 2000, seed=1)
    assert cache.length == 2200
    for old, new in zip(before, cache.keys, strict=True):
        assert torch.equal(old, new[:, :200])


def test_append_returns_old_and_new_but_counts_nothing_until_advance():
    cache = KVCache(tiny_config())
    fill(cache, 3)
    cache.reserve(2)
    k, _ = cache.append(0, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert k.shape == (2, 5, 8)
    assert cache.length == 3


def test_capacity_never_exceeds_the_context():
    cache = KVCache(tiny_config(max_seq_len=300))
    fill(cache, 290)
    assert cache.capacity == 300
    with pytest.raises(ContextOverflowError) as caught:
        cache.reserve(11)
    assert (caught.value.needed, caught.value.limit) == (301, 300)
    assert cache.length == 290


def test_truncate_forgets_from_n_on():
    cache = KVCache(tiny_config())
    fill(cache, 10)
    cache.truncate(4)
    assert cache.length == 4
    cache.truncate(9)
    assert cache.length == 4


def test_a_suffix_comes_back_as_it_was():
    cache = KVCache(tiny_config())
    fill(cache, 40)
    whole = [k[:, :40].clone() for k in cache.keys], [v[:, :40].clone() for v in cache.values]
    suffix = cache.copy_from(10)
    assert suffix.length == 30
    assert suffix.nbytes == 2 * 2 * 2 * 30 * 8 * 4
    cache.truncate(25)
    for tensor in cache.keys + cache.values:
        tensor[:, 25:] = 0
    cache.put_back(suffix, 37)
    assert cache.length == 37
    for layer in range(2):
        assert torch.equal(cache.keys[layer][:, :37], whole[0][layer][:, :37])
        assert torch.equal(cache.values[layer][:, :37], whole[1][layer][:, :37])


def test_a_suffix_is_refused_where_it_does_not_fit():
    cache = KVCache(tiny_config())
    fill(cache, 20)
    suffix = cache.copy_from(10)
    cache.truncate(5)
    with pytest.raises(ValueError, match="does not fit"):
        cache.put_back(suffix, 15)


def test_release_lets_go_of_the_memory():
    cache = KVCache(tiny_config())
    fill(cache, 10)
    cache.release()
    assert (cache.length, cache.capacity, cache.nbytes) == (0, 0, 0)
    fill(cache, 3)
    assert cache.length == 3
