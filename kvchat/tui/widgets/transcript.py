"""The conversation on the screen: one widget for all messages, however many and long they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal, cast

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import var

from kvchat.chat.plain_text import one_line
from kvchat.tui.widgets.block_view import BlockView
from kvchat.tui.widgets.greeting import greeting
from kvchat.tui.widgets.line import Line
from kvchat.tui.widgets.markdown_lines import code_blocks
from kvchat.tui.widgets.message_block import Block, MessageBlock, MessageView

Action = Literal[
    "copy",
    "copy_code",
    "edit",
    "regenerate",
    "continue",
    "branch",
    "delete",
    "previous_sibling",
    "next_sibling",
]


def _binding(keys: str, action: str, description: str, id: str, show: bool = False) -> Binding:
    return Binding(keys, action, description, id=f"transcript.{id}", show=show)


class Transcript(BlockView):
    """Shows the messages of a conversation and the reply that is being written."""

    BINDING_GROUP_TITLE = "Messages"
    BINDINGS: ClassVar[list[BindingType]] = [
        _binding("ctrl+up,k", "move(-1)", "Previous message", "previous"),
        _binding("ctrl+down,j", "move(1)", "Next message", "next"),
        _binding("c", "request('copy')", "Copy", "copy", show=True),
        _binding("x", "request('copy_code')", "Copy code", "copy_code"),
        _binding("e", "request('edit')", "Edit", "edit", show=True),
        _binding("r", "request('regenerate')", "Regenerate", "regenerate", show=True),
        _binding("o", "request('continue')", "Continue", "continue"),
        _binding("b", "request('branch')", "Branch from here", "branch"),
        _binding("delete", "request('delete')", "Delete", "delete"),
        _binding("left,h", "request('previous_sibling')", "Previous version", "previous_sibling"),
        _binding("right,l", "request('next_sibling')", "Next version", "next_sibling"),
        _binding("m", "toggle_markdown", "Text or Markdown", "toggle_markdown", show=True),
        _binding("t", "toggle_thinking", "Thinking", "toggle_thinking"),
    ]

    selected_id: var[str | None] = var(None)
    """The message that the user moved to; None for the last one."""

    @dataclass
    class ActionRequested(Message):
        """The user wants something done with a message."""

        transcript: Transcript
        node_id: str
        action: Action

        @property
        def control(self) -> Transcript:
            """The sender."""
            return self.transcript

    def __init__(
        self,
        hints: Sequence[tuple[str, str]] = (),
        *,
        name: str | None = None,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        """Create an empty transcript.

        Args:
            hints: Keys and what they do, shown while there is no message.
            name: Of the widget.
            id: Of the widget.
            classes: Of the widget.
        """
        super().__init__(name=name, id=id, classes=classes)
        self._hints = hints
        self._messages: list[MessageBlock] = []
        self._status: Block | None = None

    # What is shown

    def blocks(self) -> list[Block]:
        """Return the messages, or the greeting, and the status."""
        blocks: list[Block] = [*self._messages]
        if not blocks:
            blocks.append(Block(greeting(self._hints, self._row_width, self.size.height)))
        return [*blocks, self._status] if self._status else blocks

    def is_current(self, block: Block) -> bool:
        """Tell whether keys act on this message."""
        return bool(block.node_id) and block.node_id == self.current_node_id

    def show(self, messages: Sequence[MessageView]) -> None:
        """Show these messages.

        The view stays where it is, if it does not follow the end and the message at its top is
        among them.
        """
        known = {block.node_id: block for block in self._messages}
        same = (not a.live and a.view == b for a, b in zip(self._messages, messages, strict=False))
        with self.changing(sum(takewhile(bool, same))):
            self._messages = []
            for view in messages:
                block = known.get(view.node_id) or MessageBlock(view)
                if block.live or block.view != view:
                    block.show(view)
                self._messages.append(block)
            if not self._find(self.selected_id):
                self.selected_id = None

    def begin_reply(self, view: MessageView) -> None:
        """Show a reply that begins, or goes on from the text it has."""
        block = self._find(view.node_id)
        with self._changing(block):
            if block:
                block.show(view, live=True)
            else:
                self._messages.append(MessageBlock(view, live=True))

    def add(self, text: str, thinking: bool = False) -> None:
        """Append to the running reply."""
        if block := self._reply:
            self.grow(block, block.add(text, thinking))

    def mark(self, text: str) -> None:
        """Note in the running reply that something changes here."""
        if block := self._reply:
            self.grow(block, block.mark(text))

    def end_reply(self, view: MessageView) -> None:
        """Show the running reply as it became."""
        self.update_message(view)

    def update_message(self, view: MessageView) -> None:
        """Show another state of a message that is shown."""
        if block := self._find(view.node_id):
            with self._changing(block):
                block.show(view)

    def status(self, text: str | None) -> None:
        """Show a line below the last message, or none."""
        with self._changing(None):
            line = Line(one_line(text or ""), style="status", copied=False)
            self._status = Block([Line(copied=False), line]) if text else None

    def toggle_markdown(self, node_id: str | None = None) -> None:
        """Show a message, or the current one, as it was written or as Markdown."""
        if block := self._find(node_id or self.current_node_id):
            with self._changing(block):
                block.as_text = not block.as_text
                block.forget()

    def toggle_thinking(self, node_id: str | None = None) -> None:
        """Fold or unfold the thinking of a message, or of the current one."""
        if block := self._find(node_id or self.current_node_id):
            with self._changing(block):
                block.unfolded = not block.unfolded
                block.forget()

    @property
    def current_node_id(self) -> str | None:
        """The message that keys act on: the one moved to, else the last."""
        return self.selected_id or (self._messages[-1].node_id if self._messages else None)

    def copy_text(self, node_id: str) -> str:
        """Return the whole text of a message as it was written."""
        block = self._find(node_id)
        return block.view.text if block else ""

    def code_blocks(self, node_id: str) -> list[str]:
        """Return what stands in the code blocks of a message."""
        return code_blocks(self.copy_text(node_id))

    def _changing(self, block: MessageBlock | None) -> AbstractContextManager[None]:
        """Keep the view in place while one message changes, or what comes after all of them."""
        return self.changing(self._messages.index(block) if block else len(self._messages))

    @property
    def _reply(self) -> MessageBlock | None:
        return self._messages[-1] if self._messages and self._messages[-1].live else None

    def _find(self, node_id: str | None) -> MessageBlock | None:
        return next((block for block in self._messages if block.node_id == node_id), None)

    # Mouse and keys

    def on_click(self, event: events.Click) -> None:
        """Act on what was clicked; twice selects a word, three times a line."""
        _, offset = self.screen.get_widget_and_offset_at(event.screen_x, event.screen_y)
        if offset is None or not (block := self.block_at(offset)):
            return
        if event.chain > 1:
            event.prevent_default()
            self.select_around(offset, whole_line=event.chain > 2)
        elif block.node_id and not self.text_selection:
            self.selected_id = block.node_id
            self.refresh()
            self._act(block.node_id, event.style.meta.get("action", ""))

    def _act(self, node_id: str, action: str) -> None:
        if action == "toggle_thinking":
            self.toggle_thinking(node_id)
        elif action:
            self.post_message(self.ActionRequested(self, node_id, cast(Action, action)))

    def action_request(self, action: Action) -> None:
        """Ask for something to be done with the current message."""
        block = self._find(self.current_node_id)
        if block and (block.view.siblings[1] > 1 or not action.endswith("sibling")):
            self._act(block.node_id, action)

    def action_toggle_markdown(self) -> None:
        """Switch the current message between text and Markdown."""
        self.toggle_markdown()

    def action_toggle_thinking(self) -> None:
        """Fold or unfold the thinking of the current message."""
        self.toggle_thinking()

    def action_move(self, step: int) -> None:
        """Make the message before or after the current one the current one, and show it."""
        current = self._find(self.current_node_id)
        if not current:
            return
        index = max(0, min(self._messages.index(current) + step, len(self._messages) - 1))
        last = index == len(self._messages) - 1
        self.selected_id = None if last else self._messages[index].node_id
        self.reveal(self._messages[index])
