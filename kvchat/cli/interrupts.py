"""Ctrl+C while a model loads or answers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Interrupts:
    """Within this context the first Ctrl+C asks to stop, and the second stops at once.

    A KeyboardInterrupt out of nowhere can get lost: an import swallows it when it strikes inside
    one of its callbacks. Asked for in a place of our choice, it cannot.

    Attributes:
        asked: whether there was a first one.
        on_ask: called at the first one, between any two instructions of the main thread.
    """

    def __init__(self) -> None:
        self.asked = False
        self.on_ask: Callable[[], None] = lambda: None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before != signal.SIG_IGN:  # a background job of a shell shall not hear it
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self.asked:
            raise KeyboardInterrupt

    def _ask(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        self.on_ask()
