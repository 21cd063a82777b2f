"""kvchat: terminal chat for local language models.

    import kvchat
    llm = kvchat.load("smollm2")
    chat = kvchat.ChatSession(llm, system="Answer briefly.")
    for event in chat.send("Why is the sky blue?"):
        ...

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvchat.chat.session import ChatSession as ChatSession
    from kvchat.engine.text_generator import TextGenerator as TextGenerator
    from kvchat.engine.types import SamplingParams as SamplingParams
    from kvchat.models.load import LanguageModel as LanguageModel
    from kvchat.models.load import load as load

__version__ = "0.1.0"

_HOMES = {
    "ChatSession": "chat.session",
    "LanguageModel": "models.load",
    "SamplingParams": "engine.types",
    "TextGenerator": "engine.text_generator",
    "load": "models.load",
}

__all__ = [
    "ChatSession",
    "LanguageModel",
    "SamplingParams",
    "TextGenerator",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
