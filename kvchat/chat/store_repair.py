"""What to do about a damaged database: keep it aside, and make a new one of what is readable."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from kvchat.chat.store_errors import DATABASE_ERRORS, is_damage
from kvchat.chat.store_index import fill
from kvchat.chat.store_rows import to_time
from kvchat.chat.store_schema import create_file, prepare

SIDE_FILES = ("", "-wal", "-shm")
"""What SQLite keeps beside a database."""

_TABLES = ("chats", "nodes", "runs", "replies", "parts", "turns")
_ORPHANS = (
    "DELETE FROM replies WHERE node NOT IN (SELECT row FROM nodes)",
    "DELETE FROM parts WHERE node NOT IN (SELECT row FROM nodes)",
    "DELETE FROM turns WHERE chat NOT IN (SELECT id FROM chats)",
    "UPDATE replies SET run = NULL WHERE run NOT IN (SELECT id FROM runs)",
)
"""What rows that were lost have left behind."""

_INTERIOR = 5
_ROWS_PER_PAGE = 64
_FAILURES = 2_000
"""Unreadable ranges after which the rest of a table is given up."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What became of a damaged database."""

    aside: Path
    chats: int
    messages: int

    def __str__(self) -> str:
        """Say it to the user."""
        return (
            f"The file of your chats was damaged. {self.chats:,} chats with {self.messages:,} "
            f"messages were recovered; the damaged file is kept as {self.aside}."
        )


def repair(path: Path) -> Repair:
    """Put a sound database in the place of a damaged one, which is kept beside it.

    Raises:
        OSError: there is no space for the copy, or the folder cannot be written.
        sqlite3.Error: the new one cannot be written.
    """
    aside = _unused(path)
    with TemporaryDirectory(dir=path.parent, prefix="chats-repair-") as folder:
        copy, fresh = Path(folder) / "damaged.db", Path(folder) / "fresh.db"
        for suffix in SIDE_FILES:
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        create_file(fresh)
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            prepare(db, fresh)
            db.execute("BEGIN")
            _recover(copy, db, fresh.read_bytes())
            counts = [
                db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("chats", "nodes")
            ]
            db.execute("COMMIT")
            for suffix in SIDE_FILES:
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{path}{suffix}", f"{aside}{suffix}")
            if not _put_in_place(db, path):
                for suffix in SIDE_FILES:
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                db.execute("VACUUM INTO ?", (str(path),))
                path.chmod(0o600)
    return Repair(aside, *counts)


def _put_in_place(fresh: sqlite3.Connection, path: Path) -> bool:
    """Write a database over a damaged one in a transaction, so that other programs see it.

    False if not even that is possible, because the beginning of the file is damaged.
    """
    with closing(sqlite3.connect(path)) as target:
        try:
            target.execute("PRAGMA writable_schema = ON")  # bear with a truncated file
            fresh.backup(target)
        except DATABASE_ERRORS as error:
            if not is_damage(error):
                raise
            return False
    return True


def _unused(path: Path) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    aside, n = path.with_name(f"{path.name}.damaged-{stamp}"), 1
    while aside.exists():
        n += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{n}")
    return aside


def _recover(damaged: Path, db: sqlite3.Connection, fresh: bytes) -> None:
    """Copy all rows that can be read, and make what holds them together anew."""
    if not _knows_tables(damaged):
        _restore_schema(damaged, fresh)
    most = damaged.stat().st_size // _page_size(fresh) * _ROWS_PER_PAGE
    for table in _TABLES:
        with closing(_tolerant(damaged)) as source:
            there = _columns(source, table)  # an older version has fewer
            columns = [name for name in _columns(db, table) if name in there]
            places = ", ".join("?" for _ in columns)
            insert = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({places})"
            for row in _readable(source, table, columns, most):
                with suppress(*DATABASE_ERRORS):
                    db.execute(insert, row)
    now = datetime.now().astimezone()
    db.execute(
        "INSERT OR IGNORE INTO chats (id, title, started, changed, messages) "
        "SELECT chat, 'Recovered', ?, ?, count(*) FROM nodes GROUP BY chat",
        (to_time(now), now.timestamp()),
    )
    for orphans in _ORPHANS:
        db.execute(orphans)
    fill(db)


def _restore_schema(damaged: Path, fresh: bytes) -> None:
    """Put the list of tables of a new database in the place of a damaged one.

    The tables are always made in the same order and begin on the same pages in every database.
    The list is a tree whose root is on the first page, after the file's header: if it is not a
    leaf itself, the numbers of its leaves stand where its cells point to and at its end. The
    file's length in pages stands at byte 28 (SQLite's file format, sections 1.3 and 1.6).
    """
    size = _page_size(fresh)
    pages = [1]
    if fresh[100] == _INTERIOR:
        cells = int.from_bytes(fresh[103:105], "big")
        starts = [
            int.from_bytes(fresh[at : at + 2], "big") for at in range(112, 112 + 2 * cells, 2)
        ]
        pages += [int.from_bytes(fresh[at : at + 4], "big") for at in (*starts, 108)]
    length = (damaged.stat().st_size // size).to_bytes(4, "big")
    fresh = fresh[:28] + length + fresh[32:]
    with damaged.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(fresh[(page - 1) * size : page * size])


def _page_size(data: bytes) -> int:
    size = int.from_bytes(data[16:18], "big")
    return 65536 if size == 1 else size


def _tolerant(damaged: Path) -> sqlite3.Connection:
    """Open a database as if its list of tables and its length were not to be checked."""
    db = sqlite3.connect(damaged, isolation_level=None)
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    db.execute("PRAGMA writable_schema = ON")
    return db


def _knows_tables(damaged: Path) -> bool:
    with closing(_tolerant(damaged)) as db:
        try:
            for table in _TABLES:
                db.execute(f"SELECT * FROM {table} LIMIT 0")
        except DATABASE_ERRORS:
            return False
    return True


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


def _readable(
    db: sqlite3.Connection, table: str, columns: list[str], most: int
) -> Iterator[tuple[object, ...]]:
    """Yield a table's rows but those on unreadable pages, found by halving around failures."""
    select = f"SELECT {', '.join(columns)} FROM {table} WHERE rowid BETWEEN ? AND ? "
    last = most
    with suppress(*DATABASE_ERRORS):
        last = max(most, db.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0)
    failures = 0
    ranges = [(1, last)]
    while ranges and failures < _FAILURES:
        low, high = ranges.pop()
        done = low - 1
        try:
            for rowid, *row in db.execute(
                select.replace("SELECT", "SELECT rowid,", 1) + "ORDER BY rowid", (low, high)
            ):
                yield tuple(row)
                done = rowid
        except (*DATABASE_ERRORS, OverflowError):
            failures += 1
            low = done + 1
            if low < high:
                middle = (low + high) // 2
                ranges += [(middle + 1, high), (low, middle)]
