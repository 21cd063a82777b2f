"""The tables of the store, and how a database of an earlier version becomes one of today's."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvchat.chat.store_errors import StoreError
from kvchat.chat.store_rows import from_text
from kvchat.chat.store_search import terms

APPLICATION_ID = 0x6B766368  # "kvch"

_HEADER = b"SQLite format 3\0"

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE chats (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL DEFAULT '',     -- given by the user or a model; '' takes `opening`
        opening TEXT NOT NULL DEFAULT '',   -- a title made from the first message
        started TEXT NOT NULL,
        changed REAL NOT NULL,              -- Unix time
        messages INTEGER NOT NULL DEFAULT 0,
        model TEXT NOT NULL DEFAULT '',
        pinned INTEGER NOT NULL DEFAULT 0,
        tags TEXT NOT NULL DEFAULT '[]',
        deleted REAL,                       -- Unix time; NULL is not deleted
        system TEXT NOT NULL DEFAULT ''     -- last, so that the list need not read over it
    );
    CREATE INDEX chats_by_change ON chats (changed);
    CREATE TABLE nodes (
        row INTEGER PRIMARY KEY,
        chat TEXT NOT NULL REFERENCES chats ON DELETE CASCADE,
        id TEXT NOT NULL,
        parent TEXT,
        position INTEGER NOT NULL DEFAULT 0,  -- among its siblings
        active INTEGER NOT NULL DEFAULT 0,    -- whether it is its parent's active child
        dropped INTEGER NOT NULL DEFAULT 0,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        created TEXT NOT NULL,
        edited INTEGER NOT NULL,
        UNIQUE (chat, id)
    );
    CREATE TABLE runs (                     -- what a reply was written with
        id INTEGER PRIMARY KEY,
        provenance TEXT NOT NULL UNIQUE
    );
    CREATE TABLE replies (
        node INTEGER PRIMARY KEY REFERENCES nodes ON DELETE CASCADE,
        thinking TEXT,
        seed INTEGER,
        finish_reason TEXT,                 -- NULL while it is being written
        stop_id INTEGER,
        stats TEXT,
        params TEXT NOT NULL,
        kept INTEGER,                       -- context: ids shared with the reply before,
        context BLOB,                       -- the others,
        covered INTEGER,                    -- while written: tokens of the reply among them
        run INTEGER REFERENCES runs
    );
    CREATE INDEX replies_unfinished ON replies (node) WHERE finish_reason IS NULL;
    CREATE TABLE parts (                    -- a reply's tokens, in the pieces they were saved in
        id INTEGER PRIMARY KEY,
        node INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE,
        start INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        ms BLOB NOT NULL,
        candidates BLOB,
        UNIQUE (node, start)
    );
    CREATE TABLE turns (                    -- the ledger
        id INTEGER PRIMARY KEY,
        chat TEXT NOT NULL REFERENCES chats ON DELETE CASCADE,
        turn TEXT NOT NULL
    );
    CREATE INDEX turns_by_chat ON turns (chat);
    CREATE TABLE leases (                   -- who is writing which chat
        chat TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        seen REAL NOT NULL
    );
    CREATE VIRTUAL TABLE search USING fts5 (
        terms,
        tokenize = "unicode61 remove_diacritics 2 categories 'L* N* M* Co'",
        prefix = '1 2'
    );
    """,
    """
    ALTER TABLE chats ADD COLUMN keep_cache INTEGER;  -- NULL is as the settings say
    """,
    """
    DELETE FROM search WHERE rowid IN (SELECT node FROM replies WHERE thinking != '');
    INSERT INTO search (rowid, terms)       -- of replies, what they thought can be found too
        SELECT row, terms(content, thinking) FROM nodes JOIN replies ON node = row
        WHERE thinking != '' AND finish_reason IS NOT NULL;
    """,
    """
    UPDATE nodes SET dropped = 0 WHERE dropped;  -- was whether the model no longer sees a message,
    -- is how many at the beginning it does not see from this one on: a next turn finds out anew
    """,
)
"""Step n makes a database of version n one of version n + 1; nothing at all is version 0.

They may use `terms(content, thinking)`, which is what the index is given for a message.
"""


def refuse_newer(path: Path, known: int = len(MIGRATIONS)) -> None:
    """Look at a database's version without opening it, which would change its files.

    The version stands in the header at byte 60 (SQLite's database file format, section 1.3).

    Raises:
        StoreError: it is of a version this program does not know.
    """
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    if header.startswith(_HEADER):
        _check(int.from_bytes(header[60:64], "big"), known, path)


def prepare(
    connection: sqlite3.Connection, path: Path, migrations: Sequence[str] = MIGRATIONS
) -> Path | None:
    """Bring a database to today's version; return the copy that was kept if it was older.

    Raises:
        StoreError: it is newer than this program, or of another program.
    """
    version = _version(connection)
    _check(version, len(migrations), path)
    if version == len(migrations):
        return None
    if not version and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreError(
            f"{path} is a database of another program. Move it away, or set KVCHAT_DATA_DIR."
        )
    copy = _copy(connection, path, version) if version else None
    connection.create_function(
        "terms", 2, lambda *texts: terms(*map(from_text, texts)), deterministic=True
    )
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another instance may have been quicker.
        for step in migrations[_version(connection) :]:
            for statement in _statements(step):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return copy


def create_file(path: Path) -> None:
    """Make an empty file that only its owner may read: SQLite would let everybody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _check(version: int, known: int, path: Path) -> None:
    if version > known:
        raise StoreError(
            f"{path} was written by a newer kvchat (version {version} of its tables, this one "
            f"knows {known}). Update kvchat, or set KVCHAT_DATA_DIR to another folder."
        )


def _copy(connection: sqlite3.Connection, path: Path, version: int) -> Path:
    copy = path.with_name(f"{path.name}.version-{version}")
    create_file(copy)
    with closing(sqlite3.connect(copy)) as target:
        connection.backup(target)
    return copy


def _statements(script: str) -> list[str]:
    """Cut a script into statements: `executescript` would commit between them."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return [*statements, *([pending] if pending.strip() else [])]
