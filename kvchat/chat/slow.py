"""Progress in whole lines, for what takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_SECONDS = 1.0
NEXT_SECONDS = 5.0


class SlowProgress:
    """Tells how far something is, now and then; what is done soon is not worth a line.

    Args:
        tell: writes a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._due = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._due = time.monotonic() + FIRST_SECONDS

    def update(self, what: str, done: int, total: int | None) -> None:
        """Say that `done` of `total` are done, if it is time to."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + NEXT_SECONDS
            self._tell(f"{what}: {done / total:.0%}" if total else what)
