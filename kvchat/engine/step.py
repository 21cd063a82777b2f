"""How one decode step is executed.

Every executor is called with the last id and the cache, extends the cache by one position and
returns the logits of the next token. Eager execution is the reference that others must agree with.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvchat.engine.kv_cache import KVCache
from kvchat.engine.model import Transformer


class DecodeStep(Protocol):
    """Runs one token."""

    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Feed `token_id`; return the logits (vocab_size,) float32 that follow it."""


class EagerStep:
    """The forward pass as it is written, one torch call after another."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Feed one token through the model."""
        input_ids = torch.tensor([[token_id]], device=self.model.device)
        logits, _, _ = self.model(input_ids, cache, cache.length)
        last: Tensor = logits[0, -1]
        return last
