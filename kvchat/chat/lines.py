"""Where a plain chat's lines come from: a keyboard, or a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

from kvchat.engine.errors import KvchatError

try:
    import readline
except ImportError:  # Windows has none
    readline = None  # type: ignore[assignment]

LINE_LIMIT = 16 * 2**20
"""Bytes a piped line may have: no context here holds as much."""


class Lines(Protocol):
    """A source of lines."""

    interactive: bool
    """Whether somebody sits there, to be asked things."""

    def read(self, prompt: str, text: str = "") -> str:
        """Return the next line, without its end.

        Args:
            prompt: shown to whoever sits there.
            text: what the line has already, to be changed.

        Raises:
            EOFError: there are no more.
            KvchatError: the line is not text.
        """


class Keyboard:
    """Lines typed at a terminal, with the editing and history of readline where there is one.

    Args:
        tell: writes a line of text that cannot be put into the line to edit.
        on_stdout: whether stdout is that terminal too.
    """

    interactive = True

    def __init__(self, tell: Callable[[str], None], *, on_stdout: bool) -> None:
        self._tell = tell
        self._on_stdout = on_stdout

    def read(self, prompt: str, text: str = "") -> str:
        """Read one line."""
        if text and not self._prefill(text):
            self._tell(f"The text was:\n{text}")
        try:
            if self._on_stdout:
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        except UnicodeDecodeError as error:
            raise KvchatError("This line is not text in the terminal's encoding.") from error
        finally:
            if readline is not None:
                readline.set_startup_hook(None)

    def _prefill(self, text: str) -> bool:
        if readline is None or not self._on_stdout or "\n" in text:
            return False
        readline.set_startup_hook(lambda: readline.insert_text(text))
        return True


class Pipe:
    """Lines of a file or of another program's output, which have to be UTF-8."""

    interactive = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._number = 0

    def read(self, prompt: str, text: str = "") -> str:
        """Read one line; there is nobody to show a prompt to."""
        data = b""
        with suppress(OSError):  # a closed or write-only stream has no lines
            data = self._stream.readline(LINE_LIMIT + 1)
        if not data:
            raise EOFError
        self._number += 1
        if len(data) > LINE_LIMIT:
            self._stream = io.BytesIO()
            raise KvchatError(
                f"Line {self._number} of stdin has more than {LINE_LIMIT // 2**20} MiB, "
                "which no context holds; the chat ends before it."
            )
        try:
            return data.decode("utf-8-sig" if self._number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise KvchatError(
                f"Line {self._number} of stdin is not UTF-8 text and was left out; convert it "
                "first, with iconv for example."
            ) from error
