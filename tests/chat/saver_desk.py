"""A worker with a tiny model on its table, whose events a saver gets."""

from __future__ import annotations

import threading
from collections.abc import Callable

from chat.tiny_chat import GREEDY, tiny_llm

from kvchat.chat.commands import Command
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import CommandFailed, CommandFinished, ModelLoaded, WorkerEvent
from kvchat.chat.saver import Saver
from kvchat.chat.session import ChatSession
from kvchat.chat.store import Store
from kvchat.chat.worker import Worker
from kvchat.engine.types import TokenGenerated


class Desk:
    """A worker with a model on its table, whose events a saver gets."""

    def __init__(
        self, store: Store, conversation: Conversation | None = None, *, interval: float = 0.0
    ) -> None:
        self.told: list[str] = []
        self.saver = Saver(store, self.told.append, interval=interval, retry=0.05)
        self.failed: list[CommandFailed] = []
        self.on_token: Callable[[], None] = lambda: None
        self._done = threading.Event()
        self.worker = Worker(self._note)
        self.session = ChatSession(tiny_llm(), conversation=conversation, params=GREEDY)
        # What `Load` does once the model's file is read.
        self.worker._session = self.session
        self.worker._conversation = self.session.conversation
        self.saver.note(ModelLoaded(self.session))

    def _note(self, event: WorkerEvent) -> None:
        self.saver.note(event)
        if isinstance(event, TokenGenerated):
            self.on_token()
        if isinstance(event, CommandFailed):
            self.failed.append(event)
        if isinstance(event, CommandFailed | CommandFinished):
            self._done.set()

    @property
    def chat(self) -> Conversation:
        conversation = self.worker._conversation
        assert conversation is not None
        return conversation

    def do(self, command: Command) -> None:
        self._done.clear()
        self.worker.submit(command)
        assert self._done.wait(10)
        assert not self.failed

    def close(self) -> bool:
        assert self.worker.shutdown(5)
        return self.saver.close()
