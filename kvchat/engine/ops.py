"""The operations of the forward pass: what they are, and each of them as plain torch.

The model is written once, against `Ops`. `TorchOps` runs it as it goes and is the reference that
faster versions have to agree with. `StaticOps` runs one token in calls that do not depend on which
token it is or where, so that they can be captured once and replayed; a recorder (see
`kvchat.engine.step`) notes the model down instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.kv_cache import KVCache
from kvchat.engine.linear import multiplies_bfloat16

if TYPE_CHECKING:
    from kvchat.engine.layers import Attention, RMSNorm
    from kvchat.engine.linear import AnyEmbedding, AnyLinear


class Ops(Protocol):
    """The operations on the T rows of new positions; the residual stream is (T, dim) float32."""

    def embed(self, layer: AnyEmbedding) -> Tensor:
        """Look up the rows of the new ids; (T, dim)."""

    def rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Normalise each row."""

    def linear(self, x: Tensor, layer: AnyLinear) -> Tensor:
        """Multiply (T, in_features) to (T, out_features)."""

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Rotate queries and keys, remember keys and values, and attend; (T, n_heads × head_dim).

        `qkv` is (T, (n_heads + 2 × n_kv_heads) × head_dim).
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Gate (T, 2 × hidden_dim) to (T, hidden_dim)."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to the residual stream."""


class _RowOps:
    """What is done to each row by itself, wherever the ids and positions are."""

    __slots__ = ()

    ids: Tensor
    cis: Tensor
    cache: KVCache

    def embed(self, layer: AnyEmbedding) -> Tensor:
        """Look up the rows of the new ids."""
        return layer.rows(self.ids).float()

    def rms_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Normalise each row."""
        return rms_norm(x, norm.weight, norm.eps)

    def linear(self, x: Tensor, layer: AnyLinear) -> Tensor:
        """Multiply in whatever type the layer multiplies in."""
        out: Tensor = layer(x)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Gate the inner layer of an MLP."""
        return swiglu(gate_up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to the residual stream."""
        return x + y

    def heads(self, qkv: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (n_heads, T, head_dim), and keys and values (n_kv_heads, T, head_dim).

        Queries are of the type that attention is computed in, the others of the cache's.
        """
        a = attention
        heads = qkv.float().view(len(qkv), -1, a.head_dim)  # (T, n_heads + 2 n_kv, head_dim)
        qk, v = heads.split([a.n_heads + a.n_kv_heads, a.n_kv_heads], dim=1)
        if a.q_norm is not None and a.k_norm is not None:
            q, k = qk.split([a.n_heads, a.n_kv_heads], dim=1)
            qk = torch.cat([self.rms_norm(q, a.q_norm), self.rms_norm(k, a.k_norm)], dim=1)
        qk = rotate(qk, self.cis).transpose(0, 1)  # (n_heads + n_kv, T, head_dim)
        q, k = qk.split([a.n_heads, a.n_kv_heads])
        dtype = self.cache.dtype
        return q.to(attention_dtype(self.cache)), k.to(dtype), v.to(dtype).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TorchOps(_RowOps):
    """One torch call after another."""

    ids: Tensor
    """(T,)"""
    cis: Tensor
    """The rotations of the new positions, (T, 1, head_dim / 2) complex64."""
    cache: KVCache

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Rotate, append to the cache and attend, with a mask where it takes one."""
        a, cache, T = attention, self.cache, len(qkv)
        q, k, v = self.heads(qkv, a)
        keys, values = cache.append(a.layer, k, v)
        if a.window is not None and keys.shape[1] > a.window + T - 1:
            seen = a.window + T - 1
            keys, values = keys[:, -seen:], values[:, -seen:]
        mask = None
        if T > 1:
            mask = causal_mask(cache.length, T, keys.shape[1], a.window, qkv.device)
        return attention_of(q, keys.to(q.dtype), values.to(q.dtype), mask)


class StaticOps(_RowOps):
    """One token, by calls that stay the same: id and position are numbers in memory.

    Attention covers the cache's first `span` positions, whatever the position; a mask hides those
    that do not count. What is hidden has to be finite, as it is multiplied by zero.

    Args:
        ids: (1,) int64.
        position: (1,) int64, below `span`.
        rotations: of every position below `span`, (… , 1, head_dim / 2) complex64.
        cache: has room for `span` positions.
        span: how many positions to attend to.
    """

    __slots__ = ("_masks", "_place", "cache", "cis", "ids", "position")

    def __init__(
        self, ids: Tensor, position: Tensor, rotations: Tensor, cache: KVCache, span: int
    ) -> None:
        self.ids = ids
        self.position = position
        self.cis = rotations.index_select(0, position)  # (1, 1, head_dim / 2)
        self.cache = cache
        self._place = torch.arange(span, device=ids.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """Rotate, write to the cache and attend to the whole span behind a mask."""
        a, span = attention, len(self._place)
        q, k, v = self.heads(qkv, a)
        keys, values = self.cache.write(a.layer, self.position, k, v)
        keys, values = keys[:, :span].to(q.dtype), values[:, :span].to(q.dtype)
        return attention_of(q, keys, values, self._mask(a.window))

    def _mask(self, window: int | None) -> Tensor:
        """What is added to the scores, (1, span): 0 where a key is seen; made once for a token."""
        if window not in self._masks:
            seen = self._place <= self.position
            if window is not None:
                seen &= self._place > self.position - window
            hidden = torch.zeros(len(seen), dtype=attention_dtype(self.cache), device=seen.device)
            self._masks[window] = hidden.masked_fill_(~seen, -torch.inf)[None]
        return self._masks[window]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight` (arXiv 1910.07467).

    `x` is (..., dim) float32, `weight` (dim,); returns (..., dim) float32.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate consecutive pairs of features by position (arXiv 2104.09864).

    `x` is (T, heads, head_dim) float32, `cis` (T, 1, head_dim / 2) complex64; one complex
    product does a whole rotation. Weights whose file pairs feature i with i + head_dim / 2 are
    reordered when they are loaded, so that there is only this form.
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (T, heads, head_dim / 2)
    return torch.view_as_real(pairs * cis).flatten(-2)


def attention_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of T new positions over S cached ones.

    `q` is (n_heads, T, head_dim), `k` and `v` (n_kv_heads, S, head_dim), `mask` (T, S) bool with
    True where a query sees a key, or what is added to its score, or None when every query sees
    every key. Returns (T, n_heads × head_dim).
    """
    n_heads, T, head_dim = q.shape
    n_kv_heads = k.shape[0]
    if T == 1:
        # The heads that share a key head become rows of one query block: torch's own
        # grouped-query path repeats the keys instead, which costs several times as much.
        packed = q.view(1, n_kv_heads, n_heads // n_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(packed, k[None], v[None], attn_mask=mask)
        return out.reshape(1, n_heads * head_dim)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=n_heads != n_kv_heads
    )
    return out[0].transpose(0, 1).reshape(T, n_heads * head_dim)


def attention_dtype(cache: KVCache) -> torch.dtype:
    """Return the type that attention over a cache is computed in: one the device multiplies in."""
    if cache.device.type != "cpu" or (cache.dtype == torch.bfloat16 and multiplies_bfloat16()):
        return cache.dtype
    return torch.float32


def causal_mask(start: int, T: int, S: int, window: int | None, device: torch.device) -> Tensor:
    """Return the (T, S) bool mask of queries at start … start + T - 1 over the last S positions.

    torch's causal flag aligns top-left and so is wrong as soon as something is cached. A window
    of W shows a query W keys, itself included.
    """
    query = torch.arange(start, start + T, device=device)[:, None]
    key = torch.arange(start + T - S, start + T, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate an MLP's inner layer (arXiv 2002.05202): (T, 2 × hidden_dim) to (T, hidden_dim)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
