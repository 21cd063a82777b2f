"""MainScreen: the layout, the keys, and what the user asks for on its way to the worker.

Widgets post what the user wants, this screen puts it on the worker's queue, and `EventFeed` shows
what the worker tells.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import events, getters, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import var
from textual.widgets import Static

from kvchat.chat.attachments import expand
from kvchat.chat.commands import (
    Command,
    Continue,
    Edit,
    Load,
    Regenerate,
    Restore,
    Send,
    SetSystem,
    SetThinking,
    Switch,
)
from kvchat.chat.conversation import Conversation, Deleted
from kvchat.chat.events import WorkerEvent
from kvchat.engine.errors import ContextOverflowError, KvchatError
from kvchat.models.catalog import find, for_language
from kvchat.models.languages import language_of
from kvchat.tui.chat_keys import CHAT_KEYS
from kvchat.tui.compositor import RowCompositor
from kvchat.tui.event_feed import EventFeed
from kvchat.tui.glyphs import ASCII, UNICODE
from kvchat.tui.message_actions import MessageActions
from kvchat.tui.modals.branch_tree import BranchTree
from kvchat.tui.modals.help import HelpScreen, key_groups
from kvchat.tui.modals.model_picker import ModelChoice, ModelPicker
from kvchat.tui.modals.overflow import OverflowQuestion
from kvchat.tui.modals.system_editor import SystemEditor
from kvchat.tui.pane_screen import PaneScreen
from kvchat.tui.prompt_price import PromptPrice
from kvchat.tui.widgets.cache_panel import CachePanel
from kvchat.tui.widgets.header import ChatHeader
from kvchat.tui.widgets.key_line import KeyLine
from kvchat.tui.widgets.message_area import MessageArea
from kvchat.tui.widgets.prompt import PromptArea
from kvchat.tui.widgets.queue import Queued, QueuedMessage, QueuedMessages
from kvchat.tui.widgets.sampling import SamplingPanel
from kvchat.tui.widgets.sidebar import Sidebar
from kvchat.tui.widgets.slider import ParamSlider
from kvchat.tui.widgets.speed_panel import SpeedPanel
from kvchat.tui.widgets.tab_row import TabRow
from kvchat.tui.widgets.transcript import Transcript

TOO_SMALL = "kvchat needs a terminal of at least 60 × 20 cells. Make this one larger."


class MainScreen(PaneScreen):
    """The chats, one in view."""

    AUTO_FOCUS = "PromptArea"
    BINDING_GROUP_TITLE = "Chat"
    BINDINGS: ClassVar[list[BindingType]] = [*CHAT_KEYS]

    header = getters.query_one(ChatHeader)
    sidebar = getters.query_one(Sidebar)
    sampling = getters.query_one(SamplingPanel)
    cache = getters.query_one(CachePanel)
    speed = getters.query_one(SpeedPanel)

    busy: var[bool] = var(False, bindings=True)
    paused: var[bool] = var(False, bindings=True)

    def __init__(self, stash_budget: int) -> None:
        super().__init__()
        self._compositor = RowCompositor()
        self.feed = EventFeed(self, stash_budget)
        self.messages = MessageActions(self)
        self.price = PromptPrice(self)
        self._language: str | None = None
        """A language somebody wrote in that a model was not made for; ISO 639-1."""
        self._early: list[Command] = []
        self._attaching = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """Header, conversation and prompt; the sidebar at their right."""
        yield ChatHeader()
        yield TabRow()
        with Horizontal(id="main"):
            with Vertical(id="chat"):
                yield self.pane
            yield Sidebar(glyphs=UNICODE if self.app.speaks_unicode else ASCII)
        yield Static(TOO_SMALL, id="too-small", markup=False)
        yield KeyLine()

    def handle_events(self, events: list[WorkerEvent]) -> None:
        """Show what the worker tells."""
        with self.app.batch_update():
            self.feed.handle(events)

    # What the feed reports back

    def commands_changed(self) -> None:
        """The worker began or ended something, or another chat is in view."""
        self.busy = self.feed.writing and self.feed.pane is self.pane
        self._show_queue()

    def command_failed(self, command: Command, error: KvchatError) -> None:
        """Tell why, and give back what was typed."""
        text = command.text if isinstance(command, Send | Edit) else ""
        may_ask = self.app.settings.overflow == "ask" and isinstance(
            command, Send | Edit | Regenerate
        )
        if may_ask and isinstance(error, ContextOverflowError) and error.can_drop:
            self._ask_overflow(command, error)
            return
        prompt = self.feed.pane.prompt
        if text and not prompt.message:
            prompt.message = text
        if self.feed.session is None:
            key = self.app.keymap.first("chat.model")
            self.feed.pane.transcript.status(f"no model is loaded · {key} chooses one")
        self.notify(str(error), severity="error", timeout=10, markup=False)

    def branch_deleted(self, deleted: Deleted) -> None:
        """Tell how it can be undone."""
        count = len(deleted.nodes)
        what = f"{count} messages" if count > 1 else "the message"
        key = self.app.keymap.first("chat.undo-delete")
        self.notify(f"Deleted {what}. {key} brings {'them' if count > 1 else 'it'} back.")

    # The prompt

    @on(PromptArea.Submitted)
    def _send(self, event: PromptArea.Submitted) -> None:
        self.prompt.past.append(event.text)
        self.transcript.follow()
        # Without a worker the chat to begin with may still be looked up.
        conversation = self.pane.conversation if self.app.worker else None
        self.run_worker(self._attach_and_send(event.text, conversation))
        self._offer_other_models(event.text)

    async def _attach_and_send(self, text: str, conversation: Conversation | None) -> None:
        """Send a message, in its turn, once the files it names are read on another thread."""
        async with self._attaching:
            message = await asyncio.to_thread(expand, text, Path.cwd())
        for problem in message.problems:
            self.notify(problem, title="Attachment", severity="warning", timeout=8, markup=False)
        self.submit(Send(message.text, conversation=conversation))

    def make_way_for_letter(self, event: events.Key) -> None:
        """Give the focus to the prompt before a letter that nobody else wants arrives.

        Inserted only after it came back unwanted, a letter could be overtaken by the next keys.
        """
        focused = self.focused
        wanted = event.key in self.active_bindings or (
            focused is not None and focused.check_consume_key(event.key, event.character)
        )
        if event.is_printable and not wanted and not event.key.startswith("alt+"):
            self.set_focus(self.prompt)

    @on(MessageArea.Edited)
    def _ask_price(self, event: MessageArea.Edited) -> None:
        if event.area is self.prompt:
            self.price.ask()

    @on(QueuedMessages.ChangeRequested)
    def _change_queued(self, event: QueuedMessages.ChangeRequested) -> None:
        command = self._queued(event.queued)
        if command is not None and self.app.worker and self.app.worker.withdraw(command):
            self.prompt.message = command.text
            self.prompt.focus()
        self._show_queue()

    @on(QueuedMessages.WithdrawRequested)
    def _withdraw_queued(self, event: QueuedMessages.WithdrawRequested) -> None:
        command = self._queued(event.queued)
        if command is not None and self.app.worker:
            self.app.worker.withdraw(command)
        self._show_queue()

    # Sampling

    @on(SamplingPanel.ParamsChanged)
    def _params_changed(self, event: SamplingPanel.ParamsChanged) -> None:
        if self.app.worker is not None:
            self.app.worker.params = event.params

    @on(Transcript.ActionRequested)
    def _act_on_message(self, event: Transcript.ActionRequested) -> None:
        self.messages.act(event.node_id, event.action)

    # Keys

    def action_stop(self) -> None:
        """Stop the reply and keep what came; when there is none, go to the prompt."""
        if self.busy:
            self.stop_reply()
        else:
            self.prompt.focus()

    def action_regenerate(self) -> None:
        """Write the last reply once more; the old one stays beside it."""
        self.submit(Regenerate())

    def action_continue(self) -> None:
        """Go on with the last reply."""
        self.submit(Continue())

    def action_edit_last(self) -> None:
        """Edit the last message of the user's."""
        for node in reversed(self.pane.conversation.active_path()):
            if node.role == "user":
                self.messages.act(node.id, "edit")
                return

    def action_undo_delete(self) -> None:
        """Put back what was deleted last."""
        if self.pane.deleted is not None:
            self.submit(Restore(self.pane.deleted))
            self.pane.deleted = None

    def action_pause(self) -> None:
        """Hold the reply after its next token, or let it go on."""
        if self.app.worker is None:
            return
        self.paused = not self.paused
        if self.paused:
            self.app.worker.pause()
        else:
            self.app.worker.resume()
            self.transcript.status(None)

    def action_step(self) -> None:
        """Write one token of a paused reply."""
        if self.app.worker is not None:
            if not self.paused:
                self.action_pause()
            self.app.worker.step()

    def action_toggle_thinking(self) -> None:
        """Switch the model's reasoning off, or back on, where its template allows it."""
        session = self.feed.session
        if session is None or not session.llm.template.supports_thinking_switch:
            self.notify("This model has no switch for thinking.", timeout=4)
            return
        off = session.prompts.thinking is not False
        self.submit(SetThinking(False if off else None))
        self.notify(f"Thinking is {'off' if off else 'on'} from the next reply on.", timeout=4)

    @work
    async def action_branches(self) -> None:
        """Go to another branch of the conversation."""
        if self.feed.session is not None:
            tree = BranchTree(self.pane.conversation)
            if node_id := await self.app.push_screen_wait(tree):
                self.submit(Switch(node_id))

    @work
    async def action_edit_system(self) -> None:
        """Change the system prompt."""
        if self.feed.session is None:
            return
        editor = SystemEditor(self.pane.conversation.system)
        text = await self.app.push_screen_wait(editor)
        if text is not None:
            self.submit(SetSystem(text))

    @work
    async def action_choose_model(self) -> None:
        """Chat with another model."""
        self.app.clear_notifications()  # one may have led here, and would cover the list
        picker = ModelPicker(self._model_name(), language=self._language)
        choice = await self.app.push_screen_wait(picker)
        if choice is not None:
            self._load(choice)

    def action_help(self) -> None:
        """Show all keys."""
        kinds = (MainScreen, Transcript, ParamSlider, QueuedMessage, PromptArea, type(self.app))
        self.app.push_screen(HelpScreen(key_groups(kinds, self.app.keymap)))

    def action_toggle_sidebar(self) -> None:
        """Go to the sliders, and show them if need be; from there, put them away."""
        if self.sidebar.has_focus_within or not self.sidebar.display:
            self.toggle_class("-sidebar-toggled")
        if self.sidebar.display:
            self._first_slider.focus()
        else:
            self.prompt.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out what makes no sense now."""
        if action == "stop":
            return True if self.busy or self.focused is not self.prompt else None
        if action in ("regenerate", "continue", "edit_last"):
            return None if self.busy or not self.pane.conversation.nodes else True
        if action in ("pause", "step"):
            return True if self.busy or self.paused else None
        if action == "undo_delete":
            return True if self.pane.deleted is not None else None
        return super().check_action(action, parameters)

    # The parts of all that

    def submit(self, command: Command) -> None:
        """Put a command on the worker's queue; it is about the chat in view unless it says else."""
        if self.app.worker is None:
            self._early.append(command)
            return
        if command.conversation is None:
            command = replace(command, conversation=self.pane.conversation)
        self.app.worker.submit(command)
        self._show_queue()

    def submit_early_commands(self) -> None:
        """Put on the queue what was asked for while there was no worker yet."""
        early, self._early = self._early, []
        for command in early:
            self.submit(command)

    def stop_reply(self) -> None:
        """End what is carried out, in view or not; the next one is not paused."""
        if self.app.worker is not None:
            self.app.worker.cancel()
            if self.paused:
                self.action_pause()

    @property
    def _first_slider(self) -> ParamSlider:
        return self.sampling.query(ParamSlider).first()

    def _model_name(self) -> str | None:
        return self.feed.session.llm.name if self.feed.session else None

    def _load(self, choice: ModelChoice) -> None:
        options = self.app.settings.load_arguments()
        self._language = None
        self.submit(Load(choice.name, options, fetch=choice.must_fetch))

    def _offer_other_models(self, text: str) -> None:
        """Once, when somebody writes in a language that the model was not made for.

        No more than a word: the picker would take the keys of those who go on writing.
        """
        name = self._model_name()
        entry, language = find(name or ""), language_of(text)
        if self._language or entry is None or language is None:
            return
        if language in entry.languages or not for_language(language):
            return
        self._language = language
        key = self.app.keymap.first("chat.model")
        self.notify(
            f"{entry.alias} was not made for this language. {key} shows models that were.",
            title="Another model?",
            timeout=15,
            markup=False,
        )

    @work
    async def _ask_overflow(self, command: Command, error: ContextOverflowError) -> None:
        question = OverflowQuestion(error.needed, error.limit, can_stop=error.can_begin)
        answer = await self.app.push_screen_wait(question)
        match command:
            case Send() | Edit() | Regenerate() if answer is not None:
                self.submit(replace(command, overflow=answer))
            case Send(text=text) | Edit(text=text) if not self.prompt.message:
                self.prompt.message = text

    def _queued(self, queued: Queued) -> Send | None:
        waiting = self.app.worker.queued if self.app.worker else ()
        sends = (c for c in waiting if isinstance(c, Send) and c.id == queued.key)
        return next(sends, None)

    def _show_queue(self) -> None:
        self.tabs.show_queues()
        self.show_tabs()

    def show_tabs(self) -> None:
        """Show what the open chats are called, and which of them the cache is of."""
        super().show_tabs()
        self.feed.show_whose_cache()
