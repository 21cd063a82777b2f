"""TextEditor: a message or another longer text, to be changed."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from kvchat.tui.modals.dialog import Dialog
from kvchat.tui.widgets.message_area import MessageArea


class TextEditor(Dialog[str]):
    """Answers with the new text, exactly.

    Posts `TextEditor.Edited` while the text changes; whoever opened it may answer by setting
    `price`.

    Args:
        text: what to begin with.
        title: on the box.
        note: a sentence on what saving does.
        placeholder: shown while there is no text.
        save: the save button's label.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        # Not with priority, or it would overtake letters that came just before it, in one burst.
        Binding("ctrl+s", "save", "Save", id="editor.save"),
    ]
    DEFAULT_CSS = """
    TextEditor {
        .dialog--box { width: 92; }
        MessageArea, MessageArea:focus {
            height: auto;
            min-height: 5;
            max-height: 1fr;
            padding: 0 1;
            background: $panel;
            scrollbar-size-vertical: 1;
        }
        .text-editor--price { height: auto; margin-top: 1; color: $text-accent; }
    }
    """

    price: reactive[str] = reactive("", init=False)
    """What saving would cost."""

    class Edited(Message):
        """The text has changed, and the user has paused for a moment."""

        def __init__(self, editor: TextEditor, text: str) -> None:
            super().__init__()
            self.editor = editor
            self.text = text

    def __init__(
        self,
        text: str,
        *,
        title: str = "Edit message",
        note: str = "",
        placeholder: str = "",
        save: str = "Save",
    ) -> None:
        super().__init__()
        self.title = title
        self._text, self._note, self._placeholder, self._save = text, note, placeholder, save
        self._warned_of = text
        """The text that can be left without another word."""

    def compose_body(self) -> ComposeResult:
        """Yield the note, the text and the price."""
        if self._note:
            yield Static(self._note, classes="dialog--note", markup=False)
        yield MessageArea(self._text, placeholder=self._placeholder)
        price = Static(self.price, classes="text-editor--price", markup=False)
        price.display = bool(self.price)
        yield price

    def buttons(self) -> dict[str, tuple[str, str]]:
        """Return saving and not saving."""
        return {"save": (self._save, "Ctrl+S"), "cancel": ("Cancel", "Esc")}

    def on_mount(self) -> None:
        """Begin at the end of the text."""
        self.query_one(MessageArea).focus()

    def watch_price(self, price: str) -> None:
        """Show the price below the text."""
        shown = self.query_one(".text-editor--price", Static)
        shown.update(price)
        shown.display = bool(price)

    @on(MessageArea.Edited)
    def _tell(self, event: MessageArea.Edited) -> None:
        event.stop()
        if event.text != self._text:
            self.post_message(self.Edited(self, event.text))

    def action_save(self) -> None:
        """Answer with the text."""
        self.dismiss(self.query_one(MessageArea).message)

    def action_cancel(self) -> None:
        """Leave the text as it was; a changed one only on the second try."""
        text = self.query_one(MessageArea).message
        if text in (self._text, self._warned_of):
            self.dismiss(None)
        else:
            self._warned_of = text
            hint = self.query_one(".dialog--hint", Static)
            hint.update("Your changes are not saved. Esc again drops them.")
