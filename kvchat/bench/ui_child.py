"""`python -m kvchat.bench.ui_child`: the screen program with a stopwatch, on a pseudo-terminal.

Takes a `Script` as JSON, then the file descriptor of a pipe. What the user does comes from the
terminal; what was measured goes to the pipe, one JSON object a line. The program itself is watched
from outside: its bridge, whose events are noted when they come in and when they have been handled,
and the driver, whose next write thereafter brings them to the terminal.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from kvchat.bench.worker_child import story_params, tokens_per_second, unending
from kvchat.chat.commands import Open
from kvchat.chat.events import CommandFailed, ModelLoaded, TurnFinished, WorkerEvent
from kvchat.chat.session import ChatSession
from kvchat.engine.types import TokenGenerated
from kvchat.settings import Settings, log_file
from kvchat.tui.app import KvchatApp
from kvchat.tui.bridge import EventBridge
from kvchat.tui.native_output import native_output_to


@dataclass(frozen=True, slots=True)
class Script:
    """What to do once the model is loaded."""

    load: dict[str, Any]
    """Fields of `LoadSettings`."""
    reply_tokens: int = 0
    """Length of the first reply; the later ones go on."""
    idle_s: float = 0.0
    """Seconds of idling that are measured before."""
    open_messages: int = 0
    """Length of the chat that is opened; 0 for none, and then the terminal is listened to."""
    opens: int = 0
    """How often."""


Noted = tuple[float, WorkerEvent]
"""When an event came in, and the event."""


class Painter:
    """Follows events from the bridge to the terminal.

    Args:
        painted: called, on the thread that writes, with the events that a write has shown and the
            time when it was through.
    """

    def __init__(self, painted: Callable[[list[Noted], float], None]) -> None:
        self._painted = painted
        self._handled: list[Noted] = []
        self._queued: deque[list[Noted]] = deque()
        self._written: list[Noted] = []

    def handled(self, events: list[Noted]) -> None:
        """Events have changed widgets; the next write shows it."""
        self._handled += events

    def write_queued(self) -> None:
        """The driver takes a write."""
        events, self._handled = self._handled, []
        self._queued.append(events)

    def write_done(self) -> None:
        """The driver's file got a write."""
        self._written += self._queued.popleft()

    def flushed(self) -> None:
        """The terminal has it."""
        if self._written:
            events, self._written = self._written, []
            self._painted(events, time.perf_counter())


class PaintedFile:
    """The terminal's file, telling a painter what went through it."""

    def __init__(self, file: IO[str], painter: Painter) -> None:
        self._file = file
        self._painter = painter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        written = self._file.write(text)
        self._painter.write_done()
        return written

    def flush(self) -> None:
        self._file.flush()
        self._painter.flushed()


class NotingBridge(EventBridge):
    """A bridge that notes when each event came in."""

    def __init__(self, app: KvchatApp, painter: Painter, came: Callable[[Noted], None]) -> None:
        super().__init__(app)
        self._painter = painter
        self._came = came
        self._noted: dict[int, float] = {}

    def put(self, event: WorkerEvent) -> None:
        noted = time.perf_counter(), event
        self._came(noted)
        self._noted[id(event)] = noted[0]
        super().put(event)

    def drain(self, handle: Callable[[list[WorkerEvent]], None]) -> None:
        def handle_and_note(events: list[WorkerEvent]) -> None:
            handle(events)
            self._painter.handled([(self._noted.pop(id(event)), event) for event in events])

        super().drain(handle_and_note)


class MeasuredApp(KvchatApp):
    """The program, watched."""

    CSS_PATH = str(Path(inspect.getfile(KvchatApp)).with_name(KvchatApp.CSS_PATH))

    def __init__(self, script: Script, pipe: IO[str]) -> None:
        self._painter = Painter(self._painted)
        super().__init__(Settings(**script.load))
        self.script = script
        self.bridge = NotingBridge(self, self._painter, self._came)
        self.session: ChatSession | None = None
        self._opened: SimpleQueue[float] = SimpleQueue()
        self._pipe = pipe
        self._forget()

    def get_driver_class(self) -> Any:
        """Return the platform's driver, with a painter on its way to the terminal."""
        painter = self._painter

        class PaintedDriver(super().get_driver_class()):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self._file: Any = PaintedFile(self._file, painter)

            def write(self, data: str) -> None:
                painter.write_queued()
                super().write(data)

        return PaintedDriver

    def _report(self, **found: Any) -> None:
        self._pipe.write(json.dumps(found) + "\n")

    def _forget(self) -> None:
        self._tokens: list[float] = []
        self._token_ms: list[float] = []
        self._refreshes: list[float] = []

    # On the engine's thread

    def _came(self, noted: Noted) -> None:
        at, event = noted
        match event:
            case TokenGenerated():
                self._tokens.append(at)
            case ModelLoaded(session=session) if self.session is None:
                self.session = session
                unending(session)
                assert self.worker is not None
                self.worker.params = story_params(session, self.script.reply_tokens or None)
                Thread(target=self._go, daemon=True).start()
            case CommandFailed(error=error):
                self._report(error=str(error))

    # On the thread that writes to the terminal

    def _painted(self, events: list[Noted], at: float) -> None:
        waited = [at - came for came, event in events if isinstance(event, TokenGenerated)]
        if waited:
            self._token_ms += [seconds * 1e3 for seconds in waited]
            self._refreshes.append(at)
        kinds = {type(event) for _, event in events}
        if TurnFinished in kinds:
            self._reply_painted()
        if ModelLoaded in kinds:
            self._opened.put(at)

    def _reply_painted(self) -> None:
        assert self.worker is not None and self.session is not None
        self.worker.params = story_params(self.session, None)
        self._report(
            decode_tps=tokens_per_second(self._tokens),
            token_ms=self._token_ms,
            refreshes_per_s=len(self._refreshes) / (self._refreshes[-1] - self._tokens[0]),
        )
        self._forget()

    # On a thread of its own

    def _go(self) -> None:
        self._opened.get()
        if self.script.idle_s:
            time.sleep(1)
            cpu, since = time.process_time(), time.perf_counter()
            time.sleep(self.script.idle_s)
            elapsed = time.perf_counter() - since
            self._report(idle_cpu=(time.process_time() - cpu) / elapsed)
        if self.script.open_messages:
            self._open_chats()
        self._report(ready=True)

    def _open_chats(self) -> None:
        from kvchat.bench.long_chat import chat_of

        assert self.session is not None and self.worker is not None
        tokenizer = self.session.llm.tokenizer
        chats = [chat_of(tokenizer, self.script.open_messages) for _ in range(self.script.opens)]
        took = []
        for chat in chats:
            time.sleep(2)  # what an opened chat is followed by must not slow the next one down
            asked = time.perf_counter()
            self.worker.submit(Open(chat))
            took.append((self._opened.get() - asked) * 1e3)
        self._report(open_ms=took)


def main() -> None:
    """Run the script in the argument until the user quits."""
    script = Script(**json.loads(sys.argv[1]))
    path = log_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with native_output_to(path), os.fdopen(int(sys.argv[2]), "w", buffering=1) as pipe:
        app = MeasuredApp(script, pipe)
        app.run()
    sys.exit(app.fault or app.return_code)


if __name__ == "__main__":
    main()
