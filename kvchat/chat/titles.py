"""A chat's title by the model, written in idle time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvchat.chat.changes import title_of
from kvchat.chat.plain_text import one_line
from kvchat.chat.prompt import PromptBuilder
from kvchat.chat.session import ChatSession
from kvchat.engine.token_ids import common_prefix
from kvchat.engine.types import GenerationEvent, GenerationFinished, SamplingParams, TokenGenerated

REQUEST = (
    "Give this conversation a short title: at most six words, in the language of the "
    "conversation. Answer with the title alone."
)
_PARAMS = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=32, stop=("\n\n",))
_NAMED = re.compile(r"^(?:title|titel|titre|título|标题|タイトル)\s*[::]\s*", re.IGNORECASE)
_SIGNS = "\"'“”„«»‘’「」『』*_#`~ \t"
"""What models put around a title, besides a full stop."""


def suggest_title(session: ChatSession) -> Iterator[GenerationEvent | str]:
    """Have the model write a title for a conversation that ends with a reply.

    It is asked for greedily in a turn that is in no tree. Afterwards the cache holds what it held
    before; where the request did not simply follow that, the rest is in the stash.

    Yields the engine's events, and at the end the title, if something came of it. A cancel ends it
    without one.

    Raises:
        KvchatError: the model cannot be run.
    """
    conversation, engine, llm = session.conversation, session.engine, session.llm
    path = conversation.active_path()
    if not path or path[-1].reply is None:
        return
    held = list(engine.ids)
    prompts = PromptBuilder(conversation, llm.tokenizer, llm.template, thinking=False)
    ids = prompts.for_text(path[-1].id, REQUEST)
    assert _PARAMS.max_tokens is not None
    if len(ids) + _PARAMS.max_tokens > engine.max_seq_len:
        return
    splitter = prompts.thinking_splitter(ids)
    text, whole = "", False
    try:
        stream = llm.tokenizer.stream_decoder(continues=True)
        for event in engine.generate(ids, lambda: _PARAMS, stream):
            if isinstance(event, TokenGenerated | GenerationFinished):
                text += splitter.push(event.text)[1]
            if isinstance(event, GenerationFinished):
                whole = event.reason != "cancelled"
                text += splitter.flush()[1]
            yield event
    finally:
        engine.truncate(common_prefix(held, engine.ids))
    if whole and (title := plain_title(text)):
        yield title


def plain_title(text: str) -> str:
    """Return a title out of what a model wrote: its first line, bare, cut to a title's length."""
    line = next((line for line in text.splitlines() if line.strip(_SIGNS)), "")
    bare = _NAMED.sub("", line.strip(_SIGNS)).strip(_SIGNS)
    if bare.endswith((".", "。")) and not bare.endswith(".."):
        bare = bare[:-1].rstrip(_SIGNS)
    return title_of(one_line(bare))
