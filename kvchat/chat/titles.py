"""A chat's title by the model, written in idle time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvchat.chat.changes import TITLE_LENGTH
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

_WORD = re.compile(r"\w+")
_IN_A_ROW = 3
"""So many words of the request are no accident."""


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
    """Return the title that a model wrote, bare; "" if it is none.

    Small models go on after it, write what is no title at all, or say again what they were asked
    for. The chat's first words are better then.
    """
    lines = [line for line in text.splitlines() if line.strip(_SIGNS)]
    if len(lines) != 1:
        return ""
    bare = _NAMED.sub("", lines[0].strip(_SIGNS)).strip(_SIGNS)
    if bare.endswith((".", "。")) and not bare.endswith(".."):
        bare = bare[:-1].rstrip(_SIGNS)
    title = one_line(bare)
    return "" if len(title) > TITLE_LENGTH or _repeats_request(title) else title


def _repeats_request(title: str) -> bool:
    """Whether a title has some words in a row that the request has, or no others."""
    words, request = (_WORD.findall(each.casefold()) for each in (title, REQUEST))
    n = min(len(words), _IN_A_ROW)
    runs = {tuple(request[at : at + n]) for at in range(len(request) - n + 1)}
    return n > 0 and any(tuple(words[at : at + n]) in runs for at in range(len(words) - n + 1))
