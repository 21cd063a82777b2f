"""PresetName: a name for the sampling settings as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.widgets import Input, Static

from kvchat.chat.plain_text import one_line
from kvchat.tui.modals.dialog import Dialog

_LONGEST = 40


class PresetName(Dialog[str]):
    """Answers with a name that is not empty and on one line.

    Args:
        taken: names of the user's presets; one of these is replaced.
        reserved: names that cannot be given.
    """

    TITLE = "Save preset"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "save": ("Save", "Enter"),
        "cancel": ("Cancel", "Esc"),
    }
    DEFAULT_CSS = """
    PresetName {
        .dialog--box { width: 52; }
        Input, Input:focus { height: 1; padding: 0 1; background: $panel; }
        .preset-name--word { margin-top: 1; color: $text-warning; }
    }
    """

    def __init__(self, taken: Iterable[str] = (), reserved: Iterable[str] = ()) -> None:
        super().__init__()
        self._taken, self._reserved = frozenset(taken), frozenset(reserved)

    def compose_body(self) -> ComposeResult:
        """Yield the input and a line for a word about it."""
        yield Input(placeholder="A name, such as: letters", max_length=_LONGEST, compact=True)
        yield Static("", classes="preset-name--word", markup=False)

    @on(Input.Changed)
    def _judge(self) -> None:
        self.query_one(".preset-name--word", Static).update(self._word())

    @on(Input.Submitted)
    def action_save(self) -> None:
        """Answer with the name, if it can be given."""
        if self._typed and self._typed not in self._reserved:
            self.dismiss(self._typed)
        else:
            self.query_one(".preset-name--word", Static).update(self._word() or "Write a name.")

    @property
    def _typed(self) -> str:
        return one_line(self.query_one(Input).value)

    def _word(self) -> str:
        if self._typed in self._reserved:
            return f"“{self._typed}” comes with kvchat; choose another name."
        return f"This replaces your preset “{self._typed}”." if self._typed in self._taken else ""
