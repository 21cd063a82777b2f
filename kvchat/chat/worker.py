"""The one thread that touches the model, the cache and the random generator.

Whoever owns a worker puts commands on its queue and gets events through one callback, which is
called on the worker's thread and has to return quickly.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from kvchat.chat.commands import (
    Branch,
    Command,
    Continue,
    Edit,
    Fork,
    GetPrice,
    KeepCache,
    Load,
    Open,
    Regenerate,
    Restore,
    Send,
    SetSystem,
    SetThinking,
    Switch,
    Truncate,
)
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import (
    BranchDeleted,
    CacheStatus,
    CommandFailed,
    CommandFinished,
    CommandStarted,
    ModelLoaded,
    Paused,
    Priced,
    TitleSuggested,
    WorkerEvent,
)
from kvchat.chat.ledger import Price
from kvchat.chat.session import ChatSession, Overflow
from kvchat.chat.titles import suggest_title
from kvchat.engine.errors import Cancelled, KvchatError
from kvchat.engine.types import (
    GenerationFinished,
    LoadProgress,
    PrefillFinished,
    SamplingParams,
    TokenGenerated,
)
from kvchat.models.pull_staging import PullProgress
from kvchat.settings import cache_dir

if TYPE_CHECKING:
    from kvchat.chat.snapshots import Snapshots
    from kvchat.models.load import LanguageModel

log = logging.getLogger(__name__)

QUIET = 2.0
"""Seconds without a command after which the cache is written to the disk, if the chat wants it."""

CLOSING = 0.6
"""Seconds that this may take when the program ends."""

STATUS_EVERY = 16
"""Tokens of a reply after which the cache's state is told again."""


class Worker:
    """Carries out commands one after another on a daemon thread of its own.

    `pause`, `step`, `resume`, `cancel` and `shutdown` act at once; everything else waits its turn
    in the queue, where it can still be changed or withdrawn.

    It has one session, with the conversation of the last command; a command about another one
    begins a session with that, and what the cache held of the first is stashed.

    Args:
        on_event: gets every event, on the worker's thread.
        sampling: settings by name that replace the model's own defaults.
        overflow: what to do when the context is full.
        system: system prompt of new conversations.
        thinking: switches reasoning on or off where the template allows it.
        titles: whether the model gives chats titles in idle time.
        kernels: whether idle time is used to build our own kernels for the CPU, once.
        snapshots: keeps caches on the disk; without it none is.
        quiet: seconds without a command before it does so.
    """

    def __init__(
        self,
        on_event: Callable[[WorkerEvent], None],
        *,
        sampling: Mapping[str, Any] | None = None,
        overflow: Overflow = "ask",
        system: str = "",
        thinking: bool | None = None,
        titles: bool = False,
        kernels: bool = False,
        snapshots: Snapshots | None = None,
        quiet: float = QUIET,
    ) -> None:
        self._tell = on_event
        self._sampling = dict(sampling or {})
        self._params: SamplingParams | None = None
        self._overflow: Overflow = overflow
        self._system = system
        self._thinking = thinking
        self._titles = titles
        self._titled: set[str] = set()
        """The chats that the model has been asked for a title of."""
        self._builds_kernels = kernels
        self._builder: Popen[bytes] | None = None
        self._snapshots = snapshots
        self._quiet = quiet
        self._deadline = 0.0
        self._session: ChatSession | None = None
        self._conversation: Conversation | None = None
        self._queue: deque[Command] = deque()
        self._unreported = 0
        self._wake = threading.Condition()
        # The following are read and written while holding `_wake`.
        self._current: Command | None = None
        self._settling = self._unsettled = self._unkept = False
        self._stopping = self._closing = False
        self._paused = False
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="kvchat-engine", daemon=True)
        self._thread.start()

    # From any thread

    def submit(self, command: Command) -> Command:
        """Put a command at the end of the queue."""
        with self._wake:
            self._queue.append(command)
            if self._settling:
                self._cancel_engine()
            self._wake.notify_all()
        return command

    @property
    def queued(self) -> tuple[Command, ...]:
        """The commands that wait, next first."""
        with self._wake:
            return tuple(self._queue)

    def withdraw(self, command: Command) -> bool:
        """Take a waiting command out of the queue; False if it has started already."""
        with self._wake:
            if command not in self._queue:
                return False
            self._queue.remove(command)
            return True

    def replace(self, command: Command, changed: Command) -> bool:
        """Put a changed command in a waiting one's place; False if it has started already."""
        with self._wake:
            if command not in self._queue:
                return False
            self._queue[self._queue.index(command)] = changed
            return True

    @property
    def params(self) -> SamplingParams | None:
        """The sampling settings; setting them acts on the next token of a running reply."""
        return self._params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        with self._wake:
            self._params = params
            if self._session is not None:
                self._session.params = params

    @property
    def busy(self) -> bool:
        """Whether a command is being carried out or waits."""
        with self._wake:
            return self._current is not None or bool(self._queue)

    def cancel(self) -> None:
        """End what is being carried out; what it has written stays, the queue goes on."""
        with self._wake:
            if self._current is not None or self._settling:
                self._stopping = True
                self._cancel_engine()
            self._wake.notify_all()

    def pause(self) -> None:
        """Hold the running reply, or the next one, after its next token."""
        with self._wake:
            self._paused = True

    def step(self) -> None:
        """Let a paused reply go on by one token."""
        with self._wake:
            self._steps += self._paused
            self._wake.notify_all()

    def resume(self) -> None:
        """Let a paused reply go on."""
        with self._wake:
            self._paused, self._steps = False, 0
            self._wake.notify_all()

    def shutdown(self, timeout: float = 1.0) -> bool:
        """End everything, drop the queue and join the thread; False if it did not end in time."""
        with self._wake:
            self._closing = self._stopping = True
            self._deadline = time.monotonic() + CLOSING
            self._queue.clear()
            self._cancel_engine()
            self._wake.notify_all()
        self._thread.join(timeout)
        if self._builder is not None and self._builder.stdin is not None:
            self._builder.stdin.close()  # which ends it
        self._tell = _tell_nobody
        return not self._thread.is_alive()

    # On the worker's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                quiet = not self._wake.wait_for(
                    lambda: self._queue or self._unsettled or self._closing,
                    self._quiet if self._unkept else None,
                )
                if self._closing:
                    break
                self._current = self._queue.popleft() if self._queue else None
                self._settling = self._current is None
                self._stopping = False
                command = self._current
            if command is not None:
                self._perform(command)
            elif quiet:
                self._keep(self._session)
            else:
                self._settle()
            with self._wake:
                self._current, self._settling = None, False
                self._unsettled = command is not None and self._session is not None
                self._unkept = self._snapshots is not None and not quiet
        self._keep(self._session)

    def _perform(self, command: Command) -> None:
        self._tell(CommandStarted(command))
        try:
            for event in self._carry_out(command):
                self._tell(event)
                self._report(event)
                self._gate(event)
            if self._session is not None:
                self._tell(self._status(self._session))
        except Cancelled:
            self._tell(CommandFinished(command))
        except KvchatError as error:
            self._tell(CommandFailed(command, error))
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            name = type(error).__name__
            told = KvchatError(
                f"Something unforeseen went wrong ({name}: {error}); the log has it all."
            )
            self._tell(CommandFailed(command, told))
        else:
            self._tell(CommandFinished(command))

    def _carry_out(self, command: Command) -> Iterator[WorkerEvent]:
        if isinstance(command, Load):
            yield self._load(command)
            self._take_up()
            return
        session = self._session
        if session is None:
            raise KvchatError("No model is loaded; choose one first.")
        if isinstance(command, GetPrice):
            yield Priced(command, self._price(session, command))
            return
        if isinstance(command, KeepCache):
            self._switch(command.conversation or session.conversation, command.keep)
            return
        other = command.conversation
        if isinstance(command, Open) or (other and other is not session.conversation):
            left, session = session, self._begin_session(session.llm, other)
            yield ModelLoaded(session)
            if isinstance(command, Open):
                self._keep(left)
            self._take_up()
        match command:
            case Send(text=text, overflow=overflow):
                yield from session.send(text, overflow=overflow)
            case Regenerate(reply_id=reply_id, overflow=overflow):
                yield from session.regenerate(reply_id, overflow=overflow)
            case Edit(node_id=node_id, text=text, overflow=overflow):
                yield from session.edit(node_id, text, overflow=overflow)
            case Continue(reply_id=reply_id):
                yield from session.continue_reply(reply_id)
            case Fork(reply_id=reply_id, tokens=tokens, token_id=token_id):
                yield from session.fork(reply_id, tokens, token_id)
            case _:
                yield from self._change(session, command)

    def _change(self, session: ChatSession, command: Command) -> Iterator[WorkerEvent]:
        """Carry out what generates nothing."""
        match command:
            case Switch(node_id=node_id):
                session.select(node_id)
            case Branch(node_id=node_id):
                session.conversation.branch(node_id)
            case SetSystem(text=text):
                session.set_system(text)
            case SetThinking(thinking=thinking):
                self._thinking = thinking
                session.set_thinking(thinking)
            case Truncate(node_id=node_id):
                yield BranchDeleted(session.delete(node_id))
            case Restore(deleted=deleted):
                session.conversation.restore(deleted)

    def _price(self, session: ChatSession, command: GetPrice) -> Price:
        """Estimate for any conversation; the engine stays with the one it has."""
        other = command.conversation
        if other and other is not session.conversation:
            session = self._new_session(session.llm, other)
        return session.price(command.text, command.instead_of)

    def _load(self, command: Load) -> ModelLoaded:
        from kvchat.models.load import load  # imports torch, which takes a second
        from kvchat.models.pull import pull

        conversation = command.conversation or self._conversation

        def give_way() -> None:
            if self._session is not None:
                self._params = None  # another model, other defaults
                self._session = None
                gc.unfreeze()
                gc.collect()
            self._conversation = conversation

        def progress(event: LoadProgress | PullProgress) -> None:
            # Two models may not fit into memory side by side. A wrong name or an unsound file was
            # found before the first weight is read, and has then cost the user nothing.
            if isinstance(event, LoadProgress):
                give_way()
            self._tell(event)
            self._check_stopping()

        self._check_stopping()
        if self._session is None:
            give_way()
        if command.fetch:
            pull(command.model, progress=progress)
        llm = load(command.model, progress=progress, **command.options)
        give_way()
        # A collection that walks all that torch has made would hold up a reply for 0.15 s.
        gc.freeze()
        return ModelLoaded(self._begin_session(llm, conversation))

    def _new_session(self, llm: LanguageModel, conversation: Conversation | None) -> ChatSession:
        session = ChatSession(
            llm,
            self._system,
            conversation=conversation,
            overflow=self._overflow,
            thinking=self._thinking,
        )
        if self._session is not None and self._session.llm is llm:
            session.speed = self._session.speed
        return session

    def _begin_session(self, llm: LanguageModel, conversation: Conversation | None) -> ChatSession:
        session = self._new_session(llm, conversation)
        self._conversation = session.conversation  # it outlives a model that fails to load
        defaults = llm.defaults.updated(**self._sampling)
        with self._wake:
            session.params = self._params = self._params or defaults
            self._session = session
        return session

    def _switch(self, conversation: Conversation, keep: bool) -> None:
        if self._snapshots is None:
            raise KvchatError("This chat is not saved, so its cache cannot be kept either.")
        self._snapshots.switch(conversation, keep)

    def _take_up(self) -> None:
        """Bring back from the disk what a chat that begins here had in its cache."""
        if self._snapshots is not None and self._session is not None:
            with suppress(Cancelled):  # it is for the command then to end
                self._snapshots.load(self._session, self._check_stopping)

    def _keep(self, session: ChatSession | None) -> None:
        """Write the cache to the disk if its chat wants it."""
        if self._snapshots is None or session is None:
            return
        try:
            written = self._snapshots.save(session, self._check_keeping)
        except Cancelled:
            return  # there will be another quiet moment, and an older snapshot is of use too
        except Exception:
            log.exception("no snapshot could be written")
            return
        if written and session is self._session:
            self._tell(self._status(session))

    def _check_keeping(self) -> None:
        with self._wake:
            late = self._closing and time.monotonic() > self._deadline
            if late or self._queue or (self._stopping and not self._closing):
                raise Cancelled

    def _settle(self) -> None:
        """Prefill what the next turn is certain to begin with, until there is something to do."""
        session = self._session
        if session is None:
            return
        try:
            for _ in session.settle():
                self._give_way(session)
            if self._titles:
                self._suggest_title(session)
            if self._builds_kernels and not self.busy:
                self._build_kernels(session)
        except KvchatError as error:
            # The turn that this was meant for will meet the same error and tell it.
            log.info("idle prefill ended: %s", error)
        except Exception:  # nobody waits for it, and the thread has to live on
            log.exception("idle work failed")
        self._tell(self._status(session))

    def _suggest_title(self, session: ChatSession) -> None:
        chat = session.conversation
        if chat.title or chat.id in self._titled or self.busy or self._stopping:
            return
        for event in suggest_title(session):
            self._give_way(session)
            if isinstance(event, GenerationFinished) and event.reason != "cancelled":
                self._titled.add(chat.id)
            if isinstance(event, str):
                self._tell(TitleSuggested(chat, event))

    def _build_kernels(self, session: ChatSession) -> None:
        from kvchat.engine import native  # imports torch
        from kvchat.engine.native.background import begin

        if session.llm.device == "cpu":
            self._builds_kernels = False
            self._builder = begin(cache_dir() / native.FOLDER)

    def _give_way(self, session: ChatSession) -> None:
        """End what is done in idle time as soon as there is a command."""
        if self.busy or self._stopping:
            session.llm.engine.cancel()

    def _report(self, event: WorkerEvent) -> None:
        """Between two events: tell now and then how the cache fills."""
        self._unreported += isinstance(event, TokenGenerated)
        due = isinstance(event, PrefillFinished) or self._unreported >= STATUS_EVERY
        if due and self._session is not None:
            self._unreported = 0
            self._tell(self._status(self._session))

    def _gate(self, event: WorkerEvent) -> None:
        """Between two events: pass on a stop that came too early for the engine, or pause."""
        if self._stopping:
            self._cancel_engine()
        if not isinstance(event, TokenGenerated):
            return
        if self._held:
            self._tell(Paused())
        with self._wake:
            self._wake.wait_for(lambda: not self._held)
            self._steps = max(0, self._steps - 1)

    @property
    def _held(self) -> bool:
        """Whether a reply has to wait after its next token."""
        with self._wake:
            return self._paused and not self._steps and not self._stopping

    def _status(self, session: ChatSession) -> CacheStatus:
        engine, kept = session.llm.engine, self._snapshots
        return CacheStatus(
            len(engine.ids),
            engine.max_seq_len,
            engine.kv_bytes,
            engine.stash_bytes,
            keeps_cache=kept is not None and kept.wanted(session.conversation),
            snapshot_bytes=kept.folder.size(session.conversation.id) if kept else 0,
            would_take=engine.snapshot_bytes,
        )

    def _cancel_engine(self) -> None:
        if self._session is not None:
            self._session.llm.engine.cancel()

    def _check_stopping(self) -> None:
        if self._stopping:
            raise Cancelled


def _tell_nobody(_event: WorkerEvent) -> None:
    """Take the events of a thread that did not end in time."""
