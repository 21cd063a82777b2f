"""A progress bar on stderr for whatever takes long."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from kvchat.cli.output import is_terminal, note

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_REFRESH_SECONDS = 0.1


class Bar:
    """Shows progress on a terminal and is wiped away at the end.

    Args:
        unit: what is counted.
        delay: seconds from the first update on before it appears; what is done sooner needs none.
        announce: where stderr is no terminal, write a line for each new piece of work instead.
    """

    def __init__(
        self, unit: Literal["bytes", "tokens"], *, delay: float = 0.5, announce: bool = False
    ) -> None:
        self.unit = unit
        self.announce = announce
        self._visible = is_terminal(sys.stderr)
        self._delay = delay
        self._due: float | None = None
        self._progress: Progress | None = None
        self._what = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` are done, if it is time to."""
        if not self._visible:
            if self.announce and what != self._what:
                note(what)
            self._what = what
            return
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._delay
        if now < self._due:
            return
        self._due = now + _REFRESH_SECONDS
        if self._progress is None:
            self._progress = _start(self.unit)
        if what != self._what:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(what, total=total, completed=done)
            self._what = what
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)
        self._progress.refresh()

    def close(self) -> None:
        """Wipe the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._what = ""


def _start(unit: Literal["bytes", "tokens"]) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: list[ProgressColumn] = [MofNCompleteColumn()]
    if unit == "bytes":
        amounts = [DownloadColumn(), TransferSpeedColumn()]
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # a second thread would slow the work it shows
    )
    progress.start()
    return progress
