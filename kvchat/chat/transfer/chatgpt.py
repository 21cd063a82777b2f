"""ChatGPT's data export: `conversations.json`, alone or in its archive.

A list of conversations: `{"title", "create_time", "mapping", "current_node"}`. The mapping is a
tree by id: `{"id", "message", "parent", "children"}`; a message has `author.role`, `create_time`,
`recipient`, `metadata` and a `content`: `{"content_type": "text", "parts": [...]}`, `thoughts` of
reasoning models, code for tools, and others. There is no official description of it.

What was never shown, and the traffic with tools, is left out. Images are named where they stood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer.fields import expect, get, list_of, object_of, text_of, time_of
from kvchat.chat.transfer.messages import parts_text
from kvchat.chat.transfer.tree import ROLES, Said, grow


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a conversation of ChatGPT's."""
    return isinstance(record.get("mapping"), dict)


def read(record: dict[str, Any]) -> Conversation:
    """Make a conversation of a record; raises RecordError."""
    said: dict[str, Said] = {}
    system: list[str] = []
    for key, value in get(record, "mapping", dict).items():
        node = expect(value, dict, f"node {key[:40]!r}")
        message = object_of(node.get("message"))
        parent = node.get("parent")
        said[key] = one = Said(parent if isinstance(parent, str) else None, None)
        one.children = list_of(node.get("children"))
        role = object_of(message.get("author")).get("role")
        content = object_of(message.get("content"))
        if not _is_shown(message):
            continue
        if role == "system":
            system.append(parts_text(content.get("parts")))
        elif role in ("user", "assistant"):
            one.role = ROLES[role]
            one.text = _text(content)
            one.thinking = _thinking(content)
            one.created = time_of(message.get("create_time"))
    return grow(
        said,
        record.get("current_node"),
        title=text_of(record.get("title")),
        system="\n\n".join(text for text in system if text),
        started=time_of(record.get("create_time")),
    )


def _is_shown(message: dict[str, Any]) -> bool:
    hidden = object_of(message.get("metadata")).get("is_visually_hidden_from_conversation")
    return hidden is not True and message.get("recipient", "all") in ("all", None)


def _text(content: dict[str, Any]) -> str:
    if content.get("content_type") in ("thoughts", "reasoning_recap", "user_editable_context"):
        return ""
    return parts_text(content.get("parts")) or text_of(content.get("text"))


def _thinking(content: dict[str, Any]) -> str:
    thoughts = [object_of(thought) for thought in list_of(content.get("thoughts"))]
    return "\n\n".join(
        text
        for thought in thoughts
        for text in (text_of(thought.get("summary")), text_of(thought.get("content")))
        if text
    )
