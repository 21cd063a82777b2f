"""What can go wrong with the store, in words for the user."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kvchat.engine.errors import KvchatError


class StoreError(KvchatError):
    """The chats cannot be read or written now; trying again later may succeed."""


class ChatInUseError(StoreError):
    """Another running kvchat is writing this chat."""

    def __init__(self) -> None:
        super().__init__(
            "This chat is open in another kvchat. Close it there, or open a copy of it here."
        )


class NoSuchChatError(KvchatError):
    """There is no chat of this id."""

    def __init__(self, chat_id: str) -> None:
        super().__init__(f"There is no chat {chat_id!r}; it may have been deleted for good.")


_CAUSES = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_READONLY: "it may not be written; change its permissions",
    sqlite3.SQLITE_PERM: "it may not be opened; change its permissions",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened or made; check that its folder can be written",
    sqlite3.SQLITE_BUSY: "another program keeps it locked; close that one, or wait",
    sqlite3.SQLITE_LOCKED: "another program keeps it locked; close that one, or wait",
    sqlite3.SQLITE_IOERR: "the disk refuses; see that it has space and is sound",
    sqlite3.SQLITE_NOMEM: "there is no memory left; close something",
    sqlite3.SQLITE_TOOBIG: "a message is too long to be stored",
}


_UNSOUND = ("decode", "fts5 file format")
"""In errors that have no code: of text that is not UTF-8, and of the index."""

DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite's functions raise: a damaged name in an error's text makes it the second."""


def primary_code(error: BaseException) -> int | None:
    """Return SQLite's primary result code of a failure; None if it came from elsewhere."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_damage(error: BaseException) -> bool:
    """Return whether a failure means that the database is not what was written."""
    if isinstance(error, UnicodeDecodeError):
        return True
    if isinstance(error, sqlite3.OperationalError) and any(w in str(error) for w in _UNSOUND):
        return True
    return primary_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def explained(error: Exception, path: Path) -> StoreError:
    """Say what a failure means and what to do about it."""
    if isinstance(error, OSError):
        cause = f"{error.strerror or error}; check the folder, or set KVCHAT_DATA_DIR to another"
    else:
        cause = _CAUSES.get(primary_code(error) or 0, str(error))
    return StoreError(f"{path}: {cause}.")
