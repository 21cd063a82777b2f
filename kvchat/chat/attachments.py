"""Files that a message names with `@path`: their text goes into the message, after its words.

A mention is an `@` at the beginning of a word and a path to a file that exists, in quotes if it
has spaces: `@notes.txt`, `@"my notes.txt"`. Anything else with an `@` stays as it was typed, and so
does what stands in a fenced block of code.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvchat.chat.plain_text import one_line

LIMIT = 2**20
"""Bytes a file may have: few contexts hold as much."""

_MENTION = re.compile(r"""(?<![^\s(\[{])@(?:"([^"\n]+)"|'([^'\n]+)'|([^\s"']\S*))""")
_CLOSING = ".,;:!?)]}>\"'…。，、；：！？）】》」』"
"""What may follow a path without being part of it."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_RUN = re.compile("`+")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file whose text is in a message."""

    name: str
    """As it was typed."""
    path: Path
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """A message with the texts of its attachments."""

    text: str
    attachments: tuple[Attachment, ...]
    problems: tuple[str, ...]
    """Why files that are there are not attached; their mentions stay as they were typed."""


class _Unfit(Exception):
    """A file is there but cannot be attached; the text tells why."""


def expand(text: str, folder: Path, limit: int = LIMIT) -> Expanded:
    """Attach the files that a message mentions, each once.

    Args:
        text: the message. If it is nothing but the path of a file, as dragging one onto a terminal
            types it, that file is attached.
        folder: what relative paths are relative to.
        limit: bytes a file may have.
    """
    typed, text = text, as_mention(text, folder) or text
    blocks: dict[Path, str] = {}
    attachments: list[Attachment] = []
    problems: list[str] = []
    pieces: list[str] = []
    at = 0
    for start, end, name, path in _mentions(text, folder):
        try:
            if path not in blocks:
                content, size = _read(path, limit)
                blocks[path] = _block(name, content, size)
                attachments.append(Attachment(name, path, size))
            # Without the @, so that the message can be edited and sent again.
            pieces += [text[at:start], name]
            at = end
        except _Unfit as error:
            problem = f"{one_line(name)} is not attached: {error}."
            problems += [problem] if problem not in problems else []
    words = "".join([*pieces, text[at:]])
    expanded = "\n\n".join([words, *blocks.values()])
    return Expanded(expanded if attachments else typed, tuple(attachments), tuple(problems))


def described(attachments: Iterable[Attachment]) -> str:
    """Say what is attached, with sizes; "" for nothing."""
    told = ", ".join(f"{one_line(each.name)} ({each.size:,} bytes)" for each in attachments)
    return f"attached: {told}" if told else ""


def as_mention(pasted: str, folder: Path) -> str | None:
    """Return how to mention a file whose path was pasted or dragged onto the terminal.

    None if the text is anything but the absolute path of a file: bare, in quotes, with backslashes
    before its spaces, or as a `file:` address.
    """
    text = pasted.strip()
    if not text or "\n" in text:
        return None
    spellings = [text, _ESCAPED.sub(r"\1", text)]
    if text[0] == text[-1] and text[0] in "'\"":
        spellings.append(text[1:-1])
    if text.startswith("file://"):
        spellings.append(_path_of_address(text))
    for spelling in spellings:
        if (path := _existing(spelling, folder)) and _is_absolute(spelling) and path.is_file():
            return next((f"@{q}{spelling}{q}" for q in "\"'" if q not in spelling), None)
    return None


def _path_of_address(address: str) -> str:
    try:
        return unquote(urlsplit(address).path)
    except ValueError:
        return ""


def _is_absolute(name: str) -> bool:
    return name.startswith("~") or Path(name).is_absolute()


def _mentions(text: str, folder: Path) -> Iterator[tuple[int, int, str, Path]]:
    """Yield where each mention stands, the name in it, and the path of what is there."""
    for start, end in _unfenced(text):
        for found in _MENTION.finditer(text, start, end):
            quoted = found[1] or found[2]
            for name in [quoted] if quoted else _shortened(found[3]):
                if any(map(str.isalnum, name)) and (path := _existing(name, folder)):
                    stop = found.end() if quoted else found.start() + 1 + len(name)
                    yield found.start(), stop, name, path
                    break


def _unfenced(text: str) -> Iterator[tuple[int, int]]:
    """Yield the lines that are not in a fenced block of code."""
    fence = ""
    at = 0
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if fence:
            closes = found is not None and found[1].startswith(fence)
            fence = "" if closes and not line[found.end() :].strip() else fence  # type: ignore[union-attr]
        elif found:
            fence = found[1]
        else:
            yield at, at + len(line)
        at += len(line)


def _shortened(name: str) -> Iterator[str]:
    """Yield a name, and what it is without the punctuation at its end."""
    yield name
    while name and name[-1] in _CLOSING:
        name = name[:-1]
        if name:
            yield name


def _existing(name: str, folder: Path) -> Path | None:
    try:
        path = folder / Path(os.path.expanduser(name))
        path.stat()
    except (OSError, ValueError, RuntimeError):  # no such file, no such name, no such home
        return None
    return path


def _read(path: Path, limit: int) -> tuple[str, int]:
    """Return a file's text and its size in bytes; raises _Unfit."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise _Unfit("it is a folder; name a file in it")
        if not stat.S_ISREG(mode):
            raise _Unfit("it is a device or a pipe")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise _Unfit(f"it cannot be read ({error.strerror})") from None
    if len(data) > limit:
        raise _Unfit(f"it has more than {limit:,} bytes")
    if b"\0" in data:
        raise _Unfit("it is no text (there are NUL bytes in it)")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n"), len(data)
    except UnicodeDecodeError as error:
        raise _Unfit(f"it is no UTF-8 text (see byte {error.start:,})") from None


def _block(name: str, content: str, size: int) -> str:
    """Fence a file's text with more backticks than there are in a row in it."""
    longest = max((len(run) for run in _RUN.findall(content)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if content.endswith("\n") or not content else "\n"
    return f"{one_line(name)} ({size:,} bytes):\n{fence}\n{content}{end}{fence}"
