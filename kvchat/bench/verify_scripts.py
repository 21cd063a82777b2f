"""The chats that `kvchat verify` plays: together they do whatever can cut the cache.

One does what users do: stops, cut and continued replies, edits, branches, another system prompt.
One outgrows its context, and one is of a model that thinks and whose template forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvchat.chat.events import ChatEvent
from kvchat.chat.session import ChatSession
from kvchat.engine.engine import Engine
from kvchat.models.load import LanguageModel
from kvchat.models.template import ChatTemplate

REPLY_TOKENS = 12
SYSTEM = "Answer briefly."
COUNT = "Now count a little further."

THINKING_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""
"""ChatML that opens the reasoning of every reply, and leaves it out of all but the last."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something a user does that a reply comes of."""

    name: str
    events: Iterable[ChatEvent]
    """What the session yields for it; nothing has happened before it is iterated."""
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling settings that differ from greedy ones."""
    cancel_after: int | None = None
    """Tokens after which the user stops the reply; 0 is after the prefill."""


Script = Callable[[ChatSession], Iterator[Step]]


def scripts(llm: LanguageModel) -> Iterator[tuple[ChatSession, Script]]:
    """Yield chats with greedy settings and short replies, and what is done in each."""
    params = llm.defaults.updated(temperature=0.0, seed=0, max_tokens=REPLY_TOKENS)
    yield ChatSession(llm, SYSTEM, params=params), everyday
    template = ChatTemplate(
        THINKING_TEMPLATE,
        bos_token=llm.template.bos_token,
        eos_token=llm.template.eos_token,
    )
    yield ChatSession(replace(llm, template=template), SYSTEM, params=params), thoughtful
    alone = len(ChatSession(llm, SYSTEM).prompts.alone(COUNT))
    small = replace(llm, engine=_with_context(llm.engine, 4 * (alone + REPLY_TOKENS)))
    yield ChatSession(small, SYSTEM, params=params, overflow="drop-oldest"), crowded


def everyday(chat: ChatSession) -> Iterator[Step]:
    """Use a chat in every way that changes what is cached."""
    yield Step("first message", chat.send("What lives in the sea?"))
    first = chat.last_reply()
    yield Step("second message", chat.send("And in rivers?"))
    second = chat.last_reply()
    words = second.content[len(second.content) // 2 :][:4]
    stop = (words,) if words else ()
    yield Step("ended by a stop string", chat.regenerate(), {"stop": stop})
    yield Step("after the stop string", chat.send("Name two birds."), cancel_after=4)
    yield Step("stopped, continued", chat.continue_reply())
    chat.select(second.id)
    yield Step("back on a branch", chat.send("Why?"), {"max_tokens": 3})
    yield Step("cut short, continued", chat.continue_reply())
    yield Step("stopped at its beginning", chat.send("Are you sure?"), cancel_after=0)
    yield Step("regenerated, seeded", chat.regenerate(), {"temperature": 0.8, "seed": 7})
    yield Step("message edited", chat.edit(second.parent or "", "And in deserts?"))
    text = first.content
    for _ in chat.edit(first.id, text[: len(text) // 2] + " small crabs"):
        pass
    yield Step("reply edited, continued", chat.continue_reply())
    chat.set_system("You are a sailor. Answer briefly.")
    yield Step("system prompt changed", chat.send("Who are you?"))


def thoughtful(chat: ChatSession) -> Iterator[Step]:
    """Let a model think, and the template forget it once the chat has gone on."""
    yield Step("thinking", chat.send("Tell me a story about a fox."))
    for _ in chat.edit(chat.last_reply().id, "Once upon a time"):
        pass
    yield Step("answer written, continued", chat.continue_reply())
    yield Step("thinking again", chat.send("Tell me a story about a bear."), cancel_after=6)
    yield Step("thinking continued", chat.continue_reply())
    yield Step("thinking forgotten", chat.send("Tell me a story about a crab."))


def crowded(chat: ChatSession) -> Iterator[Step]:
    """Say more than the context holds, then go back to where all of it fits."""
    yield Step("small context", chat.send("Count from one."))
    first = chat.last_reply()
    while not chat.ledger[-1].dropped_turns:
        yield Step(f"small context, turn {len(chat.ledger) + 1}", chat.send(COUNT))
    yield Step("after turns were dropped", chat.send(COUNT))
    chat.select(first.id)
    chat.conversation.branch(first.id)
    yield Step("back before they were", chat.send(COUNT))


def _with_context(engine: Engine, tokens: int) -> Engine:
    """Return an engine that runs the same weights with another context."""
    small = Engine(
        engine.model,
        eog_ids=engine.eog_ids,
        max_seq_len=tokens,
        chunk_size=engine.chunk_size,
        step=engine.step,
    )
    small.sampler = engine.sampler
    return small
