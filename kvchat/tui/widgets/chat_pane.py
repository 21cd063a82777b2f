"""ChatPane: one open chat, with all that the screen keeps of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical

from kvchat.chat.changes import heading
from kvchat.chat.conversation import Conversation, Deleted
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Node
from kvchat.chat.plain_text import one_line
from kvchat.tui.views import message_view
from kvchat.tui.widgets.message_block import MessageView
from kvchat.tui.widgets.prompt import PromptArea
from kvchat.tui.widgets.queue import Queued, QueuedMessages
from kvchat.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel


class ChatPane(Vertical):
    """The messages of a chat, what waits to be sent in it, and what is being written.

    A pane that is not in view keeps its place, its draft and its reply that goes on.

    Args:
        conversation: the chat. The worker alone changes it once something was said.
        hints: keys and what they do, shown while there is no message.
    """

    DEFAULT_CSS = """
    ChatPane { height: 1fr; }
    """

    def __init__(self, conversation: Conversation, hints: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.conversation = conversation
        self.turns: dict[str, Turn] = {}
        """The ledger by reply."""
        self.suggested = ""
        """A title by the model, which holds while the user has given none."""
        self.deleted: Deleted | None = None
        """What can be put back."""
        self.unread = False
        """A reply has ended since the user was here."""
        self.transcript = Transcript(hints)
        self.queue = QueuedMessages()
        self.prompt = PromptArea()
        self._llm: LanguageModel | None = None
        self._waiting = False
        self._found: str | None = None

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield self.transcript
        yield self.queue
        yield self.prompt

    def on_mount(self) -> None:
        """One can type at once."""
        if self.display:
            self.prompt.focus()

    @property
    def title(self) -> str:
        """What the chat is called, on one line."""
        if not self.conversation.nodes and not self.conversation.title:
            return "New chat"
        return one_line(self.conversation.title or self.suggested or heading(self.conversation))

    @property
    def last_turn(self) -> Turn | None:
        """The turn that the ledger ends with."""
        return next(reversed(self.turns.values()), None)

    def open(self, conversation: Conversation, ledger: Iterable[Turn] = ()) -> None:
        """Show another chat in the place of this one; what is in the prompt stays."""
        self.conversation = conversation
        self.turns = {turn.reply_id: turn for turn in ledger}
        self.suggested, self.deleted, self.unread = "", None, False
        path = conversation.active_path()
        self.prompt.past = [node.content for node in path if node.role == "user"]
        self.transcript.selected_id = None
        self.transcript.follow()
        self.show_path()

    def use_model(self, llm: LanguageModel) -> None:
        """Take over a model, whose tokenizer tells where in a reply settings were changed."""
        if self._llm is not llm:
            self._llm = llm
            self.show_path()

    def show_path(self) -> None:
        """Show the active path as the tree has it."""
        self.transcript.show(self.views(self.conversation.active_path()))

    def views(self, path: Iterable[Node]) -> list[MessageView]:
        """Return what the transcript shows of messages."""
        chat = self.conversation
        unseen = {node.id for node in chat.unseen(chat.active_path())}
        return [
            message_view(chat, node, self.turns, self._llm, unseen=node.id in unseen)
            for node in path
        ]

    def go_to(self, node_id: str) -> None:
        """Go to a message as soon as `show_found` is called."""
        self._found = node_id

    def show_found(self) -> None:
        """Go to the message that was looked for, now that it is shown."""
        found, self._found = self._found, None
        if found is not None:
            self.transcript.selected_id = found
            self.transcript.action_move(0)
            self.transcript.focus()

    def show_queue(self, sends: Sequence[Queued], waits_for: str) -> None:
        """Show what waits to be sent here, and what for, if that is not to be seen here."""
        self.call_later(self.queue.show_messages, sends)
        if sends and waits_for:
            self.transcript.status(waits_for)
        elif self._waiting:
            self.transcript.status(None)
        self._waiting = bool(sends and waits_for)
