"""LineEditor: one line of text, to be changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.widgets import Input, Static

from kvchat.tui.modals.dialog import Dialog


class LineEditor(Dialog[str]):
    """Answers with the new text.

    Args:
        text: what to begin with.
        title: on the box.
        note: a sentence on what it is for.
        placeholder: shown while there is no text.
        refuse: returns why a text cannot be taken, or nothing.
    """

    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "save": ("Save", "Enter"),
        "cancel": ("Cancel", "Esc"),
    }
    DEFAULT_CSS = """
    LineEditor {
        .dialog--box { width: 64; }
        Input, Input:focus { height: 1; padding: 0 1; background: $panel; }
        .line-editor--problem { height: auto; color: $text-error; }
    }
    """

    def __init__(
        self,
        text: str = "",
        *,
        title: str,
        note: str = "",
        placeholder: str = "",
        refuse: Callable[[str], str] = lambda text: "",
    ) -> None:
        super().__init__()
        self.title = title
        self._text, self._note, self._placeholder = text, note, placeholder
        self._refuse = refuse

    def compose_body(self) -> ComposeResult:
        """Yield the note, the line, and what is wrong with it."""
        if self._note:
            yield Static(self._note, classes="dialog--note", markup=False)
        yield Input(self._text, placeholder=self._placeholder, compact=True)
        yield Static("", classes="line-editor--problem", markup=False)

    def on_mount(self) -> None:
        """One can type at once."""
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def action_save(self) -> None:
        """Answer with the text, if it can be taken."""
        text = self.query_one(Input).value.strip()
        if problem := self._refuse(text):
            self.query_one(".line-editor--problem", Static).update(problem)
        else:
            self.dismiss(text)
