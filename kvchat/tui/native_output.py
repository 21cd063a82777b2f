"""Keeps what libraries print, also from native code, off the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO


@contextmanager
def native_output_to(log: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the log; the screen program keeps the terminal.

    Textual draws on `sys.__stderr__` and measures `sys.__stdout__`, which get descriptors of
    their own meanwhile.
    """
    with ExitStack() as undo:
        file = undo.enter_context(_opened(log))
        for number, name in ((1, "__stdout__"), (2, "__stderr__")):
            terminal = os.dup(number)
            undo.callback(os.close, terminal)
            undo.callback(os.dup2, terminal, number)
            undo.callback(setattr, sys, name, getattr(sys, name))
            stream = os.fdopen(os.dup(terminal), "w", encoding="utf-8", errors="replace")
            setattr(sys, name, stream)
            undo.callback(_close, stream)
            os.dup2(file.fileno(), number)
        yield


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # the terminal may be gone
        stream.close()


def _opened(log: Path) -> BinaryIO:
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)
