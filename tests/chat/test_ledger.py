"""What a turn cost, what was saved, and why no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat import GREEDY, say, tiny_session

from kvchat.chat.ledger import PrefillSpeed, Turn
from kvchat.chat.session import ChatSession


def turn(**changes: object) -> Turn:
    values = {
        "reply_id": "r",
        "reused": 1200,
        "restored": 0,
        "new": 30,
        "decoded": 80,
        "finish_reason": "stop",
        "prefill_ms": 90.0,
        "ttft_ms": 100.0,
        "decode_tps": 91.6,
        "uncached_ttft_ms": 1500.0,
        "divergence": None,
    }
    return Turn(**{**values, **changes})  # type: ignore[arg-type]


def test_a_turn_in_one_line() -> None:
    assert turn().line() == (
        "reused 1,200 · new 30 · 0.10 s to first token · 92 tok/s · saved 1.4 s"
    )
    assert turn().saved_ms == 1400
    assert turn(uncached_ttft_ms=None).saved_ms is None
    assert turn(uncached_ttft_ms=20.0).saved_ms == 0
    assert "saved" not in turn(uncached_ttft_ms=120.0).line()
    assert turn(decoded=0, decode_tps=0.0).line() == "reused 1,200 · new 30"
    assert "tok/s · drafts 34 of 60 · " in turn(proposed=60, accepted=34).line()
    assert turn(dropped_turns=3).line().endswith("dropped 3 old turns")


@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(1, 4000)), min_size=2, max_size=20, unique=True
    ),
    st.floats(0.01, 10),
    st.floats(0.0, 0.01),
)
def test_prefill_time_is_predicted_from_what_was_measured(samples, a: float, b: float) -> None:
    speed = PrefillSpeed()

    def ms(start: int, tokens: int) -> float:
        return a * tokens + b * ((start + tokens) ** 2 - start**2) / 2

    for start, tokens in samples:
        speed.add(start, tokens, ms(start, tokens))
    start, tokens = max(samples, key=lambda sample: ms(*sample))
    assert speed.estimate(tokens, start) == pytest.approx(ms(start, tokens), rel=0.05)
    assert speed.estimate(100) >= 0


def test_a_cold_prefill_is_predicted_from_short_turns_at_two_lengths() -> None:
    speed = PrefillSpeed()
    for start, tokens in ((100, 50), (2000, 50), (900, 40)):
        speed.add(start, tokens, 2.0 * tokens + 0.001 * tokens * (start + tokens / 2))
    assert speed.estimate(3000) == pytest.approx(2.0 * 3000 + 0.001 * 3000**2 / 2)


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    speed = PrefillSpeed()
    assert speed.estimate(100) is None
    speed.add(0, 0, 5.0)
    speed.add(0, 5, 0.0)
    assert speed.estimate(100) is None
    speed.add(0, 10, 20.0)
    assert speed.estimate(100) == pytest.approx(200.0)


def test_reused_new_and_decoded_are_what_the_engine_did() -> None:
    session = tiny_session()
    assert session.price("hello").ms is None
    say(session, "hello", "Fine.")
    first = session.ledger[-1]
    assert (first.reused, first.decoded, first.finish_reason) == (0, 5, "stop")
    assert first.prefill_ms > 0
    assert first.ttft_ms >= first.prefill_ms
    assert first.uncached_ttft_ms is not None
    price = session.price("more")
    say(session, "more", "Fine.")
    second = session.ledger[-1]
    assert (price.reused, price.new) == (second.reused, second.new)
    assert price.ms is not None
    assert second.reused == first.new + 5
    # The estimate is of a prefill of everything, so it grows with the conversation.
    assert session.speed.estimate(second.reused + second.new) == second.uncached_ttft_ms


def test_a_cancel_in_prefill_counts_what_was_run() -> None:
    session = tiny_session()
    for event in session.send("x" * 100):
        if getattr(event, "done", 0) == 32:
            session.llm.engine.cancel()
    turn = session.ledger[-1]
    assert (turn.finish_reason, turn.decoded) == ("cancelled", 0)
    assert (turn.decode_tps, turn.ttft_ms) == (0, 0)
    assert "tok/s" not in turn.line()
    assert "first token" not in turn.line()
    assert turn.saved_ms is None


def test_where_and_why_reuse_stopped_is_told() -> None:
    session = tiny_session("chatml", "Be brief.")
    say(session, "hello", "Fine.")
    assert session.ledger[-1].divergence is None
    say(session, "more", "Fine.")
    assert session.ledger[-1].divergence is None
    session.set_system("Be long.")
    say(session, "and?", "Fine.")
    turn = session.ledger[-1]
    assert turn.divergence is not None
    assert turn.divergence.position == turn.reused == len("!system\nBe ")
    assert turn.divergence.expected.startswith("brief.<|im_end|>")
    assert turn.divergence.found.startswith("long.<|im_end|>")
    assert turn.line().endswith(" · reuse ended at token 11 (system prompt changed)")
    say(session, "and now?", "Fine.")
    assert session.ledger[-1].reuse_ended == ""


def test_what_was_read_anew_while_idle_is_told_by_the_next_turn() -> None:
    session = tiny_session("chatml", "Be brief.")
    say(session, "hello", "Fine.")
    session.set_system("Be long.")
    list(session.settle())
    say(session, "and?", "Fine.")
    assert session.ledger[-1].reuse_ended == (
        "at token 11 (system prompt changed; read anew while idle)"
    )


def test_reuse_that_ends_has_its_reason() -> None:
    session = tiny_session("qwen3")
    first = say(session, "hello", "<think>\nhm\n</think>\n\nFine.")
    assert session.ledger[-1].reuse_ended == ""
    second = say(session, "a story", "Once.")
    assert "(the template changed an earlier turn)" in session.ledger[-1].reuse_ended
    list(session.edit(second.parent, "joke, please"))
    assert "(message replaced)" in session.ledger[-1].reuse_ended
    list(session.regenerate())
    assert session.ledger[-1].reuse_ended == ""  # all that was read before is still of use
    list(session.edit(first.parent, "good morning"))
    session.set_thinking(False)
    session.select(second.id)
    session.llm.engine.stash.clear()
    say(session, "and then?", "The end.")
    assert "(thinking switched)" in session.ledger[-1].reuse_ended


def test_the_cache_of_another_chat_is_told() -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    other = ChatSession(session.llm, params=session.params)
    say(other, "hi", "Fine.")
    assert other.ledger[-1].reuse_ended == ""  # it has read nothing before
    session.llm.engine.stash.clear()
    back = ChatSession(session.llm, conversation=session.conversation, params=session.params)
    say(back, "more", "Fine.")
    assert "(the cache held something else)" in back.ledger[-1].reuse_ended


def test_an_edit_tells_the_first_text_that_differs() -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    say(session, "tell me a story", "Once.")
    user = session.conversation.node(session.last_reply().parent or "")
    list(session.edit(user.id, "tell me a joke"))
    divergence = session.ledger[-1].divergence
    assert divergence is not None
    assert divergence.expected.startswith("story<|im_end|>\n<|im_start|>")
    assert divergence.found.startswith("joke<|im_end|>\n<|im_start|>")


def test_what_came_back_from_the_stash_is_counted() -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    first = say(session, "tell me a story", "Once upon a time.")
    common = len(session.llm.engine.ids) - len("story!\n!assistant\nOnce upon a time.")
    user = session.conversation.node(first.parent or "")
    list(session.edit(user.id, "tell me a joke instead"))
    assert session.ledger[-1].reused == common
    session.select(first.id)
    session.params = GREEDY
    say(session, "and then?", "Fine.")
    turn = session.ledger[-1]
    assert turn.restored == len("story!\n!assistant\nOnce upon a time.")
    assert turn.reused == common + turn.restored
    assert turn.new == len("!\n!user\nand then?!\n!assistant\n")


def test_without_a_stash_a_branch_is_run_again() -> None:
    session = tiny_session(stash_bytes=0)
    say(session, "hello", "Fine.")
    first = say(session, "tell me a story", "Once upon a time.")
    list(session.edit(first.parent or "", "tell me a joke instead"))
    session.select(first.id)
    say(session, "and then?", "Fine.")
    turn = session.ledger[-1]
    assert turn.restored == 0
    assert turn.new > len("story!\n!assistant\nOnce upon a time.")
