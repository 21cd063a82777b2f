"""`kvchat chat --plain` with the default model in a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl", reason="there are no pseudo-terminals here")
import pty  # noqa: E402
import termios  # noqa: E402

pytestmark = pytest.mark.real_model

PATIENCE_SECONDS = 30
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """A program on a terminal of its own: what it shows, and a keyboard."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvchat", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment},
            start_new_session=True,
            # Makes the terminal the program's own, so that Ctrl+C reaches it.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until this is shown, after what was waited for before; return the text up to it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.compile(pattern).search(self.shown, self._seen)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.shown}"
            assert self._read(), f"ended without {pattern!r}:\n{self.shown}"
        text = self.shown[self._seen : found.end()]
        self._seen = found.end()
        return text

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.2)[0]:
            return True
        data = b""
        with suppress(OSError):  # the other side is closed
            data = os.read(self.master, 65536)
        self.shown += _CONTROL.sub("", data.decode("utf-8", "replace"))
        return bool(data)

    def wait(self) -> int:
        """Let the program end; return its exit status."""
        while self._read():
            pass
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(default_model_path: Path, tmp_path: Path) -> Iterator[Terminal]:
    folders = {f"KVCHAT_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "CACHE")}
    opened = Terminal(
        *("chat", "--plain", "-m", str(default_model_path), "--temperature", "0"), **folders
    )
    yield opened
    opened.close()


def test_a_chat_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(r"is ready.*\n1> ")

    # Ctrl+C at the prompt clears the line and the program lives.
    terminal.press("never sent")
    terminal.wait_for("never sent")
    time.sleep(0.5)  # readline notices a signal only while it waits for a key
    terminal.press("\x03")
    terminal.wait_for(r"/quit or press Ctrl\+D\.\n1> ")

    terminal.press("What is the capital of France?\n")
    assert "Paris" in terminal.wait_for(r"reused 0 · new \d+ .*tok/s[^\n]*\n\n3> ")

    # A reply is stopped in the middle and the next one comes.
    terminal.press("Tell me a very long story about a ship, a storm and an island.\n")
    terminal.wait_for(r"island\.\n(?:\S+\s+){12}")
    terminal.press("\x03")
    terminal.wait_for(r"\(stopped; /continue goes on\)\nreused [1-9].*\n\n5> ")

    terminal.press("/set max_tokens 8\n/continue\n")
    terminal.wait_for(r"max_tokens is 8 now\.")
    terminal.wait_for(r"\(cut at a limit; /continue goes on\)\nreused [1-9].*\n\n5> ")

    # An edit without text brings the old one to be changed.
    terminal.press("/edit 1\n")
    terminal.wait_for(r"edit> What is the capital of France\?")
    terminal.press("\x7f" * len("France?") + "Italy?\n")
    terminal.wait_for(r"reused [1-9].*\n\n3> ")
    terminal.press("/history 1\n")
    terminal.wait_for(r"\nWhat is the capital of Italy\?\n3> ")

    terminal.press("/regen\n")
    terminal.wait_for(r"reused [1-9]\d* · new 1 .*\n\n3> ")
    terminal.press("/branch\n")
    terminal.wait_for(r"message 2, 2 of 2: .*\n")
    terminal.press("/branch 1\n/history\n")
    terminal.wait_for(r"1  you \(1 of 2\): What is the capital of France")

    terminal.press("/stats\n")
    terminal.wait_for(r"turn 1: reused 0 · new \d+")
    terminal.wait_for(r"cache: \d+ of 8,192 tokens, .* MB; stash: \d")

    terminal.press(f"/save {tmp_path / 'chat.md'}\n")
    terminal.wait_for(r"Saved as")
    terminal.press("/quit\n")
    assert terminal.wait() == 0
    assert "## You\n\nWhat is the capital of France?" in (tmp_path / "chat.md").read_text("utf-8")
    assert "Traceback" not in terminal.shown


def test_ctrl_d_ends_the_chat(terminal: Terminal) -> None:
    terminal.wait_for(r"1> ")
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_ctrl_c_ends_a_load(terminal: Terminal) -> None:
    time.sleep(0.3)
    terminal.press("\x03")
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
