"""The engine: token ids in, token ids out. It knows no chat, no files and no screen.

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvchat.engine.config import ModelConfig as ModelConfig
    from kvchat.engine.engine import Engine as Engine
    from kvchat.engine.kv_cache import KVCache as KVCache
    from kvchat.engine.sampling import sample_next_token as sample_next_token
    from kvchat.engine.text_generator import TextGenerator as TextGenerator
    from kvchat.engine.types import SamplingParams as SamplingParams

_HOMES = {
    "Engine": "engine",
    "KVCache": "kv_cache",
    "ModelConfig": "config",
    "SamplingParams": "types",
    "TextGenerator": "text_generator",
    "sample_next_token": "sampling",
}

__all__ = [
    "Engine",
    "KVCache",
    "ModelConfig",
    "SamplingParams",
    "TextGenerator",
    "sample_next_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
