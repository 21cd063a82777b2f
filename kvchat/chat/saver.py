"""Saver: writes chats as they grow, on a thread of its own.

The engine's thread hands over copies of what has changed, which costs microseconds, and never
waits for the disk. What cannot be written stays in memory and is tried again until it can.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvchat.chat.changes import Tracker
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import (
    CommandFailed,
    CommandFinished,
    ModelLoaded,
    Paused,
    ReplyStarted,
    TitleSuggested,
    TurnFinished,
    WorkerEvent,
)
from kvchat.chat.ledger import Turn
from kvchat.chat.provenance import Provenance
from kvchat.chat.store import Store
from kvchat.chat.store_errors import ChatInUseError, StoreError
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import LoadProgress, PrefillFinished, TokenGenerated

if TYPE_CHECKING:
    from kvchat.chat.session import ChatSession

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds of a running reply that a kill may cost."""

RETRY = 2.0
"""Seconds between tries while nothing can be written."""

RENEW = 30.0
"""Seconds between signs of life to other programs."""


class Saver:
    """Saves what a worker tells, and runs other changes of the store in order with that.

    Args:
        store: what is written to.
        tell: gets texts for the user: once when saving fails, and once when it works again. Called
            on the saver's thread.
        tidy: what is done before anything else; the store's own tidying by default.
        interval: seconds between two writes of a running reply.
        retry: seconds between tries while nothing can be written.
        quiet: seconds without anything to write after which the search index is looked over, once.
    """

    def __init__(
        self,
        store: Store,
        tell: Callable[[str], None] = log.warning,
        *,
        tidy: Callable[[], None] | None = None,
        interval: float = INTERVAL,
        retry: float = RETRY,
        quiet: float = RENEW,
    ) -> None:
        self.store = store
        self._tell = tell
        self._tidy = tidy or store.tidy
        self._interval = interval
        self._retry = retry
        self._quiet = quiet
        # On the worker's thread:
        self._session: ChatSession | None = None
        self._tracker: Tracker | None = None
        self._reply_id = ""
        self._saved_at = 0.0
        # Shared, under `_wake`:
        self._trackers: dict[str, Tracker] = {}
        self._jobs: deque[tuple[Callable[[], object], str]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        # On the saver's thread:
        self._problem = False
        self._opened = store.opened
        self._thread = threading.Thread(target=self._run, name="kvchat-saver", daemon=True)
        self._thread.start()

    # On the worker's thread

    def note(self, event: WorkerEvent) -> None:
        """Take what an event means for the open chat; to be called with every event."""
        match event:
            case LoadProgress():
                self._session = None  # the model gives way to another
            case ModelLoaded(session=session):
                self._follow(session)
                self._save()
            case ReplyStarted(reply_id=reply_id):
                self._reply_id = reply_id
                self._save()
            case PrefillFinished():
                if self._tracker is not None and self._session is not None:
                    self._tracker.prefilled(self._reply_id, self._session.llm.engine.ids)
                self._save()
            case TokenGenerated():
                if time.monotonic() - self._saved_at >= self._interval:
                    self._save()
            case TurnFinished(turn=turn):
                self._save(turn)
            case TitleSuggested(conversation=conversation, title=title):
                self.call(self.store.entitle, conversation.id, title)
            case Paused() | CommandFinished() | CommandFailed():
                self._save()

    def _follow(self, session: ChatSession) -> None:
        self._session = session
        conversation = session.conversation
        with self._wake:
            tracker = self._trackers.get(conversation.id)
            if tracker is None or tracker.conversation is not conversation:
                tracker = self._trackers[conversation.id] = Tracker(conversation)
        tracker.run = Provenance.of(session.llm)
        self._tracker = tracker

    def _save(self, *turns: Turn) -> None:
        self._saved_at = time.monotonic()
        if self._tracker is not None:
            self._put_changes(self._tracker, *turns)

    # On any thread

    def open(self, chat_id: str) -> Conversation:
        """Load a chat and reserve it for writing here; what changes in it is saved from now on.

        This waits for the disk.

        Raises:
            ChatInUseError: another program is writing it; open `store.duplicate(chat_id)`.
            StoreError: it cannot be read.
        """
        with self._wake:
            if (tracker := self._trackers.get(chat_id)) is not None:
                return tracker.conversation
        try:
            self.store.claim(chat_id)
        except ChatInUseError:
            raise
        except StoreError as error:
            log.info("%s is opened without being reserved: %s", chat_id, error)
        conversation = self.store.load(chat_id)
        with self._wake:
            self._trackers[chat_id] = Tracker(conversation, stored=True)
        return conversation

    def let_go(self, chat_id: str) -> None:
        """Save no more of a chat that was closed, and let other programs write it."""
        with self._wake:
            self._trackers.pop(chat_id, None)
        self.call(self.store.release, chat_id)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a change of the store on the saver's thread, after what is waiting."""
        self._put(partial(function, *args), "")

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that was handed over is written; False if it is not in time."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Write everything and end the thread; False if something could not be written.

        The worker must have ended: the conversations are read on the caller's thread.
        """
        with self._wake:
            trackers = list(self._trackers.values())
        for tracker in trackers:
            self._put_changes(tracker)
        done = self.flush(timeout)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout)
        self.store.close()
        return done

    def _put_changes(self, tracker: Tracker, *turns: Turn) -> None:
        if (changes := tracker.changes(turns)) is not None:
            self._put(partial(self.store.write, changes), changes.chat_id)

    def _put(self, job: Callable[[], object], chat_id: str) -> None:
        with self._wake:
            self._jobs.append((job, chat_id))
            self._wake.notify_all()

    # On the saver's thread

    def _run(self) -> None:
        self._attempt(self._tidy, "")
        renewed = time.monotonic()
        looked_over = False
        while True:
            with self._wake:
                if not self._jobs:
                    self._wake.wait_for(lambda: self._jobs or self._closing, self._quiet)
                if self._closing:
                    return
                job, chat_id = self._jobs[0] if self._jobs else (None, "")
            if time.monotonic() - renewed >= RENEW:
                renewed = time.monotonic()
                self._attempt(self.store.renew_leases, "")
            if job is None:
                if not looked_over:
                    looked_over = True
                    self._look_over()
                continue
            if self._attempt(job, chat_id):
                with self._wake:
                    self._jobs.popleft()
                    self._wake.notify_all()
            else:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing, self._retry)

    def _look_over(self) -> None:
        try:
            self.store.check_search()
        except KvchatError as error:
            log.info("the search index was not looked over: %s", error)

    def _attempt(self, job: Callable[[], object], chat_id: str) -> bool:
        """Do a job; False if it has to be done again."""
        try:
            job()
        except ChatInUseError as error:
            # Others' work must not wait for this chat; it is written whole once it is free.
            self._reset(chat_id)
            self._fail(error)
            return True
        except StoreError as error:
            self._fail(error)
            return False
        except KvchatError as error:
            log.info("%s", error)  # it concerned a chat that is gone
            return True
        except Exception as error:
            log.exception("a change could not be written")
            self._reset(chat_id)
            self._fail(
                KvchatError(f"Something unforeseen went wrong ({error}); the log has it all.")
            )
            return True
        if self.store.opened != self._opened:
            if self._opened:
                self._reset()
            self._opened = self.store.opened
        if self._problem:
            self._problem = False
            self._tell("Saving works again; nothing was lost.")
        return True

    def _reset(self, chat_id: str | None = None) -> None:
        """Take nothing of a chat for written any more, or of any."""
        with self._wake:
            for known, tracker in self._trackers.items():
                if chat_id in (known, None):
                    tracker.reset()

    def _fail(self, error: KvchatError) -> None:
        log.warning("not saved: %s", error)
        if not self._problem:
            self._problem = True
            self._tell(f"This chat cannot be saved now and goes on in memory. {error}")
