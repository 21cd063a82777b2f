"""A conversation's active path as a Markdown document, and such documents back.

A line in a message that would pass for one of the document's own headings gets a backslash before
it, which Markdown does not show; so nothing that was said can pass for a message of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvchat.chat.changes import heading, title_of
from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node, Role
from kvchat.chat.plain_text import one_line
from kvchat.chat.transfer.fields import time_of
from kvchat.chat.transfer.tree import Said, chain

_YOU, _SYSTEM = "You", "System"
_THINKING = "> *Thinking*\n>\n"

_TITLE = r"# .*\n+\d{4}-\d\d-\d\d \d\d:\d\d, "
_BEGINNING = re.compile(r"^# (.*)\n+(\d{4}-\d\d-\d\d \d\d:\d\d), (.+)$", re.MULTILINE)
"""Title, date and model."""


def to_markdown(conversation: Conversation, model: str) -> str:
    """Return the transcript; messages stand in it as they were written.

    Args:
        conversation: whose active path is written.
        model: what to call the one that replies.
    """
    name = one_line(model)
    return "\n\n".join(_parts(conversation, f"{name}." if name in (_YOU, _SYSTEM) else name)) + "\n"


def _parts(conversation: Conversation, model: str) -> Iterator[str]:
    yield f"# {one_line(heading(conversation))}"
    yield f"{conversation.started:%Y-%m-%d %H:%M}, {model}"
    if conversation.system:
        yield f"## {_SYSTEM}\n\n{_escaped(conversation.system, model)}"
    for node in conversation.active_path():
        yield f"## {_YOU if node.role == 'user' else model}"
        yield from _message(node, model)


def _message(node: Node, model: str) -> Iterator[str]:
    if node.reply is not None and node.reply.thinking:
        lines = node.reply.thinking.split("\n")
        yield _THINKING + "\n".join(f"> {line}" if line else ">" for line in lines)
    if node.content:
        yield _escaped(node.content, model)


def documents(text: str) -> list[str]:
    """Return the documents that a file has one after another; none if it is no such file."""
    starts = [found.start() for found in _BEGINNING.finditer(text)]
    if not starts or text[: starts[0]].strip():
        return []
    return [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def read(document: str) -> Conversation:
    """Make a conversation of a document; raises RecordError."""
    beginning = _BEGINNING.match(document)
    assert beginning is not None
    title, date, model = beginning.groups()
    headings = rf"^## ({_YOU}|{_SYSTEM}|{re.escape(model)}) *$"
    _, *sections = re.split(headings, document[beginning.end() :], flags=re.MULTILINE)
    system: list[str] = []
    said: list[Said] = []
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        text = body.strip("\n")
        if name == _SYSTEM:
            system.append(_bare(text, model))
            continue
        thinking, answer = ("", text) if name == _YOU else _thinking(text)
        role: Role = "user" if name == _YOU else "assistant"
        said.append(Said(None, role, _bare(answer, model), thinking))
    chat = chain(
        said,
        title=title,
        system="\n\n".join(system),
        started=time_of(date),
    )
    first = next(iter(chat), None)
    if first is not None and title_of(first.content) == title:
        chat.title = ""  # it was called by its first words
    return chat


def _thinking(text: str) -> tuple[str, str]:
    """Part a reply into what it thought, which is quoted, and the answer."""
    if not f"{text}\n".startswith(_THINKING):
        return "", text
    lines = text[len(_THINKING) :].split("\n")
    end = next((n for n, line in enumerate(lines) if not line.startswith(">")), len(lines))
    quoted = [line.removeprefix(">").removeprefix(" ") for line in lines[:end]]
    return "\n".join(quoted), "\n".join(lines[end:]).strip("\n")


def _own(model: str) -> str:
    """Return what matches a line of the document's own, from its first sign on."""
    return rf"(?:## (?:{_YOU}|{_SYSTEM}|{re.escape(model)}) *$|{_TITLE}|> \*Thinking\*$)"


def _escaped(text: str, model: str) -> str:
    return re.sub(rf"^(?=\\*{_own(model)})", r"\\", text, flags=re.MULTILINE)


def _bare(text: str, model: str) -> str:
    return re.sub(rf"^\\(?=\\*{_own(model)})", "", text, flags=re.MULTILINE)
