"""A tiny Transformer with random weights, for tests of everything above it."""

from __future__ import annotations

from typing import Any

import torch

from kvchat.engine.config import ModelConfig
from kvchat.engine.engine import Engine
from kvchat.engine.model import Transformer
from kvchat.models.weights import ALL, build_transformer

VOCAB = 262
"""256 bytes and six control ids."""


def tiny_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "family": "llama",
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "hidden_dim": 48,
        "vocab_size": VOCAB,
        "max_seq_len": 512,
    }
    return ModelConfig(**{**sizes, **changes})


class RandomWeights:
    """A WeightSource that makes weights up, the same ones for the same seed."""

    pairs = True
    nbytes = 0

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        return not name.endswith("bias")

    def shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = {
            "wq": (q, c.dim),
            "wk": (kv, c.dim),
            "wv": (kv, c.dim),
            "wo": (c.dim, q),
            "w_gate": (c.hidden_dim, c.dim),
            "w_up": (c.hidden_dim, c.dim),
            "w_down": (c.dim, c.hidden_dim),
            "embedding": (c.vocab_size, c.dim),
            "head": (c.vocab_size, c.dim),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
        }
        kind = name.split(".")[-2]
        return shapes.get(kind, (c.dim,))

    def dense(self, name: str, dtype: torch.dtype, rows: slice = ALL) -> torch.Tensor:
        shape = self.shape(name)
        noise = torch.randn(shape, generator=self.generator)
        weight = 1 + 0.1 * noise if len(shape) == 1 else noise * 2 / shape[1] ** 0.5
        return weight.to(dtype)[rows]

    def blocks(self, name: str, rows: slice = ALL) -> None:
        return None

    def bits(self, name: str) -> float:
        return 32.0

    def release(self, name: str) -> int:
        return 0


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    source = RandomWeights(tiny_config(**changes), seed)
    device = torch.device("cpu")
    return build_transformer(source, dtype=torch.float32, quant="none", device=device)


def tiny_engine(seed: int = 0, *, chunk_size: int = 16, **settings: Any) -> Engine:
    return Engine(tiny_model(seed), chunk_size=chunk_size, **settings)


class ByteStream:
    """Text of ids that stand for Latin-1 characters: every id is one character."""

    def step(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""
