"""Who is writing which chat, so that two running programs do not write the same one."""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
import time
from contextlib import suppress
from functools import cache
from uuid import uuid4

from kvchat.chat.store_errors import ChatInUseError

STALE_AFTER = 120.0
"""Seconds without a sign of life after which a lease is anybody's."""


class Leases:
    """The leases of one owner: one store of one process."""

    def __init__(self) -> None:
        self.owner = uuid4().hex
        self._pid = os.getpid()

    def take(self, db: sqlite3.Connection, chat_id: str) -> bool:
        """Take a chat, and return whether it was not held already.

        Raises:
            ChatInUseError: it is in use by somebody who is alive.
        """
        if self.check(db, chat_id):
            return False
        db.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
            (chat_id, self.owner, _host(), self._pid, time.time()),
        )
        return True

    def check(self, db: sqlite3.Connection, chat_id: str) -> bool:
        """Return whether a chat is held here.

        Raises:
            ChatInUseError: it is in use by somebody who is alive.
        """
        held = db.execute(
            "SELECT owner, host, pid, seen FROM leases WHERE chat = ?", (chat_id,)
        ).fetchone()
        if held is None or (held[0] != self.owner and not _alive(*held[1:])):
            return False
        if held[0] != self.owner:
            raise ChatInUseError
        return True

    def free(self, db: sqlite3.Connection, chat_id: str | None = None) -> None:
        """Give back a chat, or all."""
        db.execute(
            "DELETE FROM leases WHERE owner = ? AND (? IS NULL OR chat = ?)",
            (self.owner, chat_id, chat_id),
        )

    def renew(self, db: sqlite3.Connection) -> None:
        """Give a sign of life."""
        db.execute("UPDATE leases SET seen = ? WHERE owner = ?", (time.time(), self.owner))

    def clear_dead(self, db: sqlite3.Connection) -> None:
        """Remove the leases of those who are gone."""
        for chat_id, *held in db.execute("SELECT chat, host, pid, seen FROM leases").fetchall():
            if not _alive(*held):
                db.execute("DELETE FROM leases WHERE chat = ?", (chat_id,))


@cache
def _host() -> str:
    """Name what process ids are unique in: the machine, or its container."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {space}".strip()


def _alive(host: str, pid: int, seen: float) -> bool:
    if abs(time.time() - seen) > STALE_AFTER:
        return False
    if host != _host() or sys.platform == "win32":  # there, asking for a process can end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
