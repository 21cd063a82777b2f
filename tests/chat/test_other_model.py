"""A chat that one model began and another goes on with: ids of the first mean nothing there."""

from __future__ import annotations

import pytest
from chat.tiny_chat import (
    GREEDY,
    held_exactly,
    merging_tokenizer,
    say,
    tiny_llm,
    tiny_session,
)

from kvchat.chat.conversation import Conversation
from kvchat.chat.session import ChatSession
from kvchat.engine.errors import ContextOverflowError, KvchatError
from kvchat.engine.types import TokenGenerated

REPLY = "The brown fox down"


@pytest.fixture
def begun() -> Conversation:
    """A chat of a model that has more tokens than the other one, with a reply that was cut."""
    session = tiny_session(tokenizer=merging_tokenizer())
    for text in ("one", "two"):
        node = say(session, text, REPLY)
        assert node.content == REPLY
    smaller = tiny_llm().tokenizer.vocab_size
    assert max(session.last_reply().reply.token_ids) >= smaller
    return session.conversation


def other(conversation: Conversation) -> ChatSession:
    return ChatSession(tiny_llm(), conversation=conversation, params=GREEDY)


def prompt_of(session: ChatSession) -> str:
    return session.llm.tokenizer.decode(list(session.llm.engine.ids))


def test_another_model_reads_the_same_text(begun: Conversation) -> None:
    session = other(begun)
    list(session.settle())
    session.price("three")
    events = list(session.send("three"))
    assert any(isinstance(event, TokenGenerated) for event in events)
    assert prompt_of(session).count(REPLY) == 2
    held_exactly(session)
    assert [node.content for node in begun.active_path()][1:5:2] == [REPLY, REPLY]


def test_a_reply_of_another_model_is_gone_on_with_beside_it(begun: Conversation) -> None:
    session = other(begun)
    old = session.last_reply()
    ids = old.reply.token_ids[:]
    list(session.continue_reply())
    new = session.last_reply()
    assert new.id != old.id
    assert (old.content, old.reply.token_ids) == (REPLY, ids)
    assert new.content.startswith(REPLY)
    assert len(new.content) > len(REPLY)
    assert REPLY in prompt_of(session)
    list(session.continue_reply(new.id))
    assert session.last_reply().id == new.id  # that one is our own now


def test_where_it_does_not_fit_nothing_stays_behind(begun: Conversation) -> None:
    session = ChatSession(tiny_llm(ctx=40), conversation=begun, params=GREEDY)
    path = begun.active_path()
    with pytest.raises(ContextOverflowError):
        list(session.continue_reply())
    assert begun.active_path() == path == list(begun)


def test_nothing_is_forked_in_the_middle_of_another_models_reply(begun: Conversation) -> None:
    session = other(begun)
    with pytest.raises(KvchatError, match="Another model wrote this reply"):
        list(session.fork(session.last_reply().id, 1))
    list(session.regenerate())
    assert REPLY not in session.last_reply().content


def test_the_first_model_still_knows_its_own(begun: Conversation) -> None:
    list(other(begun).send("three"))
    old = begun.active_path()[3]
    first = ChatSession(tiny_llm(tokenizer=merging_tokenizer()), conversation=begun, params=GREEDY)
    list(first.continue_reply(old.id))
    ids = old.reply.token_ids
    assert first.last_reply().reply.token_ids[: len(ids)] == ids
    assert first.last_reply().content.startswith(REPLY)
