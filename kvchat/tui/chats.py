"""Chats: from the store to a tab, and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvchat.chat.commands import Open, Switch
from kvchat.engine.errors import KvchatError
from kvchat.settings import remember, remembered

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation
    from kvchat.chat.keeper import Keeper
    from kvchat.chat.ledger import Turn
    from kvchat.tui.main_screen import MainScreen
    from kvchat.tui.modals.chat_list import ChatChoice

_TABS = "tabs"
"""What is remembered: the ids of the chats that were open, from left to right."""


class Chats:
    """Opens chats.

    Args:
        screen: has the tabs, and shows what there is to show.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen

    async def resume(self, which: str) -> str:
        """Show the chat to begin with; with the last one, the tabs that were open beside it.

        Args:
            which: see `Keeper.find`.

        Returns:
            The model to load.
        """
        from kvchat.chat.keeper import LAST

        settings, keeper = self.screen.app.settings, self.screen.app.keeper
        pane, model = self.screen.pane, settings.model
        if keeper is None:
            return model
        try:
            conversation, ledger = await asyncio.to_thread(keeper.resume, which)
        except KvchatError as error:
            self._complain(error)
            return model
        pane.open(conversation, ledger)
        if which == LAST:
            await self._restore_tabs(keeper, conversation.id)
        if settings.model_is_asked:
            return model
        return await asyncio.to_thread(keeper.model_of, conversation, model, self._tell_of_model)

    async def _restore_tabs(self, keeper: Keeper, here: str) -> None:
        """Open what was open beside a chat when the program ended."""
        ids = remembered().get(_TABS)
        if not isinstance(ids, list) or here not in ids:
            return
        place = ids.index(here)
        before = await asyncio.to_thread(keeper.open_free, ids[:place])
        after = await asyncio.to_thread(keeper.open_free, ids[place + 1 :])
        self.screen.tabs.surround(before, after)

    def remember_tabs(self) -> None:
        """Remember which chats are open, for `--continue`."""
        panes = self.screen.tabs.panes
        if ids := [pane.conversation.id for pane in panes if pane.conversation.nodes]:
            remember(**{_TABS: ids})

    def _tell_of_model(self, text: str) -> None:
        self.screen.notify(text, title="Model", severity="warning", timeout=10, markup=False)

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
