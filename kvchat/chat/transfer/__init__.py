"""Conversations to files and from files.

What a format is, is told in its module; `docs/chat-format.md` describes our own. A file's format is
recognised by its contents, record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer import chatgpt, html, kvchat_json, markdown, open_webui
from kvchat.chat.transfer.html import Pieces
from kvchat.chat.transfer.messages import OPENAI, SHAREGPT
from kvchat.chat.transfer.records import (
    BadRecord,
    RecordError,
    read_markdown,
    read_records,
)
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.models.tokenizer import Tokenizer

__all__ = ["WRITERS", "Author", "BadRecord", "Writer", "format_of", "pieces_of", "read", "write"]


@dataclass(frozen=True, slots=True)
class _Reader:
    recognises: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any]], Conversation]


_READERS = (
    _Reader(kvchat_json.recognises, kvchat_json.read),
    _Reader(chatgpt.recognises, chatgpt.read),
    _Reader(open_webui.recognises, open_webui.read),
    _Reader(SHAREGPT.recognises, SHAREGPT.read),
    _Reader(OPENAI.recognises, OPENAI.read),
)


@dataclass(frozen=True, slots=True)
class Author:
    """The model that wrote the replies of a conversation."""

    name: str = "Assistant"
    pieces: Pieces | None = None
    """Gives the texts of its tokens, as `pieces_of` its tokenizer does."""


class Writable(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> object:
        """Take some text."""


@dataclass(frozen=True, slots=True)
class Writer:
    """How conversations become a file of some format."""

    one: Callable[[Conversation, Author], str]
    suffixes: tuple[str, ...]
    """What names of such files end in, the usual one first."""
    begin: str = ""
    between: str = ""
    end: str = ""


WRITERS: dict[str, Writer] = {
    "json": Writer(lambda chat, _: kvchat_json.write(chat), (".json",), "[\n", ",\n", "\n]\n"),
    "markdown": Writer(
        lambda chat, author: markdown.to_markdown(chat, author.name),
        (".md", ".markdown"),
        between="\n",
    ),
    "html": Writer(
        lambda chat, author: html.to_html(chat, author.name, author.pieces),
        (".html", ".htm"),
        begin=html.BEGIN,
        end=html.END,
    ),
    "sharegpt": Writer(lambda chat, _: SHAREGPT.write(chat), (".sharegpt.jsonl",)),
    "openai": Writer(lambda chat, _: OPENAI.write(chat), (".jsonl",)),
}
"""By the names of the formats."""


def read(path: Path) -> Iterator[Conversation | BadRecord]:
    """Read the conversations of a file, or say of each that cannot be read why.

    Raises:
        KvchatError: the file cannot be read, or is no file of conversations at all.
    """
    documents = markdown.documents(read_markdown(path))
    records = enumerate(documents, start=1) if documents else read_records(path)
    make: Callable[[Any], Conversation] = markdown.read if documents else _conversation
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        number, value = record
        try:
            yield make(value)
        except (RecordError, KvchatError) as error:
            yield BadRecord(number, str(error))


def _conversation(value: object) -> Conversation:
    if isinstance(value, dict):
        for reader in _READERS:
            if reader.recognises(value):
                return reader.read(value)
    raise RecordError(
        "it is not a conversation of kvchat, ChatGPT or Open WebUI, nor has it ShareGPT's "
        "'conversations' or OpenAI's 'messages'"
    )


def write(
    conversations: Iterable[Conversation],
    format: str,
    file: Writable,
    author: Callable[[Conversation], Author] = lambda _: Author(),
) -> int:
    """Write conversations, one after the other, and return how many there were.

    Args:
        conversations: whole in `json`, their active paths in the other formats.
        format: a name in `WRITERS`.
        file: takes text that has UTF-8.
        author: tells who wrote a conversation's replies, for the formats that are to be read.
    """
    writer = WRITERS[format]
    count = 0
    file.write(writer.begin)
    for count, chat in enumerate(conversations, start=1):
        text = (writer.between if count > 1 else "") + writer.one(chat, author(chat))
        # Half a surrogate pair has no UTF-8; text typed in a terminal may have one.
        file.write(text.encode("utf-8", "replace").decode("utf-8"))
    file.write(writer.end)
    return count


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """Return what gives the text that each token of a reply adds."""

    def pieces(ids: Sequence[int]) -> Iterator[str]:
        stream = tokenizer.stream_decoder(continues=True)
        for id_ in ids[:-1]:
            yield stream.step(id_)
        for id_ in ids[-1:]:
            yield stream.step(id_) + stream.flush()

    return pieces


def format_of(path: Path) -> str | None:
    """Return the format that a file's name ends in, or None."""
    name = path.name.lower()
    ending = {suffix: each for each, writer in WRITERS.items() for suffix in writer.suffixes}
    return next(
        (ending[s] for s in sorted(ending, key=len, reverse=True) if name.endswith(s)), None
    )
