"""Full-text search over all messages, for languages with spaces between words and without.

The index holds words, and of scripts without spaces all pairs of neighbouring characters: 公园里
becomes 公园 园里 里. A query of two characters is then one term, a longer one a phrase of pairs,
and a single character the beginning of every pair it starts.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvchat.chat.plain_text import printable

_UNSPACED = (
    r"\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    r"\u0e01-\u0e4e\u0e80-\u0edf\u1000-\u109f\u1780-\u17d3"  # Thai, Lao, Burmese, Khmer
)
_RUN = re.compile(f"[{_UNSPACED}]+")
_TERM = re.compile(f'"([^"]*)"|([{_UNSPACED}]+)|([^\\s"{_UNSPACED}]+)')

_BORDER = "\ue000"
"""A word of no language, so that no phrase reaches from what was said into what was thought."""

_LITERALLY = """
    nodes.row IN (
        SELECT row FROM nodes WHERE instr(content, :value)
        UNION SELECT node FROM replies WHERE instr(thinking, :value)
    )
"""

_EXCERPT = 160
_LEAD = 48
"""Characters of an excerpt, and of those the most before the first match."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that was found."""

    chat_id: str
    node_id: str
    title: str
    role: str
    excerpt: str
    """The part of the message around the first match, on one line."""
    marks: tuple[tuple[int, int], ...]
    """Where in the excerpt the matches are: start and end."""
    when: datetime
    in_thinking: bool = False
    """Whether the excerpt is of what a reply thought, not of what it said."""


def terms(content: str, thinking: str = "") -> str:
    """Return what the index is given for a message."""
    texts = [_RUN.sub(_pairs, _folded(text)) for text in (content, thinking) if text]
    return f" {_BORDER} ".join(texts)


def expression(query: str) -> str | None:
    """Return a query in FTS5's language; None if nothing in it can be in the index.

    All words have to occur, each as the beginning of a word; words in double quotes as they stand.
    """
    found = []
    for quoted, run, word in _TERM.findall(_folded(query)):
        if quoted.strip():
            spaced = _RUN.sub(lambda run: f" {' '.join(_bigrams(run[0]))} ", quoted)
            found.append((spaced, ""))
        elif len(run) > 1:
            found.append((" ".join(_bigrams(run)), ""))
        elif run or word:
            found.append((run or word, "*"))
    return (
        " ".join(f'"{term}"{ending}' for term, ending in found if any(map(str.isalnum, term)))
        or None
    )


def index(db: sqlite3.Connection, row: int, content: str, thinking: str | None) -> None:
    """Put a message into the index, in the place of what it was before."""
    db.execute("DELETE FROM search WHERE rowid = ?", (row,))
    db.execute(
        "INSERT INTO search (rowid, terms) VALUES (?, ?)", (row, terms(content, thinking or ""))
    )


def find_rows(
    db: sqlite3.Connection, query: str, limit: int, chat_id: str | None
) -> list[tuple[Any, ...]]:
    """Return chat, message, title, role, time, content and thinking of what matches, newest first.

    A query without words or letters, such as "→", is looked for in the texts themselves.
    """
    match = expression(query)
    if match is not None:
        source, condition, newest = (
            "search JOIN nodes ON nodes.row = search.rowid",
            "search MATCH :value",
            "search.rowid",
        )
    else:
        source, condition, newest = "nodes", _LITERALLY, "nodes.row"
    return db.execute(
        "SELECT chats.id, nodes.id, CASE title WHEN '' THEN opening ELSE title END, role, "
        f"created, content, thinking FROM {source} JOIN chats ON chats.id = nodes.chat "
        "LEFT JOIN replies ON replies.node = nodes.row "
        f"WHERE {condition} AND chats.deleted IS NULL AND (:chat IS NULL OR nodes.chat = :chat) "
        f"ORDER BY {newest} DESC LIMIT :limit",
        {"value": match or _storable(query.strip()), "chat": chat_id, "limit": limit},
    ).fetchall()


def excerpt(content: str, query: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the part of a message around the first match, and where the matches in it are."""
    pattern = _pattern(query)
    at, text = 0, content
    if (first := pattern.search(content)) is None:
        # Other letters for the same words: é for e, or full-width ones.
        text = "".join(map(_plain_letter, content))
        first = pattern.search(text)
    if first is not None:
        at = max(0, first.start() - _LEAD)
    end = at + _EXCERPT
    shown = printable("".join(" " if c.isspace() else c for c in content[at:end]))
    marks = tuple(match.span() for match in pattern.finditer(text[at:end]) if match[0])
    if at:
        shown = "…" + shown
        marks = tuple((start + 1, stop + 1) for start, stop in marks)
    return shown + ("…" if end < len(content) else ""), marks


def _pattern(query: str) -> re.Pattern[str]:
    words = [quoted or run or word for quoted, run, word in _TERM.findall(query)]
    plain = ["".join(map(_plain_letter, word)) for word in words]
    wanted = sorted({*words, *plain, query.strip()} - {""}, key=len, reverse=True)
    return re.compile(
        "|".join(
            (r"\b" if word[0].isalnum() and not _RUN.match(word) else "") + re.escape(word)
            for word in wanted
        )
        or r"(?!)",
        re.IGNORECASE,
    )


def _plain_letter(character: str) -> str:
    """Return one character for one: without accent, and of ordinary width."""
    if character.isascii():
        return character
    return unicodedata.normalize("NFKD", character)[0]


def _folded(text: str) -> str:
    return _storable(unicodedata.normalize("NFKC", text).casefold())


def _bigrams(run: str) -> list[str]:
    return [run[i : i + 2] for i in range(len(run) - 1)] or [run]


def _pairs(run: re.Match[str]) -> str:
    pairs = [run[0][i : i + 2] for i in range(len(run[0]))]
    return f" {' '.join(pairs)} "


def _storable(text: str) -> str:
    """Return text without what ends a string for SQLite, or cannot be in one."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()
