"""The database file: a connection for each thread, transactions, and what to do about damage."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvchat.chat.store_errors import DATABASE_ERRORS, explained, is_damage, primary_code
from kvchat.chat.store_repair import repair
from kvchat.chat.store_schema import create_file, prepare, refuse_newer

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_SECONDS = 5.0
"""How long to wait for another program's write."""

_WAL_BYTES = 16 << 20

_OPTIONS: dict[str, Any] = {
    "timeout": BUSY_SECONDS,
    "isolation_level": None,
    "check_same_thread": False,  # closed by whoever closes or repairs the database
}


class Database:
    """A database of which several programs and threads have connections.

    Readers do not wait for writers (WAL). One that is found damaged is repaired, one that was
    replaced is opened anew.

    Args:
        path: of the file; it is opened or made when it is needed.
        tell: gets texts for the user about what was done by itself.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self.opened = 0
        """How often a file was found, made or repaired here."""
        self._tell = tell
        self._repairs = 0
        self._local = threading.local()
        self._lock = threading.RLock()
        self._file: tuple[int, int] | None = None
        self._connections: list[tuple[threading.Thread, sqlite3.Connection]] = []

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` finds.

        Raises:
            StoreError: the database cannot be read.
        """
        return self._guarded(lambda: work(self._connection()))

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction: all of it is written, or nothing.

        Raises:
            StoreError: the database cannot be written.
        """

        def transaction() -> T:
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            try:
                result = work(db)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            return result

        return self._guarded(transaction)

    def close(self) -> None:
        """Close all connections; the next use opens the file again."""
        with self._lock:
            for _, connection in self._connections:
                connection.close()
            self._connections.clear()
            self._local = threading.local()
            self._file = None

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do something; if the database is damaged, repair it and try once more."""
        known = self._repairs
        try:
            return work()
        except (*DATABASE_ERRORS, OSError) as error:
            if not is_damage(error):
                raise explained(error, self.path) from error
            log.warning("%s: %s", self.path, error)
        try:
            with self._lock:
                if self._repairs == known:  # else another thread was quicker
                    self._repair()
            return work()
        except (*DATABASE_ERRORS, OSError) as error:
            raise explained(error, self.path) from error

    def _repair(self) -> None:
        self.close()
        told = repair(self.path)
        self._repairs += 1
        log.warning("%s", told)
        self._tell(str(told))

    def _file_now(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        return stat.st_dev, stat.st_ino

    def _connection(self) -> sqlite3.Connection:
        """Return this thread's connection to the file that is there now."""
        held: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if held is not None and self._file == self._file_now():
            return held
        with self._lock:
            if self._file != self._file_now():
                # Connections to a file that is gone would, when closed later, take the side
                # files of the new one with them.
                self.close()
            connection = self._open()
            if self._file is None:
                self._file = self._file_now()
                self.opened += 1
            for entry in [entry for entry in self._connections if not entry[0].is_alive()]:
                entry[1].close()
                self._connections.remove(entry)
            self._connections.append((threading.current_thread(), connection))
            self._local.connection = connection
        return connection

    def _open(self) -> sqlite3.Connection:
        refuse_newer(self.path)
        try:
            create_file(self.path)
            return self._prepared(sqlite3.connect(self.path, **_OPTIONS))
        except (*DATABASE_ERRORS, OSError) as error:
            if not _is_unwritable(error) or not self.path.is_file():
                raise
            log.info("%s: %s; reading only", self.path, error)
        return self._open_to_read()

    def _open_to_read(self) -> sqlite3.Connection:
        address = self.path.absolute().as_uri()
        with suppress(sqlite3.OperationalError):
            return self._prepared(sqlite3.connect(f"{address}?mode=ro", uri=True, **_OPTIONS))
        # SQLite has no place for what connections share, so it must not look beside the file.
        db = self._prepared(sqlite3.connect(f"{address}?immutable=1", uri=True, **_OPTIONS))
        with suppress(OSError):
            if os.stat(f"{self.path}-wal").st_size:
                self._tell(
                    f"{self.path}: what was written last is missing until it can be written."
                )
        return db

    def _prepared(self, db: sqlite3.Connection) -> sqlite3.Connection:
        try:
            db.execute("PRAGMA foreign_keys = ON")
            copy = prepare(db, self.path)
            with suppress(sqlite3.OperationalError):  # read only
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        except BaseException:
            db.close()
            raise
        if copy is not None:
            self._tell(f"Your chats were brought up to date; a copy is kept as {copy}.")
        return db


def _is_unwritable(error: Exception) -> bool:
    return isinstance(error, OSError) or primary_code(error) in {
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
    }
