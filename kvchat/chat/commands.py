"""What a worker can be asked to do, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from kvchat.chat.conversation import Conversation, Deleted

if TYPE_CHECKING:
    from kvchat.chat.session import Overflow

_numbers = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something to do, with a number of its own."""

    id: int = field(default_factory=lambda: next(_numbers))
    conversation: Conversation | None = field(default=None, repr=False)
    """What it is about; None is what the last command was about."""


@dataclass(frozen=True, slots=True)
class Load(Command):
    """Load a model; the chat so far goes on with it, or another one begins."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `kvchat.load`."""
    fetch: bool = False
    """Fetch the model first if it is not on this disk."""


@dataclass(frozen=True, slots=True)
class Open(Command):
    """Go on with another conversation, and read it in idle time."""

    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Send(Command):
    """Say something."""

    text: str
    overflow: Overflow | None = None


@dataclass(frozen=True, slots=True)
class Regenerate(Command):
    """Write another reply beside this one, or at the end of the chat."""

    reply_id: str | None = None
    overflow: Overflow | None = None


@dataclass(frozen=True, slots=True)
class Edit(Command):
    """Change a message on a new branch."""

    node_id: str
    text: str
    overflow: Overflow | None = None


@dataclass(frozen=True, slots=True)
class Continue(Command):
    """Go on with a reply that was cut or edited."""

    reply_id: str | None = None


@dataclass(frozen=True, slots=True)
class Fork(Command):
    """Go on from the first tokens of a reply on a branch of its own, with another token next."""

    reply_id: str
    tokens: int
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Switch(Command):
    """Go to the branch of a message."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Branch(Command):
    """End the active path at a message, so that what is said next begins a branch there."""

    node_id: str


@dataclass(frozen=True, slots=True)
class SetSystem(Command):
    """Change the system prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class SetThinking(Command):
    """Switch reasoning on or off where the template allows it; None leaves it to the template."""

    thinking: bool | None


@dataclass(frozen=True, slots=True)
class KeepCache(Command):
    """Keep a snapshot of the chat's KV cache on the disk, or no longer."""

    keep: bool


@dataclass(frozen=True, slots=True)
class Truncate(Command):
    """Delete a message and all that follows it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Restore(Command):
    """Put back what was deleted."""

    deleted: Deleted


@dataclass(frozen=True, slots=True)
class GetPrice(Command):
    """Estimate what sending a text would cost, or putting it in a message's place."""

    text: str
    instead_of: str | None = None
