"""ActionLabel: a few words to click on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widgets import Static


class ActionLabel(Static):
    """Says what its owner can do, and asks for it when clicked.

    Args:
        label: the words.
        action: name of the owner's action.
        key: shown after the words: the key that does the same.
        tooltip: more about it.
        focusable: whether Tab goes there.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "press", "Press", show=False),
    ]
    DEFAULT_CSS = """
    ActionLabel {
        width: auto;
        height: 1;
        padding: 0 1;
        color: $text-muted;
        pointer: pointer;
        &:hover { color: $text; text-style: underline; }
    }
    """

    @dataclass
    class Pressed(Message):
        """The owner is asked to carry out an action."""

        label: ActionLabel
        action: str

        @property
        def control(self) -> ActionLabel:
            """The label."""
            return self.label

    def __init__(
        self,
        label: str,
        action: str,
        *,
        key: str = "",
        tooltip: str | None = None,
        focusable: bool = False,
        classes: str | None = None,
    ) -> None:
        super().__init__(
            Content.assemble(label, (f" {key}" if key else "", "$text-muted")), classes=classes
        )
        self._action = action
        self.tooltip = tooltip
        self.can_focus = focusable

    def on_click(self, event: Click) -> None:
        """Ask for the action."""
        event.stop()
        self.action_press()

    def action_press(self) -> None:
        """Ask for the action."""
        self.post_message(self.Pressed(self, self._action))
