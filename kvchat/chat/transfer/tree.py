"""From other programs' messages to a conversation, in which users and replies alternate.

Other programs have messages that we do not: hidden ones, calls of tools and what they gave back,
replies in several parts. Those are left out or joined; branches stay branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid4

from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node, Reply, Role
from kvchat.chat.transfer.records import RECORD_LIMIT, RecordError

ROLES: Mapping[str, Role | None] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": None,
    "developer": None,
    "tool": None,
    "function": None,
    "function_call": None,
    "function_response": None,
    "observation": None,
}
"""Ours by the names that files use for them; None has no place in the tree."""

SYSTEM_ROLES = ("system", "developer")


@dataclass(slots=True)
class Said:
    """One message of another program. Without a role or words it has no place of its own."""

    parent: str | None
    role: Role | None
    text: str = ""
    thinking: str = ""
    created: datetime | None = None
    children: Sequence[object] = ()
    """The ids of what follows it in their order, as far as the file tells."""

    @property
    def counts(self) -> bool:
        """Whether it becomes a message, or part of one."""
        return self.role is not None and bool(self.text or self.thinking)


@dataclass(slots=True)
class _Growing:
    started: datetime
    nodes: dict[str, Node] = field(default_factory=dict)
    children: dict[str | None, list[str]] = field(default_factory=dict)
    size: int = 0

    def add(self, parent: str | None, role: Role, parts: Sequence[Said]) -> str:
        text = "\n\n".join(part.text for part in parts if part.text)
        thinking = "\n\n".join(part.thinking for part in parts if part.thinking)
        self.size += len(text) + len(thinking)
        if self.size > RECORD_LIMIT:
            raise RecordError("its messages come to more text than a record may have")
        if role == "assistant" and parent is None:
            parent = self._silent_user()
        created = next((part.created for part in parts if part.created), self.started)
        # No tokens tell of this text, which is what an edited reply is.
        reply = Reply(thinking=thinking or None, finish_reason="stop")
        replied = role == "assistant"
        node = Node(
            uuid4().hex, parent, role, text, created, reply if replied else None, edited=replied
        )
        self.nodes[node.id] = node
        self.children.setdefault(parent, []).append(node.id)
        return node.id

    def _silent_user(self) -> str:
        for node_id in self.children.get(None, ()):
            if not self.nodes[node_id].content:
                return node_id
        return self.add(None, "user", [])


def chain(messages: Iterable[Said], **about: Any) -> Conversation:
    """Make a conversation of messages that follow each other; see `grow`."""
    said = {}
    for n, message in enumerate(messages):
        message.parent = str(n - 1) if n else None
        said[str(n)] = message
    return grow(said, str(len(said) - 1), **about)


def grow(
    said: Mapping[str, Said],
    current: object,
    *,
    title: str = "",
    system: str = "",
    started: datetime | None = None,
) -> Conversation:
    """Make a conversation of a tree of messages.

    Args:
        said: the messages by id.
        current: the id of the last message on the active path, if it is one.
        title: its title.
        system: its system prompt.
        started: when it began.

    Raises:
        RecordError: the messages are no tree, or none of them has words.
    """
    order = _parents_first(said)
    above = _counting_parents(said, order)
    counting = [key for key in order if said[key].counts]
    if not counting:
        raise RecordError("there are no messages in it")
    followed_by: dict[str, set[Role | None]] = {key: set() for key in counting}
    for key in counting:
        if (parent := above[key]) is not None:
            followed_by[parent].add(said[key].role)

    first = next((said[key].created for key in counting if said[key].created), None)
    about: dict[str, Any] = {"started": moment} if (moment := started or first) else {}
    conversation = Conversation(system=system, title=title, **about)
    growing = _Growing(conversation.started)
    ids: dict[str, str] = {}
    for key in counting:
        role = said[key].role
        if followed_by[key] == {role}:
            continue  # the beginning of a longer message
        parts, parent = [said[key]], above[key]
        while parent is not None and said[parent].role == role:
            parts.append(said[parent])
            parent = above[parent]
        assert role is not None
        ids[key] = growing.add(ids[parent] if parent is not None else None, role, parts[::-1])

    conversation.nodes, conversation.children = growing.nodes, growing.children
    conversation.active = {parent: among[-1] for parent, among in growing.children.items()}
    end = current if isinstance(current, str) and current in said else None
    if end is not None and not said[end].counts:
        end = above[end]
    if end in ids:
        conversation.select(ids[end])
    return conversation


def _parents_first(said: Mapping[str, Said]) -> list[str]:
    children: dict[str | None, list[str]] = {}
    for key, message in said.items():
        if message.parent is not None and message.parent not in said:
            message.parent = None
        children.setdefault(message.parent, []).append(key)
    for parent, among in children.items():
        if parent is not None and len(among) > 1:
            told = [child for child in said[parent].children if isinstance(child, str)]
            places = {child: place for place, child in enumerate(told)}
            among.sort(key=lambda child: places.get(child, len(places)))
    order: list[str] = []
    pending = children.get(None, [])[::-1]
    while pending:
        key = pending.pop()
        order.append(key)
        pending.extend(reversed(children.get(key, ())))
    if len(order) < len(said):
        raise RecordError("its messages follow each other in a circle")
    return order


def _counting_parents(said: Mapping[str, Said], order: Iterable[str]) -> dict[str, str | None]:
    """Find the nearest message before each one that counts."""
    above: dict[str, str | None] = {}
    for key in order:
        parent = said[key].parent
        above[key] = parent if parent is None or said[parent].counts else above[parent]
    return above
