"""What comes out of the store is what went in, whoever else uses it."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from chat.store_author import Author, operations
from chat.store_helpers import image, say, token, turn, write
from hypothesis import assume, given, settings

from kvchat.chat.changes import TITLE_LENGTH, Tracker, title_of
from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.prefix import Divergence
from kvchat.chat.provenance import Provenance
from kvchat.chat.store import Store
from kvchat.chat.store_errors import ChatInUseError, NoSuchChatError, StoreError
from kvchat.engine.errors import KvchatError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "chats.db")


def rows(store: Store, table: str) -> int:
    with sqlite3.connect(store.path) as db:
        return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_a_chat_comes_back_as_it_was(store: Store) -> None:
    chat = Conversation("Be brief.", title="Über 公园\n\0\ud800")
    chat.started = datetime(2024, 2, 29, 1, 2, 3, 4, timezone(timedelta(hours=5.5), "IST"))
    first = say(chat, "hi \0 \ud83d", [1, 5, 3], "length")
    say(chat, "more", [])
    chat.fork_reply(first.id, 1, [8])
    running = chat.active_path()[-1]
    chat.finish_reply(running.id, "cancelled", context_ids=[1, 2, 3])
    chat.select(first.id)
    chat.branch(first.id)
    chat.drop(first.id, 2)
    store.save(chat)
    again = Store(store.path).load(chat.id)
    assert image(again) == image(chat)
    assert again.started.strftime("%Z") == "IST"


@settings(max_examples=80, deadline=None)
@given(history=operations)
def test_any_chat_comes_back_whether_saved_at_once_or_as_it_grew(tmp_path_factory, history) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole, grown = Store(folder / "whole.db"), Store(folder / "grown.db")
    author = Author()
    tracker = Tracker(author.chat)
    for operation in history:
        author.apply(operation)
        if (changes := tracker.changes()) is not None:
            grown.write(changes)
    assert tracker.changes() is None
    whole.save(author.chat)
    for store in (whole, grown):
        if author.chat.nodes:
            assert image(store.load(author.chat.id)) == image(author.chat)
        store.close()
    if author.chat.nodes:
        assert Tracker(grown.load(author.chat.id), stored=True).changes() is None


@settings(max_examples=40, deadline=None)
@given(history=operations, more=operations)
def test_a_chat_goes_on_after_it_was_opened(tmp_path_factory, history, more) -> None:
    store = Store(tmp_path_factory.mktemp("store") / "chats.db")
    author = Author()
    for operation in [("say", "hi", [1], token(1).params, 2), *history]:
        author.apply(operation)
    assume(author.chat.nodes)
    store.save(author.chat)
    author.chat = store.load(author.chat.id)
    author.deleted.clear()
    tracker = Tracker(author.chat, stored=True)
    for operation in more:
        author.apply(operation)
    if (changes := tracker.changes()) is not None:
        store.write(changes)
    assert image(store.load(author.chat.id)) == image(author.chat)
    store.close()


def test_a_running_reply_is_appended_to_and_opens_as_interrupted(store: Store) -> None:
    chat = Conversation()
    say(chat, "one", [1, 2])
    tracker = Tracker(chat)
    store.write(tracker.changes())
    node = chat.start_reply(chat.add_user("two").id)
    store.write(tracker.changes())
    prompt = [1000, 1, 2, 2, 50, 51]
    tracker.prefilled(node.id, prompt)
    store.write(tracker.changes())
    for n in range(5):
        write(chat, node, [10 * n, 10 * n + 1])
        changes = tracker.changes()
        assert [(saved.start, len(saved.node.reply.token_ids)) for saved in changes.nodes] == [
            (2 * n, 2)
        ]
        assert not changes.places
        store.write(changes)
        again = store.load(chat.id)
        reply = again.nodes[node.id].reply
        assert reply.finish_reason == "interrupted"
        assert reply.token_ids == node.reply.token_ids
        assert again.context_ids(node.id) == [*prompt, *reply.token_ids]
        assert again.nodes[node.id].content == node.content
    chat.finish_reply(node.id, "stop", stop_id=2, context_ids=[*prompt, *node.reply.token_ids, 2])
    store.write(tracker.changes())
    assert image(store.load(chat.id)) == image(chat)


def test_a_reply_taken_up_again_keeps_its_context_if_it_is_broken_off(store: Store) -> None:
    chat = Conversation()
    node = say(chat, "one", [1, 2], "length")
    tracker = Tracker(chat)
    store.write(tracker.changes())
    chat.continue_reply(node.id)
    store.write(tracker.changes())
    assert store.load(chat.id).nodes[node.id].reply.context is None
    tracker.prefilled(node.id, [1000, 1, 2])
    write(chat, node, [3])
    store.write(tracker.changes())
    assert store.load(chat.id).context_ids(node.id) == [1000, 1, 2, 3]


def test_what_a_killed_program_left_is_ended_and_can_be_found(store: Store) -> None:
    chat = Conversation()
    node = chat.start_reply(chat.add_user("two").id)
    tracker = Tracker(chat)
    store.write(tracker.changes())
    tracker.prefilled(node.id, [4, 4])
    write(chat, node, [77])
    store.write(tracker.changes())
    other = Store(store.path)
    other.tidy()
    assert other.search("77") == []
    with pytest.raises(ChatInUseError):
        other.claim(chat.id)
    store.close()
    other.tidy()
    assert [hit.node_id for hit in other.search("77")] == [node.id]
    loaded = other.load(chat.id)
    assert loaded.context_ids(node.id) == [4, 4, 77]
    assert Tracker(loaded, stored=True).changes() is None


def test_candidates_can_be_left_out(tmp_path: Path) -> None:
    chat = Conversation()
    node = say(chat, "hi", [1, 2, 3])
    with_them, without = Store(tmp_path / "a.db"), Store(tmp_path / "b.db", candidates=False)
    with_them.save(chat)
    without.save(chat)
    reply = without.load(chat.id).nodes[node.id].reply
    assert [len(c.ids) for c in (*reply.before, *reply.after)] == [0] * 6
    assert reply.logprobs == chat.nodes[node.id].reply.logprobs


def test_an_empty_chat_is_not_saved(store: Store) -> None:
    store.save(Conversation("system"))
    assert store.chats() == []
    assert store.last() is None


def test_the_list(store: Store) -> None:
    ids = []
    for text in ("the first", "the second", "第三"):
        chat = Conversation()
        say(chat, text, [1])
        store.save(chat)
        ids.append(chat.id)
    assert [chat.title for chat in store.chats()] == ["第三", "the second", "the first"]
    assert store.last() == ids[2]
    store.pin(ids[0])
    store.tag(ids[1], ["work", "Zürich", "work"])
    store.rename(ids[2], "公园")
    listed = store.chats()
    assert [chat.id for chat in listed] == [ids[0], ids[2], ids[1]]
    assert (listed[0].pinned, listed[2].tags) == (True, ("Zürich", "work"))
    assert (listed[1].title, listed[1].messages) == ("公园", 2)
    assert [chat.id for chat in store.chats("zÜR")] == [ids[1]]
    assert [chat.id for chat in store.chats("FIRST")] == [ids[0]]
    assert [chat.id for chat in store.chats(tag="work")] == [ids[1]]
    store.rename(ids[2], "")
    assert store.chats("第三")[0].id == ids[2]
    with pytest.raises(NoSuchChatError):
        store.rename("nothing", "x")


def test_renaming_an_open_chat_outlives_its_next_save(store: Store) -> None:
    chat = Conversation()
    say(chat, "one", [1])
    tracker = Tracker(chat)
    store.write(tracker.changes())
    store.rename(chat.id, "mine")
    say(chat, "two", [2])
    store.write(tracker.changes())
    tracker.reset()
    store.write(tracker.changes())
    assert store.chats()[0].title == "mine"
    chat.title = "by the model"
    store.write(tracker.changes())
    assert store.load(chat.id).title == "by the model"


def test_delete_can_be_undone_until_it_is_purged(store: Store) -> None:
    chat = Conversation()
    say(chat, "needle", [1])
    store.save(chat)
    before = image(store.load(chat.id))
    store.delete(chat.id)
    assert store.chats() == []
    assert store.search("needle") == []
    assert [gone.id for gone in store.chats(deleted=True)] == [chat.id]
    store.tidy()
    store.restore(chat.id)
    assert image(store.load(chat.id)) == before
    assert len(store.search("needle")) == 1
    store.delete(chat.id)
    store.tidy(keep_deleted=-1)
    with pytest.raises(NoSuchChatError):
        store.load(chat.id)
    assert {rows(store, t) for t in ("chats", "nodes", "replies", "parts", "search")} == {0}


def test_a_duplicate_is_the_same_chat_and_goes_its_own_way(store: Store) -> None:
    chat = Conversation("sys", title="x")
    first = say(chat, "one", [1, 2])
    chat.edit_reply(first.id, "mine")
    tracker = Tracker(chat)
    store.write(tracker.changes([turn(first.id)]))
    copy = store.duplicate(chat.id)
    assert image(store.load(copy)) == image(chat) | {"id": copy, "title": "x (copy)"}
    assert store.ledger(copy) == store.ledger(chat.id)
    assert len(store.search("one")) == 2
    chat.delete(first.id)
    store.write(tracker.changes())
    assert first.id in store.load(copy).nodes
    assert first.id not in store.load(chat.id).nodes
    with pytest.raises(NoSuchChatError):
        store.duplicate("nothing")


def test_duplicates_are_told_apart_by_their_titles(store: Store) -> None:
    chat = Conversation()
    say(chat, "one", [1])
    store.save(chat)
    first = store.duplicate(chat.id)
    store.duplicate(chat.id)
    store.duplicate(first)
    titles = {each.title for each in store.chats()}
    assert titles == {"one", "one (copy)", "one (copy 2)", "one (copy 3)"}
    store.delete(first)
    store.duplicate(chat.id)
    assert len(titles & {each.title for each in store.chats()}) == 4


def test_the_ledger_and_where_replies_came_from(store: Store) -> None:
    chat = Conversation()
    node = say(chat, "one", [1])
    tracker = Tracker(chat)
    tracker.run = Provenance(
        model="m", path="p", fingerprint=None, template="t", device="cpu", dtype="float32",
        quant="none", kvchat="1", torch="2", python="3",
    )  # fmt: skip
    lines = [turn(node.id), turn(node.id, 5)]
    full = Turn(
        **{name: getattr(lines[0], name) for name in Turn.__slots__}
        | {"divergence": Divergence(3, "a\ud800", "")}
    )
    store.write(tracker.changes([*lines, full]))
    assert store.ledger(chat.id) == [*lines, full]
    assert store.provenance(chat.id, node.id)["template"] == "t"
    assert store.chats()[0].model == "m"


def test_ids_may_be_shortened(store: Store) -> None:
    chats = [Conversation(id=name) for name in ("abc1", "abd2")]
    for chat in chats:
        say(chat, "hi", [])
        store.save(chat)
    assert store.find("abc") == "abc1"
    for beginning in ("ab", "x", "", "%"):
        with pytest.raises(KvchatError):
            store.find(beginning)


def test_titles() -> None:
    assert title_of(" a\n\tb ") == "a b"
    long = title_of("word " * 100)
    assert len(long) <= TITLE_LENGTH
    assert long.endswith("word…")
    assert title_of("公" * 100) == "公" * (TITLE_LENGTH - 1) + "…"
    assert title_of("\x1b[31mred") == "␛[31mred"


def test_two_stores_see_each_other(store: Store) -> None:
    other = Store(store.path)
    chat, second = Conversation(), Conversation()
    say(chat, "from the first", [1])
    say(second, "from the second", [1])
    assert other.chats() == []
    store.save(chat)
    assert [each.id for each in other.chats()] == [chat.id]
    assert [hit.chat_id for hit in other.search("first")] == [chat.id]
    other.save(second)
    other.rename(chat.id, "renamed")
    assert {each.title for each in store.chats()} == {"renamed", "from the second"}


def test_a_writer_waits_for_another_program(store: Store) -> None:
    chat = Conversation()
    say(chat, "hi", [1])
    store.save(chat)
    locker = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    locker.execute("BEGIN IMMEDIATE")
    assert len(store.chats()) == 1  # readers do not wait
    threading.Timer(0.2, lambda: locker.execute("COMMIT")).start()
    say(chat, "more", [1])
    store.save(chat)
    assert len(store.load(chat.id).nodes) == 4
    locker.close()


def test_a_chat_is_written_by_one_store_at_a_time(store: Store) -> None:
    chat = Conversation()
    say(chat, "hi", [1])
    tracker = Tracker(chat)
    store.write(tracker.changes())
    other = Store(store.path)
    with pytest.raises(ChatInUseError):
        other.claim(chat.id)
    with pytest.raises(ChatInUseError):
        other.save(chat)
    store.claim(chat.id)
    copy = other.duplicate(chat.id)
    other.claim(copy)
    store.release(chat.id)
    other.claim(chat.id)
    say(chat, "more", [1])
    with pytest.raises(ChatInUseError):
        store.write(tracker.changes())
    assert len(other.load(chat.id).nodes) == 2


@pytest.mark.parametrize(("pid", "age", "free"), [(1, 0, False), (1, 1000, True), (-1, 0, True)])
def test_leases_of_the_dead_are_free(store: Store, pid: int, age: float, free: bool) -> None:
    chat = Conversation()
    say(chat, "hi", [1])
    other = Store(store.path)
    other.write(Tracker(chat).changes())
    gone = 2**22 + 1  # above the highest process id of Linux
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE leases SET pid = ?, seen = seen - ?", (gone if pid < 0 else pid, age))
    if free:
        store.claim(chat.id)
    else:
        with pytest.raises(ChatInUseError):
            store.claim(chat.id)


def test_threads_share_a_store(store: Store) -> None:
    chats = [Conversation() for _ in range(8)]
    failures = []

    def work(chat: Conversation) -> None:
        try:
            for n in range(5):
                say(chat, f"message {n}", [n])
                store.save(chat)
                assert image(store.load(chat.id)) == image(chat)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(chat,)) for chat in chats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.chats()) == 8


def test_a_store_can_be_used_after_it_was_closed(store: Store) -> None:
    store.close()
    assert store.chats() == []
    store.close()
    chat = Conversation()
    say(chat, "hi", [1])
    store.save(chat)
    assert len(store.chats()) == 1


def test_a_file_that_was_removed_is_made_again(store: Store) -> None:
    chat = Conversation()
    say(chat, "hi", [1])
    store.save(chat)
    opened = store.opened
    store.path.unlink()
    assert store.chats() == []
    assert store.opened > opened
    store.save(chat)
    assert len(store.chats()) == 1


def test_only_the_owner_may_read_the_chats(store: Store) -> None:
    store.chats()
    assert store.path.stat().st_mode & 0o077 == 0


def test_a_store_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "chats.db")
    with pytest.raises(StoreError, match="KVCHAT_DATA_DIR"):
        store.chats()


def test_large_numbers_of_candidates_and_none(store: Store) -> None:
    chat = Conversation()
    node = chat.start_reply(chat.add_user("x").id)
    write(chat, node, [1, 2, 3], width=0)
    node.reply.add_typed(7)
    chat.add_token(node.id, token(9, width=300))
    chat.finish_reply(node.id, "stop")
    store.save(chat)
    assert image(store.load(chat.id)) == image(chat)
    assert len(store.load(chat.id).nodes[node.id].reply.before[4].ids) == 300
    assert store.load(chat.id).started.astimezone(UTC) == chat.started
    assert array("i", [1, 2, 3, 7, 9]) == store.load(chat.id).nodes[node.id].reply.token_ids
