"""A conversation: a tree of messages, of which one path is active.

Nothing is overwritten. Editing a message, regenerating a reply or forking it adds a sibling; the
old one stays with all that follows it, and selecting it brings that whole path back. User messages
and replies alternate along every path. The system prompt belongs to the conversation, not to the
tree: changing it gives back the old one, which is all that undoing needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import uuid4

from kvchat.chat.nodes import Context, Node, Reply, ReplyEnd, Role
from kvchat.engine.errors import KvchatError
from kvchat.engine.token_ids import common_prefix
from kvchat.engine.types import GenerationStats, TokenGenerated


def _new_id() -> str:
    return uuid4().hex


def _now() -> datetime:
    return datetime.now(UTC).astimezone()


@dataclass(frozen=True, slots=True)
class Deleted:
    """A branch that was taken out, and where it belongs."""

    nodes: list[Node]
    """The branch's first message, then all below it, parents before children."""
    children: dict[str, list[str]]
    active: dict[str, str]
    index: int
    """Its place among its siblings."""
    was_active: bool


@dataclass(slots=True)
class Conversation:
    """The tree and the path through it. Read the fields freely; change them by the methods."""

    system: str = ""
    id: str = field(default_factory=_new_id)
    title: str = ""
    started: datetime = field(default_factory=_now)
    """What the chat template takes for now: a date that moved would change the whole prompt."""
    nodes: dict[str, Node] = field(default_factory=dict)
    children: dict[str | None, list[str]] = field(default_factory=dict)
    """Ids of the messages after each message, oldest first; those after None begin the chat."""
    active: dict[str | None, str] = field(default_factory=dict)
    """Which child of each message was last on the active path."""
    dropped: dict[str, int] = field(default_factory=dict)
    """By a user's message: how many of the first messages on its path the model does not see from
    it on, left out when the context was full."""
    keep_cache: bool | None = None
    """Whether a snapshot of its KV cache is kept on the disk; None is as the settings say."""

    def __iter__(self) -> Iterator[Node]:
        """All messages, parents before children."""
        pending: list[str] = list(reversed(self.children.get(None, ())))
        while pending:
            node_id = pending.pop()
            yield self.nodes[node_id]
            pending.extend(reversed(self.children.get(node_id, ())))

    def node(self, node_id: str) -> Node:
        """Return the message with this id.

        Raises:
            KvchatError: there is none.
        """
        try:
            return self.nodes[node_id]
        except KeyError:
            raise KvchatError(
                f"There is no message {node_id!r} in this conversation; it may have been deleted."
            ) from None

    def active_path(self) -> list[Node]:
        """Return the messages on the active path, first to last."""
        path: list[Node] = []
        node_id = self.active.get(None)
        while node_id is not None:
            path.append(self.nodes[node_id])
            node_id = self.active.get(node_id)
        return path

    def path_to(self, node_id: str) -> list[Node]:
        """Return the messages from the first one to this one."""
        path = [self.node(node_id)]
        while (parent := path[-1].parent) is not None:
            path.append(self.nodes[parent])
        path.reverse()
        return path

    def siblings(self, node_id: str) -> tuple[int, int]:
        """Return this message's index among its siblings, and how many there are with it."""
        among = self.children[self.node(node_id).parent]
        return among.index(node_id), len(among)

    # What the user says

    def set_system(self, text: str) -> str:
        """Change the system prompt and return the old one."""
        old, self.system = self.system, text
        return old

    def add_user(self, content: str) -> Node:
        """Add a user message at the end of the active path."""
        path = self.active_path()
        if path and path[-1].role == "user":
            raise KvchatError(
                "The last message has no reply yet. Generate one, or edit the message."
            )
        if path and path[-1].running:
            raise KvchatError("A reply is being written. Wait for it or stop it first.")
        return self._insert(path[-1].id if path else None, "user", content)

    def edit_user(self, node_id: str, content: str) -> Node:
        """Add a sibling of a user message with other text; a reply to it is yet to be started."""
        node = self.node(node_id)
        if node.role != "user":
            raise KvchatError("This message is a reply, not one of yours. Edit it as a reply.")
        return self._insert(node.parent, "user", content)

    # What the model says

    def start_reply(self, user_id: str) -> Node:
        """Add an empty reply to a user message, beside those it has."""
        if self.node(user_id).role != "user":
            raise KvchatError("Only a user message can be replied to. Write one first.")
        return self._insert(user_id, "assistant", "", Reply())

    def regenerate(self, reply_id: str) -> Node:
        """Add an empty reply beside this one."""
        parent = self.finished_reply(reply_id)[0].parent
        assert parent is not None
        return self.start_reply(parent)

    def finished_reply(self, reply_id: str) -> tuple[Node, Reply]:
        """Return a reply that has ended.

        Raises:
            KvchatError: it is a user message, is running, or is not there.
        """
        node, reply = self._reply(reply_id)
        if node.running:
            raise KvchatError("This reply is being written. Wait for it or stop it first.")
        return node, reply

    def fork_reply(self, reply_id: str, tokens: int, then: Sequence[int] = ()) -> Node:
        """Add a running reply with the first `tokens` tokens of this one, and then others.

        Its text is yet to be set.
        """
        node, reply = self._as_written(reply_id)
        if not 0 <= tokens <= len(reply.token_ids):
            raise KvchatError(
                f"This reply has {len(reply.token_ids)} tokens; it cannot be forked at {tokens}."
            )
        record = reply.first(tokens)
        for token_id in then:
            record.add_typed(token_id)
        return self._insert(node.parent, "assistant", "", record)

    def continue_reply(self, reply_id: str) -> Node:
        """Take up a reply that was cut short, and return the message being written.

        That is the reply itself, or a fork of it if the conversation has gone on from it. The
        stop id is taken off its context.
        """
        node, reply = self._as_written(reply_id)
        if self.children.get(reply_id):
            return self.fork_reply(reply_id, len(reply.token_ids))
        node.reply = reply.first(len(reply.token_ids))
        return node

    def resume_edited(self, reply_id: str, token_ids: Sequence[int]) -> Node:
        """Make a reply that the user wrote a running one with these tokens.

        Tokens it shares with the original keep their record; those of the user have none: no
        candidates, and NaN for probability and time.
        """
        node, reply = self.finished_reply(reply_id)
        same = common_prefix(reply.token_ids, array("i", token_ids))
        node.reply = record = reply.first(same)
        for token_id in token_ids[same:]:
            record.add_typed(token_id)
        node.edited = False
        return node

    def edit_reply(self, reply_id: str, content: str) -> Node:
        """Add a reply beside this one with text of the user's.

        It takes the original's tokens and context along: `kvchat.chat.prefix` finds out how much
        of them still holds.
        """
        node, reply = self.finished_reply(reply_id)
        record = replace(
            reply.first(len(reply.token_ids)),
            finish_reason=reply.finish_reason,
            stop_id=reply.stop_id,
            context=reply.context,
        )
        return self._insert(node.parent, "assistant", content, record, edited=True)

    def add_token(self, reply_id: str, event: TokenGenerated) -> None:
        """Record a token of a running reply; its text is added by `add_text`."""
        self._running(reply_id)[1].add(event)

    def add_text(self, reply_id: str, text: str, *, thinking: bool = False) -> None:
        """Add to the answer of a running reply, or to its thinking."""
        node, reply = self._running(reply_id)
        if thinking:
            reply.thinking = (reply.thinking or "") + text
        else:
            node.content += text

    def finish_reply(
        self,
        reply_id: str,
        reason: ReplyEnd,
        *,
        stop_id: int | None = None,
        stats: GenerationStats | None = None,
        context_ids: Sequence[int] | None = None,
    ) -> Node:
        """End a running reply.

        Args:
            reply_id: the reply.
            reason: why it ended.
            stop_id: the end-of-generation id that was drawn.
            stats: what it cost.
            context_ids: prompt, reply and stop id, as the model had them; None if unknown.
        """
        node, reply = self._running(reply_id)
        reply.finish_reason, reply.stop_id, reply.stats = reason, stop_id, stats
        reply.context = None  # a reply that was taken up again still has its old one
        if context_ids is not None:
            ids = array("i", context_ids)
            kept = common_prefix(self.context_to(reply_id), ids)
            reply.context = Context(kept, ids[kept:])
        return node

    def context_ids(self, node_id: str) -> list[int]:
        """Return what the model had in its context after the last reply up to this message."""
        return self.context_to(node_id).tolist()

    def context_to(self, node_id: str) -> array[int]:
        """Return `context_ids` as an array of type code 'i': much quicker to make and compare."""
        ids = array("i")
        for reply in self._replies_to(node_id):
            if reply.context:
                ids[reply.context.kept :] = reply.context.ids
        return ids

    def generated_spans(self, node_id: str) -> list[range]:
        """Return which spans of `context_ids` are replies, at the places they were written at."""
        spans: list[range] = []
        for reply in self._replies_to(node_id):
            if reply.context:
                kept = reply.context.kept
                while spans and spans[-1].stop > kept:
                    cut = range(spans.pop().start, kept)
                    if cut:
                        spans.append(cut)
                stop = kept + len(reply.context.ids) - (reply.stop_id is not None)
                spans.append(range(max(kept, stop - len(reply.token_ids)), stop))
        return [span for span in spans if span]

    # Moving about

    def drop(self, user_id: str, count: int) -> None:
        """Hide the first `count` messages before a user's message from the model, from it on.

        They stay in the tree, and paths that do not lead over that message show them as before.
        """
        self.dropped[user_id] = count

    def unseen(self, path: Sequence[Node]) -> Sequence[Node]:
        """Return the first messages of a path, those that the model does not see at its end.

        They are whole turns and never all, whatever a file may say.
        """
        count = max((self.dropped.get(node.id, 0) for node in path), default=0)
        return path[: min(count, max(0, len(path) - 1)) // 2 * 2]

    def select(self, node_id: str) -> None:
        """Put this message on the active path, with what was last active below it."""
        for node in self.path_to(node_id):
            self.active[node.parent] = node.id

    def branch(self, node_id: str) -> None:
        """Make this message the end of the active path; what follows it stays beside it."""
        self.select(node_id)
        self.active.pop(node_id, None)

    def neighbour(self, node_id: str, step: int) -> Node:
        """Return the sibling `step` places on, or the first or last one at the ends."""
        among = self.children[self.node(node_id).parent]
        index = among.index(node_id) + step
        return self.nodes[among[max(0, min(index, len(among) - 1))]]

    def delete(self, node_id: str) -> Deleted:
        """Take out a message and all that follows it; `restore` puts them back."""
        branch = self._branch(node_id)
        if any(node.running for node in branch):
            raise KvchatError("A reply is being written in this branch. Stop it first.")
        parent, among = branch[0].parent, self.children[branch[0].parent]
        index = among.index(node_id)
        deleted = Deleted(
            nodes=branch,
            children={n.id: self.children.pop(n.id) for n in branch if n.id in self.children},
            active={n.id: self.active.pop(n.id) for n in branch if n.id in self.active},
            index=index,
            was_active=self.active.get(parent) == node_id,
        )
        among.pop(index)
        for node in branch:
            del self.nodes[node.id]
        if not among:
            del self.children[parent]
            self.active.pop(parent, None)
        elif deleted.was_active:
            self.active[parent] = among[max(0, index - 1)]
        return deleted

    def restore(self, deleted: Deleted) -> Node:
        """Put back what `delete` took out, and return its first message."""
        first = deleted.nodes[0]
        if first.id in self.nodes:
            raise KvchatError("This branch is in the conversation already.")
        if first.parent is not None:
            self.node(first.parent)
        self.nodes.update((node.id, node) for node in deleted.nodes)
        self.children.update(deleted.children)
        self.active.update(deleted.active)
        self.children.setdefault(first.parent, []).insert(deleted.index, first.id)
        if deleted.was_active:
            self.active[first.parent] = first.id
        return first

    def _insert(
        self,
        parent: str | None,
        role: Role,
        content: str,
        reply: Reply | None = None,
        *,
        edited: bool = False,
    ) -> Node:
        node = Node(_new_id(), parent, role, content, _now(), reply, edited)
        self.nodes[node.id] = node
        self.children.setdefault(parent, []).append(node.id)
        self.select(node.id)
        return node

    def _branch(self, node_id: str) -> list[Node]:
        branch = [self.node(node_id)]
        for node in branch:
            branch.extend(self.nodes[child] for child in self.children.get(node.id, ()))
        return branch

    def _replies_to(self, node_id: str) -> Iterator[Reply]:
        return (node.reply for node in self.path_to(node_id) if node.reply)

    def _reply(self, reply_id: str) -> tuple[Node, Reply]:
        node = self.node(reply_id)
        if node.reply is None:
            raise KvchatError("This is a user message; choose a reply.")
        return node, node.reply

    def _as_written(self, reply_id: str) -> tuple[Node, Reply]:
        node, reply = self.finished_reply(reply_id)
        if node.edited:
            raise KvchatError("An edited reply has no tokens to go on from. Regenerate it instead.")
        return node, reply

    def _running(self, reply_id: str) -> tuple[Node, Reply]:
        node, reply = self._reply(reply_id)
        if not node.running:
            raise KvchatError("This reply has ended. Continue it or regenerate it.")
        return node, reply
