"""Keeps what libraries print, also from native code, off the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def native_output_to(log: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the log; the screen program keeps the terminal.

    Textual draws on `sys.__stderr__`, which gets a descriptor of its own meanwhile.
    """
    terminal = os.dup(2)
    saved = os.dup(1)
    original = sys.__stderr__
    with (
        _opened(log) as file,
        os.fdopen(os.dup(terminal), "w", encoding="utf-8", errors="replace") as screen,
    ):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.__stderr__ = screen  # type: ignore[misc]
        try:
            yield
        finally:
            sys.__stderr__ = original  # type: ignore[misc]
            os.dup2(saved, 1)
            os.dup2(terminal, 2)
            os.close(saved)
            os.close(terminal)


def _opened(log: Path) -> BinaryIO:
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)
