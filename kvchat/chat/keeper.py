"""Keeper: the store, its saver and the snapshots, as a program that chats uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvchat.chat.conversation import Conversation
from kvchat.chat.events import WorkerEvent
from kvchat.chat.ledger import Turn
from kvchat.chat.own_model import own_model
from kvchat.chat.saver import Saver
from kvchat.chat.snapshots import Snapshots, folder_beside
from kvchat.chat.store import Store
from kvchat.chat.store_errors import ChatInUseError, StoreError
from kvchat.engine.errors import KvchatError

log = logging.getLogger(__name__)

LAST = "last"
"""In the place of a chat's id, which is never a word: the one that was changed last."""


class Keeper:
    """Opens and saves chats. Whatever goes wrong with the disk, the chat itself goes on.

    Args:
        tell: gets texts for the user, on any thread.
        candidates: whether the candidates of each token are saved.
        snapshots: whether KV caches are kept of chats that say nothing about it.
        snapshots_mb: MiB that all of them together may take.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        candidates: bool = True,
        snapshots: bool = False,
        snapshots_mb: int = 2048,
    ) -> None:
        self.store = Store(tell=tell, candidates=candidates)
        folder = folder_beside(self.store.path, snapshots_mb * 2**20)
        self.snapshots = Snapshots(folder, always=snapshots, tell=tell)
        self._saver = Saver(self.store, tell, tidy=self._tidy)
        self._tell = tell

    def note(self, event: WorkerEvent) -> None:
        """Save what an event means. Called on the worker's thread."""
        self._saver.note(event)

    def find(self, which: str) -> str | None:
        """Return the id of a chat given by the beginning of it, or of the last one.

        Raises:
            KvchatError: there is none, or more than one.
        """
        return self.store.last() if which == LAST else self.store.find(which)

    def resume(self, which: str) -> tuple[Conversation, list[Turn]]:
        """Open the chat that `find` finds; see `open`.

        Raises:
            KvchatError: there is none, or it cannot be read.
        """
        chat_id = self.find(which)
        if chat_id is None:
            raise KvchatError("There is no chat yet to go on with.")
        return self.open(chat_id)

    def open(self, chat_id: str) -> tuple[Conversation, list[Turn]]:
        """Return a chat and its ledger; a copy of it when another program is writing in it.

        Raises:
            KvchatError: it cannot be read.
        """
        self.flush()  # it may have been closed here a moment ago
        try:
            conversation = self._saver.open(chat_id)
        except ChatInUseError as error:
            self._tell(f"{error} A copy is opened.")
            chat_id = self.store.duplicate(chat_id)
            conversation = self._saver.open(chat_id)
        return conversation, self.store.ledger(chat_id)

    def open_free(self, chat_ids: Iterable[object]) -> list[tuple[Conversation, list[Turn]]]:
        """Open those of some chats that are there and that no other program is writing."""
        opened = []
        for chat_id in chat_ids:
            try:
                found = self.store.find(str(chat_id))
                opened.append((self._saver.open(found), self.store.ledger(found)))
            except KvchatError as error:
                log.info("the tab of %s is not opened again: %s", chat_id, error)
        return opened

    def model_of(self, chat: Conversation, otherwise: str, tell: Callable[[str], None]) -> str:
        """Return which model a chat goes on with; see `own_model`."""
        try:
            return own_model(self.store, chat, otherwise, tell)
        except StoreError as error:
            tell(str(error))
            return otherwise

    def flush(self) -> bool:
        """Wait a moment until all is written; False if it is not."""
        return self._saver.flush()

    def let_go(self, chat_id: str) -> None:
        """Close a chat: other programs may write it now."""
        self._saver.let_go(chat_id)

    def close(self) -> None:
        """Write everything and end. The worker must have ended."""
        try:
            if not self._saver.close():
                self._tell("Some of this chat could not be written to the disk.")
        except KvchatError as error:
            self._tell(str(error))

    def _tidy(self) -> None:
        """Purge what was deleted long ago, with the snapshots of chats that are gone for good."""
        self.store.tidy()
        self.snapshots.folder.prune(self.store.keeping())
