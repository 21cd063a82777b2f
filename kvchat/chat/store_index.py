"""The search index as a whole: whether it is sound, and how it is made anew."""

from __future__ import annotations

import sqlite3

from kvchat.chat.store_errors import DATABASE_ERRORS, is_damage
from kvchat.chat.store_rows import from_text
from kvchat.chat.store_search import index

REMADE = (
    "The index that chats are searched with was damaged. It was made anew; no message was lost."
)

_OVER = "(node IS NULL OR finish_reason IS NOT NULL)"
"""Of a message that is written; others get into the index later."""


def is_sound(db: sqlite3.Connection) -> bool:
    """Return whether the index agrees with itself and has every message.

    It reads the whole index, which takes two seconds for 100,000 messages; SQLite offers that as a
    write, so others cannot write meanwhile.
    """
    try:
        db.execute("INSERT INTO search (search) VALUES ('integrity-check')")
        missing = db.execute(
            "SELECT EXISTS (SELECT 1 FROM nodes LEFT JOIN replies ON node = row "
            f"WHERE {_OVER} AND row NOT IN (SELECT id FROM search_docsize))"
        ).fetchone()
    except DATABASE_ERRORS as error:
        if not is_damage(error):
            raise
        return False
    return not missing[0]


def rebuild(db: sqlite3.Connection) -> None:
    """Make the index anew, whatever is left of the old one."""
    [made_by] = db.execute("SELECT sql FROM sqlite_master WHERE name = 'search'").fetchone()
    db.execute("DROP TABLE search")
    db.execute(made_by)
    fill(db)


def fill(db: sqlite3.Connection) -> None:
    """Put all messages into the index."""
    for row, content, thinking in db.execute(
        f"SELECT row, content, thinking FROM nodes LEFT JOIN replies ON node = row WHERE {_OVER}"
    ).fetchall():
        index(db, row, from_text(content), thinking and from_text(thinking))
