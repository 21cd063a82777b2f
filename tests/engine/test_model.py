from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, tiny_model

from kvchat.engine.errors import Cancelled

SHAPES = [
    {},
    {"n_heads": 4, "n_kv_heads": 4},
    {"n_heads": 3, "n_kv_heads": 1},
    {"n_heads": 9, "n_kv_heads": 3},
    {"qk_norm": True},
    {"tied_embeddings": True},
    {"sliding_windows": (7, None)},
]


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_cached_equals_uncached(shape, chunk):
    model = tiny_model(1, **shape)
    tokens = ids(50)
    whole, _, _ = model(tokens, all_logits=True)
    cache = model.new_cache()
    parts = []
    for start in range(0, 50, chunk):
        logits, _, _ = model(tokens[:, start : start + chunk], cache, start, all_logits=True)
        parts.append(logits)
    assert cache.length == 50
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=0)


def test_only_the_last_logits_unless_asked():
    model = tiny_model()
    tokens = ids(9)
    last, loss, _ = model(tokens)
    whole, _, _ = model(tokens, all_logits=True)
    assert loss is None
    assert last.shape == (1, 1, VOCAB)
    torch.testing.assert_close(last[0, 0], whole[0, -1])


def test_truncate_then_continue_equals_fresh():
    model = tiny_model()
    a, b = ids(30), ids(20, seed=5)
    cache = model.new_cache()
    model(a, cache, 0)
    cache.truncate(11)
    warm, _, _ = model(b, cache, 11)
    cold, _, _ = model(torch.cat([a[:, :11], b], dim=1))
    torch.testing.assert_close(warm, cold, atol=1e-4, rtol=0)


def test_a_position_outside_the_window_has_no_influence():
    model = tiny_model(sliding_windows=(5, 5), n_layers=2)
    a = ids(40)
    b = a.clone()
    b[0, 0] = (b[0, 0] + 1) % VOCAB
    # Two layers of windows of five reach eight positions back.
    x, _, _ = model(a, all_logits=True)
    y, _, _ = model(b, all_logits=True)
    torch.testing.assert_close(x[0, 9:], y[0, 9:])
    assert not torch.allclose(x[0, 8], y[0, 8])


def test_a_check_that_raises_leaves_the_cache_as_it_was():
    model = tiny_model()
    cache = model.new_cache()
    model(ids(5), cache, 0)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        model(ids(6, seed=2), cache, 5, check=check)
    assert cache.length == 5
    warm, _, _ = model(ids(4, seed=3), cache, 5)
    cold, _, _ = model(torch.cat([ids(5), ids(4, seed=3)], dim=1))
    torch.testing.assert_close(warm, cold, atol=1e-4, rtol=0)


def test_a_position_that_disagrees_with_the_cache_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="start_pos is 3"):
        model(ids(2), model.new_cache(), 3)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 0), (1, 1, 3)])
def test_anything_but_one_sequence_is_refused(shape):
    with pytest.raises(ValueError, match="one sequence"):
        tiny_model()(torch.zeros(shape, dtype=torch.long))
