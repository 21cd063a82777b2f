"""Turns of a chat: what is run, what is kept, what is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from template_zoo import ZOO
from tiny_chat import (
    CHUNK,
    GREEDY,
    DictatedSampler,
    cold_reply,
    dictate,
    held_exactly,
    merging_tokenizer,
    say,
    spelled,
    tiny_llm,
    tiny_session,
)

from kvchat.chat.events import ReplyStarted, TextAdded, TurnFinished
from kvchat.chat.session import ChatSession
from kvchat.engine.errors import (
    Cancelled,
    ContextOverflowError,
    GenerationError,
    KvchatError,
    OutOfMemoryError,
)
from kvchat.engine.types import (
    GenerationFinished,
    PrefillFinished,
    PrefillProgress,
    SamplingParams,
    TokenGenerated,
)

HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1, repetition_penalty=1, max_tokens=12)

NEW_AFTER_SETTLING = {
    "chatml": "user\n" "!\n!assistant\n",
    "llama3": "\n\n" "!!assistant!\n\n",
    "mistral": "!",
    "gemma": "user\n" "!\n!model\n",
    "qwen3": "user\n" "!\n!assistant\n",
    "deepseek": "!!\n",
    "phi3": "\n" "!\n!\n",
    "plain-inst": "[INST] " " [/INST]",
    "parts-only": "User: " "!\n!Assistant:",
    "drops-system": "!!",
}  # fmt: skip
"""What a turn runs besides the user's words; each ! is a control token."""


def settle(session: ChatSession) -> int:
    """Settle and return how many tokens that ran."""
    progress = list(session.settle())
    return progress[-1].done if progress else 0


def context_of(session: ChatSession) -> list[int]:
    return session.conversation.context_ids(session.last_reply().id)


# Work counted


@pytest.mark.parametrize("name", ZOO)
def test_after_settling_a_turn_runs_the_users_words_and_the_header_only(name: str) -> None:
    session = tiny_session(name)
    for text in ("hello", "and then", "a longer message, 你好", "x"):
        say(session, text, "Fine so far.")
        turn = session.ledger[-1]
        if len(session.ledger) > 1:
            assert turn.new == len(text.encode()) + len(NEW_AFTER_SETTLING[name])
        assert turn.reused + turn.new == len(context_of(session)) - len("Fine so far.") - 1
        settle(session)
        assert settle(session) == 0
        held_exactly(session)


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "phi3"])
def test_without_settling_the_end_of_the_reply_is_run_too(name: str) -> None:
    end = {"chatml": "!\n!", "gemma": "!\n!", "llama3": "!!user!", "phi3": "!\n!"}[name]
    session = tiny_session(name)
    for limit, reason, unfed in ((6, "stop", 0), (5, "length", 1)):
        session.params = GREEDY.updated(max_tokens=limit)
        dictate(session, "Fine.")
        list(session.send("and then"))
        assert session.ledger[-1].finish_reason == reason
        say(session, "again", "Fine.")
        expected = unfed + len(end) + len("again") + len(NEW_AFTER_SETTLING[name])
        assert session.ledger[-1].new == expected


def test_the_first_turn_runs_everything() -> None:
    session = tiny_session("chatml", "Be brief.")
    say(session, "hello", "Fine.")
    rendered = session.llm.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    )
    turn = session.ledger[-1]
    assert (turn.reused, turn.new) == (0, len(session.llm.tokenizer.encode(rendered)))
    assert turn.decoded == len("Fine.")


def test_ten_turns_equal_one_prefill_of_the_whole_conversation() -> None:
    session = tiny_session("chatml")
    for nth in range(10):
        list(session.send(f"message {nth}"))
        said = list(session.last_reply().reply.token_ids)
        prompt = context_of(session)[: session.ledger[-1].reused + session.ledger[-1].new]
        assert said == cold_reply(session.llm, prompt, GREEDY)
    held_exactly(session)


# Events and records


def test_events_of_a_turn_come_in_order() -> None:
    session = tiny_session()
    dictate(session, "Fine.")
    events = list(session.send("hello"))
    kinds = [type(event) for event in events]
    assert kinds[0] is ReplyStarted
    assert events[0].reply_id == session.last_reply().id
    assert kinds[-2:] == [GenerationFinished, TurnFinished]
    assert kinds.index(PrefillFinished) > kinds.index(PrefillProgress)
    assert kinds.count(PrefillFinished) == 1
    assert kinds.index(PrefillFinished) < kinds.index(TokenGenerated)
    assert "".join(e.text for e in events if isinstance(e, TextAdded)) == "Fine."
    assert session.last_reply().content == "Fine."


def records_agree(session: ChatSession) -> None:
    reply = session.last_reply().reply
    assert reply is not None
    n = len(reply.token_ids)
    assert n == len(reply.logprobs) == len(reply.ms) == len(reply.before) == len(reply.after)
    starts = [start for start, _ in reply.params]
    assert starts == sorted(set(starts))
    assert all(start < n for start in starts)
    context = context_of(session)
    prompt = context[: len(context) - n - (reply.stop_id is not None)]
    logprobs = session.llm.score([*prompt, *reply.token_ids]).log_softmax(-1)
    for nth, (token_id, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
        if math.isnan(logprob):
            continue
        now = logprobs[len(prompt) + nth - 1]
        assert logprob == pytest.approx(now[token_id].item(), abs=1e-3)
        assert len(reply.before[nth].ids) == 20
        assert now[reply.before[nth].ids[0]].item() == pytest.approx(now.max().item(), abs=1e-3)


def test_a_replys_records_stay_aligned_when_it_is_continued_and_forked() -> None:
    session = tiny_session()
    session.params = HOT.updated(max_tokens=5, seed=3)
    list(session.send("hello"))
    node = session.last_reply()
    assert node.reply is not None
    assert (node.reply.finish_reason, node.reply.seed) == ("length", 3)
    assert node.reply.stats.completion_tokens == 5
    records_agree(session)
    cooler = session.params = HOT.updated(temperature=0.5, seed=4)
    list(session.continue_reply())
    assert session.last_reply() is node
    assert len(node.reply.token_ids) > 5
    assert [start for start, _ in node.reply.params] == [0, 5]
    assert node.reply.params[1][1] == cooler
    records_agree(session)
    list(session.fork(node.id, 3, token_id=65))
    fork = session.last_reply().reply
    assert list(fork.token_ids[:4]) == [*node.reply.token_ids[:3], 65]
    assert math.isnan(fork.logprobs[3])
    records_agree(session)


def test_settings_over_time_are_kept_by_token_index() -> None:
    session = tiny_session()
    session.params = HOT.updated(seed=1)
    for event in session.send("hello"):
        if isinstance(event, TokenGenerated) and event.index == 4:
            session.params = GREEDY
    reply = session.last_reply().reply
    assert [(start, params.temperature) for start, params in reply.params] == [(0, 1.5), (5, 0)]


# Seeds


def changing_at(session: ChatSession, index: int, text: str) -> Iterator[None]:
    session.params = HOT.updated(seed=7, max_tokens=16)
    events = session.send(text) if text else session.regenerate()
    for event in events:
        if isinstance(event, TokenGenerated) and event.index == index:
            session.params = session.params.updated(temperature=0.7)
        yield


def test_a_seed_and_the_same_settings_over_time_give_the_reply_again() -> None:
    session = tiny_session()
    said = []
    for index, text in ((3, "hello"), (3, ""), (9, "")):
        list(changing_at(session, index, text))
        said.append(list(session.last_reply().reply.token_ids))
    assert said[0] == said[1] != said[2]
    other = tiny_session(stash_bytes=0, chunk_size=5)
    say(other, "something else", "Fine.")
    other.conversation.delete(other.conversation.active_path()[0].id)
    list(changing_at(other, 3, "hello"))
    assert list(other.last_reply().reply.token_ids) == said[0]


# Stops


def uninterrupted(text: str = "hello", **settings: object) -> list[int]:
    session = tiny_session(**settings)
    list(session.send(text))
    return list(session.last_reply().reply.token_ids)


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_a_cancel_at_any_token_then_going_on_equals_uninterrupted(stop_after: int) -> None:
    whole = uninterrupted()
    session = tiny_session()
    for event in session.send("hello"):
        if isinstance(event, TokenGenerated) and event.index == stop_after - 1:
            session.llm.engine.cancel()
    node = session.last_reply()
    assert node.reply.finish_reason == "cancelled"
    assert list(node.reply.token_ids) == whole[:stop_after]
    held_exactly(session)
    session.params = GREEDY.updated(max_tokens=len(whole) - stop_after)
    list(session.continue_reply())
    assert list(node.reply.token_ids) == whole
    assert session.ledger[-1].new == 1
    assert node.content == session.llm.tokenizer.decode(whole)


@pytest.mark.parametrize("chunks", range(5))
def test_a_cancel_in_prefill_then_going_on_equals_uninterrupted(chunks: int) -> None:
    text = "x" * (4 * CHUNK - 50)
    whole = uninterrupted(text)
    session = tiny_session()
    for nth, event in enumerate(e for e in session.send(text) if isinstance(e, PrefillProgress)):
        if nth == chunks:
            session.llm.engine.cancel()
            assert event.done == min(chunks * CHUNK, event.new)
    node = session.last_reply()
    assert node.reply.finish_reason == "cancelled"
    assert len(node.reply.token_ids) == 0
    held_exactly(session)
    list(session.continue_reply())
    assert list(node.reply.token_ids) == whole
    assert session.ledger[-1].reused == min(chunks * CHUNK, session.ledger[-1].reused)


@pytest.mark.parametrize("at", range(0, 24, 2))
def test_a_cancel_at_any_check_leaves_ids_and_cache_together(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted()
    session = tiny_session()
    calls = iter(range(at))

    def check() -> None:
        if next(calls, None) is None:
            raise Cancelled

    with monkeypatch.context() as patched:
        patched.setattr(session.llm.engine, "_check_cancelled", check)
        list(session.send("hello"))
    held_exactly(session)
    node = session.last_reply()
    assert node.reply.finish_reason == "cancelled"
    session.params = GREEDY.updated(max_tokens=len(whole) - len(node.reply.token_ids))
    list(session.continue_reply())
    assert list(node.reply.token_ids) == whole


def test_a_stop_string_ends_text_ids_and_cache_together() -> None:
    session = tiny_session()
    session.params = GREEDY.updated(stop=("ne",))
    say(session, "hello", "All is fine now.")
    node = session.last_reply()
    assert (node.content, node.reply.finish_reason) == ("All is fi", "stop")
    assert context_of(session)[-len("All is fi") :] == list(node.reply.token_ids)
    held_exactly(session)
    say(session, "more", "All.")
    assert session.ledger[-1].divergence is None


def test_a_stop_string_inside_a_token_leaves_text_that_no_token_has() -> None:
    tokenizer = merging_tokenizer()
    session = tiny_session(tokenizer=tokenizer)
    session.params = GREEDY.updated(stop=("own",))
    say(session, "hello", tokenizer.encode("The brown"))
    node = session.last_reply()
    assert node.content == "The br"
    assert tokenizer.decode(node.reply.token_ids) != node.content
    session.params = GREEDY.updated(max_tokens=3)
    list(session.continue_reply())
    assert node.content == tokenizer.decode(node.reply.token_ids)
    held_exactly(session)


def test_a_character_cut_by_a_stop_is_completed_by_going_on() -> None:
    session = tiny_session()
    session.params = GREEDY.updated(max_tokens=2)
    dictate(session, "你好")
    list(session.send("hello"))
    assert session.last_reply().content == "\N{REPLACEMENT CHARACTER}"
    session.params = GREEDY
    list(session.continue_reply())
    assert session.last_reply().content == "你好"
    say(session, "more", "Fine.")
    assert session.ledger[-1].divergence is None


# Changes of the past


def test_a_reply_goes_on_under_the_system_prompt_of_now() -> None:
    session = tiny_session("chatml", "Old.")
    session.params = GREEDY.updated(max_tokens=4)
    list(session.send("hello"))
    node = session.last_reply()
    said = list(node.reply.token_ids)
    assert session.set_system("New.") == "Old."
    list(session.continue_reply())
    prompt = session.prompts.for_reply(node.parent)
    assert context_of(session)[: len(prompt) + 4] == [*prompt, *said]
    assert "New." in session.llm.tokenizer.decode(prompt)
    expected = cold_reply(session.llm, [*prompt, *said], session.params)
    assert list(node.reply.token_ids) == [*said, *expected]


def test_an_edited_reply_keeps_what_it_shares_and_goes_on() -> None:
    session = tiny_session("chatml")
    say(session, "hello", "All is fine now.")
    original = session.last_reply()
    before = session.ledger[-1]
    list(session.edit(original.id, "All is bad"))
    dictate(session, ", so bad")
    list(session.continue_reply())
    edited = session.last_reply()
    assert edited.content == "All is bad, so bad"
    assert original.content == "All is fine now."
    turn = session.ledger[-1]
    assert turn.reused == before.reused + before.new + len("All is ")
    assert [math.isnan(x) for x in edited.reply.logprobs[:11]] == [False] * 7 + [True] * 3 + [False]
    held_exactly(session)


@pytest.mark.parametrize("text", ["\n\n fox", "", " dog", "\n", "ab"])
@pytest.mark.parametrize("name", ["chatml", "deepseek", "plain-inst", "qwen3", "mistral"])
def test_an_edited_reply_says_exactly_that_and_what_follows(name: str, text: str) -> None:
    session = tiny_session(name, tokenizer=merging_tokenizer() if name == "chatml" else None)
    say(session, "hello", "</think>Fine." if name == "deepseek" else "Fine.")
    list(session.edit(session.last_reply().id, text))
    dictate(session, "ok")
    list(session.continue_reply())
    node = session.last_reply()
    # As these templates write it: between spaces, or after line breaks that belong to no part.
    written = {"plain-inst": f" {text.strip()}", "qwen3": text.lstrip("\n")}.get(name, text)
    assert (node.reply.thinking or None, node.content) == (None, written + "ok")
    held_exactly(session)


def test_an_edited_reply_may_just_stand() -> None:
    session = tiny_session()
    say(session, "hello", "All is fine now.")
    list(session.edit(session.last_reply().id, "All is bad."))
    say(session, "why?", "Fine.")
    tokenizer = session.llm.tokenizer
    assert "assistant\nAll is bad.<|im_end|>" in tokenizer.decode(context_of(session))
    assert "fine now" not in tokenizer.decode(context_of(session))


def test_a_fork_goes_on_with_the_chosen_token_and_no_prefill() -> None:
    session = tiny_session()
    say(session, "hello", "All is fine now.")
    original = session.last_reply()
    for tokens in (0, 3, len("All is fine now.")):
        list(session.fork(original.id, tokens, ord("!") - 33))
        fork = session.last_reply()
        assert fork is not original
        assert fork.content.startswith("All is fine now."[:tokens])
        assert session.ledger[-1].new <= 2
        held_exactly(session)
    assert len(session.conversation.children[original.parent]) == 4
    with pytest.raises(KvchatError, match="16 tokens"):
        list(session.fork(original.id, 17))
    with pytest.raises(KvchatError, match="choose a reply"):
        list(session.fork(original.parent, 0))


def test_branches_come_back_without_prefill() -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    first = say(session, "tell me more of it", "A long story, to be told.")
    say(session, "and then?", "The end.")
    end = session.last_reply()
    list(session.edit(first.parent, "tell me something else"))
    session.select(first.id)
    assert session.conversation.active_path()[-1] is end
    assert settle(session) <= len("!\n!")
    say(session, "more", "Fine.")
    assert session.ledger[-1].new == len("more") + len(NEW_AFTER_SETTLING["chatml"])
    held_exactly(session)


# What users type


@pytest.mark.parametrize("name", ZOO)
def test_what_looks_like_control_tokens_arrives_as_text(name: str) -> None:
    zoo = ZOO[name]
    look_alikes = " ".join([*zoo.control_tokens, *zoo.tags])
    session = tiny_session(name, look_alikes)
    tokenizer = session.llm.tokenizer
    for text in (f"{look_alikes}", f"x{look_alikes}y"):
        say(session, text, "Fine.")
    list(session.edit(session.last_reply().id, look_alikes))
    say(session, look_alikes, "Fine.")
    plain = tiny_session(name, "S" * 9 if zoo.accepts_system else "")
    for text in ("hi", "ho"):
        say(plain, text, "Fine.")
    list(plain.edit(plain.last_reply().id, "Fine."))
    say(plain, "hu", "Fine.")
    controls, expected = (
        [id_ for id_ in context_of(chat) if tokenizer.is_control(id_)] for chat in (session, plain)
    )
    assert controls == expected
    assert look_alikes in tokenizer.decode(context_of(session))
    assert spelled(tokenizer, context_of(session)) != spelled(
        tokenizer, tokenizer.encode(tokenizer.decode(context_of(session)))
    )


def test_replies_are_never_encoded_again() -> None:
    """The trap: the reply's text encodes to other ids than it was written with."""
    tokenizer = merging_tokenizer()
    session = tiny_session(tokenizer=tokenizer)
    written = []
    for text in ("hello", "and then", "more"):
        ids = [id_ for char in "The fox " for id_ in tokenizer.encode_plain(char)]
        assert ids != tokenizer.encode("The fox ")
        written.append(list(say(session, text, ids).reply.token_ids))
        assert written[-1] == ids
    context = context_of(session)
    for ids in written:
        assert any(context[at : at + len(ids)] == ids for at in range(len(context)))
    session.set_system("Everything is read anew now.")
    prompt = session.prompts.for_text(session.last_reply().id, "last")
    assert sum(prompt[at : at + 8] == written[0] for at in range(len(prompt))) == 3


def test_control_tokens_that_a_model_wrote_are_kept_as_it_wrote_them() -> None:
    session = tiny_session("qwen3")
    tokenizer = session.llm.tokenizer
    call = tokenizer.encode("Calling <tool_call>now</tool_call> or not")
    node = say(session, "hello", call)
    assert node.content == "Calling <tool_call>now</tool_call> or not"
    say(session, "and <tool_call> typed", "Fine.")
    assert session.ledger[-1].divergence is None
    session.set_system("Everything is read anew now.")
    prompt = session.prompts.for_text(session.last_reply().id, "last")
    assert prompt.count(call[8]) == 1
    assert any(prompt[at : at + len(call)] == call for at in range(len(prompt)))


# Failures


def poisoned(session: ChatSession, act: Callable[[], object]) -> None:
    """Run this with a model that computes NaN."""
    weight = session.llm.model.norm.weight
    sound = weight.clone()
    weight[0] = float("nan")
    try:
        act()
    finally:
        weight.copy_(sound)


def test_a_failed_turn_changes_nothing() -> None:
    session = tiny_session()
    user = say(session, "hello", "One.").parent
    second = say(session, "more", "Two.")
    list(session.regenerate())
    list(session.edit(user, "other"))
    session.select(second.id)
    chat = session.conversation
    before = (dict(chat.nodes), {k: list(v) for k, v in chat.children.items()}, chat.active_path())
    for act in (
        lambda: list(session.send("again")),
        lambda: list(session.regenerate()),
        lambda: list(session.edit(user, "changed")),
    ):
        with pytest.raises(GenerationError):
            poisoned(session, act)
        after = (dict(chat.nodes), dict(chat.children), chat.active_path())
        assert after == before
        assert len(session.llm.engine.ids) == 0
    say(session, "again", "Three.")
    held_exactly(session)


def test_memory_that_runs_out_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    session = tiny_session()
    say(session, "hello", "Fine.")
    engine = session.llm.engine
    step = engine.step

    class Hungry:
        def __call__(self, token_id: int, cache: object) -> torch.Tensor:
            if len(engine.ids) % 5:
                return step(token_id, cache)
            return torch.empty(1 << 50)

    monkeypatch.setattr(engine, "step", Hungry())
    with pytest.raises(OutOfMemoryError, match="choose a smaller model"):
        list(session.send("more"))
    held_exactly(session)
    node = session.last_reply()
    assert (node.content == "Fine.") or node.reply.finish_reason == "interrupted"
    monkeypatch.setattr(engine, "step", step)
    say(session, "more", "Fine.")
    held_exactly(session)


def test_an_unforeseen_exception_leaves_the_chat_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    before = list(session.conversation.nodes)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="broken"):
        patched.setattr(session.llm.engine.sampler, "sample", _broken)
        list(session.send("more"))
    assert list(session.conversation.nodes) == before
    say(session, "more", "Fine.")
    held_exactly(session)


def _broken(*_args: object) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("kind", [ReplyStarted, PrefillProgress, PrefillFinished, TokenGenerated])
def test_a_turn_that_is_abandoned_is_over(kind: type) -> None:
    session = tiny_session()
    events = session.send("hello")
    next(event for event in events if isinstance(event, kind))
    events.close()
    node = session.last_reply()
    assert node.reply.finish_reason == "interrupted"
    held_exactly(session)
    session.params = GREEDY.updated(max_tokens=12 - len(node.reply.token_ids))
    list(session.continue_reply())
    assert list(node.reply.token_ids) == uninterrupted()


def test_there_must_be_something_to_go_on_from() -> None:
    session = tiny_session()
    assert list(session.settle()) == []
    for act in (session.regenerate, session.continue_reply):
        with pytest.raises(KvchatError, match="say something"):
            list(act())
    assert session.price("hello").reused == 0


def test_a_message_that_says_the_probes_words_is_settled_like_any_other() -> None:
    session = tiny_session()
    say(session, "What is a kvchat-probe?", "A kvchat-probe is a probe.")
    held = len(session.llm.engine.ids)
    settle(session)
    assert len(session.llm.engine.ids) == held + len("!\n!")


def test_settling_stops_when_it_is_told_to() -> None:
    llm = tiny_llm()
    session = tiny_session(llm=llm)
    say(session, "hello " * 20, "Fine.")
    session.set_system("Everything is read anew now.")
    for progress in session.settle():
        if progress.done == CHUNK:
            llm.engine.cancel()
    assert len(llm.engine.ids) <= progress.reused + CHUNK
    held_exactly(session)
    assert isinstance(llm.engine.sampler, DictatedSampler)
    with pytest.raises(ContextOverflowError):
        list(session.send("x" * 5000))
    held_exactly(session)


def test_a_failure_before_the_first_event_leaves_no_running_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = tiny_session()

    def fails(*_: object) -> None:
        raise GenerationError("no decoder")

    with monkeypatch.context() as patch:
        patch.setattr(session.prompts, "thinking_splitter", fails)
        with pytest.raises(GenerationError, match="no decoder"):
            list(session.send("hello"))
    assert not session.conversation.nodes
    assert say(session, "hello", "Yes.").content == "Yes."
