"""The tree of messages: nothing is lost, and each reply's context comes back exactly."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import Candidates, SamplingParams, TokenGenerated

PARAMS = SamplingParams()


def token(index: int, token_id: int, params: SamplingParams = PARAMS) -> TokenGenerated:
    """A token event whose candidates are itself."""
    alone = Candidates(array("i", [token_id]), array("f", [0.0]))
    return TokenGenerated(index, token_id, f"<{token_id}>", -0.5, 1.0, alone, alone, params)


def answer(
    chat: Conversation, node: Node, prompt: list[int], ids: list[int], stop_id: int | None = 0
) -> Node:
    """Write and finish a reply whose context is the prompt, the ids and the stop id."""
    assert node.reply is not None
    for index, token_id in enumerate(ids, len(node.reply.token_ids)):
        event = token(index, token_id)
        chat.add_token(node.id, event)
        chat.add_text(node.id, event.text)
    context = prompt + ids + ([] if stop_id is None else [stop_id])
    reason = "length" if stop_id is None else "stop"
    return chat.finish_reply(node.id, reason, stop_id=stop_id, context_ids=context)


def exchange(chat: Conversation, text: str, prompt: list[int], ids: list[int]) -> tuple[Node, Node]:
    """Add a user message and its reply."""
    user = chat.add_user(text)
    return user, answer(chat, chat.start_reply(user.id), prompt, ids)


def texts(chat: Conversation) -> list[str]:
    """Contents along the active path."""
    return [node.content for node in chat.active_path()]


def test_a_chat_grows_along_the_active_path() -> None:
    chat = Conversation()
    assert chat.active_path() == []
    exchange(chat, "one", [1], [2, 3])
    exchange(chat, "two", [1, 2, 3, 0, 4], [5])
    assert texts(chat) == ["one", "<2><3>", "two", "<5>"]
    assert [node.role for node in chat] == ["user", "assistant"] * 2


def test_regenerate_keeps_the_old_reply_and_switching_back_restores_the_path_below() -> None:
    chat = Conversation()
    _, first = exchange(chat, "one", [1], [2])
    exchange(chat, "two", [1, 2, 0, 4], [5])
    again = answer(chat, chat.regenerate(first.id), [1], [3])
    assert texts(chat) == ["one", "<3>"]
    assert chat.siblings(again.id) == (1, 2)
    assert chat.neighbour(again.id, -1) is first
    chat.select(first.id)
    assert texts(chat) == ["one", "<2>", "two", "<5>"]
    assert chat.neighbour(first.id, -5) is first
    assert chat.neighbour(first.id, 5) is again


def test_edit_of_the_first_user_message_branches_at_the_top() -> None:
    chat = Conversation()
    user, _ = exchange(chat, "one", [1], [2])
    edited = chat.edit_user(user.id, "uno")
    assert texts(chat) == ["uno"]
    assert (user.content, chat.siblings(edited.id)) == ("one", (1, 2))
    chat.select(user.id)
    assert texts(chat) == ["one", "<2>"]


def test_edit_of_a_reply_leaves_the_original_and_its_record_alone() -> None:
    chat = Conversation()
    _, original = exchange(chat, "one", [1], [2, 3])
    edited = chat.edit_reply(original.id, "mine")
    assert (original.content, edited.content, edited.edited) == ("<2><3>", "mine", True)
    assert chat.context_ids(edited.id) == chat.context_ids(original.id) == [1, 2, 3, 0]
    chat.continue_reply(original.id)
    answer(chat, original, [1, 2, 3], [4])
    assert chat.context_ids(edited.id) == [1, 2, 3, 0]
    assert chat.generated_spans(edited.id) == [range(1, 3)]
    for misuse in (chat.continue_reply, lambda id_: chat.fork_reply(id_, 0)):
        with pytest.raises(KvchatError, match="edited"):
            misuse(edited.id)


def test_context_ids_of_every_reply_come_back_from_deltas() -> None:
    chat = Conversation()
    _, first = exchange(chat, "one", [1, 7], [2, 3])
    # The thinking (2) is gone from the second prompt, so only [1, 7] is shared.
    _, second = exchange(chat, "two", [1, 7, 3, 0, 4], [5, 6])
    third = answer(chat, chat.regenerate(second.id), [1, 7, 3, 0, 4], [8], stop_id=None)
    assert chat.context_ids(first.id) == [1, 7, 2, 3, 0]
    assert chat.context_ids(second.id) == [1, 7, 3, 0, 4, 5, 6, 0]
    assert chat.context_ids(third.id) == [1, 7, 3, 0, 4, 8]
    assert second.reply and second.reply.context
    assert (second.reply.context.kept, list(second.reply.context.ids)) == (2, [3, 0, 4, 5, 6, 0])
    assert chat.generated_spans(second.id) == [range(5, 7)]
    assert chat.generated_spans(third.id) == [range(5, 6)]
    assert chat.context_ids(chat.active_path()[0].id) == []


def test_continue_goes_on_in_place_without_the_stop_id() -> None:
    chat = Conversation()
    user = chat.add_user("one")
    reply = chat.start_reply(user.id)
    chat.add_token(reply.id, token(0, 2))
    chat.add_text(reply.id, "ab")
    chat.finish_reply(reply.id, "stop", stop_id=0, context_ids=[1, 2, 0])
    assert reply.content == "ab"
    assert chat.continue_reply(reply.id) is reply
    assert (reply.content, reply.running, chat.context_ids(reply.id)) == ("ab", True, [1, 2])
    answer(chat, reply, [1, 2], [3])
    assert reply.content == "ab<3>"
    assert reply.reply and list(reply.reply.token_ids) == [2, 3]
    assert chat.context_ids(reply.id) == [1, 2, 3, 0]
    assert chat.generated_spans(reply.id) == [range(1, 3)]


def test_continue_forks_a_reply_the_conversation_went_on_from() -> None:
    chat = Conversation()
    _, reply = exchange(chat, "one", [1], [2])
    exchange(chat, "two", [1, 2, 0, 4], [5])
    fork = chat.continue_reply(reply.id)
    assert fork is not reply
    assert fork.reply and fork.running and list(fork.reply.token_ids) == [2]
    assert chat.context_ids(fork.id) == [1, 2]
    chat.add_token(fork.id, token(1, 9))
    assert reply.reply and list(reply.reply.token_ids) == [2]
    chat.select(reply.id)
    assert texts(chat) == ["one", "<2>", "two", "<5>"]


def test_fork_takes_the_tokens_and_settings_up_to_the_index() -> None:
    chat = Conversation()
    user = chat.add_user("one")
    reply = chat.start_reply(user.id)
    hot = PARAMS.updated(temperature=1.5)
    for index, params in enumerate([PARAMS, PARAMS, hot, hot, PARAMS]):
        chat.add_token(reply.id, token(index, 10 + index, params))
    chat.finish_reply(reply.id, "cancelled", context_ids=[1, *range(10, 15)])
    assert reply.reply and reply.reply.params == [(0, PARAMS), (2, hot), (4, PARAMS)]
    fork = chat.fork_reply(reply.id, 3)
    assert fork.reply and fork.reply.params == [(0, PARAMS), (2, hot)]
    assert list(fork.reply.token_ids) == [10, 11, 12]
    assert chat.context_ids(fork.id) == [1, 10, 11, 12]
    assert len(fork.reply.before) == len(fork.reply.after) == len(fork.reply.ms) == 3
    with pytest.raises(KvchatError, match="5 tokens"):
        chat.fork_reply(reply.id, 6)


def test_thinking_is_kept_apart_from_the_answer() -> None:
    chat = Conversation()
    reply = chat.start_reply(chat.add_user("one").id)
    chat.add_text(reply.id, "hm", thinking=True)
    chat.add_text(reply.id, "yes")
    chat.add_text(reply.id, "...", thinking=True)
    assert reply.reply and (reply.reply.thinking, reply.content) == ("hm...", "yes")


def test_set_system_gives_back_what_undo_needs() -> None:
    chat = Conversation(system="old")
    assert chat.set_system("new") == "old"
    assert chat.system == "new"


@pytest.mark.parametrize(
    "misuse",
    [
        lambda chat, user, reply: chat.start_reply(reply),
        lambda chat, user, reply: chat.regenerate(user),
        lambda chat, user, reply: chat.edit_user(reply, "x"),
        lambda chat, user, reply: chat.edit_reply(user, "x"),
        lambda chat, user, reply: chat.continue_reply(user),
        lambda chat, user, reply: chat.add_text(reply, "more"),
        lambda chat, user, reply: chat.add_token(reply, token(9, 9)),
        lambda chat, user, reply: chat.finish_reply(reply, "stop"),
        lambda chat, user, reply: chat.delete("nowhere"),
        lambda chat, user, reply: chat.select("nowhere"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(misuse) -> None:
    chat = Conversation()
    user, reply = exchange(chat, "one", [1], [2])
    with pytest.raises(KvchatError):
        misuse(chat, user.id, reply.id)
    assert texts(chat) == ["one", "<2>"]
    assert len(list(chat)) == 2


def test_a_running_reply_cannot_be_overtaken() -> None:
    chat = Conversation()
    user = chat.add_user("one")
    with pytest.raises(KvchatError, match="no reply yet"):
        chat.add_user("two")
    reply = chat.start_reply(user.id)
    for overtake in (
        lambda: chat.add_user("two"),
        lambda: chat.regenerate(reply.id),
        lambda: chat.edit_reply(reply.id, "x"),
        lambda: chat.continue_reply(reply.id),
        lambda: chat.delete(user.id),
    ):
        with pytest.raises(KvchatError, match="being written"):
            overtake()


def test_delete_and_restore_are_inverse() -> None:
    chat = Conversation()
    _, first = exchange(chat, "one", [1], [2])
    exchange(chat, "two", [1, 2, 0, 4], [5])
    again = answer(chat, chat.regenerate(first.id), [1], [3])
    chat.select(first.id)
    deleted = chat.delete(first.id)
    assert texts(chat) == ["one", "<3>"]
    assert chat.siblings(again.id) == (0, 1)
    assert chat.restore(deleted) is first
    assert texts(chat) == ["one", "<2>", "two", "<5>"]
    assert chat.siblings(again.id) == (1, 2)
    with pytest.raises(KvchatError, match="already"):
        chat.restore(deleted)


def test_restore_below_a_deleted_message_is_refused() -> None:
    chat = Conversation()
    user, reply = exchange(chat, "one", [1], [2])
    inner = chat.delete(reply.id)
    chat.delete(user.id)
    with pytest.raises(KvchatError, match="deleted"):
        chat.restore(inner)
    assert list(chat) == []


def snapshot(chat: Conversation) -> object:
    """All of the tree's structure, by value."""
    return (
        {key: list(ids) for key, ids in chat.children.items()},
        dict(chat.active),
        {node.id: node.content for node in chat},
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1000)), max_size=40))
def test_any_sequence_of_operations_keeps_the_tree_sound(steps: list[tuple[int, int]]) -> None:
    chat = Conversation()
    contexts: dict[str, list[int]] = {}
    fresh = 100
    for operation, choice in steps:
        nodes = list(chat)
        node = nodes[choice % len(nodes)] if nodes else None
        users = [n for n in nodes if n.role == "user"]
        replies = [n for n in nodes if n.role == "assistant"]
        started: Node | None = None
        if operation == 0:
            path = chat.active_path()
            if not path or path[-1].role == "assistant":
                chat.add_user(f"user {choice}")
        elif operation == 1 and users:
            started = chat.start_reply(users[choice % len(users)].id)
        elif operation == 2 and users:
            chat.edit_user(users[choice % len(users)].id, f"edited {choice}")
        elif operation == 3 and replies:
            chosen = replies[choice % len(replies)]
            edited = chat.edit_reply(chosen.id, f"mine {choice}")
            contexts[edited.id] = contexts[chosen.id]
        elif operation == 4 and node:
            chat.select(chat.neighbour(node.id, choice % 5 - 2).id)
        elif operation == 5 and node:
            before = snapshot(chat)
            deleted = chat.delete(node.id)
            if choice % 2:
                chat.restore(deleted)
                assert snapshot(chat) == before
        elif operation == 6 and (written := [n for n in replies if not n.edited]):
            started = chat.continue_reply(written[choice % len(written)].id)
        if started is not None and started.reply:
            # Anything may have come before in the context: keep a part of it, whatever it is.
            prompt = chat.context_ids(started.id)
            kept = choice % (len(prompt) + 1)
            prompt = [*prompt[:kept], fresh, *started.reply.token_ids]
            answer(chat, started, prompt, [fresh + 1], stop_id=(0, None)[choice % 2])
            contexts[started.id] = chat.context_ids(started.id)
            assert contexts[started.id][: len(prompt)] == prompt
            fresh += 2
        for n in chat:
            parent = chat.nodes[n.parent] if n.parent else None
            assert n.role == (
                "user" if parent is None or parent.role == "assistant" else "assistant"
            )
            assert (n.reply is not None) == (n.role == "assistant")
            if n.reply:
                assert chat.context_ids(n.id) == contexts[n.id]
                *_, written_last = chat.generated_spans(n.id)
                ids = contexts[n.id][written_last.start : written_last.stop]
                assert ids == list(n.reply.token_ids)[-len(ids) :]
        assert set(chat.nodes) == {n.id for n in chat}
        assert set(chat.active) == set(chat.children)
        assert all(chat.active[key] in ids for key, ids in chat.children.items())
