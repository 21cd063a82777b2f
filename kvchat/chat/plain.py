"""A chat line by line, for plain terminals, screen readers, SSH and scripts.

The main thread reads a line, puts a command on the worker's queue and prints what the worker
tells until the command has ended.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.chat import slash
from kvchat.chat.attachments import as_mention, described, expand
from kvchat.chat.changes import heading
from kvchat.chat.commands import Command, Edit, Load, Regenerate, Send, Truncate
from kvchat.chat.events import (
    BranchDeleted,
    CacheStatus,
    CommandFailed,
    CommandFinished,
    CommandStarted,
    ModelLoaded,
    TextAdded,
    TurnFinished,
    WorkerEvent,
)
from kvchat.chat.ledger import Turn
from kvchat.chat.lines import Lines
from kvchat.chat.plain_commands import COMMANDS
from kvchat.chat.plain_text import one_line
from kvchat.chat.reply_writer import Output, ReplyWriter
from kvchat.chat.slow import SlowProgress
from kvchat.chat.worker import Worker
from kvchat.engine.errors import ContextOverflowError, KvchatError
from kvchat.engine.types import LoadProgress, PrefillProgress
from kvchat.models.pull_staging import PullProgress

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation, Deleted
    from kvchat.chat.keeper import Keeper
    from kvchat.chat.session import ChatSession, Overflow

PATIENCE = 2
"""How many Ctrl+C ask a reply to end; the next one ends the program."""

_POLL_SECONDS = 0.2  # on Windows, Ctrl+C does not end a wait

_ENDINGS = {
    "cancelled": "stopped; /continue goes on",
    "length": "cut at a limit; /continue goes on",
    "interrupted": "broken off by an error",
}


class PlainChat:
    """The chat, its worker, and what is on the terminal.

    Args:
        lines: what the user types.
        output: replies and answers to commands.
        note: writes a line about a failure.
        progress: writes a line about something that takes long.
        system: system prompt.
        overflow: what to do when the context is full; nobody is asked where nobody sits.
        sampling: settings by name that replace the model's own.
        kernels: whether idle time is used to build our own kernels for the CPU.
        keeper: saves the chat; without it nothing is kept. It is closed with the chat.
    """

    def __init__(
        self,
        lines: Lines,
        output: Output,
        *,
        note: Callable[[str], None],
        progress: Callable[[str], None],
        system: str = "",
        overflow: Overflow = "ask",
        sampling: Mapping[str, Any] | None = None,
        kernels: bool = False,
        keeper: Keeper | None = None,
    ) -> None:
        self.lines = lines
        self.output = output
        self.failed = False
        """Whether anything has gone wrong so far."""
        self.ended = False
        self.cache: CacheStatus | None = None
        self.deleted: Deleted | None = None
        """What the last command took out."""
        self.undo: list[tuple[str, Command]] = []
        """What was done, in a word, and what takes it back; the last is on top."""
        self._note = note
        self._progress = SlowProgress(progress)
        self._events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        asks = overflow == "ask" and lines.interactive
        self._asks_on_overflow = asks
        self._keeper = keeper
        self.worker = Worker(
            self._take_event,
            overflow=overflow if asks or overflow != "ask" else "stop",
            system=system,
            sampling=sampling,
            kernels=kernels,
            snapshots=keeper.snapshots if keeper is not None else None,
        )
        self._session: ChatSession | None = None
        self._waiting_for: Command | None = None
        self._started = False
        self._interrupts = 0
        self._reply = ReplyWriter(output)
        self._draft = ""

    @property
    def session(self) -> ChatSession:
        """The session; the worker alone changes it."""
        if self._session is None:
            raise KvchatError("No model is loaded.")
        return self._session

    @property
    def conversation(self) -> Conversation:
        """The conversation."""
        return self.session.conversation

    # The chat

    def load(
        self, model: str, options: Mapping[str, Any], conversation: Conversation | None = None
    ) -> None:
        """Load a model.

        Args:
            model: its name, file or folder.
            options: keyword arguments of `kvchat.load`.
            conversation: the chat to go on with; a new one by default.

        Raises:
            KvchatError: it cannot be loaded.
            KeyboardInterrupt: there was a Ctrl+C.
        """
        with self._hearing_interrupts():
            self.perform(Load(model, dict(options), conversation=conversation))
        if self.session.llm.template.is_default:
            self._note(f"{model} has no chat template of its own; a common one is used")
        self.remark(f"{model} is ready. /help lists the commands, /quit or Ctrl+D ends the chat.")
        if conversation is not None:
            count = len(conversation.active_path())
            title = one_line(heading(conversation))
            self.remark(f"“{title}” goes on after {count} messages; /history lists them.")

    def run(self) -> None:
        """Read lines and carry them out until there are no more."""
        with self._hearing_interrupts():
            while not self.ended:
                try:
                    self._take(self._read())
                except EOFError:
                    self.ended = True
                    if self.lines.interactive:
                        self.output.write("\n")
                except KeyboardInterrupt:
                    if not self.lines.interactive or self._waiting_for is not None:
                        raise
                    self.output.write("\n")
                    self.remark("To end the chat, type /quit or press Ctrl+D.")
                except KvchatError as error:
                    self._fail(error)

    def close(self) -> None:
        """End the worker, and save what is not saved yet."""
        self.worker.shutdown()
        if self._keeper is not None:
            self._keeper.close()

    def _take_event(self, event: WorkerEvent) -> None:
        """Pass an event on; called on the worker's thread."""
        if self._keeper is not None:
            self._keeper.note(event)
        self._events.put(event)

    def _read(self) -> str:
        number = len(self.conversation.active_path()) + 1
        draft, self._draft = self._draft, ""
        line = self.lines.read(f"{number}> ", draft)
        text = ""
        while slash.goes_on(line):
            text += line[:-1] + "\n"
            try:
                line = self.lines.read("... ")
            except EOFError:
                line = ""
        return text + line

    def _take(self, line: str) -> None:
        if as_mention(line, Path.cwd()):  # the path of a file begins with a slash too
            self._send(line)
            return
        match slash.read(line):
            case slash.Called(name=name, argument=argument):
                slash.find(name, COMMANDS).run(self, argument)
            case str(text) if text.strip():
                self._send(text)

    def _send(self, text: str) -> None:
        message = self._with_attachments(text)
        before = len(self.conversation.active_path())
        try:
            self.answer(Send(message))
        finally:
            path = self.conversation.active_path()
            if len(path) > before:
                self.undo.append(("message", Truncate(path[before].id)))
            else:
                self._give_back(text)

    def _with_attachments(self, text: str) -> str:
        message = expand(text, Path.cwd())
        if message.problems:
            self._give_back(text)
            raise KvchatError(" ".join(message.problems))
        if message.attachments:
            tokens = len(self.session.llm.tokenizer.encode_plain(message.text))
            self.remark(f"({described(message.attachments)}; the message has {tokens:,} tokens)")
        return message.text

    def _give_back(self, text: str) -> None:
        if self.lines.interactive:
            self._draft = text

    def _fail(self, error: KvchatError) -> None:
        self.failed = True
        self._note(str(error))

    # What commands use

    def say(self, text: str) -> None:
        """Write a line that was asked for."""
        self.output.write(f"{text}\n")

    def remark(self, text: str) -> None:
        """Write a line that only somebody who sits there needs."""
        if self.lines.interactive:
            self.output.write(f"{text}\n", dim=True)

    def ask(self, question: str, text: str = "") -> str:
        """Return the line that answers a question; `text` is in it already.

        Raises:
            KvchatError: nobody sits there.
        """
        if not self.lines.interactive:
            raise KvchatError("This takes its text on the same line when it comes from a pipe.")
        return self.lines.read(question, text)

    def answer(self, command: Send | Regenerate | Edit) -> None:
        """Carry out a command that a reply comes of; ask what to do when the context is full."""
        try:
            self.perform(command)
        except ContextOverflowError as error:
            if not (self._asks_on_overflow and error.can_drop):
                raise
            question = f"{error.needed:,} tokens do not fit into the context of {error.limit:,}. "
            reply = self.ask(f"{question}Drop the oldest turns? [y/N] ")
            if reply.strip().lower() not in ("y", "yes"):
                raise
            self.perform(replace(command, overflow="drop-oldest"))

    def perform(self, command: Command) -> None:
        """Have the worker carry out a command, and print what it tells.

        Raises:
            KvchatError: it failed.
            KeyboardInterrupt: there was a Ctrl+C that did not mean the reply.
        """
        self._waiting_for, self._started, self._interrupts = command, False, 0
        self.worker.submit(command)
        while self._waiting_for is not None:
            match self._next():
                case CommandStarted(command=started) if started == command:
                    self._started = True
                    self._progress.begin()
                case CommandFinished(command=finished) if finished == command:
                    self._waiting_for = None
                case CommandFailed(command=failed, error=error) if failed == command:
                    self._waiting_for = None
                    self._reply.finish()
                    raise error
                case event if self._started:
                    self._show(event)

    def _next(self) -> WorkerEvent:
        while True:
            try:
                return self._events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue

    def _show(self, event: WorkerEvent) -> None:
        match event:
            case TextAdded():
                self._reply.add(event)
            case TurnFinished(turn=turn):
                self._reply.finish()
                self._tell_turn(turn)
            case PrefillProgress(new=new, done=done):
                self._progress.update("reading the prompt", done, new)
            case LoadProgress(done=done, total=total):
                self._progress.update("loading the model", done, total)
            case PullProgress(what=what, done=done, total=total):
                self._progress.update(what, done, total)
            case ModelLoaded(session=session):
                self._session = session
            case BranchDeleted(deleted=deleted):
                self.deleted = deleted
            case CacheStatus():
                self.cache = event

    def _tell_turn(self, turn: Turn) -> None:
        ending = _ENDINGS.get(turn.finish_reason)
        if ending:
            self.remark(f"({ending})")
        if self.output.is_terminal:
            self.output.write(f"{turn.line()}\n\n", dim=True)

    # Ctrl+C

    @contextmanager
    def _hearing_interrupts(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGINT)
        here = threading.current_thread() is threading.main_thread()
        if not here or before == signal.SIG_IGN:  # a background job of a shell shall not hear it
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, *_: object) -> None:
        command = self._waiting_for
        self._interrupts += 1
        stops = self.lines.interactive and self._session is not None
        if command is None or not stops or self._interrupts > PATIENCE:
            raise KeyboardInterrupt
        if self.worker.withdraw(command):
            self._events.put(CommandStarted(command))
            self._events.put(CommandFinished(command))
        else:
            self.worker.cancel()
