"""A program on a pseudo-terminal: what a user would see and type."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import selectors
import struct
import subprocess
import termios
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvchat.engine.errors import KvchatError

COLUMNS, ROWS = 120, 36

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Terminal:
    """A running program, its screen of 120 × 36 cells, and a pipe for what it reports.

    Args:
        arguments: the command line.
        environment: added to this process's; values of None are taken out.
        pipe: whether the program reports on a pipe, whose descriptor becomes its last argument.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str | None], *, pipe: bool = False
    ) -> None:
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._reports, reports_in = os.pipe()
        terminal = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": None}
        wanted = {**os.environ, **terminal, "LINES": None, "NO_COLOR": None, **environment}
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [*arguments, *([str(reports_in)] if pipe else [])],
                stdin=inside,
                stdout=inside,
                stderr=inside,
                env={name: value for name, value in wanted.items() if value is not None},
                pass_fds=[reports_in] if pipe else [],
                start_new_session=True,
            )
        finally:
            os.close(inside)
            os.close(reports_in)
        self._output = bytearray()
        self._lines = b""
        self.reports: deque[dict[str, Any]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._terminal, selectors.EVENT_READ)
        if pipe:
            self._selector.register(self._reports, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        os.close(self._terminal)
        os.close(self._reports)

    def write(self, text: str) -> float:
        """Type; return when."""
        self._output.clear()
        now = time.perf_counter()
        os.write(self._terminal, text.encode())
        return now

    def shown(self, pattern: str, timeout: float) -> float:
        """Wait until text that matches is written since the last `write`; return when it was.

        Raises:
            KvchatError: the program ended, or the text did not come in time.
        """
        wanted = re.compile(pattern)
        deadline = time.perf_counter() + timeout
        while not wanted.search(self._text):
            self._read_on(deadline, f"did not show {pattern!r}")
        return time.perf_counter()

    def report(self, timeout: float) -> dict[str, Any]:
        """Wait for the next report of the program.

        Raises:
            KvchatError: as `shown`.
        """
        deadline = time.perf_counter() + timeout
        while not self.reports:
            self._read_on(deadline, "did not report")
        return self.reports.popleft()

    def read_for(self, seconds: float) -> None:
        """Let the program go on for a while."""
        deadline = time.perf_counter() + seconds
        while (left := deadline - time.perf_counter()) > 0:
            self._read(left)

    def ended(self, timeout: float) -> float:
        """Wait until the program has ended; return when it was.

        Raises:
            KvchatError: it did not in time.
        """
        deadline = time.perf_counter() + timeout
        while self._process.poll() is None:
            if time.perf_counter() > deadline:
                raise KvchatError("The screen program did not end when it was asked to.")
            self._read(0.002)
        return time.perf_counter()

    @property
    def _text(self) -> str:
        return _ESCAPES.sub(b"", self._output).decode(errors="replace")

    def _read_on(self, deadline: float, complaint: str) -> None:
        left = deadline - time.perf_counter()
        if self._process.poll() is not None or left <= 0:
            last = self._text.strip().splitlines()[-1:] or ["nothing"]
            raise KvchatError(f"The screen program {complaint}; it wrote {last[0][-200:]!r} last.")
        self._read(min(left, 0.5))

    def _read(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            try:
                data = os.read(key.fd, 1 << 16)
            except OSError:  # how a pseudo-terminal tells on Linux that the program has ended
                data = b""
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fd == self._terminal:
                self._output += data
            else:
                *lines, self._lines = (self._lines + data).split(b"\n")
                self.reports += (json.loads(line) for line in lines)
