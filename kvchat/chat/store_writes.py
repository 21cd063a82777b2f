"""What the store writes, as functions over an open transaction."""

from __future__ import annotations

import re
import sqlite3
import time
from itertools import count

from kvchat.chat.changes import Changes
from kvchat.chat.nodes import Reply
from kvchat.chat.store_errors import NoSuchChatError
from kvchat.chat.store_rows import (
    from_text,
    load_replies,
    remove_node,
    save_end,
    save_node,
    save_places,
    to_json,
    to_text,
    to_time,
)
from kvchat.chat.store_search import index

_COPY = re.compile(r" \(copy(?: \d+)?\)$")


def write_changes(db: sqlite3.Connection, changes: Changes, *, candidates: bool = True) -> None:
    """Write what has changed in a chat."""
    columns = changes.columns
    db.execute(
        "INSERT OR IGNORE INTO chats (id, title, started, changed) VALUES (?, ?, ?, 0)",
        (changes.chat_id, to_text(columns.title), to_time(columns.started)),
    )
    values: dict[str, object] = {
        "opening": to_text(columns.opening),
        "system": to_text(columns.system),
        "started": to_time(columns.started),
        "changed": time.time(),
        "messages": changes.messages,
    }
    if changes.retitled:
        values["title"] = to_text(columns.title)
    if changes.switched:
        values["keep_cache"] = columns.keep_cache
    if models := [saved.run.model for saved in changes.nodes if saved.run]:
        values["model"] = models[-1]
    assigned = ", ".join(f"{name} = ?" for name in values)
    db.execute(f"UPDATE chats SET {assigned} WHERE id = ?", (*values.values(), changes.chat_id))
    for node_id in changes.removed:
        remove_node(db, changes.chat_id, node_id)
    for saved in changes.nodes:
        save_node(db, changes.chat_id, saved, candidates=candidates)
    save_places(db, changes.chat_id, changes.places)
    db.executemany(
        "INSERT INTO turns (chat, turn) VALUES (?, ?)",
        [(changes.chat_id, to_json(turn)) for turn in changes.turns],
    )


def set_column(db: sqlite3.Connection, chat_id: str, column: str, value: object) -> None:
    """Change one thing about a chat.

    Raises:
        NoSuchChatError: there is none of this id.
    """
    done = db.execute(f"UPDATE chats SET {column} = ? WHERE id = ?", (value, chat_id))
    if not done.rowcount:
        raise NoSuchChatError(chat_id)


def entitle(db: sqlite3.Connection, chat_id: str, title: str | bytes) -> None:
    """Give a chat a title if it has none."""
    db.execute("UPDATE chats SET title = ? WHERE id = ? AND title = ''", (title, chat_id))


def settle(db: sqlite3.Connection, chat_id: str) -> None:
    """End the replies of a chat that were being written by a program that is gone."""
    for row, content in db.execute(
        "SELECT row, content FROM nodes JOIN replies ON node = row "
        "WHERE chat = ? AND finish_reason IS NULL",
        (chat_id,),
    ).fetchall():
        reply = load_replies(db, "nodes.row = ?", row).get(row) or Reply()
        reply.finish_reason = reply.finish_reason or "interrupted"
        save_end(db, row, reply)
        index(db, row, from_text(content), reply.thinking)


def settle_abandoned(db: sqlite3.Connection) -> None:
    """Settle the chats that nobody has a lease of."""
    for (chat_id,) in db.execute(
        "SELECT DISTINCT chat FROM nodes WHERE chat NOT IN (SELECT chat FROM leases) "
        "AND row IN (SELECT node FROM replies WHERE finish_reason IS NULL)"
    ).fetchall():
        settle(db, chat_id)


def purge(db: sqlite3.Connection, before: float) -> None:
    """Remove for good what was deleted before this Unix time."""
    chats = db.execute("SELECT id FROM chats WHERE deleted < ?", (before,)).fetchall()
    for chat in chats:
        db.execute("DELETE FROM search WHERE rowid IN (SELECT row FROM nodes WHERE chat = ?)", chat)
        db.execute("DELETE FROM chats WHERE id = ?", chat)


def duplicate(db: sqlite3.Connection, chat_id: str, copy_id: str) -> None:
    """Copy a chat with all that belongs to it; its title says that it is a copy.

    Raises:
        NoSuchChatError: there is none of this id.
    """
    chat = _columns(db, "chats", without={"id", "changed", "deleted"})
    made = db.execute(
        f"INSERT INTO chats (id, changed, {chat}) SELECT ?, ?, {chat} FROM chats WHERE id = ?",
        (copy_id, time.time(), chat_id),
    )
    if not made.rowcount:
        raise NoSuchChatError(chat_id)
    set_column(db, copy_id, "title", to_text(_copy_title(db, chat_id)))
    for table in ("nodes", "turns"):
        own = _columns(
            db, table, without={"row", "id", "chat"} if table == "turns" else {"row", "chat"}
        )
        db.execute(
            f"INSERT INTO {table} (chat, {own}) SELECT ?, {own} FROM {table} WHERE chat = ? "
            "ORDER BY rowid",
            (copy_id, chat_id),
        )
    pairs = db.execute(
        "SELECT old.row, new.row FROM nodes old JOIN nodes new ON new.id = old.id "
        "WHERE old.chat = ? AND new.chat = ?",
        (chat_id, copy_id),
    ).fetchall()
    for table, key in (("replies", "node"), ("parts", "node"), ("search", "rowid")):
        own = "terms" if table == "search" else _columns(db, table, without={"id", "node"})
        db.executemany(
            f"INSERT INTO {table} ({key}, {own}) SELECT ?, {own} FROM {table} WHERE {key} = ?",
            [(new, old) for old, new in pairs],
        )


def _copy_title(db: sqlite3.Connection, chat_id: str) -> str:
    """Return a title that no other chat has; a copy of a copy is counted with its siblings."""
    (named,) = db.execute(
        "SELECT CASE title WHEN '' THEN opening ELSE title END FROM chats WHERE id = ?", (chat_id,)
    ).fetchone()
    name = _COPY.sub("", from_text(named))
    titles = (f"{name} (copy{f' {n}' if n > 1 else ''})" for n in count(1))
    taken = "SELECT 1 FROM chats WHERE title = ? AND deleted IS NULL"
    return next(t for t in titles if not db.execute(taken, (to_text(t),)).fetchone())


def _columns(db: sqlite3.Connection, table: str, without: set[str]) -> str:
    names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    return ", ".join(name for name in names if name not in without)
