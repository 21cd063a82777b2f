"""One question, one answer: a prompt without a conversation around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvchat.chat.decoded import DecodedContext
from kvchat.chat.prefix import plan
from kvchat.engine.types import GenerationEvent, SamplingParams
from kvchat.models.message import Message

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel


def prompt_ids(llm: LanguageModel, text: str, *, system: str = "", raw: bool = False) -> list[int]:
    """Return the ids that ask `text`; nothing in it can become a control token.

    Args:
        llm: whose template and tokenizer to use.
        text: what the user says.
        system: system prompt, if any.
        raw: leave the chat template out; the model writes on from `text`.
    """
    tokenizer = llm.tokenizer
    segments: list[int | str] = [text]
    if not raw:
        messages = [Message("system", system)] if system else []
        segments = llm.template.render_segments([*messages, Message("user", text)], tokenizer)
    elif tokenizer.add_bos_default and tokenizer.bos_id is not None:
        segments = [tokenizer.bos_id, text]
    return plan(DecodedContext(tokenizer), segments).ids


def ask(
    llm: LanguageModel, text: str, params: SamplingParams, *, system: str = "", raw: bool = False
) -> Iterator[GenerationEvent]:
    """Ask once and yield the engine's events; arguments are those of `prompt_ids`.

    Raises:
        ContextOverflowError: at the first event, if the prompt leaves no room to reply.
        KvchatError: another failure.
    """
    ids = prompt_ids(llm, text, system=system, raw=raw)
    stream = llm.tokenizer.stream_decoder(continues=raw)
    return llm.engine.generate(ids, lambda: params, stream)
