"""KVCache: the keys and values of every position the model has seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat.engine.config import ModelConfig
from kvchat.engine.errors import ContextOverflowError

GROWTH = 256
"""Positions are allocated in multiples of this."""


@dataclass(frozen=True, slots=True)
class CacheSuffix:
    """Keys and values of positions from `start` on, copied out of a cache into host memory."""

    start: int
    keys: Tensor
    """(n_layers, n_kv_heads, n, head_dim)"""
    values: Tensor

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory it takes."""
        return 2 * self.keys.nbytes


class KVCache:
    """Keys and values per layer, (n_kv_heads, capacity, head_dim) each, of one sequence.

    Positions 0 to length - 1 are valid. A forward pass reserves room, appends to every layer and
    then advances once; until it has advanced, nothing counts. Capacity grows in chunks, so a
    fresh chat does not take the memory of the whole window.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_seq_len: int | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len or config.max_seq_len
        self.dtype = dtype
        self.device = torch.device(device)
        self.length = 0
        empty = (config.n_kv_heads, 0, config.head_dim)
        self.keys = [torch.empty(empty, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self.values = [torch.empty_like(k) for k in self.keys]

    @property
    def capacity(self) -> int:
        """Positions there is memory for, in every layer: these values are the last to grow."""
        return self.values[-1].shape[1]

    @property
    def planes(self) -> dict[str, list[Tensor]]:
        """What is held for every position, by name: a tensor per layer, positions on axis 1."""
        return {"keys": self.keys, "values": self.values}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.nbytes for layers in self.planes.values() for layer in layers)

    def reserve(self, n: int) -> None:
        """Make room for `n` more positions.

        Raises:
            ContextOverflowError: if they would not fit into max_seq_len.
        """
        needed = self.length + n
        if needed > self.max_seq_len:
            raise ContextOverflowError(
                f"{needed:,} tokens do not fit into the context of {self.max_seq_len:,}; "
                "shorten the text, or raise --ctx if the model allows it",
                needed=needed,
                limit=self.max_seq_len,
            )
        if needed <= self.capacity:
            return
        # Half as much again, so that a long chat is copied a few times and not hundreds of times.
        roomy = max(needed, self.length + self.length // 2)
        capacity = min(self.max_seq_len, -(-roomy // GROWTH) * GROWTH)
        for tensors in self.planes.values():
            for i, old in enumerate(tensors):
                new = old.new_empty(old.shape[0], capacity, old.shape[2])
                new[:, : self.length] = old[:, : self.length]
                tensors[i] = new

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new positions of one layer and return all its keys and values with them.

        `k` and `v` are (n_kv_heads, T, head_dim); returns views (n_kv_heads, length + T,
        head_dim). Room must have been reserved; the length does not change.
        """
        end = self.length + k.shape[1]
        self.keys[layer][:, self.length : end] = k
        self.values[layer][:, self.length : end] = v
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def write(self, layer: int, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer at a position that is itself in memory, (1,); return all its memory.

        `k` and `v` are (n_kv_heads, 1, head_dim) of the cache's dtype; returns (n_kv_heads,
        capacity, head_dim). Room must have been reserved; the length does not change.
        """
        self.keys[layer].index_copy_(1, position, k)
        self.values[layer].index_copy_(1, position, v)
        return self.keys[layer], self.values[layer]

    def advance(self, n: int) -> None:
        """Count the `n` positions that every layer has appended."""
        self.length += n

    def truncate(self, n: int) -> None:
        """Forget all positions from `n` on."""
        self.length = min(self.length, max(n, 0))

    def release(self) -> None:
        """Forget all positions and let go of their memory, and of whatever is in it."""
        self.length = 0
        for tensors in self.planes.values():
            tensors[:] = [t.new_empty(t.shape[0], 0, t.shape[2]) for t in tensors]

    def copy_from(self, n: int) -> CacheSuffix:
        """Copy positions from `n` on to host memory."""
        keys = torch.stack([k[:, n : self.length] for k in self.keys]).cpu()
        values = torch.stack([v[:, n : self.length] for v in self.values]).cpu()
        return CacheSuffix(n, keys, values)

    @torch.inference_mode()
    def put_back(self, suffix: CacheSuffix, end: int) -> None:
        """Copy positions length … end - 1 of a suffix back in; it must begin at or before length.

        The caller answers for the positions before them being the ones the suffix was cut from.
        """
        if not suffix.start <= self.length <= end <= suffix.start + suffix.length:
            raise ValueError(
                f"suffix of {suffix.start}+{suffix.length} does not fit at {self.length}"
            )
        n = end - self.length
        self.reserve(n)
        here = slice(self.length, end)
        there = slice(self.length - suffix.start, end - suffix.start)
        for layer, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            k[:, here] = suffix.keys[layer][:, there].to(k.device)
            v[:, here] = suffix.values[layer][:, there].to(v.device)
        self.advance(n)
