"""The naive loop, on purpose: read everything again for every token.

It exists to be measured. What it wastes is what the KV cache saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvchat.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from kvchat.engine.engine import Engine


class NaiveStep:
    """A decode step that forgets the cache and runs the whole text from its first token.

    Step n of a reply costs a forward pass over prompt + n tokens instead of over one. Use it by
    `engine.step = NaiveStep(engine)`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Read prompt and reply so far, and `token_id` after them."""
        model = self.engine.model
        input_ids = torch.tensor([[*self.engine.ids, token_id]], device=model.device)
        # In a cache of its own, so that a pass that is cancelled leaves the engine's as it was.
        fresh = model.new_cache(cache.max_seq_len)
        logits, _, _ = model(input_ids, fresh, 0, check=self.engine._check_cancelled)
        cache.keys, cache.values, cache.length = fresh.keys, fresh.values, fresh.length
        following: Tensor = logits[0, -1]
        return following
