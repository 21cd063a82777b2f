"""Saving while the chat goes on: killed at any moment, on a full disk, with two programs."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat.saver_desk import Desk
from chat.store_helpers import image, say
from chat.store_threads import watch
from chat.tiny_chat import GREEDY, tiny_llm, tiny_session

from kvchat.chat.commands import Continue, Edit, Open, Regenerate, Send, SetSystem, Truncate
from kvchat.chat.conversation import Conversation
from kvchat.chat.saver import INTERVAL
from kvchat.chat.session import ChatSession
from kvchat.chat.store import Store
from kvchat.chat.store_errors import ChatInUseError

resource = pytest.importorskip("resource", reason="limits of a process, which POSIX has")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "chats.db")


def stored(store: Store, chat: Conversation) -> bool:
    return image(Store(store.path).load(chat.id)) == image(chat)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_everything_a_worker_does_is_saved(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("hello"))
    assert desk.saver.flush()
    assert stored(store, desk.chat)
    first = desk.chat.active_path()[1].id
    for command in (
        Continue(),
        Send("more"),
        Regenerate(),
        Edit(first, "mine"),
        Continue(),
        SetSystem("Be brief."),
        Truncate(first),
    ):
        desk.do(command)
        assert desk.saver.flush()
        assert stored(store, desk.chat)
    turns = desk.session.ledger
    assert len(turns) == 5
    assert store.ledger(desk.chat.id) == turns
    reply = next(node for node in desk.chat if node.reply and not node.edited)
    made = store.provenance(desk.chat.id, reply.id)
    assert made["template"] == desk.session.llm.template.hash
    assert desk.close()
    assert desk.told == []


def test_only_the_savers_thread_touches_the_database(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    desk = Desk(store)
    for command in (Send("hello"), Continue(), Send("more"), Regenerate(), SetSystem("x")):
        desk.do(command)
    desk.saver.call(store.rename, desk.chat.id, "mine")
    desk.saver.let_go(desk.chat.id)
    assert desk.saver.flush()
    assert seen == {"kvchat-saver"}
    assert desk.close()
    store.chats()
    assert "MainThread" in seen  # so uses are seen


def test_a_running_reply_is_on_the_disk_with_its_prompt(store: Store) -> None:
    desk = Desk(store)
    seen = []

    def look() -> None:
        assert desk.saver.flush()
        chat = Store(store.path).load(desk.chat.id)
        node = chat.active_path()[-1]
        seen.append(len(node.reply.token_ids))
        held = list(desk.session.llm.engine.ids)
        context = chat.context_ids(node.id)
        # A token may be drawn and not yet fed.
        assert context[: len(held)] == held[: len(context)]
        assert len(context) >= len(held)

    desk.on_token = look
    desk.do(Send("hello"))
    assert seen == list(range(1, 13))
    desk.on_token = lambda: None
    assert desk.close()


def test_of_a_running_reply_no_more_than_a_second_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kvchat.chat.saver.time", SimpleNamespace(monotonic=lambda: now))
    desk = Desk(store, interval=INTERVAL)
    waiting = []

    def a_quarter_of_a_second_later() -> None:
        nonlocal now
        now += 0.25
        assert desk.saver.flush()
        there = store.load(desk.chat.id).active_path()[-1].reply
        waiting.append(len(desk.chat.active_path()[-1].reply.token_ids) - len(there.token_ids))

    desk.on_token = a_quarter_of_a_second_later
    desk.do(Send("hello"))
    assert max(waiting) == 4
    assert waiting.count(0) == 2
    assert desk.close()


def test_a_broken_off_reply_is_gone_on_with_as_if_nothing_had_happened(store: Store) -> None:
    whole = tiny_session(session={"params": GREEDY.updated(max_tokens=12)})
    list(whole.send("hello"))
    desk = Desk(store)
    left: list[Conversation] = []
    desk.on_token = lambda: left.append(desk.saver.flush() and Store(store.path).load(desk.chat.id))
    desk.do(Send("hello"))
    desk.close()
    for chat in left[:7]:
        assert chat.active_path()[-1].reply.finish_reason == "interrupted"
        session = ChatSession(tiny_llm(), conversation=chat, params=GREEDY)
        session.params = GREEDY.updated(max_tokens=12 - len(chat.active_path()[-1].reply.token_ids))
        list(session.continue_reply())
        assert session.last_reply().reply.token_ids == whole.last_reply().reply.token_ids
        assert session.last_reply().content == whole.last_reply().content


def test_an_opened_chat_is_saved_on(store: Store) -> None:
    old = Conversation()
    say(old, "one", [])
    store.save(old)
    changed = store.chats()[0].changed
    desk = Desk(store)
    assert store.chats()[0].changed == changed
    conversation = desk.saver.open(old.id)
    assert desk.saver.open(old.id) is conversation
    desk.do(Open(conversation))
    desk.do(Send("more"))
    assert desk.saver.flush()
    assert len(store.load(old.id).nodes) == 4
    assert stored(store, conversation)
    with pytest.raises(ChatInUseError):
        Store(store.path).claim(old.id)
    desk.saver.let_go(old.id)
    assert desk.saver.flush()
    Store(store.path).claim(old.id)
    desk.close()


def test_opening_changes_nothing(store: Store) -> None:
    old = Conversation()
    say(old, "one", [])
    store.save(old)
    before = store.chats()
    desk = Desk(store, None)
    desk.do(Open(desk.saver.open(old.id)))
    assert desk.close()
    assert store.chats() == before


def test_two_programs_and_one_chat(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("mine"))
    assert desk.saver.flush()
    other = Desk(Store(store.path))
    with pytest.raises(ChatInUseError):
        other.saver.open(desk.chat.id)
    copy = other.saver.open(store.duplicate(desk.chat.id))
    other.do(Open(copy))
    other.do(Send("theirs"))
    assert other.close()
    assert desk.close()
    assert sorted(chat.messages for chat in store.chats()) == [2, 4]


def test_a_chat_that_somebody_else_took_is_told_and_saved_when_it_is_free(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("mine"))
    assert desk.saver.flush()
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE leases SET owner = 'another'")
    desk.do(Send("more"))
    assert desk.saver.flush()
    assert len(desk.told) == 1
    assert "another kvchat" in desk.told[0]
    with sqlite3.connect(store.path) as db:
        db.execute("DELETE FROM leases")
    assert desk.close()
    assert stored(store, desk.chat)


def test_changes_of_the_list_keep_their_order_with_saving(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("hello"))
    desk.saver.call(store.rename, desk.chat.id, "mine")
    desk.saver.call(store.rename, "no such chat", "x")
    assert desk.saver.flush()
    assert store.chats()[0].title == "mine"
    desk.close()


@pytest.fixture
def limit():
    """Limits the size of files, which is how a full disk looks from here."""
    was = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size: int | None) -> None:
        soft = was[0] if size is None else size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, was[1]))

    yield set_limit
    set_limit(None)


def test_a_full_disk_is_told_once_and_all_is_saved_when_there_is_room(
    store: Store, limit: Callable[[int | None], None]
) -> None:
    desk = Desk(store)
    desk.do(Send("before"))
    assert desk.saver.flush()
    limit(0)
    for n in range(3):
        desk.do(Send(f"while it is full {n}"))
    until(lambda: bool(desk.told))
    assert not desk.saver.flush(0.2)
    limit(None)
    assert desk.saver.flush()
    until(lambda: len(desk.told) == 2)
    assert stored(store, desk.chat)
    assert "memory" in desk.told[0]
    assert "again" in desk.told[1]
    assert desk.close()
    assert len(store.ledger(desk.chat.id)) == 4


@pytest.mark.parametrize("room", [1, 4_000, 5_000, 9_000, 13_000])
def test_a_disk_that_is_full_in_the_middle_of_a_write(
    store: Store, limit: Callable[[int | None], None], room: int
) -> None:
    desk = Desk(store)
    desk.do(Send("before"))
    assert desk.saver.flush()
    limit(Path(f"{store.path}-wal").stat().st_size + room)
    for n in range(4):
        desk.do(Send(f"while it gets full {n} " + "x" * 50))
    until(lambda: bool(desk.told))
    assert desk.told[0].endswith(
        (
            f"{store.path}: the disk is full; free some space.",
            f"{store.path}: the disk refuses; see that it has space and is sound.",
        )
    )
    there = Store(store.path).load(desk.chat.id)  # whole up to some moment
    assert {node.id for node in there} <= desk.chat.nodes.keys()
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    limit(None)
    assert desk.close()
    assert len(desk.told) == 2
    assert stored(store, desk.chat)


def test_a_chat_goes_on_while_another_program_keeps_the_database_locked(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("before"))
    assert desk.saver.flush()
    locker = sqlite3.connect(store.path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    desk.do(Send("while it is locked"))
    assert not desk.saver.flush(0)
    locker.execute("COMMIT")
    locker.close()
    assert desk.close()
    assert stored(store, desk.chat)


def test_a_folder_that_cannot_be_made_is_told_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    desk = Desk(Store(tmp_path / "file" / "chats.db"))
    desk.do(Send("hello"))
    desk.do(Send("again"))
    until(lambda: bool(desk.told))
    assert len(desk.chat.nodes) == 4
    (tmp_path / "file").unlink()
    assert desk.close()
    assert stored(desk.saver.store, desk.chat)


def test_chats_that_are_open_survive_the_loss_of_the_database(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("one"))
    assert desk.saver.flush()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{store.path}{suffix}").unlink(missing_ok=True)
    desk.do(Send("two"))
    assert desk.saver.flush()
    desk.do(Send("three"))
    assert desk.close()
    assert stored(store, desk.chat)


def test_a_damaged_database_is_told_and_open_chats_are_written_anew(store: Store) -> None:
    desk = Desk(store)
    desk.do(Send("one"))
    assert desk.saver.flush()
    store._database.close()
    store.path.write_bytes(b"not a database " * 1000)
    told = []
    store._database._tell = told.append
    desk.do(Send("two"))
    assert desk.saver.flush()
    desk.do(Send("three"))
    assert desk.close()
    assert "damaged" in told[0]
    assert stored(store, desk.chat)
