"""When the context is full: refused, or the oldest turns left out; never in silence."""

from __future__ import annotations

import pytest
from template_zoo import ZOO
from tiny_chat import GREEDY, cold_reply, dictate, held_exactly, say, tiny_session

from kvchat.chat.session import ChatSession, Overflow
from kvchat.engine.errors import ContextOverflowError, KvchatError

LIMIT = 300


def full(name: str = "chatml", overflow: Overflow = "stop") -> ChatSession:
    """A chat that has dropped nothing and has no room for 40 characters more."""
    chat = tiny_session(name, "Be brief.", ctx=LIMIT, session={"overflow": "stop"})
    nth = 0
    while (price := chat.price("z" * 40)).new + price.reused < LIMIT:
        say(chat, f"message number {nth}", f"Reply {nth}.")
        nth += 1
    chat.overflow = overflow
    return chat


def state(chat: ChatSession) -> tuple[object, ...]:
    tree = chat.conversation
    return (
        list(tree.nodes),
        [node.id for node in tree.active_path()],
        dict(tree.dropped),
        list(chat.llm.engine.ids),
        len(chat.ledger),
    )


@pytest.mark.parametrize("overflow", ["ask", "stop"])
def test_a_full_context_refuses_a_turn_before_anything_changes(overflow: Overflow) -> None:
    chat = full(overflow=overflow)
    before = state(chat)
    with pytest.raises(ContextOverflowError, match="drop the oldest turns") as caught:
        list(chat.send("z" * 40))
    assert state(chat) == before
    assert caught.value.limit == LIMIT
    assert caught.value.needed > LIMIT
    assert caught.value.can_drop


def test_a_turn_refused_at_a_branch_does_not_go_back_to_the_old_path() -> None:
    chat = full()
    first_reply = chat.conversation.active_path()[1]
    chat.conversation.branch(first_reply.id)
    before = state(chat)
    with pytest.raises(ContextOverflowError):
        list(chat.send("z" * 2 * LIMIT))
    assert state(chat) == before


def test_asking_leaves_room_for_a_reply_and_stopping_does_not() -> None:
    chat = full()
    text = "z" * 30
    list(chat.send(text))
    chat.delete(chat.last_reply().parent)
    with pytest.raises(ContextOverflowError):
        list(chat.send(text, overflow="ask"))


def test_a_reply_fills_the_context_to_its_last_place_and_says_so() -> None:
    chat = full()
    chat.params = GREEDY.updated(max_tokens=1000)
    dictate(chat, "y" * 500)
    list(chat.send("z"))
    node = chat.last_reply()
    assert node.reply.finish_reason == "length"
    assert len(chat.conversation.context_ids(node.id)) == LIMIT
    assert len(chat.llm.engine.ids) == LIMIT - 1
    held_exactly(chat)
    before = state(chat)
    with pytest.raises(ContextOverflowError):
        list(chat.continue_reply())
    assert state(chat) == before
    assert node.reply.finish_reason == "length"
    assert list(chat.settle()) == []
    with pytest.raises(ContextOverflowError):
        list(chat.fork(node.id, len(node.reply.token_ids), 65))
    assert state(chat) == before
    list(chat.fork(node.id, 3))


@pytest.mark.parametrize("name", ZOO)
def test_dropping_leaves_out_whole_old_turns_and_keeps_the_system_prompt(name: str) -> None:
    chat = full(name)
    path = chat.conversation.active_path()
    list(chat.send("z" * 40, overflow="drop-oldest"))
    turn = chat.ledger[-1]
    assert turn.dropped_turns >= 1
    assert f"dropped {turn.dropped_turns} old turns" in turn.line()
    now = chat.conversation.active_path()
    assert list(chat.conversation.unseen(now)) == path[: 2 * turn.dropped_turns]
    assert [node.id for node in chat.conversation.active_path()][: len(path)] == [
        node.id for node in path
    ]
    prompt = chat.conversation.context_ids(chat.last_reply().id)[: turn.reused + turn.new]
    text = chat.llm.tokenizer.decode(prompt)
    assert "Be brief." in text
    assert "message number 0" not in text
    assert f"message number {len(path) // 2 - 1}" in text
    # A quarter of the context is free afterwards: every dropping costs a new prefill.
    assert len(prompt) <= LIMIT - LIMIT // 4
    assert turn.divergence is not None
    held_exactly(chat)
    said = list(chat.last_reply().reply.token_ids)
    assert said == cold_reply(chat.llm, prompt, chat.params)


def test_going_back_to_what_was_left_out_brings_it_back() -> None:
    chat = full()
    u0, r0, u1, r1, *_ = path = chat.conversation.active_path()
    other = say(chat, "z" * 9, "Other.")
    chat.delete(other.parent)
    list(chat.fork(r0.id, 3))
    sibling = chat.last_reply()
    chat.select(path[-1].id)
    list(chat.send("z" * 40, overflow="drop-oldest"))
    end = chat.last_reply()
    unseen = chat.conversation.unseen(chat.conversation.active_path())
    assert [u0, r0, u1, r1] == list(unseen[:4])

    def seen() -> str:
        return chat.llm.tokenizer.decode(chat.conversation.context_ids(chat.last_reply().id))

    chat.select(sibling.id)
    say(chat, "after the sibling", "Fine.")
    assert "message number 0" in seen()
    list(chat.continue_reply(r1.id))
    assert "message number 0" in seen()
    list(chat.regenerate(r1.id))
    assert "message number 0" in seen()
    # And the branch they were left out for goes on without them, as if nobody had been away.
    chat.select(end.id)
    say(chat, "more", "Fine.")
    assert chat.ledger[-1].dropped_turns == 0
    assert "message number 0" not in seen()
    held_exactly(chat)


def test_an_edit_that_gives_room_is_told_everything_again() -> None:
    chat = full()
    list(chat.send("z" * 40, overflow="drop-oldest"))
    message = chat.last_reply().parent
    list(chat.edit(message, "y"))
    assert chat.conversation.unseen(chat.conversation.active_path()) == []
    assert chat.ledger[-1].dropped_turns == 0
    held_exactly(chat)


def test_after_dropping_turns_are_cheap_again() -> None:
    chat = full()
    list(chat.send("z" * 40, overflow="drop-oldest"))
    list(chat.settle())
    say(chat, "more", "Fine.")
    assert chat.ledger[-1].dropped_turns == 0
    assert chat.ledger[-1].new == len("user\nmore!\n!assistant\n")


def test_a_message_too_long_for_any_chat_is_refused_with_its_size() -> None:
    chat = full(overflow="drop-oldest")
    before = state(chat)
    with pytest.raises(ContextOverflowError, match=r"alone takes 3\d\d tokens") as caught:
        list(chat.send("z" * LIMIT))
    assert not caught.value.can_drop
    assert state(chat) == before
    user = chat.conversation.active_path()[0]
    with pytest.raises(ContextOverflowError, match="alone"):
        list(chat.edit(user.id, "z" * LIMIT))
    assert state(chat) == before


@pytest.mark.parametrize("overflow", ["ask", "stop", "drop-oldest"])
def test_a_first_message_may_fill_the_context(overflow: str) -> None:
    chat = tiny_session("drops-system", ctx=100, session={"overflow": overflow})
    list(chat.send("z" * (100 - 3 - 1)))
    assert chat.ledger[-1].new == 99
    assert len(chat.last_reply().reply.token_ids) == 1
    assert chat.conversation.dropped == {}


def test_a_turn_that_fails_after_dropping_brings_the_old_turns_back() -> None:
    chat = full(overflow="drop-oldest")
    weight = chat.llm.model.norm.weight
    sound = weight.clone()
    weight[0] = float("nan")
    before = state(chat)[:3]
    with pytest.raises(KvchatError):
        list(chat.send("z" * 40))
    weight.copy_(sound)
    assert state(chat)[:3] == before


def test_a_long_chat_goes_on_for_ever() -> None:
    chat = tiny_session("chatml", "Be brief.", ctx=200, session={"overflow": "drop-oldest"})
    for nth in range(30):
        list(chat.send(f"message number {nth}"))
        turn = chat.ledger[-1]
        context = chat.conversation.context_ids(chat.last_reply().id)
        assert len(context) <= 201
        assert turn.reused + turn.new + turn.decoded <= 200
        if nth % 3:
            list(chat.settle())
    assert sum(turn.dropped_turns for turn in chat.ledger) > 10
    held_exactly(chat)
