"""What a session and its worker tell besides the engine's own events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.chat.commands import Command
from kvchat.chat.conversation import Conversation, Deleted
from kvchat.chat.ledger import Price, Turn
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import GenerationEvent, LoadProgress, PrefillProgress
from kvchat.models.pull_staging import PullProgress

if TYPE_CHECKING:
    from kvchat.chat.session import ChatSession


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """A reply begins, or goes on; its message is in the tree already."""

    reply_id: str
    text: str
    """The answer so far: whoever looks into the tree may find later tokens there already."""
    thinking: str


@dataclass(frozen=True, slots=True)
class TextAdded:
    """Text was added to the running reply: to its reasoning, or to its answer."""

    text: str
    thinking: bool


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A reply has ended and is in the ledger."""

    turn: Turn


ChatEvent = ReplyStarted | GenerationEvent | TextAdded | TurnFinished
"""What `ChatSession.send` and its like yield: for each token, its text and then its event."""


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """A command left the queue; what is told until it ends belongs to it."""

    command: Command


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """A command was carried out, to its end or to where it was cancelled."""

    command: Command


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """A command could not be carried out; the conversation is as usable as before."""

    command: Command
    error: KvchatError
    """Its text is for the user."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """A model is ready, and a session with it."""

    session: ChatSession


@dataclass(frozen=True, slots=True)
class Priced:
    """What sending a text would cost."""

    command: Command
    price: Price


@dataclass(frozen=True, slots=True)
class BranchDeleted:
    """Messages were deleted; this puts them back."""

    deleted: Deleted


@dataclass(frozen=True, slots=True)
class TitleSuggested:
    """The model wrote a title for a chat that has none."""

    conversation: Conversation
    title: str


@dataclass(frozen=True, slots=True)
class Paused:
    """The reply waits after a token, to be stepped or resumed."""


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What the cache and the stash hold: during a reply now and then, and after a command."""

    tokens: int
    max_seq_len: int
    kv_bytes: int
    stash_bytes: int
    keeps_cache: bool = False
    """Whether a snapshot of the chat is kept on the disk."""
    snapshot_bytes: int = 0
    """What it takes there; 0 while there is none."""
    would_take: int = 0
    """About what one of what is cached now would take."""


WorkerEvent = (
    ChatEvent
    | LoadProgress
    | PullProgress
    | PrefillProgress
    | CommandStarted
    | CommandFinished
    | CommandFailed
    | ModelLoaded
    | Priced
    | BranchDeleted
    | TitleSuggested
    | Paused
    | CacheStatus
)
