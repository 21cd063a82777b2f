"""A file of conversations, cut into records: the elements of a JSON list, or lines of JSON.

Only the record at hand is in memory. What is wrong with one is told in its place, and the next one
is read if it can be found.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TextIO

from kvchat.engine.errors import KvchatError

RECORD_LIMIT = 256 * 2**20
"""Characters a record may have."""

_LARGEST_RATIO = 100
"""How many times its size an archive may unpack to; conversations come to ten."""

_CHUNK = 2**18
_OUTSIDE = re.compile(r'[\[\]{}",]')
_INSIDE = re.compile(r'["\\]')
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_DAMAGED = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError)
"""What reading raises: of a disk, or of an archive that is damaged, locked or of another kind."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be read."""

    number: int
    """Its place among the records of the file; the first is 1."""
    reason: str


class RecordError(Exception):
    """A record is not what its format says; the text tells why."""


def read_records(path: Path) -> Iterator[tuple[int, Any] | BadRecord]:
    """Yield each record's number and its JSON value.

    Raises:
        KvchatError: the file cannot be read, or is no file of records at all.
    """
    try:
        texts = (text for file in _files(path) for text in _texts(file, path))
        for number, text in enumerate(texts, start=1):
            try:
                yield number, _parsed(text)
            except RecordError as error:
                yield BadRecord(number, str(error))
    except _DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise KvchatError(f"{path} cannot be read: {reason}") from error


def read_markdown(path: Path) -> str:
    """Return the text of a file if it may be Markdown; "" if it begins like something else.

    Raises:
        KvchatError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as data:
            file = _decoded(data)
            if file.read(_CHUNK).lstrip()[:2] != "# ":
                return ""
            file.seek(0)
            text = file.read(RECORD_LIMIT + 1)
    except OSError as error:
        raise KvchatError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > RECORD_LIMIT:
        raise KvchatError(f"{path} has more than {RECORD_LIMIT:,} characters")
    return _NOT_UTF8.sub("\N{REPLACEMENT CHARACTER}", text).replace("\r\n", "\n")


def _parsed(text: str | RecordError | None) -> Any:
    if isinstance(text, RecordError):
        raise text
    if text is None:
        raise RecordError(f"it has more than {RECORD_LIMIT:,} characters")
    if _NOT_UTF8.search(text):
        raise RecordError("it is not UTF-8 text")
    try:
        return json.loads(text)
    except RecursionError:
        raise RecordError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise RecordError(f"not valid JSON: {error.msg} ({where}column {error.colno})") from None
    except ValueError:  # the reader's limit against numbers that take forever
        raise RecordError("a number in it has thousands of digits") from None


def _files(path: Path) -> Iterator[TextIO]:
    """Open a file, or what an archive holds of conversations."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            yield _decoded(file)
            return
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if _holds_conversations(name)]
            if not names:
                raise KvchatError(f"{path} is an archive without a conversations.json.")
            for name in sorted(names):
                info = archive.getinfo(name)
                if info.file_size > max(RECORD_LIMIT, _LARGEST_RATIO * info.compress_size):
                    raise KvchatError(
                        f"{path} would unpack to {info.file_size:,} bytes, which is beyond all "
                        "proportion; unpack it yourself if you trust it, and import what is in it."
                    )
                with archive.open(name) as member:
                    yield _decoded(member)


def _holds_conversations(name: str) -> bool:
    return PurePosixPath(name).match("conversations*.json")


def _decoded(file: IO[bytes]) -> TextIO:
    start = file.read(2)
    file.seek(0)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return io.TextIOWrapper(file, "utf-16", "replace", newline="\n")
    # What is not UTF-8 spoils the record it is in, not the file.
    return io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")


def _texts(file: TextIO, path: Path) -> Iterator[str | RecordError | None]:
    """Yield the text of each record: None if it is too long, an error where it cannot be found."""
    start = next((text for text in _chunks(file) if text.strip()), "").lstrip()[:1]
    if not start:
        raise KvchatError(f"{path} is empty; there is nothing in it to import.")
    if start not in "[{":
        raise KvchatError(
            f"{path} is neither JSON nor JSON Lines, nor Markdown as kvchat writes it. "
            "Conversations are imported from files of kvchat, ChatGPT or Open WebUI, or of "
            "ShareGPT or OpenAI messages."
        )
    file.seek(0)
    if start == "[":
        yield from _elements(_chunks(file))
    elif _is_lines(file):
        yield from _lines(file)
    else:
        text = file.read(RECORD_LIMIT + 1)
        yield text if len(text) <= RECORD_LIMIT else None


def _chunks(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.read(_CHUNK), "")


def _is_lines(file: TextIO) -> bool:
    """Tell JSON Lines from one object over several lines: one of the first two lines is whole."""
    try:
        for _, line in zip(range(2), _lines(file), strict=False):
            try:
                if isinstance(_parsed(line), dict):
                    return True
            except RecordError:
                pass
        return False
    finally:
        file.seek(0)


def _lines(file: TextIO) -> Iterator[str | None]:
    while line := file.readline(RECORD_LIMIT + 1):
        whole = len(line) <= RECORD_LIMIT
        while len(line) > RECORD_LIMIT and not line.endswith("\n"):
            line = file.readline(RECORD_LIMIT + 1)
        if line.strip() or not whole:
            yield line if whole else None


def _elements(chunks: Iterator[str]) -> Iterator[str | RecordError | None]:
    """Yield the texts between the commas of a list, found by counting brackets outside strings."""
    depth, quoted, skipped = -1, False, 0
    element = _Collected()
    for chunk in chunks:
        start = 0
        at, skipped = skipped, 0
        while found := (_INSIDE if quoted else _OUTSIDE).search(chunk, at):
            at = found.end()
            match found[0]:
                case '"':
                    quoted = not quoted
                case "\\":
                    at += 1
                case "[" | "{":
                    depth += 1
                    if depth == 0:
                        start = at
                case "]" | "}" if depth > 0:
                    depth -= 1
                case "]" | "," as mark if depth == 0:
                    element.add(chunk[start : at - 1])
                    start = at
                    text, element = element.text, _Collected()
                    ends = mark == "]"
                    if not (ends and text is not None and not text.strip()):
                        yield text
                    if ends:
                        if chunk[at:].strip() or any(rest.strip() for rest in chunks):
                            yield RecordError("something follows the end of the list")
                        return
        skipped = max(0, at - len(chunk))
        element.add(chunk[start:])
    yield RecordError("the file ends in the middle of it")


class _Collected:
    """The parts of one element, until there are too many."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def add(self, part: str) -> None:
        self._size += len(part)
        if self._size > RECORD_LIMIT:
            self._parts.clear()
        else:
            self._parts.append(part)

    @property
    def text(self) -> str | None:
        return None if self._size > RECORD_LIMIT else "".join(self._parts)
