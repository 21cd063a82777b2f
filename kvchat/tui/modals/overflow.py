"""OverflowQuestion: what to do when the context is full."""

from __future__ import annotations

from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvchat.tui.modals.dialog import Dialog

OverflowAnswer = Literal["drop-oldest", "stop"]


class OverflowQuestion(Dialog[OverflowAnswer]):
    """Answers with what to do; None leaves everything as it was.

    Args:
        needed: tokens the turn would take.
        limit: tokens the context holds.
        drop_cost: what dropping the oldest turns would cost, such as "1,204 new tokens · 2.1 s".
        can_stop: whether there is room to answer at all without dropping anything.
    """

    TITLE = "The context is full"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "choose": ("Choose", "Enter"),
        "cancel": ("Cancel", "Esc"),
    }
    DEFAULT_CSS = """
    OverflowQuestion .dialog--box {
        width: 64;
        border: round $warning;
        border-title-color: $text-warning;
    }
    """

    def __init__(
        self, needed: int, limit: int, *, drop_cost: str = "", can_stop: bool = True
    ) -> None:
        super().__init__()
        self._needed, self._limit = needed, limit
        self._drop_cost, self._can_stop = drop_cost, can_stop

    def compose_body(self) -> ComposeResult:
        """Yield what is the matter and the choices."""
        yield Static(
            f"This turn needs {self._needed:,} tokens; the context holds {self._limit:,}.",
            classes="dialog--note",
            markup=False,
        )
        drop = "The model no longer sees them; they stay here, dimmed."
        if self._drop_cost:
            drop += f" Reading the rest again: {self._drop_cost}."
        yield OptionList(
            _choice("drop-oldest", "Drop the oldest turns", drop),
            Option(""),
            _choice("stop", "Go on until it is full", "The reply ends where the context does."),
            Option(""),
            _choice("cancel", "Do not send", "The message goes back into the prompt."),
            markup=False,
        )

    def on_mount(self) -> None:
        """Offer only what is possible."""
        choices = self.query_one(OptionList)
        for index, option in enumerate(choices.options):
            if option.id is None or (option.id == "stop" and not self._can_stop):
                choices.disable_option_at_index(index)
        choices.focus()

    @on(OptionList.OptionSelected)
    def action_choose(self) -> None:
        """Answer with the choice under the cursor."""
        option = self.query_one(OptionList).highlighted_option
        match option and option.id:
            case "drop-oldest" | "stop" as answer:
                self.dismiss(answer)
            case _:
                self.dismiss(None)


def _choice(id_: str, what: str, detail: str) -> Option:
    return Option(Content.assemble((what, "bold"), "\n", detail), id=id_)
