"""Reasoning: apart from the answer in the tree, and no prefill for what the template drops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from template_zoo import ZOO
from tiny_chat import GREEDY, cold_reply, dictate, held_exactly, say, tiny_session

from kvchat.chat.events import TextAdded
from kvchat.chat.session import ChatSession
from kvchat.engine.types import TokenGenerated

REPLIES = {
    "qwen3": "<think>\nhm, 你好\n</think>\n\nFour.",
    "deepseek": "hm, 你好\n</think>\n\nFour.",
}
HEADER = {"qwen3": "user\n!\n!assistant\n", "deepseek": "!!\n"}
"""What a turn runs besides the user's words; each ! is a control token."""
KEPT = {"qwen3": "Four.", "deepseek": "Four."}

each = pytest.mark.parametrize("name", REPLIES)


def thought_and_said(session: ChatSession) -> tuple[str | None, str]:
    node = session.last_reply()
    assert node.reply is not None
    return node.reply.thinking, node.content


@each
def test_thinking_is_apart_in_the_tree_and_in_the_events(name: str) -> None:
    session = tiny_session(name)
    session.params = GREEDY.updated(max_tokens=100)
    dictate(session, REPLIES[name])
    events = list(session.send("2+2?"))
    parts = {
        thinking: "".join(
            e.text for e in events if isinstance(e, TextAdded) and e.thinking is thinking
        )
        for thinking in (True, False)
    }
    assert parts == {True: "hm, 你好", False: "Four."}
    assert thought_and_said(session) == ("hm, 你好", "Four.")
    ids = session.last_reply().reply.token_ids
    assert session.llm.tokenizer.decode(ids) == REPLIES[name]


@each
def test_after_settling_a_turn_runs_only_the_users_words(name: str) -> None:
    session = tiny_session(name)
    for text in ("2+2?", "and 3+1?", "5-1?"):
        say(session, text, REPLIES[name])
        turn = session.ledger[-1]
        if len(session.ledger) > 1:
            assert turn.new == len(text) + len(HEADER[name])
            assert turn.divergence is None
        progress = list(session.settle())
        # The answer is run once more without its thinking, and what follows it.
        assert 0 < progress[-1].new <= len("Four.") + len("!!\n\n\n\n!")
        assert progress[-1].done == progress[-1].new
        held_exactly(session)


@each
def test_the_answer_moves_with_the_ids_it_was_written_with(name: str) -> None:
    session = tiny_session(name)
    say(session, "2+2?", REPLIES[name])
    prompt = session.prompts.for_text(session.last_reply().id, "and?")
    text = session.llm.tokenizer.decode(prompt)
    assert "Four." in text
    assert "hm" not in text
    say(session, "and?", REPLIES[name])
    assert "你好" not in session.llm.tokenizer.decode(
        session.conversation.context_ids(session.last_reply().id)[: len(prompt)]
    )


@each
def test_a_cancel_at_any_token_then_going_on_equals_uninterrupted(name: str) -> None:
    whole = tiny_session(name).llm.tokenizer.encode(REPLIES[name])
    for stop_after in range(1, len(whole)):
        session = tiny_session(name)
        session.params = GREEDY.updated(max_tokens=100)
        dictate(session, whole)
        for event in session.send("2+2?"):
            if isinstance(event, TokenGenerated) and event.index == stop_after - 1:
                session.llm.engine.cancel()
        dictate(session, whole[stop_after:])
        list(session.continue_reply())
        assert thought_and_said(session) == ("hm, 你好", "Four.")
        assert list(session.last_reply().reply.token_ids) == whole
        assert session.ledger[-1].new == 1


@each
def test_a_reply_cut_in_its_thinking_stands_and_the_chat_goes_on(name: str) -> None:
    session = tiny_session(name)
    session.params = GREEDY.updated(max_tokens=4)
    dictate(session, REPLIES[name])
    list(session.send("2+2?"))
    thinking, answer = thought_and_said(session)
    assert answer == ""
    assert thinking is None or "hm, 你好".startswith(thinking)
    say(session, "and?", REPLIES[name])
    assert thought_and_said(session) == ("hm, 你好", "Four.")
    held_exactly(session)


@each
def test_an_edited_answer_keeps_its_thinking(name: str) -> None:
    session = tiny_session(name)
    say(session, "2+2?", REPLIES[name])
    list(session.edit(session.last_reply().id, "Fo"))
    dictate(session, "rty.")
    list(session.continue_reply())
    assert session.last_reply().content == "Forty."
    held_exactly(session)
    say(session, "sure?", REPLIES[name])
    assert "Forty." in session.llm.tokenizer.decode(
        session.conversation.context_ids(session.last_reply().id)
    )


def test_the_switch_turns_thinking_off() -> None:
    session = tiny_session("qwen3", session={"thinking": False})
    say(session, "2+2?", "Four.")
    context = session.conversation.context_ids(session.last_reply().id)
    assert "assistant\n<think>\n\n</think>\n\nFour." in session.llm.tokenizer.decode(context)
    assert thought_and_said(session) == (None, "Four.")
    session.set_thinking(True)
    say(session, "and?", REPLIES["qwen3"])
    assert thought_and_said(session) == ("hm, 你好", "Four.")
    held_exactly(session)


@each
def test_a_settled_turn_says_what_a_cold_run_says(name: str) -> None:
    session = tiny_session(name)
    say(session, "2+2?", REPLIES[name])
    list(session.settle())
    list(session.send("and?"))
    turn = session.ledger[-1]
    node = session.last_reply()
    prompt = session.conversation.context_ids(node.id)[: turn.reused + turn.new]
    assert list(node.reply.token_ids) == cold_reply(session.llm, prompt, GREEDY)


def test_thinking_that_the_user_types_is_text() -> None:
    session = tiny_session("qwen3")
    say(session, "<think>\nhm\n</think>\n\nWhat does that mean?", "Nothing.")
    assert thought_and_said(session) == (None, "Nothing.")
    tokenizer = session.llm.tokenizer
    think = tokenizer.encode("<think>")[0]
    assert think not in session.conversation.context_ids(session.last_reply().id)


def test_a_template_that_takes_the_chat_but_not_the_probe_is_answered() -> None:
    refuses = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    )
    opens = ZOO["chatml"].source.replace("assistant\\n'", "assistant\\n<think>'")
    assert opens != ZOO["chatml"].source
    zoo = replace(ZOO["chatml"], source=refuses + opens)
    session = tiny_session(system="Be brief.", zoo=zoo)
    node = say(session, "hello", "Well.</think>Yes.")
    assert node.reply is not None
    assert (node.reply.thinking, node.content) == ("Well.", "Yes.")
    plain = replace(ZOO["chatml"], source=refuses + ZOO["chatml"].source)
    node = say(tiny_session(system="Be brief.", zoo=plain), "hello", "Yes.")
    assert node.reply is not None
    assert (node.reply.thinking, node.content) == (None, "Yes.")
