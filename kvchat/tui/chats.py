"""Chats: from the store to a tab, and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvchat.chat.commands import Open, Switch
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation
    from kvchat.chat.ledger import Turn
    from kvchat.tui.main_screen import MainScreen
    from kvchat.tui.modals.chat_list import ChatChoice


class Chats:
    """Opens chats.

    Args:
        screen: has the tabs, and shows what there is to show.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen

    def resume(self, which: str) -> None:
        """Show the chat to begin with; see `Keeper.find`."""
        keeper = self.screen.app.keeper
        if keeper is None:
            return
        try:
            conversation, ledger = keeper.resume(which)
        except KvchatError as error:
            self._complain(error)
        else:
            self.screen.pane.open(conversation, ledger)

    def new(self, conversation: Conversation | None = None) -> None:
        """Begin another chat; the one before it is kept."""
        self._show(conversation or self.screen.new_conversation())
        self.screen.prompt.focus()

    async def choose(self) -> None:
        """Let the user choose a chat, or a message found in one, and go there."""
        screen, keeper = self.screen, self.screen.app.keeper
        if keeper is None:
            return
        from kvchat.tui.modals.chat_list import ChatList

        here, *others = [pane.conversation.id for pane in (screen.pane, *screen.tabs.panes)]
        chats = ChatList(keeper.store, here, others, renamed=self.renamed)
        choice = await screen.app.push_screen_wait(chats)
        if choice is not None:
            await self._go_to(choice)

    async def _go_to(self, choice: ChatChoice) -> None:
        screen, keeper = self.screen, self.screen.app.keeper
        if pane := screen.tabs.with_id(choice.chat_id):
            screen.tabs.go_to(pane)
            if choice.node_id is not None:
                pane.go_to(choice.node_id)
                screen.submit(Switch(choice.node_id))
            return
        if keeper is None:
            return
        try:
            conversation, ledger = await asyncio.to_thread(keeper.open, choice.chat_id)
        except KvchatError as error:
            self._complain(error)
            return
        if choice.node_id is not None and choice.node_id in conversation.nodes:
            conversation.select(choice.node_id)
        alone = len(screen.tabs.panes) == 1
        self._show(conversation, ledger, beside=choice.beside)
        if choice.node_id is not None:
            screen.pane.go_to(choice.node_id)
            screen.call_after_refresh(screen.pane.show_found)
        if alone and len(screen.tabs.panes) == 1:
            # Nobody else has the cache: what the next turn begins with is read in idle time.
            screen.submit(Open(conversation))

    def _show(
        self, conversation: Conversation, ledger: list[Turn] | None = None, *, beside: bool = False
    ) -> None:
        """Show a chat in the tab in view, or in one of its own."""
        tabs, keeper = self.screen.tabs, self.screen.app.keeper
        if beside or tabs.is_working(tabs.pane):
            tabs.open(conversation).open(conversation, ledger or ())
        else:
            before = tabs.pane.conversation.id
            tabs.pane.open(conversation, ledger or ())
            if keeper is not None:
                keeper.let_go(before)
        self.screen.commands_changed()

    def renamed(self, chat_id: str, title: str) -> None:
        """Take over a title that the user has given in the list."""
        if pane := self.screen.tabs.with_id(chat_id):
            pane.conversation.title = title
            pane.suggested = ""
            self.screen.show_tabs()

    def _complain(self, error: KvchatError) -> None:
        self.screen.notify(str(error), severity="error", timeout=10, markup=False)
