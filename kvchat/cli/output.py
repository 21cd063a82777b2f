"""Where words go: answers to stdout, everything else to stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvchat.chat.plain_text import one_line, printable
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from rich.console import RenderableType


STATUS_WIDTH = 60


def note(text: str) -> None:
    """Write one line to stderr, if it can be written to."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"kvchat: {one_line(text)}", file=sys.stderr, flush=True)


def status(text: str) -> None:
    """Show what goes on, on a line of stderr that the next one overwrites; "" wipes it away.

    Nothing moves on its own: a spinner's thread would take part in what is measured.
    """
    if is_terminal(sys.stderr):
        print(f"\r{text:<{STATUS_WIDTH}}\r{text}", end="", file=sys.stderr, flush=True)


def is_terminal(stream: object) -> bool:
    """Whether a standard stream is open and a terminal."""
    isatty: Callable[[], bool] | None = getattr(stream, "isatty", None)
    try:
        return isatty is not None and isatty()
    except ValueError:
        return False


class Output:
    """Standard output, written through at once.

    To a terminal, untrusted text goes without control codes; files and pipes get it as it is.
    Characters the stream's encoding lacks are replaced.

    Raises:
        KvchatError: stdout is closed, or cannot be written for another reason than a closed pipe.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise KvchatError("standard output is closed, so there is nowhere to write to")
        self._stream = sys.stdout
        with suppress(AttributeError):  # a stand-in for stdout may take any text
            self._stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self.is_terminal = is_terminal(self._stream)
        self._dims = self.is_terminal and _takes_colour()

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write text that may come from anywhere; dimmed on a terminal that wants colour."""
        shown = printable(text) if self.is_terminal else text
        self._put(f"\x1b[2m{shown}\x1b[22m" if dim and self._dims else shown)

    def show(self, table: RenderableType) -> None:
        """Write something of rich's, coloured on a terminal that wants it."""
        from rich.console import Console

        # Not to the stream itself, which may be full or closed: that is for _put to explain.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        console = Console(
            file=io.TextIOWrapper(io.BytesIO(), encoding),
            force_terminal=self.is_terminal,
            markup=False,
            highlight=False,
            emoji=False,
        )
        with console.capture() as captured:
            console.print(table)
        self._put(captured.get())

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise KvchatError(f"standard output cannot be written: {error.strerror}") from error


def _takes_colour() -> bool:
    """Whether a terminal here may be sent colours; an old Windows console would print the codes."""
    environ = os.environ
    understands = os.name != "nt" or "WT_SESSION" in environ
    return understands and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def settle_stdout() -> None:
    """Flush stdout; let go of what cannot be written, or the interpreter complains at its exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
