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
        everything = [*self.engine.ids, token_id]
        cache.truncate(0)
        input_ids = torch.tensor([everything], device=self.engine.model.device)
        logits, _, _ = self.engine.model(input_ids, cache, 0)
        following: Tensor = logits[0, -1]
        return following
