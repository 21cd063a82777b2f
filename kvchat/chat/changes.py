"""What a save writes: the difference between a conversation and what is stored of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Context, Node, Reply, ReplyEnd
from kvchat.chat.plain_text import one_line
from kvchat.chat.provenance import Provenance
from kvchat.engine.token_ids import common_prefix

TITLE_LENGTH = 60
"""Characters of a title made from a message."""


def heading(conversation: Conversation) -> str:
    """Return what a chat is called: its title, else its first words."""
    first = next(iter(conversation), None)
    return conversation.title or (title_of(first.content) if first else "") or "Chat"


def title_of(text: str) -> str:
    """Return a title made from a message: its first words."""
    title = one_line(text[: 8 * TITLE_LENGTH])
    if len(title) <= TITLE_LENGTH:
        return title
    cut = title[:TITLE_LENGTH]
    words = cut.rpartition(" ")[0]
    return (words if len(words) > TITLE_LENGTH // 2 else cut[:-1]).rstrip(" ,.;:-") + "…"


@dataclass(frozen=True, slots=True)
class SavedNode:
    """A message as it was at one moment."""

    node: Node
    """A copy; its reply's lists begin at token `start`."""
    start: int = 0
    """So many tokens are stored already; 0 replaces all that is stored."""
    covered: int | None = None
    """While a reply is written: how many of its tokens are in its context."""
    run: Provenance | None = None


class Place(NamedTuple):
    """Where a message stands in the tree."""

    node_id: str
    position: int
    active: bool
    dropped: int


class Columns(NamedTuple):
    """What belongs to a conversation as a whole."""

    title: str
    opening: str
    """A title made from the first message."""
    system: str
    started: datetime
    keep_cache: bool | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to be written, in one transaction. Nothing in it changes any more."""

    chat_id: str
    columns: Columns
    messages: int
    retitled: bool
    """Whether `columns.title` is news, rather than what the store may have had changed since."""
    switched: bool
    """The same of `columns.keep_cache`."""
    nodes: Sequence[SavedNode] = ()
    removed: Sequence[str] = ()
    places: Sequence[Place] = ()
    turns: Sequence[Turn] = ()


class _Known(NamedTuple):
    """What is stored of a message."""

    parent: str | None
    content: str
    reply: Reply | None
    finish_reason: ReplyEnd | None
    tokens: int
    covered: int | None

    def holds(self, node: Node) -> bool:
        """Whether this is all there is of a message, at a glance: a chat may have thousands."""
        reply = node.reply
        return (
            self.content is node.content
            and self.reply is reply
            and (
                reply is None
                or (
                    reply.finish_reason is not None
                    and self.finish_reason == reply.finish_reason
                    and self.tokens == len(reply.token_ids)
                )
            )
        )


class Tracker:
    """Knows what is stored of a conversation, and finds what is not.

    Not thread-safe, but for `reset`: to be used where the conversation may be read.

    Args:
        conversation: whose changes are found.
        stored: whether it has just come from the store.
    """

    def __init__(self, conversation: Conversation, *, stored: bool = False) -> None:
        self.conversation = conversation
        self.run: Provenance | None = None
        """What replies are being written with."""
        self._prompt: tuple[str, Context, int] | None = None
        self._known: dict[str, _Known] = {}
        self._active: dict[str | None, str] = {}
        self._dropped: dict[str, int] = {}
        self._columns: Columns | None = None
        self._forget = True
        if stored:
            self.changes()

    def reset(self) -> None:
        """Take nothing for stored any more. Callable from any thread."""
        self._forget = True

    def prefilled(self, reply_id: str, ids: Sequence[int]) -> None:
        """Note what the model has in its context as it begins to write, or goes on."""
        node = self.conversation.node(reply_id)
        assert node.reply is not None and node.parent is not None
        ids = list(ids)
        kept = common_prefix(self.conversation.context_ids(node.parent), ids)
        context = Context(kept, array("i", ids[kept:]))
        self._prompt = reply_id, context, len(node.reply.token_ids)

    def changes(self, turns: Sequence[Turn] = ()) -> Changes | None:
        """Return what is not stored yet, and take it for stored from now on."""
        chat = self.conversation
        if self._forget:
            self._forget = False
            self._known, self._active, self._dropped, self._columns = {}, {}, {}, None
        if not chat.nodes and self._columns is None:
            return None
        removed = tuple(self._known.keys() - chat.nodes.keys())
        touched = {self._known[node_id].parent for node_id in removed}
        nodes = []
        for node in chat.nodes.values():
            known = self._known.get(node.id)
            if known is None:
                touched.add(node.parent)
            elif known.holds(node):
                continue
            if (saved := self._saved(node, known)) is not None:
                nodes.append(saved)
        for node_id in removed:
            del self._known[node_id]
        places = self._places(touched)
        columns = self._columns_now()
        old, self._columns = self._columns, columns
        if not (nodes or removed or places or turns or columns != old):
            return None
        retitled = columns.title != (old.title if old else "")
        switched = columns.keep_cache != (old.keep_cache if old else None)
        return Changes(
            chat.id,
            columns,
            len(chat.nodes),
            retitled,
            switched,
            nodes,
            removed,
            places,
            tuple(turns),
        )

    def _columns_now(self) -> Columns:
        chat = self.conversation
        opening = self._columns.opening if self._columns else ""
        if not opening and (first := chat.children.get(None)):
            opening = title_of(chat.nodes[first[0]].content)
        return Columns(chat.title, opening, chat.system, chat.started, chat.keep_cache)

    def _saved(self, node: Node, known: _Known | None) -> SavedNode | None:
        """Return a copy of what is not stored of a message; None if all of it is."""
        reply = node.reply
        if reply is None:
            if known is not None and known.content is node.content:
                return None
            self._known[node.id] = _Known(node.parent, node.content, None, None, 0, None)
            return SavedNode(replace(node))
        tokens = len(reply.token_ids)
        context, covered = reply.context, None
        if node.running:
            # What a reply that is taken up goes on from says nothing of tokens typed after it.
            context = None
            if self._prompt and self._prompt[0] == node.id:
                _, context, covered = self._prompt
        now = _Known(node.parent, node.content, reply, reply.finish_reason, tokens, covered)
        start = 0
        if known is not None and known.reply is reply:
            if (known.content is node.content or known.content == node.content) and (
                known[3:] == now[3:]
            ):
                return None
            if known.finish_reason is None:
                start = known.tokens
        self._known[node.id] = now
        frozen = replace(reply, context=context)
        if start or node.running:
            frozen.token_ids = reply.token_ids[start:]
            frozen.logprobs = reply.logprobs[start:]
            frozen.ms = reply.ms[start:]
            frozen.before = reply.before[start:]
            frozen.after = reply.after[start:]
            frozen.params = list(reply.params)
        return SavedNode(replace(node, reply=frozen), start, covered, self.run)

    def _places(self, touched: set[str | None]) -> list[Place]:
        """Return the places of messages whose siblings, activity or visibility changed."""
        chat = self.conversation
        turned = chat.active.items() ^ self._active.items()
        hidden = {node_id for node_id, _ in chat.dropped.items() ^ self._dropped.items()}
        parents = touched | {parent for parent, _ in turned}
        parents |= {chat.nodes[node_id].parent for node_id in hidden if node_id in chat.nodes}
        if turned:
            self._active = dict(chat.active)
        if hidden:
            self._dropped = dict(chat.dropped)
        return [
            Place(
                node_id,
                position,
                chat.active.get(parent) == node_id,
                chat.dropped.get(node_id, 0),
            )
            for parent in parents
            for position, node_id in enumerate(chat.children.get(parent, ()))
        ]
