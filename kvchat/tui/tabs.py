"""Tabs: the open chats, and which of them is in view."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvchat.chat.commands import Command, GetPrice, Load, Send
from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.tui.widgets.chat_pane import ChatPane
from kvchat.tui.widgets.queue import Queued
from kvchat.tui.widgets.tab_row import TabState, TabView

if TYPE_CHECKING:
    from kvchat.tui.main_screen import MainScreen

OpenChat = tuple[Conversation, list[Turn]]
"""A chat and its ledger."""


class Tabs:
    """Holds the panes, one in view; one worker and one cache serve them all.

    Going to another pane asks nothing of the worker: it goes to a chat when a command about that
    chat begins.

    Args:
        screen: where the panes are.
        first: the pane to begin with.
    """

    def __init__(self, screen: MainScreen, first: ChatPane) -> None:
        self.screen = screen
        self.panes = [first]
        self.pane = first
        """The one in view."""
        self._warned_of: tuple[str, ...] = ()
        """The texts that can be lost without another word."""

    def of(self, conversation: Conversation | None) -> ChatPane | None:
        """Return the pane of a chat, also one that is being closed."""
        panes = self.screen.query(ChatPane)
        return next((pane for pane in panes if pane.conversation is conversation), None)

    def with_id(self, chat_id: str) -> ChatPane | None:
        """Return the tab of the chat with this id."""
        return next((pane for pane in self.panes if pane.conversation.id == chat_id), None)

    def is_working(self, pane: ChatPane) -> bool:
        """Whether something is carried out or waits for this chat."""
        running = self.screen.feed.writing and self.screen.feed.pane is pane
        return running or bool(self._waiting(pane))

    # Going about

    def open(self, conversation: Conversation) -> ChatPane:
        """Open a chat in a tab of its own, and go there."""
        pane = self.screen.new_pane(conversation)
        self.panes.insert(self.panes.index(self.pane) + 1, pane)
        self.screen.query_one("#chat").mount(pane)
        self.go_to(pane)
        return pane

    def surround(self, before: Iterable[OpenChat], after: Iterable[OpenChat]) -> None:
        """Open chats in tabs at the left and at the right of the one in view, which stays there."""
        at = self.panes.index(self.pane)
        self.panes[at:at] = [self._behind(*chat) for chat in before]
        at = self.panes.index(self.pane) + 1
        self.panes[at:at] = [self._behind(*chat) for chat in after]
        self.screen.commands_changed()

    def _behind(self, conversation: Conversation, ledger: Iterable[Turn]) -> ChatPane:
        pane = self.screen.new_pane(conversation)
        pane.display = False
        self.screen.query_one("#chat").mount(pane)
        pane.open(conversation, ledger)
        return pane

    def go_to(self, pane: ChatPane) -> None:
        """Bring a pane into view."""
        self.pane = pane
        pane.unread = False
        for each in self.screen.query(ChatPane):
            each.display = each is pane
        if pane.is_mounted:
            pane.prompt.focus()
        self.screen.commands_changed()
        self.screen.price.ask()

    def step(self, by: int) -> None:
        """Go to the next tab, or the one before, round and round."""
        self.go_to(self.panes[(self.panes.index(self.pane) + by) % len(self.panes)])

    def close(self, pane: ChatPane) -> None:
        """Close a tab; a reply that is written there ends. Unsent texts are warned of once."""
        waiting = self._waiting(pane)
        unsent = [c.text for c in waiting if isinstance(c, Send)]
        texts = tuple(text for text in (pane.prompt.message, *unsent) if text.strip())
        if texts and texts != self._warned_of:
            self._warned_of = texts
            self.screen.notify(
                f"“{pane.title}” has a message that is not sent. Close it once more to drop that.",
                severity="warning",
                markup=False,
            )
            return
        worker, feed = self.screen.app.worker, self.screen.feed
        for command in waiting:
            if worker is not None:
                worker.withdraw(command)
        if feed.pane is pane and feed.writing and not isinstance(feed.running, Load):
            self.screen.stop_reply()
        at = self.panes.index(pane)
        if len(self.panes) == 1:
            self.open(self.screen.new_conversation())
        self.panes.remove(pane)
        if self.pane is pane:
            self.go_to(self.panes[min(at, len(self.panes) - 1)])
        self.let_go()
        self.screen.commands_changed()

    def let_go(self) -> None:
        """Remove what was closed, as soon as nothing is carried out there any more."""
        feed, keeper = self.screen.feed, self.screen.app.keeper
        for pane in self.screen.query(ChatPane):
            if pane in self.panes or (feed.running is not None and feed.pane is pane):
                continue
            pane.remove()
            if keeper is not None:
                keeper.let_go(pane.conversation.id)

    # What is shown

    def views(self) -> list[TabView]:
        """Return what the row of tabs shows."""
        return [TabView(id(pane), pane.title, self._state(pane)) for pane in self.panes]

    def with_key(self, key: int) -> ChatPane | None:
        """Return the pane that the row of tabs knows by this."""
        return next((pane for pane in self.panes if id(pane) == key), None)

    def show_queues(self) -> None:
        """Show in each pane what waits there, and for what if that is elsewhere."""
        feed = self.screen.feed
        for pane in self.panes:
            sends = [Queued(c.id, c.text) for c in self._waiting(pane) if isinstance(c, Send)]
            elsewhere = ""
            if feed.writing and feed.pane is not pane:
                elsewhere = f"waits until the reply in “{feed.pane.title}” has ended"
            pane.show_queue(sends, elsewhere)

    def _state(self, pane: ChatPane) -> TabState:
        if self.screen.feed.writing and self.screen.feed.pane is pane:
            return "writing"
        if self._waiting(pane):
            return "waiting"
        return "unread" if pane.unread else ""

    def _waiting(self, pane: ChatPane) -> list[Command]:
        worker = self.screen.app.worker
        return [
            command
            for command in (worker.queued if worker else ())
            if command.conversation is pane.conversation and not isinstance(command, GetPrice)
        ]
