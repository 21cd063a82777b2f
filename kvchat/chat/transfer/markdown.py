"""A conversation's active path as a Markdown document."""

from __future__ import annotations

from collections.abc import Iterator

from kvchat.chat.changes import heading
from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node


def to_markdown(conversation: Conversation, model: str) -> str:
    """Return the transcript; messages stand in it as they were written.

    Args:
        conversation: whose active path is written.
        model: what to call the one that replies.
    """
    return "\n\n".join(_parts(conversation, model)) + "\n"


def _parts(conversation: Conversation, model: str) -> Iterator[str]:
    yield f"# {heading(conversation)}"
    yield f"{conversation.started:%Y-%m-%d %H:%M}, {model}"
    if conversation.system:
        yield f"## System\n\n{conversation.system}"
    for node in conversation.active_path():
        yield f"## {'You' if node.role == 'user' else model}"
        yield from _message(node)


def _message(node: Node) -> Iterator[str]:
    if node.reply is not None and node.reply.thinking:
        quoted = "\n".join(f"> {line}".rstrip() for line in node.reply.thinking.splitlines())
        yield f"> *Thinking*\n>\n{quoted}"
    if node.content:
        yield node.content
