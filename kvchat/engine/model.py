"""Transformer: one forward pass for every family, told apart by ModelConfig alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvchat.engine.config import ModelConfig
from kvchat.engine.kv_cache import KVCache
from kvchat.engine.layers import Block, RMSNorm, RotaryEmbedding
from kvchat.engine.linear import AnyEmbedding, AnyLinear
from kvchat.engine.ops import Ops, TorchOps


class Transformer(nn.Module):
    """A decoder-only Transformer that reads new tokens and remembers the old ones in a KVCache."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: AnyEmbedding,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: AnyLinear,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype  # of whatever is not quantised
        self.embedding = embedding  # read by rows; the head itself where the two are tied
        self.rotary = RotaryEmbedding(config)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        # On a CPU, torch's attention of one token is slower over bfloat16 than over float32.
        self.cache_dtype = torch.float32 if self.device.type == "cpu" else dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    def new_cache(self, max_seq_len: int | None = None) -> KVCache:
        """Return an empty cache for this model on its device."""
        return KVCache(
            self.config, dtype=self.cache_dtype, device=self.device, max_seq_len=max_seq_len
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        past_key_values: KVCache | None = None,
        start_pos: int = 0,
        *,
        all_logits: bool = False,
        check: Callable[[], None] | None = None,
    ) -> tuple[Tensor, None, KVCache]:
        """Run T new tokens after the `start_pos` ones that the cache holds.

        Args:
            input_ids: (1, T) token ids.
            past_key_values: the cache so far; None starts an empty one. It is extended in place.
            start_pos: how many positions the cache holds; must agree with it.
            all_logits: whether to return the logits of every new position, not of the last alone.
            check: called between layers; an exception from it leaves the cache as it was.

        Returns:
            Logits (1, T or 1, vocab_size) float32, no loss, the cache.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.numel():
            raise ValueError(f"input_ids must be (1, T), one sequence, not {(*input_ids.shape,)}")
        cache = self.new_cache() if past_key_values is None else past_key_values
        if start_pos != cache.length:
            raise ValueError(f"start_pos is {start_pos} but the cache holds {cache.length} tokens")
        T = input_ids.shape[1]
        cache.reserve(T)
        ops = TorchOps(input_ids[0], self.rotary(start_pos, T, self.device), cache)
        x = self.hidden(ops, check)
        cache.advance(T)
        if not all_logits:
            x = x[-1:]
        return self.logits(x, ops).float()[None], None, cache

    def hidden(self, ops: Ops, check: Callable[[], None] | None = None) -> Tensor:
        """The residual stream of the new positions after all layers, (T, dim) float32."""
        x = ops.embed(self.embedding)
        for block in self.blocks:
            if check is not None:
                check()
            x = block(x, ops)
        return x

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """The logits that follow each of (T, dim) positions, (T, vocab_size)."""
        return ops.linear(ops.rms_norm(x, self.norm), self.head)
