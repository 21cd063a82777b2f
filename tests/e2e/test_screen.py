"""The whole program with the default model in a real terminal: keys in, a screen out."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl", reason="there are no pseudo-terminals here")
import pty  # noqa: E402
import termios  # noqa: E402

import pyte  # noqa: E402

pytestmark = pytest.mark.real_model

PATIENCE_SECONDS = 30
COLUMNS, ROWS = 120, 36
CHAT_COLUMNS = 84
"""What is left of the sidebar."""

RIGHT, F2, F7, F12 = "\x1b[C", "\x1bOQ", "\x1b[18~", "\x1b[24~"
ESCAPE, ENTER = "\x1b", "\r"
CTRL_Q, CTRL_R, CTRL_S = "\x11", "\x12", "\x13"

AUTO_WRAP, CURSOR = "7", "25"
"""The private modes that are on in a terminal which nobody has changed."""

_ENVIRONMENT = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
_NOT_INHERITED = ("COLUMNS", "LINES", "NO_COLOR")

_UNKNOWN_TO_PYTE = re.compile(r"\x1b\[[<=>][0-9;]*[a-zA-Z]")
_CUT_OFF = re.compile(r"\x1b(?:\[[^a-zA-Z]*)?$")
_PRIVATE_MODES = re.compile(r"\x1b\[\?([0-9;]+)([hl])")


class Terminal:
    """kvchat on a terminal of its own.

    `said` is all that it wrote, `screen` what that looks like. One that is not `owned` is not told
    when the terminal goes.
    """

    def __init__(self, *arguments: str, owned: bool = True, **environment: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._cut_off = ""
        self.said = ""
        self.master, self._slave = pty.openpty()
        self._set_size(COLUMNS, ROWS)
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        self.attributes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvchat", "--threads", "1", "--temperature", "0", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**inherited, **_ENVIRONMENT, **environment},
            start_new_session=True,
            # Makes the terminal the program's own, so that a new size and a hang-up reach it.
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if owned else None,  # noqa: PLW1509
        )

    @property
    def shown(self) -> str:
        return "\n".join(self.screen.display)

    @property
    def chat(self) -> str:
        """The screen without the sidebar."""
        return "\n".join(line[:CHAT_COLUMNS] for line in self.screen.display)

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self.master, key.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def wait_until(self, predicate: Callable[[], object]) -> None:
        """Let the program work until `predicate` holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not predicate():
            assert time.monotonic() < deadline, f"what was waited for did not come:\n{self.shown}"
            assert self.process.poll() is None, f"it ended:\n{self.shown}"
            self._read()

    def wait_for(self, pattern: str, *, gone: str | None = None) -> None:
        """Let the program work until the chat shows one thing, and another no longer."""
        self.wait_until(
            lambda: re.search(pattern, self.chat) and not (gone and re.search(gone, self.chat))
        )

    def stop(self) -> None:
        """Stop the reply and wait until the next can be asked for."""
        self.press(ESCAPE)
        self.wait_for("stopped")
        self.wait_until(lambda: re.search(r"SPEED +idle", self.shown))

    def wait_for_end(self) -> int:
        """Let the program end and return its exit status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"does not end:\n{self.shown}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def modes(self) -> dict[str, bool]:
        """Return which private modes of the terminal the program has left on or off."""
        modes: dict[str, bool] = {}
        for numbers, state in _PRIVATE_MODES.findall(self.said):
            modes |= dict.fromkeys(numbers.split(";"), state == "h")
        return modes

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """Take the terminal away."""
        for descriptor in (self.master, self._slave):
            with suppress(OSError):
                os.close(descriptor)
        self.master = self._slave = -1

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.1)[0]:
            return False
        text = self._cut_off + self._decoder.decode(os.read(self.master, 65536))
        end = cut.start() if (cut := _CUT_OFF.search(text)) else len(text)
        self._cut_off, text = text[end:], text[:end]
        self.said += text
        self._stream.feed(_UNKNOWN_TO_PYTE.sub("", text))
        return True


@pytest.fixture
def terminal(
    request: pytest.FixtureRequest, tmp_path: Path, default_model_path: Path
) -> Iterator[Terminal]:
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    (models / default_model_path.name).symlink_to(default_model_path)
    folders = {f"KVCHAT_{name.upper()}_DIR": str(tmp_path / name) for name in ("config", "cache")}
    folders["KVCHAT_DATA_DIR"] = str(tmp_path / "data")
    terminal = Terminal(owned=getattr(request, "param", True), **folders)
    yield terminal
    terminal.close()


def assert_left_as_found(terminal: Terminal) -> None:
    modes = terminal.modes()
    assert "1049" in modes, "the alternate screen was never used"
    assert {mode for mode, on in modes.items() if on} <= {AUTO_WRAP, CURSOR}
    assert modes[CURSOR]
    assert termios.tcgetattr(terminal.master) == terminal.attributes


def test_a_chat_from_first_paint_to_quit(terminal: Terminal, tmp_path: Path) -> None:
    # One can write at once; what is sent waits for the model.
    terminal.wait_for("Write a message")
    terminal.press("What is the capital of France?", ENTER)
    terminal.wait_for(r"Assistant\s+[^│]*Paris[\s\S]*tok/s")
    assert terminal.said.index("rite a message") < terminal.said.index("context 8,192")

    # A slider moved while a reply is written leaves a mark in it; a stop keeps what came.
    terminal.press("Tell me a very long story about a ship and a storm.", ENTER)
    terminal.wait_for(r"a storm\.\s+Assistant\s+\S+ \S+")
    terminal.press(F2)
    terminal.wait_until(lambda: "▸ temp" in terminal.shown)
    terminal.press(RIGHT)
    terminal.wait_for(r"⟨temperature\s+0\s+→\s+0\.05⟩")
    terminal.stop()

    # Another reply stands beside the first.
    terminal.press(CTRL_R)
    terminal.wait_for(r"‹ 2/2 ›\s+\S+ \S+", gone="stopped")
    terminal.stop()
    assert "‹ 2/2 ›" in terminal.chat

    # An edit is answered anew.
    terminal.press(F12)
    terminal.wait_for("Edit message")
    terminal.press(" And a dog.", CTRL_S)
    terminal.wait_for(r"And a dog\.\s+Assistant\s+\S+ \S+", gone="Edit message")

    # What is sent while a reply is written waits for its turn.
    terminal.press(F7)
    terminal.wait_for("paused")
    terminal.press("What is the dog called?", ENTER)
    terminal.wait_for(r"queued\s+What is the dog called\?")
    terminal.press(ESCAPE)
    terminal.wait_for(r"stopped[\s\S]*dog called\?\s+Assistant\s+\S+", gone="queued|paused")

    # Another size while it writes.
    terminal.press("Tell me everything about storms.", ENTER)
    terminal.wait_for(r"about storms\.\s+Assistant\s+\S+ \S+")
    terminal.resize(80, 24)
    terminal.wait_until(lambda: re.search(r"╭─{70,}╮ *\n.*Write a message", terminal.shown))
    terminal.wait_until(lambda: "SAMPLING" not in terminal.shown)
    terminal.resize(COLUMNS, ROWS)
    terminal.wait_until(lambda: "SAMPLING" in terminal.shown)
    terminal.wait_for("Write a message")

    terminal.press(CTRL_Q)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)
    assert "Traceback" not in terminal.said + (tmp_path / "cache" / "kvchat.log").read_text("utf-8")


def test_quitting_while_the_model_loads(terminal: Terminal) -> None:
    terminal.wait_for("Write a message")
    terminal.press(CTRL_Q)
    assert terminal.wait_for_end() == 0
    assert_left_as_found(terminal)


@pytest.mark.parametrize("terminal", [True, False], ids=["told", "untold"], indirect=True)
def test_a_terminal_that_goes_away_ends_it_and_the_chat_is_kept(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.wait_for("Write a message")
    terminal.press("Tell me a story about a fox.", ENTER)
    terminal.wait_for(r"a fox\.\s+Assistant\s+\S+ \S+")
    terminal.hang_up()
    assert terminal.process.wait(PATIENCE_SECONDS) == 128 + signal.SIGHUP
    with closing(sqlite3.connect(tmp_path / "data" / "chats.db")) as chats:
        said = chats.execute("SELECT content FROM nodes ORDER BY row").fetchall()
    assert said[0][0] == "Tell me a story about a fox."
    assert len(said[1][0].split()) > 1
    assert "Traceback" not in (tmp_path / "cache" / "kvchat.log").read_text("utf-8")
