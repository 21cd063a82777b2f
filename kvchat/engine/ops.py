"""The hot operations of the forward pass, as plain torch.

Each one is the reference a faster version has to agree with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of T new positions over S cached ones.

    `q` is (n_heads, T, head_dim), `k` and `v` (n_kv_heads, S, head_dim), `mask` (T, S) bool with
    True where a query sees a key, or None when every query sees every key. Returns (T, n_heads ×
    head_dim).
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
