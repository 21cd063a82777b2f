"""KV snapshots of chats: when one is written, and what becomes of it when its chat is opened.

A snapshot of an earlier state of a chat is still worth having: the next turn reuses it as far as
it goes and prefills the rest. So nothing hangs on writing the last state. It is written by the
engine's thread, which alone may read the cache, in idle time, and once more for a moment when the
program ends; it is given up between two layers as soon as there is something else to do. A thread
of its own for it would need a copy of the whole cache in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.ledger import Loaded
from kvchat.chat.provenance import Provenance
from kvchat.chat.snapshot_folder import SnapshotFolder
from kvchat.engine.errors import OutOfMemoryError, SnapshotError
from kvchat.engine.token_ids import common_prefix

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation
    from kvchat.chat.events import CacheStatus
    from kvchat.chat.session import ChatSession
    from kvchat.models.load import LanguageModel

log = logging.getLogger(__name__)

FOLDER = "snapshots"
"""Beside the database."""

BUDGET = 2 * 2**30
"""Default for the bytes of all snapshots together."""

WORTH = 0.01
"""Share of a snapshot that has to be new for it to be written again."""

_Check = Callable[[], None]


class Snapshots:
    """Writes and reads the snapshots of the chats that want one. For the engine's thread.

    Args:
        folder: where they are.
        always: whether chats want one that say nothing about it.
        tell: gets texts for the user, when one could not be written.
    """

    def __init__(
        self,
        folder: SnapshotFolder,
        *,
        always: bool = False,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self.folder = folder
        self.always = always
        self._tell = tell
        self._told = ""
        self._model: tuple[LanguageModel, Provenance] | None = None
        self._ids: dict[str, list[int]] = {}
        """What the snapshots hold that were written or read here, by chat."""

    def wanted(self, conversation: Conversation) -> bool:
        """Whether a chat's cache is to be kept."""
        kept = conversation.keep_cache
        return self.always if kept is None else kept

    def switch(self, conversation: Conversation, keep: bool) -> None:
        """Keep a chat's cache from now on, or no longer; then what there is of it is removed.

        Raises:
            SnapshotError: it cannot be removed.
        """
        conversation.keep_cache = keep
        if not keep:
            self._ids.pop(conversation.id, None)
            try:
                self.folder.remove(conversation.id)
            except OSError as error:
                raise SnapshotError(
                    f"The cache of this chat could not be removed ({error.strerror}): "
                    f"{self.folder.file(conversation.id)}"
                ) from error

    def load(self, session: ChatSession, check: _Check) -> None:
        """Bring back the cache of a chat that was opened, if the engine has not got it anyway.

        Whatever is wrong with a snapshot, the chat goes on without it, and the ledger says so.

        Raises:
            Cancelled: by the check.
        """
        chat, engine = session.conversation, session.engine
        certain = session.certain()
        about = self._note_model(session.llm)
        if not self.folder.file(chat.id).exists():
            return
        self.folder.touch(chat.id)
        if certain and engine.reusable(certain) >= len(certain) - 1:
            return
        try:
            engine.load(str(self.folder.file(chat.id)), made_with(about), check)
        except (SnapshotError, OutOfMemoryError) as error:
            log.warning("the snapshot of %s is not used: %s", chat.id, error)
            session.loaded = Loaded(problem=str(error))
            if isinstance(error, SnapshotError) and error.damaged:
                self._remove(chat.id)
            return
        self._ids[chat.id] = list(engine.ids)
        session.loaded = Loaded(len(engine.ids))

    def save(self, session: ChatSession, check: _Check) -> bool:
        """Write a chat's snapshot if it is wanted and would spare more than the one there is.

        Returns whether it was written. What goes wrong is told once, and costs nothing else.

        Raises:
            Cancelled: by the check.
        """
        chat, engine = session.conversation, session.engine
        if not self.wanted(chat):
            return False
        certain, held = session.certain(), list(engine.ids)
        had = self._ids.get(chat.id, []) if self.folder.size(chat.id) else []
        gain = common_prefix(held, certain) - common_prefix(had, certain)
        if gain <= 0 or gain < WORTH * len(held):
            return False
        if engine.snapshot_bytes > self.folder.budget:
            self._complain(
                f"it would take {mebibytes(engine.snapshot_bytes)}, more than "
                "all snapshots together may; the setting snapshots_mb allows more"
            )
            return False
        try:
            about = made_with(self._note_model(session.llm))
            self.folder.put(chat.id, lambda path: engine.save(path, about, check))
        except OSError as error:
            self._complain(f"{error.strerror or error}")
            return False
        except (SnapshotError, OutOfMemoryError) as error:
            self._complain(str(error))
            return False
        self._told = ""
        self._ids[chat.id] = held
        return True

    def _note_model(self, llm: LanguageModel) -> Provenance:
        """Return where a model came from; looked up once, for its files may change later."""
        if self._model is None or self._model[0] is not llm:
            self._model = llm, Provenance.of(llm)
        return self._model[1]

    def _complain(self, why: str) -> None:
        log.warning("no snapshot was written: %s", why)
        if why != self._told:
            self._told = why
            self._tell(
                f"The cache of this chat could not be kept on the disk: {why}. The chat "
                "itself is not concerned; when it is opened again, it is read again."
            )

    def _remove(self, chat_id: str) -> None:
        try:
            self.folder.remove(chat_id)
        except OSError as error:
            log.warning("a damaged snapshot stays: %s", error)


def snapshot_text(status: CacheStatus) -> str:
    """Say whether a chat's cache is kept, and what it takes on the disk."""
    if status.snapshot_bytes:
        return f"The cache of this chat takes {mebibytes(status.snapshot_bytes)} on the disk."
    if status.keeps_cache:
        return (
            f"The cache of this chat will take about {mebibytes(status.would_take)} on the disk; "
            "it is written when there is nothing else to do."
        )
    return (
        "The cache of this chat is not kept; "
        f"it would take about {mebibytes(status.would_take)} on the disk."
    )


def mebibytes(n: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{n / 2**20:,.{0 if n >= 100 * 2**20 else 1}f} MiB"


def folder_beside(database: Path, budget: int = BUDGET) -> SnapshotFolder:
    """Return the folder of the snapshots of a database's chats."""
    return SnapshotFolder(database.with_name(FOLDER), budget)


def made_with(found: Provenance) -> dict[str, str]:
    """Return what a snapshot's reader has to agree on, besides what the engine compares.

    Raises:
        SnapshotError: the model's files cannot be read, so it cannot be told from others.
    """
    if found.fingerprint is None:
        raise SnapshotError("the model's files cannot be read")
    return {
        "model": found.fingerprint,
        "template": found.template,
        "device": found.device,
        "dtype": found.dtype,
        "quantisation": found.quant,
        "version": found.kvchat,
    }
