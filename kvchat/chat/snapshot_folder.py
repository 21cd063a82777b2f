"""The folder of KV snapshots: one file for each chat, all together under a cap."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvchat.engine.errors import SnapshotError

_SUFFIX = ".safetensors"
_UNFINISHED = ".part"
_ABANDONED = 600.0
"""Seconds without a write after which nobody is writing an unfinished file any more."""

_PLAIN_ID = re.compile(r"[0-9a-f]{1,64}")


class SnapshotFile(NamedTuple):
    """A snapshot in the folder."""

    path: Path
    nbytes: int
    used_at: float
    """When it was last written or read, in Unix time."""


class SnapshotFolder:
    """Snapshots by the ids of their chats; the least recently used ones go when room is needed.

    A snapshot is whole or not there: it is written beside its place and moved there. Until then
    the file it replaces stays, and so do those that have to go for it.

    Args:
        path: of the folder, which is made when it is needed.
        budget: bytes that all snapshots together may take.
    """

    def __init__(self, path: Path, budget: int) -> None:
        self.path = path
        self.budget = budget

    def file(self, chat_id: str) -> Path:
        """Where a chat's snapshot is, or would be."""
        # Imported chats bring ids of their own, which must not name a file elsewhere.
        plain = _PLAIN_ID.fullmatch(chat_id)
        name = chat_id if plain else hashlib.sha256(chat_id.encode("utf-8", "replace")).hexdigest()
        return self.path / f"{name}{_SUFFIX}"

    def size(self, chat_id: str) -> int:
        """Return the bytes of a chat's snapshot; 0 if it has none."""
        try:
            return self.file(chat_id).stat().st_size
        except OSError:
            return 0

    def all(self) -> list[SnapshotFile]:
        """Return all snapshots, the least recently used first."""
        found = [
            SnapshotFile(path, stat.st_size, stat.st_mtime)
            for path in self._paths(_SUFFIX)
            if (stat := _stat(path)) is not None
        ]
        return sorted(found, key=lambda each: each.used_at)

    def put(self, chat_id: str, write: Callable[[str], None]) -> None:
        """Have a chat's snapshot written to a path, then put it in its place.

        Raises:
            OSError: it cannot be written; what was there is there still.
            SnapshotError: it is larger than the budget.
        """
        target = self.file(chat_id)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, beside = tempfile.mkstemp(_UNFINISHED, target.stem, self.path)
        os.close(handle)
        try:
            write(beside)
            self._make_room(os.stat(beside).st_size, target)
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise

    def touch(self, chat_id: str) -> None:
        """Mark a chat's snapshot as just used."""
        with suppress(OSError):
            os.utime(self.file(chat_id))

    def remove(self, chat_id: str) -> int:
        """Remove a chat's snapshot, and return its bytes.

        Raises:
            OSError: there is one, and it cannot be removed.
        """
        size = self.size(chat_id)
        self.file(chat_id).unlink(missing_ok=True)
        return size

    def prune(self, chat_ids: Iterable[str]) -> None:
        """Remove the snapshots of all chats but these, and what killed programs have left."""
        if found := self._paths(_SUFFIX):
            for path in set(found) - {self.file(chat_id) for chat_id in chat_ids}:
                _discard(path)
        for path in self._paths(_UNFINISHED):
            stat = _stat(path)
            if stat is not None and time.time() - stat.st_mtime > _ABANDONED:
                _discard(path)
        self._make_room(0)

    def _make_room(self, needed: int, instead_of: Path | None = None) -> None:
        if needed > self.budget:
            raise SnapshotError("it is larger than all snapshots together may be")
        others = [each for each in self.all() if each.path != instead_of]
        room = self.budget - needed - sum(each.nbytes for each in others)
        for each in others:
            if room >= 0:
                break
            _discard(each.path)
            room += each.nbytes

    def _paths(self, suffix: str) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if path.suffix == suffix]
        except OSError:
            return []


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
