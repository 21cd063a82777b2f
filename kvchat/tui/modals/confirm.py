"""Confirm: a question to answer with yes or no."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from kvchat.tui.modals.dialog import Dialog
from kvchat.tui.widgets.action_label import ActionLabel


class Confirm(Dialog[bool]):
    """Asks before something that is hard to take back. Answers True or False.

    Args:
        question: one sentence.
        detail: what follows from a yes.
        yes: the yes button's label, best a verb.
        no: the no button's label.
    """

    TITLE = "Are you sure?"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes", id="confirm.yes"),
        Binding("n", "cancel", "No", id="confirm.no"),
        Binding("left", "app.focus_previous", "Other button", show=False),
        Binding("right", "app.focus_next", "Other button", show=False),
    ]
    DEFAULT_CSS = """
    Confirm {
        .dialog--box { width: 56; border: round $warning; border-title-color: $text-warning; }
        .confirm--detail { color: $text-muted; margin-top: 1; }
    }
    """

    def __init__(
        self, question: str, detail: str = "", *, yes: str = "Yes", no: str = "No"
    ) -> None:
        super().__init__()
        self._question, self._detail = question, detail
        self._yes, self._no = yes, no

    def compose_body(self) -> ComposeResult:
        """Yield the question and its detail."""
        yield Static(self._question, markup=False)
        if self._detail:
            yield Static(self._detail, classes="confirm--detail", markup=False)

    def buttons(self) -> dict[str, tuple[str, str]]:
        """Return both answers."""
        return {"yes": (self._yes, "y"), "cancel": (self._no, "n")}

    def on_mount(self) -> None:
        """Begin at the answer that changes nothing."""
        self.query(ActionLabel).last().focus()

    def action_yes(self) -> None:
        """Answer yes."""
        self.dismiss(True)

    def action_cancel(self) -> None:
        """Answer no."""
        self.dismiss(False)
