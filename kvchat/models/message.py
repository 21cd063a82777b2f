"""Messages, and the ways to rearrange them for a chat template that wants them otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of `ROLES`."""
    content: str
    thinking: str | None = None
    """A reply's reasoning, kept apart from its answer."""


def as_data(message: Message, parts: bool) -> dict[str, Any]:
    """Return the message as a template sees it, its content as a list of parts if so asked."""
    content = [{"type": "text", "text": message.content}] if parts else message.content
    data: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking is not None:
        data |= dict.fromkeys(_REASONING_KEYS, message.thinking)
    return data


def has_system(messages: Sequence[Message]) -> bool:
    """Return whether there is a system prompt."""
    return any(message.role == "system" for message in messages)


def folded(messages: Sequence[Message]) -> list[Message]:
    """Put all system prompts in front of what the user says first."""
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    rest = [message for message in messages if message.role != "system"]
    for i, message in enumerate(rest):
        if message.role == "user":
            rest[i] = replace(message, content=f"{system}\n\n{message.content}")
            return rest
    return [Message("user", system), *rest]


def merged(messages: Sequence[Message]) -> list[Message]:
    """Make one message of neighbours that have the same role."""
    groups = (list(group) for _, group in groupby(messages, key=lambda message: message.role))
    return [
        replace(
            group[-1],
            content="\n\n".join(message.content for message in group),
        )
        for group in groups
    ]


def texts_of(messages: Iterable[Message]) -> Iterator[str]:
    """Yield all text of messages."""
    for message in messages:
        yield message.content
        yield message.thinking or ""
