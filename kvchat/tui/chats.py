"""Chats: which chat is open on the screen, and going to another one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvchat.chat.commands import Open, Switch
from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.tui.main_screen import MainScreen
    from kvchat.tui.modals.chat_list import ChatChoice


class Chats:
    """Opens chats from the store.

    Args:
        screen: takes the commands, and shows what there is to show.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen
        self._open: str | None = None
        self._ledgers: dict[str, list[Turn]] = {}
        """Of chats that are about to be shown, by id."""
        self._found: str | None = None
        """The message to go to as soon as its chat is shown."""

    def first(self, resume: str | None) -> Conversation | None:
        """Return the chat to begin with: None for a new one."""
        keeper = self.screen.app.keeper
        if resume is None or keeper is None:
            return None
        try:
            chat_id = keeper.find(resume)
            if chat_id is None:
                self.screen.notify("There is no chat yet to go on with.", timeout=5)
                return None
            conversation, self._ledgers[chat_id] = keeper.open(chat_id)
        except KvchatError as error:
            self.screen.notify(str(error), severity="error", timeout=10, markup=False)
            return None
        return conversation

    def new(self) -> None:
        """Begin another chat; the one before it is kept."""
        self.screen.submit(Open(Conversation(system=self.screen.app.settings.system or "")))
        self.screen.prompt.focus()

    async def choose(self) -> None:
        """Let the user choose a chat, or a message found in one, and go there."""
        keeper = self.screen.app.keeper
        if keeper is None:
            return
        from kvchat.tui.modals.chat_list import ChatList

        choice = await self.screen.app.push_screen_wait(ChatList(keeper.store, self._open))
        if choice is not None:
            await self._go_to(choice)

    async def _go_to(self, choice: ChatChoice) -> None:
        screen, keeper = self.screen, self.screen.app.keeper
        if choice.chat_id == self._open:
            if choice.node_id is not None:
                self._found = choice.node_id
                screen.submit(Switch(choice.node_id))
            return
        if keeper is None:
            return
        try:
            conversation, ledger = await asyncio.to_thread(keeper.open, choice.chat_id)
        except KvchatError as error:
            screen.notify(str(error), severity="error", timeout=10, markup=False)
            return
        self._ledgers[conversation.id] = ledger
        if choice.node_id is not None and choice.node_id in conversation.nodes:
            conversation.select(choice.node_id)
            self._found = choice.node_id
        screen.submit(Open(conversation))

    def show_found(self) -> None:
        """Go to the message that was chosen, now that its chat is shown."""
        transcript = self.screen.transcript
        found, self._found = self._found, None
        if found is not None:
            transcript.selected_id = found
            transcript.action_move(0)
            transcript.focus()

    def shown(self, conversation: Conversation) -> list[Turn] | None:
        """Return the ledger of a chat that is on the screen now; None if it was there before.

        The one that was there before is let go of.
        """
        keeper, before = self.screen.app.keeper, self._open
        if before == conversation.id:
            return None
        self._open = conversation.id
        if keeper is not None and before is not None:
            keeper.let_go(before)
        return self._ledgers.pop(conversation.id, [])
