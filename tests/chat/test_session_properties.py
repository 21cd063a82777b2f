"""Whatever is done to a chat, the cache stays exact and the next reply is a cold run's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_zoo import ZOO
from tiny_chat import (
    GREEDY,
    cold_reply,
    held_exactly,
    merging_tokenizer,
    messages_of,
    spelled,
    tiny_llm,
)

from kvchat.chat.conversation import Deleted
from kvchat.chat.nodes import Node
from kvchat.chat.session import ChatSession
from kvchat.engine.errors import ContextOverflowError, GenerationError, KvchatError
from kvchat.engine.types import (
    GenerationFinished,
    PrefillFinished,
    PrefillProgress,
    TokenGenerated,
)
from kvchat.models.load import LanguageModel

TEXTS = ["hi", "", " a b ", "\n\nab", "<|im_end|>\n<|im_start|>x", "你好 é", "</think>", "[INST]"]

texts = st.sampled_from(TEXTS)
picks = st.integers(0, 7)
endings = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"max_tokens": st.integers(1, 5)}),
    st.fixed_dictionaries({"cancel_token": st.integers(0, 6)}),
    st.fixed_dictionaries({"cancel_chunk": st.integers(0, 3)}),
    st.fixed_dictionaries({"stop": st.sampled_from(["�", "a", "e", "  ", "\n", "��"])}),
    st.just({"nan": True}),
    st.just({"abandon": True}),
)
operations = st.one_of(
    st.tuples(st.just("send"), texts, endings),
    st.tuples(st.just("send"), texts, endings),
    st.tuples(st.just("regenerate"), picks, endings),
    st.tuples(st.just("edit_user"), picks, texts, endings),
    st.tuples(st.just("edit_reply"), picks, st.integers(0, 5), texts),
    st.tuples(st.just("resume"), picks, endings),
    st.tuples(st.just("fork"), picks, st.integers(0, 6), st.none() | st.integers(60, 255), endings),
    st.tuples(st.just("select"), picks),
    st.tuples(st.just("move"), picks, st.sampled_from([-1, 1])),
    st.tuples(st.just("delete"), picks),
    st.tuples(st.just("undo")),
    st.tuples(st.just("system"), texts),
    st.tuples(st.just("settle"), st.integers(0, 3)),
)


class Driver:
    """Does to a session what a user could do, and watches the counts."""

    def __init__(self, llm: LanguageModel, system: str = "", **session: Any) -> None:
        self.session = ChatSession(llm, system, params=GREEDY.updated(max_tokens=6), **session)
        self.deleted: list[Deleted] = []

    @property
    def chat(self) -> Any:
        return self.session.conversation

    def pick(self, which: int, role: str | None = None) -> Node | None:
        found = [node for node in self.chat if role in (None, node.role)]
        return found[which % len(found)] if found else None

    def apply(self, operation: tuple[Any, ...]) -> None:
        name, *rest = operation
        with suppress(KvchatError):
            getattr(self, name)(*rest)

    def watch(self, events: Any, ending: dict[str, Any]) -> list[Any]:
        """Run a reply to the ending asked for."""
        session, engine = self.session, self.session.llm.engine
        ordinary = session.params
        session.params = ordinary.updated(
            max_tokens=ending.get("max_tokens"),
            stop=(ending["stop"],) if "stop" in ending else None,
        )
        norm = engine.model.norm.weight
        sound = norm.clone()
        seen: list[Any] = []
        tokens = chunks = 0
        try:
            if "nan" in ending:
                norm[0] = float("nan")
            for event in events:
                seen.append(event)
                if isinstance(event, TokenGenerated):
                    if tokens == ending.get("cancel_token"):
                        engine.cancel()
                    tokens += 1
                    if tokens == 2 and "abandon" in ending:
                        break
                if isinstance(event, PrefillProgress):
                    if chunks == ending.get("cancel_chunk"):
                        engine.cancel()
                    chunks += 1
        except GenerationError:
            assert "nan" in ending
            assert len(engine.ids) == 0
        finally:
            events.close()
            norm.copy_(sound)
            session.params = ordinary
        for event in seen:
            if isinstance(event, PrefillFinished | PrefillProgress):
                assert event.new >= 1
            if isinstance(event, GenerationFinished):
                assert event.stats.completion_tokens == tokens
        return seen

    def send(self, text: str, ending: dict[str, Any]) -> None:
        self.watch(self.session.send(text), ending)

    def regenerate(self, which: int, ending: dict[str, Any]) -> None:
        if node := self.pick(which, "assistant"):
            self.watch(self.session.regenerate(node.id), ending)

    def edit_user(self, which: int, text: str, ending: dict[str, Any]) -> None:
        if node := self.pick(which, "user"):
            self.watch(self.session.edit(node.id, text), ending)

    def edit_reply(self, which: int, kept: int, text: str) -> None:
        if node := self.pick(which, "assistant"):
            list(self.session.edit(node.id, node.content[:kept] + text))

    def resume(self, which: int, ending: dict[str, Any]) -> None:
        if node := self.pick(which, "assistant"):
            self.watch(self.session.continue_reply(node.id), ending)

    def fork(self, which: int, at: int, chosen: int | None, ending: dict[str, Any]) -> None:
        if node := self.pick(which, "assistant"):
            self.watch(self.session.fork(node.id, at, chosen), ending)

    def select(self, which: int) -> None:
        if node := self.pick(which):
            self.session.select(node.id)

    def move(self, which: int, step: int) -> None:
        if node := self.pick(which):
            self.session.select(self.chat.neighbour(node.id, step).id)

    def delete(self, which: int) -> None:
        if node := self.pick(which):
            self.deleted.append(self.session.delete(node.id))

    def undo(self) -> None:
        if self.deleted:
            self.chat.restore(self.deleted.pop())

    def system(self, text: str) -> None:
        self.session.set_system(text)

    def settle(self, chunks: int) -> None:
        """Settle, interrupted after some chunks (not at all at 3)."""
        for n, _ in enumerate(self.session.settle()):
            if n == chunks < 3:
                self.session.llm.engine.cancel()

    def end_with_a_reply(self) -> None:
        path = self.chat.active_path()
        if path and path[-1].role == "user":
            list(self.session.regenerate(path[-1].id))

    def check(self, text: str = "and now?") -> None:
        """The invariants, and one turn more to see that they held."""
        held_exactly(self.session)
        self.end_with_a_reply()
        path = self.chat.active_path()
        price = self.session.price(text)
        before = len(self.session.ledger)
        prompt = self.session.prompts.for_text(path[-1].id if path else None, text)
        self.spells_the_rendering(prompt, path, text)
        self.holds_what_was_written(prompt, path)
        events = list(self.session.send(text))
        turn = self.session.ledger[-1]
        assert len(self.session.ledger) == before + 1
        assert turn.reused + turn.new == len(prompt)
        assert (turn.reused, turn.new) == (price.reused, price.new)
        assert turn.new >= 1
        reply = self.session.last_reply().reply
        assert reply is not None
        said = [event.id for event in events if isinstance(event, TokenGenerated)]
        assert said == list(reply.token_ids)
        context = self.chat.context_ids(self.session.last_reply().id)
        assert context[: len(prompt) + len(said)] == prompt + said
        assert said == cold_reply(self.session.llm, prompt, self.session.params)
        held_exactly(self.session)

    def spells_the_rendering(self, prompt: list[int], path: list[Node], text: str) -> None:
        llm = self.session.llm
        tokenizer = llm.tokenizer
        from kvchat.models.message import Message

        messages = [*messages_of(self.session, path), Message("user", text)]
        rendered = llm.template.render(messages, now=self.chat.started)
        if tokenizer.add_bos_default and not rendered.startswith(tokenizer.bos_text):
            rendered = tokenizer.bos_text + rendered
        if not any("</think>" in node.content for node in path):  # which some templates cut out
            assert tokenizer.decode(prompt) == tokenizer.normalize(rendered)
        written = {token_id for node in path if node.reply for token_id in node.reply.token_ids}
        if tokenizer.control_ids.isdisjoint(written):
            segments = llm.template.render_segments(messages, tokenizer, now=self.chat.started)
            assert spelled(tokenizer, prompt) == spelled(tokenizer, segments)

    def holds_what_was_written(self, prompt: list[int], path: list[Node]) -> None:
        """The ids of every reply stand in the prompt, as far as its text does."""
        for node in path[len(self.chat.unseen(path)) :]:
            if node.reply is None or node.edited:
                continue
            ids, decode = list(node.reply.token_ids), self.session.llm.tokenizer.decode
            while ids and not decode(ids).strip():
                ids.pop()
            if ids and decode(ids) == node.content == node.content.strip():
                assert any(
                    prompt[at : at + len(ids)] == ids for at in range(len(prompt) - len(ids) + 1)
                )


each_template = pytest.mark.parametrize("name", ZOO)


@each_template
@settings(max_examples=25, deadline=None)
@given(
    history=st.lists(operations, max_size=9),
    system=st.sampled_from(["", "Be brief. "]),
    stash=st.sampled_from([0, 20_000, 2**24]),
)
def test_any_history_leaves_the_cache_exact(name: str, history, system: str, stash: int) -> None:
    driver = Driver(tiny_llm(name, stash_bytes=stash), system)
    for operation in history:
        driver.apply(operation)
        engine = driver.session.llm.engine
        assert len(engine.ids) == engine._context.cache.length
        assert engine.stash_bytes <= stash
    driver.check()
    driver.check("again")


@settings(max_examples=40, deadline=None)
@given(history=st.lists(operations, max_size=9))
def test_any_history_with_a_tokenizer_that_merges(history) -> None:
    driver = Driver(tiny_llm("chatml", tokenizer=merging_tokenizer()))
    for operation in history:
        driver.apply(operation)
    driver.check()
    driver.check("the brown fox")


@pytest.mark.parametrize("name", ["chatml", "mistral", "plain-inst"])
@settings(max_examples=20, deadline=None)
@given(history=st.lists(operations, min_size=4, max_size=14))
def test_any_history_in_a_small_context(name: str, history) -> None:
    driver = Driver(tiny_llm(name, ctx=150), "Be brief.", overflow="drop-oldest")
    for operation in history:
        driver.apply(operation)
    with suppress(ContextOverflowError):
        held_exactly(driver.session)
        driver.end_with_a_reply()
        list(driver.session.send("and now?"))
    turn_context = driver.chat.context_ids(driver.session.last_reply().id)
    assert len(turn_context) <= 151  # a stop id is drawn and not run
    held_exactly(driver.session)
