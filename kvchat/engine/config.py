"""ModelConfig: everything that tells one Transformer from another, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Sources: RoFormer (arXiv 2104.09864); scaling as in transformers' `modeling_rope_utils`.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    divisors: tuple[float, ...] | None = None
    """Divides each inverse frequency, (head_dim / 2,): GGUF files carry llama3 scaling so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only Transformer."""

    family: str
    """Row of the table in `kvchat.models.families` it came from."""
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of the MLP's inner layer."""
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many keys, itself included, a position sees; empty when all layers see all."""
    tied_embeddings: bool = False

    def kv_elements_per_token(self) -> int:
        """Numbers stored in the KV cache for one token."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim
