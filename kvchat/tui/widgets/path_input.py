"""PathInput: the path of a file, completed from the folders as one types."""

from __future__ import annotations

import asyncio
import os
from itertools import islice
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.suggester import Suggester
from textual.widgets import Input

_MOST = 5_000
"""Entries of a folder that are looked at."""


class PathSuggester(Suggester):
    """Completes a path by the first name in its folder that begins so."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """Return the whole path, a folder with its slash; None if there is none."""
        return await asyncio.to_thread(completed, value)


def completed(value: str) -> str | None:
    """Return a path that `value` begins, or None."""
    folder, name = os.path.split(value)
    if not name:
        return None
    try:
        with os.scandir(Path(folder or ".").expanduser()) as entries:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in islice(entries, _MOST)
                if entry.name.startswith(name)
            )
    except (OSError, ValueError, RuntimeError):
        return None
    sound = [each for each in names if each.isprintable()]
    return value + sound[0][len(name) :] if sound and sound[0] != name else None


class PathInput(Input):
    """An input line for a path; Tab takes the completion that is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete", "Complete the path", show=False),
    ]

    def __init__(self, value: str = "", *, placeholder: str = "") -> None:
        super().__init__(value, placeholder=placeholder, compact=True, suggester=PathSuggester())

    @property
    def path(self) -> Path | None:
        """The path that was typed; None where there is none."""
        text = self.value.strip()
        try:
            return Path(text).expanduser() if text else None
        except RuntimeError:  # nobody's home
            return Path(text)

    def action_complete(self) -> None:
        """Take the completion, or go on to what is next."""
        if self._suggestion:
            self.action_cursor_right()
        else:
            self.screen.focus_next()
