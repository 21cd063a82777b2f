"""Which threads use the database."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import pytest

_USES = ("execute", "executemany", "executescript", "commit", "backup", "cursor", "close")


def watch(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that takes the names of all threads that use a database from now on."""
    seen: set[str] = set()

    def noted(name: str) -> Any:
        def use(self: sqlite3.Connection, *given: Any, **named: Any) -> Any:
            seen.add(threading.current_thread().name)
            return getattr(sqlite3.Connection, name)(self, *given, **named)

        return use

    watched = type("Watched", (sqlite3.Connection,), {name: noted(name) for name in _USES})
    connect = sqlite3.connect

    def connected(*given: Any, **named: Any) -> sqlite3.Connection:
        seen.add(threading.current_thread().name)
        return connect(*given, **{"factory": watched, **named})

    monkeypatch.setattr(sqlite3, "connect", connected)
    return seen
