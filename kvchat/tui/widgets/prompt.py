"""PromptArea: where the user writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive

from kvchat.chat.attachments import as_mention
from kvchat.tui.widgets.message_area import MessageArea


class PromptArea(MessageArea):
    """The prompt: grows with its text, sends on Enter, remembers what was sent.

    `past` holds earlier messages, oldest first; whoever owns the prompt fills it.
    """

    BINDING_GROUP_TITLE = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Send", id="prompt.send"),
        Binding("ctrl+j,shift+enter", "add_line", "New line", id="prompt.new-line", show=False),
        Binding("up", "cursor_up", "Message sent before", show=False),
        Binding("down", "cursor_down", "Message sent after", show=False),
    ]
    """
    | Key | What it does |
    | :- | :- |
    | enter | Send the message. |
    | ctrl+j, shift+enter | Begin a new line. |
    | up | In an empty prompt: the message sent before. |
    | down | Back again. |
    """

    DEFAULT_CSS = """
    PromptArea {
        height: auto;
        min-height: 3;
        max-height: 12;
        padding: 0 1;
        background: $background;
        border: round $foreground 25%;
        border-title-color: $text-muted;
        border-title-background: $background;
        border-subtitle-color: $text-muted;
        border-subtitle-background: $background;
        scrollbar-size-vertical: 1;
        &:focus { border: round $primary; }
    }
    """

    cost: reactive[str] = reactive("")
    """What sending would cost, in a few quiet words."""
    attached: reactive[str] = reactive("")
    """Which files would be sent along."""

    @dataclass
    class Submitted(Message):
        """The user sends a message."""

        prompt: PromptArea
        text: str
        """Exactly what was typed and pasted."""

        @property
        def control(self) -> PromptArea:
            """The prompt."""
            return self.prompt

    def __init__(
        self,
        message: str = "",
        *,
        placeholder: str = "Write a message",
        name: str | None = None,
        id: str | None = None,
        classes: str | None = None,
        disabled: bool = False,
    ) -> None:
        super().__init__(
            message,
            placeholder=placeholder,
            name=name,
            id=id,
            classes=classes,
            disabled=disabled,
        )
        self.past: list[str] = []
        self._recalled: int | None = None
        """Index in `past` of the message that stands in the prompt, unchanged."""

    def watch_cost(self) -> None:
        """Show the cost at the lower right."""
        self._show_about()

    def watch_attached(self) -> None:
        """Show the files there too."""
        self._show_about()

    def _show_about(self) -> None:
        self.border_subtitle = Content(" · ".join(filter(None, (self.attached, self.cost))))

    def paste(self, text: str) -> None:
        """Put text where the cursor is; of a file's path, what attaches the file."""
        if mention := as_mention(text, Path.cwd()):
            row, column = self.selection.start
            before = self.document.get_line(row)[:column]
            text = f"{'' if not before or before[-1].isspace() else ' '}{mention} "
        super().paste(text)

    async def _on_key(self, event: events.Key) -> None:
        """Do what is bound to a key in its turn.

        Bindings are looked up when a key has found no other use, far from here, and by then letters
        that came after it in one burst over a slow line have overtaken it.
        """
        if not event.is_printable:
            bound = self.screen.active_bindings.get(event.key)
            if bound is not None and bound.node is self and bound.enabled:
                event.prevent_default()
                event.stop()
                await self.run_action(bound.binding.action)
                return
        if not event.key.startswith("alt+"):
            await super()._on_key(event)

    def action_submit(self) -> None:
        """Send the message, unless it is blank."""
        text = self.message
        if text.strip():
            self.message = ""
            self.cost = self.attached = ""
            self._recalled = None
            self.post_message(self.Submitted(self, text))

    def action_add_line(self) -> None:
        """Begin a new line at the cursor."""
        self.replace("\n", *self.selection, maintain_selection_offset=False)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up, or to the message sent before."""
        at_top = self.navigator.is_first_wrapped_line(self.cursor_location)
        if not self.text:
            self._recalled = None
            recall = len(self.past) - 1
        elif self._is_recalled and at_top:
            assert self._recalled is not None
            recall = self._recalled - 1
        else:
            recall = -1
        if select or recall < 0:
            super().action_cursor_up(select)
        else:
            self._recall(recall)
            self.move_cursor((0, len(self.document.get_line(0))))  # so that up goes on

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down, or back to the message sent after."""
        at_bottom = self.navigator.is_last_wrapped_line(self.cursor_location)
        if select or not (self._is_recalled and at_bottom):
            super().action_cursor_down(select)
        else:
            assert self._recalled is not None
            self._recall(self._recalled + 1)

    @property
    def _is_recalled(self) -> bool:
        index = self._recalled
        return index is not None and self.past[index : index + 1] == [self.message]

    def _recall(self, index: int) -> None:
        if index < len(self.past):
            self.message = self.past[index]
            self._recalled = index
        else:
            self.message = ""
            self._recalled = None
