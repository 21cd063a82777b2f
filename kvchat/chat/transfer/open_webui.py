"""Open WebUI's export: a list of chats.

Each is `{"title", "created_at", "chat": {"title", "params", "history"}}`, or what its `chat` holds
alone. The history is a tree: `{"currentId", "messages": {id: {"id", "parentId", "childrenIds",
"role", "content", "timestamp"}}}`; chats without one have a list of `messages`. Thinking stands in
the content as `<details type="reasoning">`, quoted and escaped. Source: the import section of Open
WebUI's documentation.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer.fields import expect, list_of, object_of, text_of, time_of
from kvchat.chat.transfer.messages import OPENAI, parts_text, split_thinking
from kvchat.chat.transfer.tree import ROLES, SYSTEM_ROLES, Said, grow

_OPENING = re.compile(r'<details\b[^<>]*\btype="reasoning"[^<>]*>')
_CLOSING = "</details>"
_SUMMARY = re.compile(r"\s*<summary>[^<]*</summary>")
_QUOTED = re.compile(r"^> ?", re.MULTILINE)


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a chat of Open WebUI's."""
    chat = object_of(record.get("chat")) or record
    return isinstance(object_of(chat.get("history")).get("messages"), dict) or (
        chat is not record and OPENAI.recognises(chat)
    )


def read(record: dict[str, Any]) -> Conversation:
    """Make a conversation of a record; raises RecordError."""
    chat = object_of(record.get("chat")) or record
    title = text_of(record.get("title") or chat.get("title"))
    history = object_of(chat.get("history"))
    messages = object_of(history.get("messages"))
    if not messages:
        return OPENAI.read({"messages": list_of(chat.get("messages")), "title": title})
    said: dict[str, Said] = {}
    prompts = [text_of(chat.get("system") or object_of(chat.get("params")).get("system"))]
    for key, value in messages.items():
        message = expect(value, dict, f"message {key[:40]!r}")
        role, parent = message.get("role"), message.get("parentId")
        said[key] = one = Said(parent if isinstance(parent, str) else None, None)
        one.children = list_of(message.get("childrenIds"))
        text = parts_text(message.get("content"))
        if role in SYSTEM_ROLES:
            prompts.append(text)
        elif role in ("user", "assistant"):
            one.role, one.text = ROLES[role], text
            one.created = time_of(message.get("timestamp"))
            if role == "assistant":
                one.thinking, one.text = _split_thinking(text)
    return grow(
        said,
        history.get("currentId"),
        title=title,
        system="\n\n".join(text for text in prompts if text),
        started=time_of(record.get("created_at"), chat.get("timestamp")),
    )


def _split_thinking(text: str) -> tuple[str, str]:
    thoughts: list[str] = []
    answer: list[str] = []
    at = 0
    while opening := _OPENING.search(text, at):
        end = text.find(_CLOSING, opening.end())
        if end < 0:
            break
        answer.append(text[at : opening.start()])
        body = _SUMMARY.sub("", text[opening.end() : end], count=1)
        thoughts.append(_QUOTED.sub("", html.unescape(body).strip()))
        at = end + len(_CLOSING)
    if not thoughts:
        return split_thinking(text)
    answer.append(text[at:])
    said = "\n".join(part for piece in answer if (part := piece.strip("\n")))
    return "\n\n".join(thoughts), said
