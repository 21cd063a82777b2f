"""QueuedMessages: what was sent ahead while a reply runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widgets import Static

from kvchat.chat.plain_text import one_line
from kvchat.tui.widgets.action_label import ActionLabel


@dataclass(frozen=True, slots=True)
class Queued:
    """A message that waits."""

    key: int
    """Whatever its owner knows it by."""
    text: str


class QueuedMessage(Horizontal, can_focus=True):
    """One waiting message on one line."""

    BINDING_GROUP_TITLE = "Queued messages"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "change", "Change", id="queue.change"),
        Binding("delete,backspace", "withdraw", "Withdraw", id="queue.withdraw"),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]
    """
    | Key | What it does |
    | :- | :- |
    | enter | Take the message back into the prompt. |
    | delete, backspace | Withdraw it. |
    | up, down | Go to its neighbours. |
    """

    DEFAULT_CSS = """
    QueuedMessage {
        height: 1;
        padding: 0 1;
        .queued-message--mark { width: 8; color: $text-muted; }
        .queued-message--text { width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
        &:focus {
            background: $block-cursor-blurred-background;
            .queued-message--text { text-style: bold; }
            .queued-message--mark { color: $text-primary; text-style: bold; }
        }
    }
    """

    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued = queued

    def compose(self) -> ComposeResult:
        """Lay out the mark, the text and what can be done with it."""
        yield Static("queued", classes="queued-message--mark", markup=False)
        text = one_line(self.queued.text[:500])
        yield Static(text, classes="queued-message--text", markup=False)
        yield ActionLabel("change", "change", tooltip="Take it back into the prompt (Enter)")
        yield ActionLabel("withdraw", "withdraw", tooltip="Do not send it (Delete)")

    async def on_action_label_pressed(self, event: ActionLabel.Pressed) -> None:
        """Do what was clicked on."""
        event.stop()
        await self.run_action(event.action)

    def action_change(self) -> None:
        """Ask for the message to go back into the prompt."""
        self.post_message(QueuedMessages.ChangeRequested(self.queued))

    def action_withdraw(self) -> None:
        """Ask for the message not to be sent."""
        self.post_message(QueuedMessages.WithdrawRequested(self.queued))


class QueuedMessages(VerticalScroll, can_focus=False):
    """The waiting messages, the next one first; not there when none waits."""

    DEFAULT_CSS = """
    QueuedMessages {
        height: auto;
        max-height: 4;
        display: none;
        scrollbar-size-vertical: 1;
        &.-waiting { display: block; }
    }
    """

    @dataclass
    class ChangeRequested(Message):
        """The user wants a message back in the prompt."""

        queued: Queued

    @dataclass
    class WithdrawRequested(Message):
        """The user does not want a message sent."""

        queued: Queued

    async def show_messages(self, messages: Iterable[Queued]) -> None:
        """Show these messages; the focus stays at its place in the list."""
        wanted, rows = list(messages), list(self.query(QueuedMessage))
        if [row.queued for row in rows] == wanted:
            return
        focused = next((index for index, row in enumerate(rows) if row.has_focus), None)
        self.set_class(bool(wanted), "-waiting")
        async with self.batch():
            await self.remove_children()
            rows = [QueuedMessage(queued) for queued in wanted]
            await self.mount_all(rows)
        if focused is not None and rows:
            rows[min(focused, len(rows) - 1)].focus()
