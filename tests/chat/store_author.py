"""Random histories of a conversation."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from chat.store_helpers import PARAMS, STATS, write
from hypothesis import strategies as st

from kvchat.chat.conversation import Conversation, Deleted
from kvchat.chat.nodes import Node
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import SamplingParams

picks = st.integers(0, 9)
texts = st.text(st.characters(), max_size=12)
ids = st.lists(st.integers(0, 2**31 - 30), max_size=4)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    max_tokens=st.none() | st.integers(1, 9),
    stop=st.lists(st.text(st.characters(), min_size=1, max_size=3), max_size=2).map(tuple),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("say"), texts, ids, params, st.integers(0, 20)),
        st.tuples(st.just("say"), texts, ids, params, st.integers(0, 20)),
        st.tuples(st.just("edit"), picks, texts),
        st.tuples(st.just("regenerate"), picks, ids),
        st.tuples(st.just("fork"), picks, st.integers(0, 4), ids),
        st.tuples(st.just("resume"), picks, ids),
        st.tuples(st.just("select"), picks),
        st.tuples(st.just("branch"), picks),
        st.tuples(st.just("drop"), picks),
        st.tuples(st.just("delete"), picks),
        st.tuples(st.just("undo")),
        st.tuples(st.just("system"), texts),
        st.tuples(st.just("title"), texts),
    ),
    max_size=12,
)


class Author:
    """Does to a conversation what its user could, model or no model."""

    def __init__(self) -> None:
        self.chat = Conversation()
        self.deleted: list[Deleted] = []

    def apply(self, operation: tuple[Any, ...]) -> None:
        name, *rest = operation
        with suppress(KvchatError):
            getattr(self, name)(*rest)

    def pick(self, which: int) -> Node:
        if not self.chat.nodes:
            raise KvchatError("there is nothing")
        return list(self.chat)[which % len(self.chat.nodes)]

    def reply(self, node: Node, ids: list[int], params: SamplingParams, width: int = 3) -> None:
        chat = self.chat
        write(chat, node, ids, params, width)
        reply = node.reply
        assert reply is not None
        reason = ("stop", "length", "cancelled", "interrupted")[len(ids) % 4]
        stop_id = 2 if reason == "stop" else None
        before = chat.context_ids(node.parent or "")
        context = [*before, 7, *reply.token_ids, *([2] if reason == "stop" else [])]
        chat.finish_reply(
            node.id,
            reason,
            stop_id=stop_id,
            stats=STATS if len(ids) % 2 else None,
            context_ids=None if reason == "length" else context,
        )

    def say(self, text: str, ids: list[int], params: SamplingParams, width: int) -> None:
        self.reply(self.chat.start_reply(self.chat.add_user(text).id), ids, params, width)

    def edit(self, which: int, text: str) -> None:
        node = self.pick(which)
        if node.role == "user":
            self.reply(self.chat.start_reply(self.chat.edit_user(node.id, text).id), [5], PARAMS)
        else:
            self.chat.edit_reply(node.id, text)

    def regenerate(self, which: int, ids: list[int]) -> None:
        self.reply(self.chat.regenerate(self.pick(which).id), ids, PARAMS)

    def fork(self, which: int, at: int, ids: list[int]) -> None:
        self.reply(self.chat.fork_reply(self.pick(which).id, at, ids[:1]), ids[1:], PARAMS)

    def resume(self, which: int, ids: list[int]) -> None:
        node = self.pick(which)
        if node.edited:
            self.reply(self.chat.resume_edited(node.id, ids), [9], PARAMS)
        else:
            self.reply(self.chat.continue_reply(node.id), ids, PARAMS)

    def select(self, which: int) -> None:
        self.chat.select(self.pick(which).id)

    def branch(self, which: int) -> None:
        self.chat.branch(self.pick(which).id)

    def drop(self, which: int) -> None:
        self.chat.drop(self.pick(which).id, which + 1)

    def delete(self, which: int) -> None:
        self.deleted.append(self.chat.delete(self.pick(which).id))

    def undo(self) -> None:
        if self.deleted:
            self.chat.restore(self.deleted.pop())

    def system(self, text: str) -> None:
        self.chat.set_system(text)

    def title(self, text: str) -> None:
        self.chat.title = text
