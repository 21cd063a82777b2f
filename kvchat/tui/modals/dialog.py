"""Dialog: the frame that all dialogs share."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from kvchat.tui.widgets.action_label import ActionLabel

Answer = TypeVar("Answer")


class Dialog(ModalScreen[Answer]):
    """A titled box over the screen; Escape leaves it without an answer.

    Subclasses say what is inside in `compose_body`; each button carries out the action it is for.
    """

    TITLE: ClassVar[str | None] = ""
    HINT: ClassVar[str] = ""
    """What is worth knowing, on the last line."""
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {"cancel": ("Back", "Esc")}

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Back", id="dialog.cancel"),
    ]

    DEFAULT_CSS = """
    Dialog {
        align: center middle;
        background: $background 60%;
        &:ansi { background: transparent; }

        .dialog--box {
            width: 76;
            max-width: 94%;
            height: auto;
            max-height: 92%;
            padding: 1 2;
            background: $surface;
            border: round $primary;
            border-title-color: $text-primary;
            border-title-background: $surface;
            border-title-style: bold;
        }
        .dialog--foot { height: auto; margin-top: 1; }
        .dialog--hint { width: 1fr; color: $text-muted; }
        .dialog--note { color: $text-muted; margin-bottom: 1; }
        .dialog--buttons { width: auto; height: 1; }
        ActionLabel {
            margin-left: 1;
            color: $text;
            background: $panel;
            &:hover { background: $block-cursor-blurred-background; text-style: none; }
            &:focus {
                background: $block-cursor-blurred-background;
                text-style: $block-cursor-text-style;
            }
        }
        OptionList, Tree, TextArea, Input {
            background: $surface;
            background-tint: transparent;
            border: none;
            padding: 0;
            &:focus { border: none; background-tint: transparent; }
        }
        OptionList { height: auto; max-height: 1fr; scrollbar-size-vertical: 1; }
        OptionList:focus > .option-list--option-highlighted, Tree:focus > .tree--cursor {
            color: $block-cursor-blurred-foreground;
            background: $block-cursor-blurred-background;
            text-style: $block-cursor-text-style;
        }
    }
    """

    def compose(self) -> ComposeResult:
        """Lay out title, body, hint and buttons."""
        with Vertical(classes="dialog--box") as box:
            box.border_title = Content(self.title or "")
            yield from self.compose_body()
            with Horizontal(classes="dialog--foot"):
                yield Static(self.HINT, classes="dialog--hint", markup=False)
                with Horizontal(classes="dialog--buttons"):
                    for action, (label, key) in self.buttons().items():
                        yield ActionLabel(label, action, key=key, focusable=True)

    def buttons(self) -> dict[str, tuple[str, str]]:
        """Return the buttons: by action, the label and the key that does the same."""
        return self.BUTTONS

    def compose_body(self) -> ComposeResult:
        """Yield what is inside."""
        raise NotImplementedError

    def action_cancel(self) -> None:
        """Leave without an answer."""
        self.dismiss(None)

    async def on_action_label_pressed(self, event: ActionLabel.Pressed) -> None:
        """Do what was clicked on."""
        event.stop()
        await self.run_action(event.action)
