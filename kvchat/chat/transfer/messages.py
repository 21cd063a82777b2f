"""OpenAI messages and ShareGPT: conversations without branches, one JSON object a line.

OpenAI messages, as chat completions and fine-tuning files have them:
`{"messages": [{"role": "system" | "user" | "assistant", "content": "..."}]}`. A content may be a
list of parts, of which text is taken. Thinking stands in `reasoning_content`, as servers of
reasoning models send it.

ShareGPT, as Axolotl's documentation describes it:
`{"conversations": [{"from": "system" | "human" | "gpt", "value": "..."}]}`, sometimes with a
`system` beside. Thinking stands before the answer in `<think>` tags, as reasoning models write it.

Both may have a `title`. Calls of tools and what they gave back are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Role
from kvchat.chat.transfer.fields import expect, get, text_of, time_of
from kvchat.chat.transfer.records import RecordError
from kvchat.chat.transfer.tree import ROLES, SYSTEM_ROLES, Said, chain

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one format of messages names things."""

    messages: str
    role: str
    content: str
    names: Mapping[str, str]
    """What to write for our roles."""
    thinking: str | None = None
    """Where thinking stands; None is inside the content."""

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of this format."""
        return isinstance(record.get(self.messages), list)

    def read(self, record: dict[str, Any]) -> Conversation:
        """Make a conversation of a record; raises RecordError."""
        system = [text_of(record.get("system"))]
        said = []
        for nth, message in enumerate(get(record, self.messages, list), start=1):
            where = f"message {nth}"
            role, text = self._message(expect(message, dict, where), where)
            if role in SYSTEM_ROLES:
                system.append(text)
            elif ROLES[role] is not None:
                thinking = text_of(message.get("reasoning_content") or message.get("reasoning"))
                if role != "user" and not thinking:
                    thinking, text = split_thinking(text)
                said.append(Said(None, ROLES[role], text, thinking))
        return chain(
            said,
            title=text_of(record.get("title")),
            system="\n\n".join(text for text in system if text),
            started=time_of(record.get("created"), record.get("create_time")),
        )

    def write(self, conversation: Conversation) -> str:
        """Return a conversation's active path as one line."""
        messages = [dict(self._written(*message)) for message in _spoken(conversation)]
        title = {"title": conversation.title} if conversation.title else {}
        record = {**title, self.messages: messages}
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _written(self, role: str, text: str, thinking: str) -> Iterator[tuple[str, str]]:
        if thinking and self.thinking is None:
            text = f"{_THINK}\n{thinking}\n{_END_THINK}\n\n{text}"
        yield self.role, self.names[role]
        yield self.content, text
        if thinking and self.thinking is not None:
            yield self.thinking, thinking

    def _message(self, message: dict[str, Any], where: str) -> tuple[str, str]:
        role = message.get(self.role, message.get("role"))
        if not isinstance(role, str) or role not in ROLES:
            raise RecordError(f"{where} has the unknown role {str(role)[:40]!r}")
        content = message.get(self.content, message.get("content"))
        if content is None or isinstance(content, str | list):
            return role, parts_text(content)
        raise RecordError(f"the content of {where} is no text")


OPENAI = Dialect(
    messages="messages",
    role="role",
    content="content",
    names={"system": "system", "user": "user", "assistant": "assistant"},
    thinking="reasoning_content",
)

SHAREGPT = Dialect(
    messages="conversations",
    role="from",
    content="value",
    names={"system": "system", "user": "human", "assistant": "gpt"},
)


def parts_text(content: object) -> str:
    """Return the text of a content; what is no text in a list is named in brackets."""
    if not isinstance(content, list):
        return text_of(content)
    return "\n".join(piece for part in content if (piece := _part_text(part)))


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        return text_of(part)
    if isinstance(part.get("text"), str):
        return text_of(part["text"])
    return f"[{text_of(part.get('type') or part.get('content_type')) or 'something else'}]"


def split_thinking(text: str) -> tuple[str, str]:
    """Part a reply into the thinking it begins with in tags, and the answer."""
    opening, tag, rest = text.partition(_THINK)
    thinking, end, answer = rest.partition(_END_THINK)
    if opening.strip() or not tag or not end:
        return "", text
    return thinking.strip("\n"), answer.lstrip("\n")


def _spoken(conversation: Conversation) -> Iterator[tuple[Role | str, str, str]]:
    if conversation.system:
        yield "system", conversation.system, ""
    for node in conversation.active_path():
        thinking = node.reply.thinking if node.reply else None
        # An empty first message only carries a greeting that another program began with.
        if node.content or thinking or node.parent is not None:
            yield node.role, node.content, thinking or ""
