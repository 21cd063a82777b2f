"""The store: all chats in one SQLite database that several running programs may share."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from kvchat import settings
from kvchat.chat import store_index, store_writes
from kvchat.chat.changes import Changes, Tracker
from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.provenance import Provenance
from kvchat.chat.store_database import Database
from kvchat.chat.store_errors import NoSuchChatError, StoreError
from kvchat.chat.store_leases import Leases
from kvchat.chat.store_rows import (
    from_text,
    from_time,
    load_conversation,
    tags_from,
    to_text,
    turn_from,
)
from kvchat.chat.store_search import Hit, excerpt, find_rows
from kvchat.engine.errors import KvchatError

log = logging.getLogger(__name__)

KEEP_DELETED = 30 * 86_400.0
"""Seconds after which a deleted chat is gone for good."""


def default_path() -> Path:
    """Where the chats are kept."""
    return settings.data_dir() / "chats.db"


class ChatSummary(NamedTuple):
    """A chat in the list."""

    id: str
    title: str
    started: str
    """As stored; `created` is the date."""
    changed_at: float
    """Unix time; `changed` is the date."""
    messages: int
    pinned: bool
    tags: tuple[str, ...]
    model: str
    """The last one that wrote in it."""

    @property
    def created(self) -> datetime:
        """When the chat began."""
        return from_time(self.started, self.changed)

    @property
    def changed(self) -> datetime:
        """When it was last written to."""
        return datetime.fromtimestamp(self.changed_at).astimezone()


class Store:
    """All chats. Nothing is opened before it is needed; methods may be called from any thread.

    Every method raises `StoreError` when the database cannot be read or written.

    Args:
        path: of the database; the one in the data folder by default.
        tell: gets texts for the user about what was done by itself: a migration, a repair. Called
            on the thread that met the need.
        candidates: whether the candidates of each token are written.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        tell: Callable[[str], None] = log.warning,
        candidates: bool = True,
    ) -> None:
        self.candidates = candidates
        self._tell = tell
        self._database = Database(path or default_path(), tell)
        self._read, self._write = self._database.read, self._database.write
        self._leases = Leases()

    @property
    def path(self) -> Path:
        """Of the database."""
        return self._database.path

    @property
    def opened(self) -> int:
        """How often a database was found, made or repaired here.

        When it grows, some of what was written before may be gone.
        """
        return self._database.opened

    # The list

    def chats(
        self, text: str = "", *, tag: str | None = None, deleted: bool = False
    ) -> list[ChatSummary]:
        """Return chats, pinned ones first, then those changed last.

        Args:
            text: only those with this in their title or in a tag.
            tag: only those with this tag.
            deleted: those that were deleted and can come back, instead of the others.
        """
        rows = self._read(
            lambda db: db.execute(
                "SELECT id, CASE title WHEN '' THEN opening ELSE title END, started, changed, "
                "messages, pinned, tags, model FROM chats "
                f"WHERE deleted IS {'NOT' if deleted else ''} NULL "
                "ORDER BY pinned DESC, changed DESC, rowid DESC"
            ).fetchall()
        )
        wanted = text.casefold()
        return [_summary(row) for row in rows if _is_wanted(row, wanted, tag)]

    def last(self) -> str | None:
        """Return the id of the chat that was changed last; None if there is none."""
        found = self._read(
            lambda db: db.execute(
                "SELECT id FROM chats WHERE deleted IS NULL ORDER BY changed DESC LIMIT 1"
            ).fetchone()
        )
        return found[0] if found else None

    def find(self, beginning: str) -> str:
        """Return the id of the one chat whose id begins so.

        Raises:
            KvchatError: there is none, or more than one.
        """
        found = self._read(
            lambda db: db.execute(
                "SELECT id FROM chats WHERE substr(id, 1, ?) = ? AND deleted IS NULL LIMIT 2",
                (len(beginning), beginning),
            ).fetchall()
        )
        if not found or not beginning:
            raise NoSuchChatError(beginning)
        if len(found) > 1:
            raise KvchatError(f"More than one chat begins with {beginning!r}; give more of its id.")
        return str(found[0][0])

    def search(self, text: str, *, limit: int = 50, chat_id: str | None = None) -> list[Hit]:
        """Return messages with all words of `text`, newest first; in one chat only if it is given.

        Words match the words they begin, and characters of scripts without spaces anywhere.
        """
        if not text.strip():
            return []
        rows = self._read(lambda db: find_rows(db, text, limit, chat_id))
        return [_hit(row, text) for row in rows]

    def keeping(self) -> dict[str, bool | None]:
        """Return whether each chat's cache is kept, see `Conversation.keep_cache`.

        Deleted chats that can come back are among them.
        """
        rows = self._read(lambda db: db.execute("SELECT id, keep_cache FROM chats").fetchall())
        return {chat_id: None if keep is None else bool(keep) for chat_id, keep in rows}

    # One chat

    def load(self, chat_id: str) -> Conversation:
        """Return a chat exactly as it was saved.

        A reply that was being written is `interrupted`, and can be gone on with.

        Raises:
            NoSuchChatError: there is none of this id.
        """
        chat = self._read(lambda db: load_conversation(db, chat_id))
        if chat is None:
            raise NoSuchChatError(chat_id)
        return chat

    def ledger(self, chat_id: str) -> list[Turn]:
        """Return what each turn of a chat cost, oldest first."""
        rows = self._read(
            lambda db: db.execute(
                "SELECT turn FROM turns WHERE chat = ? ORDER BY id", (chat_id,)
            ).fetchall()
        )
        return [turn for (stored,) in rows if (turn := turn_from(stored)) is not None]

    def provenance(self, chat_id: str, reply_id: str) -> dict[str, Any] | None:
        """Return what a reply was written with; None if that is not known."""
        found = self._read(
            lambda db: db.execute(
                "SELECT provenance FROM nodes JOIN replies ON node = row JOIN runs "
                "ON runs.id = run WHERE chat = ? AND nodes.id = ?",
                (chat_id, reply_id),
            ).fetchone()
        )
        return json.loads(found[0]) if found else None

    def rename(self, chat_id: str, title: str) -> None:
        """Give a chat a title; an empty one brings back that of its first message."""
        self._set(chat_id, "title", to_text(title))

    def entitle(self, chat_id: str, title: str) -> None:
        """Give a chat a title if nobody has given it one."""
        self._write(lambda db: store_writes.entitle(db, chat_id, to_text(title)))

    def pin(self, chat_id: str, pinned: bool = True) -> None:
        """Keep a chat at the top of the list, or no longer."""
        self._set(chat_id, "pinned", pinned)

    def keep_cache(self, chat_id: str, keep: bool | None) -> None:
        """Keep a snapshot of a chat's cache, or none; None is as the settings say."""
        self._set(chat_id, "keep_cache", keep)

    def tag(self, chat_id: str, tags: Iterable[str]) -> None:
        """Replace a chat's tags."""
        self._set(chat_id, "tags", json.dumps(sorted(set(tags))))

    def delete(self, chat_id: str) -> None:
        """Take a chat off the list; `restore` brings it back within thirty days.

        Raises:
            ChatInUseError: somebody else is writing it.
        """

        def work(db: sqlite3.Connection) -> None:
            self._leases.check(db, chat_id)
            store_writes.set_column(db, chat_id, "deleted", time.time())

        self._write(work)

    def restore(self, chat_id: str) -> None:
        """Bring back a deleted chat."""
        self._set(chat_id, "deleted", None)

    def duplicate(self, chat_id: str) -> str:
        """Copy a chat with all its branches, and return the copy's id."""
        copy_id = uuid4().hex
        self._write(lambda db: store_writes.duplicate(db, chat_id, copy_id))
        return copy_id

    # Writing

    def save(self, conversation: Conversation, run: Provenance | None = None) -> None:
        """Write a whole conversation.

        Raises:
            ChatInUseError: somebody else is writing it.
        """
        self.save_all([conversation], run)

    def save_all(
        self, conversations: Sequence[Conversation], run: Provenance | None = None
    ) -> None:
        """Write whole conversations, all of them or none.

        Raises:
            ChatInUseError: somebody else is writing one of them.
        """

        def work(db: sqlite3.Connection) -> None:
            for conversation in conversations:
                tracker = Tracker(conversation)
                tracker.run = run
                if (changes := tracker.changes()) is None:
                    continue
                taken = self._leases.take(db, changes.chat_id)
                store_writes.write_changes(db, changes, candidates=self.candidates)
                if taken:
                    self._leases.free(db, changes.chat_id)

        self._write(work)

    def write(self, changes: Changes) -> None:
        """Write what has changed in a chat, all of it or nothing, and reserve it.

        Raises:
            ChatInUseError: somebody else is writing it.
        """

        def work(db: sqlite3.Connection) -> None:
            self._leases.take(db, changes.chat_id)
            store_writes.write_changes(db, changes, candidates=self.candidates)

        self._write(work)

    def claim(self, chat_id: str) -> None:
        """Reserve a chat for writing, until `release`, `close` or the end of this program.

        Raises:
            ChatInUseError: somebody else is writing it.
        """

        def work(db: sqlite3.Connection) -> None:
            if self._leases.take(db, chat_id):
                store_writes.settle(db, chat_id)

        self._write(work)

    def release(self, chat_id: str) -> None:
        """Let others write a chat."""
        self._write(lambda db: self._leases.free(db, chat_id))

    def renew_leases(self) -> None:
        """Tell others that this program is alive; to be called every minute or so."""
        self._write(self._leases.renew)

    def tidy(self, keep_deleted: float = KEEP_DELETED) -> None:
        """Finish what programs that were killed have left, and purge what was deleted long ago.

        Args:
            keep_deleted: seconds for which a deleted chat can be brought back.
        """

        def work(db: sqlite3.Connection) -> None:
            self._leases.clear_dead(db)
            store_writes.settle_abandoned(db)
            store_writes.purge(db, time.time() - keep_deleted)

        self._write(work)

    def check_search(self) -> None:
        """Look whether the search index is sound; if not, make it anew and tell so.

        It takes seconds where there are many chats: something for a quiet moment.
        """

        def work(db: sqlite3.Connection) -> bool:
            if sound := store_index.is_sound(db):
                return sound
            store_index.rebuild(db)
            return False

        if not self._write(work):
            self._tell(store_index.REMADE)

    def close(self) -> None:
        """Let go of all chats and close the database; the store may be used again."""
        if self.opened:
            try:
                self._write(self._leases.free)
            except StoreError as error:
                log.info("leases remain until they are stale: %s", error)
        self._database.close()

    def _set(self, chat_id: str, column: str, value: object) -> None:
        self._write(lambda db: store_writes.set_column(db, chat_id, column, value))


def _hit(row: Sequence[Any], query: str) -> Hit:
    chat_id, node_id, title, role, created, content, thinking = row
    shown, marks = excerpt(from_text(content), query)
    thought = excerpt(from_text(thinking or ""), query) if not marks else ("", ())
    if thought[1]:
        shown, marks = thought
    when = from_time(created)
    return Hit(chat_id, node_id, from_text(title), role, shown, marks, when, bool(thought[1]))


def _is_wanted(row: Sequence[Any], text: str, tag: str | None) -> bool:
    """Whether a chat has a text, given in lower case, in its title or a tag, and has a tag."""
    if not text and tag is None:
        return True
    tags = tags_from(row[6])
    return (tag is None or tag in tags) and any(
        text in word.casefold() for word in (from_text(row[1]), *tags)
    )


def _summary(row: Sequence[Any]) -> ChatSummary:
    chat_id, title, started, changed, messages, pinned, tags, model = row
    return ChatSummary(
        chat_id, from_text(title), started, changed, messages, bool(pinned), tags_from(tags), model
    )
