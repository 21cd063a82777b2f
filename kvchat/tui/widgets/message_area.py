"""MessageArea: a text area whose text, folded pastes included, is kept exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.document._document import EditResult, Location, Selection
from textual.document._edit import Edit
from textual.geometry import Offset
from textual.message import Message
from textual.timer import Timer
from textual.widgets import TextArea

from kvchat.chat.plain_text import printable

PASTE_CHARACTERS = 1_000
PASTE_LINES = 20
"""A longer paste folds into one line."""
EDITABLE_CHARACTERS = 200_000
"""A longer text folds even if it was not pasted: each key press would be felt."""
DEBOUNCE = 0.15
"""Seconds from the last change to the message that tells of it."""

_SEPARATORS = frozenset("\u2028\u2029")
"""A text area takes these for line feeds."""
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
_LABEL = re.compile("⟦pasted [^⟦⟧\n]*⟧")


def _editing_keys() -> Iterator[Binding]:
    """A text area's keys, but for the function keys: those are the program's."""
    for binding in TextArea.BINDINGS:
        if isinstance(binding, Binding) and binding.key not in ("f6", "f7"):
            yield replace(binding, description="", show=False)  # everybody knows them


class MessageArea(TextArea, inherit_bindings=False):
    """A text area for messages.

    Long pastes become a label on one line; so does any text with characters that a text area
    cannot hold or a terminal would obey. A label is one thing: the cursor steps over it and
    deleting a part deletes it. `message` is the text with every label replaced by what it stands
    for.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *_editing_keys(),
        Binding("ctrl+o", "open_paste", "Open paste", id="message.open-paste", show=False),
        Binding("alt+a", "select_all", "Select all", id="message.select-all", show=False),
    ]
    """
    | Key | What it does |
    | :- | :- |
    | ctrl+o | Replace a label by its text, to be changed. |
    | alt+a | Select all. |
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"message-area--label"}
    """
    | Class | What it styles |
    | :- | :- |
    | `message-area--label` | The label of a folded paste. |
    """

    DEFAULT_CSS = """
    MessageArea .message-area--label {
        color: $text-accent;
        text-style: italic;
    }
    """

    @dataclass
    class Edited(Message):
        """The text has changed, and the user has paused for a moment."""

        area: MessageArea
        text: str
        """The exact message."""

        @property
        def control(self) -> MessageArea:
            """The area that was edited."""
            return self.area

    def __init__(
        self,
        message: str = "",
        *,
        placeholder: str = "",
        name: str | None = None,
        id: str | None = None,
        classes: str | None = None,
        disabled: bool = False,
    ) -> None:
        self._folded: dict[str, str] = {}
        self._debounce: Timer | None = None
        super().__init__(
            placeholder=placeholder,
            highlight_cursor_line=False,
            name=name,
            id=id,
            classes=classes,
            disabled=disabled,
        )
        self.match_cursor_bracket = False
        self.message = message

    @property
    def message(self) -> str:
        """The text with every paste in full. Setting it starts afresh, with nothing to undo."""
        return self._expand(self.text)

    @message.setter
    def message(self, message: str) -> None:
        self._folded.clear()
        foldable = len(message) > EDITABLE_CHARACTERS or not _is_plain(message)
        self.load_text(self._fold(message) if foldable else message)
        self.move_cursor(self.document.end)

    def paste(self, text: str) -> None:
        """Put text where the selection is, folded if it is long."""
        if self.read_only:
            return
        text = text.replace("\r\n", "\n").replace("\r", "\n")  # terminals paste either
        is_long = len(text) > PASTE_CHARACTERS or text.count("\n") >= PASTE_LINES
        if is_long or not _is_plain(text):
            text = self._fold(text)
        self.history.checkpoint()
        self.replace(text, *self.selection, maintain_selection_offset=False)
        self.scroll_cursor_visible()

    def edit(self, edit: Edit) -> EditResult:
        """Perform an edit; labels it touches go as a whole."""
        top, bottom = self._outside(edit.top, -1), self._outside(edit.bottom, 1)
        if edit.top == edit.bottom:
            top = bottom
        return super().edit(Edit(edit.text, top, bottom, edit.maintain_selection_offset))

    def validate_selection(self, selection: Selection) -> Selection:
        """Keep both ends of the selection out of labels."""
        before = self.selection.end
        return Selection(*(self._outside(end, _direction(before, end)) for end in selection))

    def get_line(self, line_index: int) -> Text:
        """Return a line for display, its labels styled."""
        line = super().get_line(line_index)
        if self._folded:
            style = self.get_component_rich_style("message-area--label")
            for start, end in self._labels(line_index):
                line.stylize(style, start, end)
        return line

    def action_open_paste(self) -> None:
        """Open the label at the cursor, else the last one."""
        labels = [
            (row, start, end)
            for row in range(self.document.line_count)
            for start, end in self._labels(row)
        ]
        if not labels:
            self.notify("There is no folded paste here.")
            return
        row, column = self.cursor_location
        near = (label for label in labels if label[0] == row and column in label[1:])
        row, start, end = next(near, labels[-1])
        text = self._folded[self.document.get_line(row)[start:end]]
        self.replace(printable(text), (row, start), (row, end), maintain_selection_offset=False)

    def action_copy(self) -> None:
        """Copy the selection, its pastes in full."""
        if not self.selected_text:
            super().action_copy()
        else:
            self.app.copy_to_clipboard(self._expand(self.selected_text))

    def action_cut(self) -> None:
        """Cut the selection, its pastes in full, or else the line."""
        if not self.selected_text:
            self.action_select_line()
        if self.selected_text:
            self.action_copy()
            self.action_delete_left()

    def action_paste(self) -> None:
        """Paste what was copied here."""
        self.paste(self.app.clipboard)

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Scroll to the cursor, unless an undo has just taken away the line it is on."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)

    def on_key(self, event: events.Key) -> None:
        """Take joiners, which are typed like letters: Persian and many emoji need them.

        Letters with Alt are commands, though terminals send the letter too.
        """
        if event.key.startswith("alt+"):
            event.prevent_default()
            return
        if event.character and event.character in _JOINERS and not self.read_only:
            event.prevent_default()
            event.stop()
            self.replace(event.character, *self.selection, maintain_selection_offset=False)

    def on_paste(self, event: events.Paste) -> None:
        """Take a paste from the terminal."""
        event.prevent_default()
        event.stop()
        self.paste(event.text)

    def on_text_area_changed(self) -> None:
        """Tell of the change when the user pauses."""
        if self._debounce is not None:
            self._debounce.stop()
        self._debounce = self.set_timer(DEBOUNCE, self._tell)

    def _tell(self) -> None:
        self.post_message(self.Edited(self, self.message))

    def _fold(self, text: str) -> str:
        lines = text.count("\n") + (not text.endswith("\n"))
        size = f"{len(text):,} characters, {lines:,} line" + ("s" if lines > 1 else "")
        what = size if _is_plain(text) else f"{size}, with control codes"
        label, number = f"⟦pasted {what}⟧", 1
        while self._folded.setdefault(label, text) != text:
            number += 1
            label = f"⟦pasted {what} · {number}⟧"
        return label

    def _expand(self, text: str) -> str:
        if not self._folded:
            return text
        return _LABEL.sub(lambda label: self._folded.get(label[0], label[0]), text)

    def _labels(self, row: int) -> Iterator[tuple[int, int]]:
        if self._folded and 0 <= row < self.document.line_count:
            for label in _LABEL.finditer(self.document.get_line(row)):
                if label[0] in self._folded:
                    yield label.span()

    def _outside(self, location: Location, direction: int) -> Location:
        """Move a location out of a label: to its start (-1), its end (1) or the nearer one (0)."""
        row, column = location
        for start, end in self._labels(row):
            if start < column < end:
                at_end = direction > 0 or (direction == 0 and column - start > end - column)
                return row, end if at_end else start
        return location


def _is_plain(text: str) -> bool:
    """Whether a text area holds the text as it is, and a terminal shows it as it is."""
    return printable(text) == text and not _SEPARATORS.intersection(text)


def _direction(before: Location, now: Location) -> int:
    """Which way the cursor went along its row; 0 for another row."""
    return (now > before) - (now < before) if now[0] == before[0] else 0
