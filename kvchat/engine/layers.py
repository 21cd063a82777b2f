"""The parts of a Transformer block: rotary embedding, attention, MLP.

The residual stream is float32 whatever the weights are: norms and additions in it are both faster
on a CPU and more exact than in bfloat16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvchat.engine.config import ModelConfig, RopeConfig
from kvchat.engine.kv_cache import GROWTH
from kvchat.engine.linear import AnyLinear
from kvchat.engine.ops import Ops


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())  # (dim,)
        self.weight: Tensor
        self.eps = eps


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of every pair of features, (head_dim / 2,) float64.

    The llama3 rule is Meta's: wavelengths beyond the old context are stretched by the factor,
    short ones are left alone, those between are blended.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv = rope.theta**-exponent
    if rope.divisors is not None:
        inv = inv / torch.tensor(rope.divisors, dtype=torch.float64)
    if rope.scaling == "linear":
        inv = inv / rope.factor
    elif rope.scaling == "llama3":
        turns = rope.original_max_seq_len * inv / (2 * math.pi)  # rotations in the old context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        inv = (1 - blend) * inv / rope.factor + blend * inv
    return inv


class RotaryEmbedding(nn.Module):
    """The table of rotations, grown with the longest position asked for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._inv = inverse_frequencies(config.rope, config.head_dim)
        self._table = torch.empty(0, 1, len(self._inv), dtype=torch.complex64)

    def forward(self, start: int, T: int, device: torch.device) -> Tensor:
        """Return the rotations of positions start … start + T - 1, (T, 1, head_dim / 2)."""
        end = start + T
        if end > len(self._table) or self._table.device != device:
            size = -(-max(end, len(self._table)) // GROWTH) * GROWTH * 2
            # Angles in float64: at position 100,000 float32 is off by a hundredth of a turn.
            angles = torch.outer(torch.arange(size, dtype=torch.float64), self._inv)
            table = torch.polar(torch.ones_like(angles), angles)
            self._table = table.to(torch.complex64).unsqueeze(1).to(device)
        return self._table[start:end]


class Attention(nn.Module):
    """Causal grouped-query self-attention over the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        wqkv: AnyLinear,
        wo: AnyLinear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        self.window = config.sliding_windows[layer] if config.sliding_windows else None
        self.wqkv = wqkv
        self.wo = wo
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Attend from (T, dim) new positions to all cached ones and each other; (T, dim)."""
        return ops.linear(ops.attend(ops.linear(x, self.wqkv), self), self.wo)


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, w_gate_up: AnyLinear, w_down: AnyLinear) -> None:
        super().__init__()
        self.w_gate_up = w_gate_up
        self.w_down = w_down

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Map (T, dim) to (T, dim)."""
        return ops.linear(ops.swiglu(ops.linear(x, self.w_gate_up)), self.w_down)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Map the residual stream (T, dim) float32 to its next state."""
        x = ops.add(x, self.attention(ops.rms_norm(x, self.attention_norm), ops))
        x = ops.add(x, self.mlp(ops.rms_norm(x, self.mlp_norm), ops))
        return x
