"""PaneScreen: the chats of the screen, in tabs, and what can be done with a chat as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual import getters, on, work
from textual.screen import Screen

from kvchat.chat.conversation import Conversation
from kvchat.tui.chat_records import ChatRecords
from kvchat.tui.chats import Chats
from kvchat.tui.personas import Personas
from kvchat.tui.tabs import Tabs
from kvchat.tui.widgets.chat_pane import ChatPane
from kvchat.tui.widgets.prompt import PromptArea
from kvchat.tui.widgets.queue import QueuedMessages
from kvchat.tui.widgets.tab_row import TabRow
from kvchat.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from kvchat.tui.app import KvchatApp
    from kvchat.tui.main_screen import MainScreen

HINTS = (
    ("prompt.send", "sends what you write"),
    ("chat.stop", "stops the reply"),
    ("chat.sliders", "goes to the sliders"),
    ("chat.commands", "finds every command"),
    ("chat.help", "shows all keys"),
)
"""Shown, with the keys they are bound to, while there is no message."""


class PaneScreen(Screen[None]):
    """Has a pane for each open chat."""

    app: getters.app[KvchatApp]
    tab_row = getters.query_one(TabRow)

    def __init__(self) -> None:
        super().__init__()
        screen = cast("MainScreen", self)
        self.chats = Chats(screen)
        self.records = ChatRecords(screen)
        self.personas = Personas(screen)
        self.tabs = Tabs(screen, self.new_pane(self.new_conversation()))

    @property
    def pane(self) -> ChatPane:
        """The chat in view."""
        return self.tabs.pane

    @property
    def transcript(self) -> Transcript:
        """The messages in view."""
        return self.pane.transcript

    @property
    def prompt(self) -> PromptArea:
        """The prompt in view."""
        return self.pane.prompt

    @property
    def queue(self) -> QueuedMessages:
        """What waits to be sent in the chat in view."""
        return self.pane.queue

    def new_conversation(self) -> Conversation:
        """Return a chat in which nothing has been said."""
        return Conversation(system=self.app.settings.system or "")

    def new_pane(self, conversation: Conversation) -> ChatPane:
        """Return what shows a chat."""
        return ChatPane(conversation, [(self.app.keymap.first(name), what) for name, what in HINTS])

    def show_tabs(self) -> None:
        """Show what the open chats are called and what goes on in them."""
        self.tab_row.show(self.tabs.views(), id(self.pane))

    # Keys

    def action_new_chat(self) -> None:
        """Begin another chat."""
        self.chats.new()

    def action_new_tab(self) -> None:
        """Begin another chat in a tab of its own."""
        self.tabs.open(self.new_conversation())

    def action_close_tab(self) -> None:
        """Close the tab in view; the chat is kept."""
        self.tabs.close(self.pane)

    def action_step_tab(self, by: int) -> None:
        """Go to the next tab or the one before."""
        self.tabs.step(by)

    @work
    async def action_chats(self) -> None:
        """Go to another chat."""
        await self.chats.choose()

    @work
    async def action_rename(self) -> None:
        """Give this chat another title."""
        await self.records.rename()

    @work
    async def action_tags(self) -> None:
        """Give this chat other tags."""
        await self.records.edit_tags()

    @work
    async def action_import(self) -> None:
        """Take in the chats of a file."""
        await self.records.import_file()

    @work
    async def action_export(self) -> None:
        """Write this chat into a file."""
        await self.records.export()

    @work
    async def action_personas(self) -> None:
        """Begin a chat with a persona."""
        await self.personas.choose()

    @work
    async def action_save_persona(self) -> None:
        """Save model, system prompt and sliders under a name."""
        await self.personas.save()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out what makes no sense now."""
        if action in ("step_tab", "close_tab"):
            return True if len(self.tabs.panes) > 1 else None
        if action in ("rename", "tags", "export"):
            return True if self.pane.conversation.nodes else None
        return True

    # Tabs

    @on(TabRow.Chosen)
    def _go_to_tab(self, event: TabRow.Chosen) -> None:
        if pane := self.tabs.with_key(event.key):
            self.tabs.go_to(pane)

    @on(TabRow.CloseRequested)
    def _close_tab(self, event: TabRow.CloseRequested) -> None:
        if pane := self.tabs.with_key(event.key):
            self.tabs.close(pane)

    @on(TabRow.NewRequested)
    def _open_tab(self) -> None:
        self.action_new_tab()
