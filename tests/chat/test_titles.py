"""Titles by the model: what they cost the chat, and when they are not written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chat.tiny_chat import GREEDY, cold_reply, dictate, held_exactly, say, tiny_llm, tiny_session

from kvchat.chat.commands import Send
from kvchat.chat.events import CommandFinished, TitleSuggested, WorkerEvent
from kvchat.chat.saver import Saver
from kvchat.chat.session import ChatSession
from kvchat.chat.store import Store
from kvchat.chat.titles import plain_title, suggest_title
from kvchat.chat.worker import Worker
from kvchat.engine.types import TokenGenerated


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "gemma"])
@pytest.mark.parametrize("settled", [True, False])
def test_a_title_leaves_the_cache_as_it_was(name: str, settled: bool) -> None:
    asked, plain = (tiny_session(name, "Be brief.") for _ in range(2))
    for session in (asked, plain):
        say(session, "Tell me of an animal", "The otter sleeps.")
        if settled:
            list(session.settle())
    held = list(asked.engine.ids)
    dictate(asked, "Otters asleep")
    *_, title = suggest_title(asked)
    assert title == "Otters asleep"
    assert [node.content for node in asked.conversation] == [
        "Tell me of an animal",
        "The otter sleeps.",
    ]
    assert list(asked.engine.ids) == held[: len(asked.engine.ids)]
    if settled:
        assert list(asked.engine.ids) == held
    held_exactly(asked)
    for session in (asked, plain):
        session.llm.engine.sampler.dictated = []
        list(session.send("And then?"))
    (_, with_title), (_, without) = asked.ledger, plain.ledger
    assert with_title.new + with_title.reused == without.new + without.reused
    assert with_title.new <= without.new  # the header of a turn may come from the stash
    assert [n.content for n in asked.conversation] == [n.content for n in plain.conversation]


def test_a_title_that_is_broken_off_is_none_and_costs_nothing() -> None:
    session = tiny_session()
    say(session, "hello", "Fine.")
    list(session.settle())
    held = list(session.engine.ids)
    dictate(session, "A very long title")
    told = []
    for event in suggest_title(session):
        told.append(event)
        if isinstance(event, TokenGenerated):
            session.llm.engine.cancel()
    assert not [each for each in told if isinstance(each, str)]
    assert list(session.engine.ids) == held
    say(session, "more", "Good.")
    path = session.conversation.active_path()
    reply = path[-1].reply
    assert reply is not None
    ids = session.conversation.context_ids(path[-1].id)
    prompt = ids[: len(ids) - len(reply.token_ids) - 1]
    assert session.ledger[-1].new + session.ledger[-1].reused == len(prompt)
    assert cold_reply(session.llm, prompt, GREEDY)  # a whole prompt, which a model can go on from


def test_no_title_where_there_is_no_reply_or_no_room() -> None:
    session = tiny_session()
    assert list(suggest_title(session)) == []
    small = tiny_session(ctx=120)
    say(small, "hello", "Fine.")
    assert list(suggest_title(small)) == []


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Otters asleep", "Otters asleep"),
        ('"Otters asleep."', "Otters asleep"),
        ("**Title:** Otters\n", "Otters"),
        ("Otters\nThis title tells of otters.", ""),
        ("A short title: otters", ""),
        ("Short title", ""),
        ("Answer with the title alone.", ""),
        ("Six words for an otter", "Six words for an otter"),
        ("A title of more than sixty letters is no title but a sentence", ""),
        ("标题:水獭", "水獭"),
        ("\n\n# Otters\x1b[31m", "Otters␛[31m"),
        ("wait...", "wait..."),
        ("***", ""),
        ("", ""),
        ("word " * 40, ""),
    ],
)
def test_a_title_is_one_plain_short_line_or_none(written: str, title: str) -> None:
    assert plain_title(written) == title


def test_a_chat_whose_title_is_refused_is_called_by_its_first_words(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    desk = Desk(store)
    dictate_both(desk, "Fine.", "A short title of at most six words")
    desk.worker.submit(Send("hello otter"))
    desk.until(CommandFinished)
    with desk.changed:
        chat_id = desk.session.conversation.id
        assert desk.changed.wait_for(lambda: chat_id in desk.worker._titled, 20)
    desk.close()
    assert not [event for event in desk.told if isinstance(event, TitleSuggested)]
    assert [chat.title for chat in Store(store.path).chats()] == ["hello otter"]


class Desk:
    """A worker that gives titles, and a saver behind it."""

    def __init__(self, store: Store) -> None:
        self.told: list[WorkerEvent] = []
        self.saver = Saver(store, lambda _: None)
        self.changed = threading.Condition()
        self.worker = Worker(self.note, titles=True)
        self.session = ChatSession(tiny_llm(), params=GREEDY)
        self.worker._session = self.session
        self.worker._conversation = self.session.conversation
        self.saver._follow(self.session)

    def note(self, event: WorkerEvent) -> None:
        self.saver.note(event)
        with self.changed:
            self.told.append(event)
            self.changed.notify_all()

    def until(self, kind: type, count: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: sum(isinstance(event, kind) for event in self.told) >= count, 20
            )

    def close(self) -> None:
        assert self.worker.shutdown(5)
        assert self.saver.close()


def dictate_both(desk: Desk, *texts: str) -> None:
    tokenizer = desk.session.llm.tokenizer
    desk.session.llm.engine.sampler.dictated = [
        id_ for text in texts for id_ in [*tokenizer.encode(text), tokenizer.eos_token_id]
    ]


def test_the_worker_gives_a_title_once_and_the_saver_keeps_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    desk = Desk(store)
    dictate_both(desk, "Fine.", "Greetings")
    desk.worker.submit(Send("hello"))
    desk.until(TitleSuggested)
    desk.worker.submit(Send("more"))
    desk.until(CommandFinished, 2)
    desk.close()
    assert [e.title for e in desk.told if isinstance(e, TitleSuggested)] == ["Greetings"]
    assert [chat.title for chat in Store(store.path).chats()] == ["Greetings"]


def test_a_title_of_the_users_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    desk = Desk(store)
    dictate_both(desk, "Fine.", "Greetings")
    renamed = threading.Event()

    def rename(event: WorkerEvent) -> None:
        if isinstance(event, CommandFinished):
            assert desk.saver.flush()
            store.rename(desk.session.conversation.id, "Mine")
            renamed.set()

    note = desk.note
    desk.worker._tell = lambda event: (note(event), rename(event))
    desk.worker.submit(Send("hello"))
    desk.until(TitleSuggested)
    desk.close()
    assert renamed.is_set()
    assert [chat.title for chat in Store(store.path).chats()] == ["Mine"]
