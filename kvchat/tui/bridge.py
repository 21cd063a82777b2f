"""EventBridge: from the engine's thread to the screen, without either waiting for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from textual.app import App

    from kvchat.chat.events import WorkerEvent

UPDATES_PER_SECOND = 13
"""At most. Every update holds the interpreter lock that decoding needs too."""


class EngineUpdate(Message, bubble=False):
    """There are events to take from the bridge."""


class EventBridge:
    """Collects the worker's events; at most one update is outstanding on the screen.

    Args:
        app: gets an EngineUpdate and answers it by calling `drain` with the events' handler.
    """

    def __init__(self, app: App[None]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._events: list[WorkerEvent] = []
        self._outstanding = False
        self._last = 0.0

    def put(self, event: WorkerEvent) -> None:
        """Take an event in. Called on the engine's thread; never blocks on the screen."""
        with self._lock:
            self._events.append(event)
            if self._outstanding:
                return
            self._outstanding = True
        self._app.post_message(EngineUpdate())

    def drain(self, handle: Callable[[list[WorkerEvent]], None]) -> None:
        """Hand over all events, at once or when the rate allows; on the screen's thread."""
        wait = self._last + 1 / UPDATES_PER_SECOND - time.monotonic()
        if wait > 0:
            self._app.set_timer(wait, lambda: self._hand_over(handle))
        else:
            self._hand_over(handle)

    def _hand_over(self, handle: Callable[[list[WorkerEvent]], None]) -> None:
        with self._lock:
            events, self._events = self._events, []
            self._outstanding = False
        self._last = time.monotonic()
        if self._app.is_running:  # the widgets go before the engine's thread does
            handle(events)
