"""Damaged databases: kept aside, what is readable recovered, never a crash."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from chat.store_helpers import image, say

from kvchat.chat.changes import Tracker
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.chat.store_rows import LOST
from kvchat.chat.store_schema import MIGRATIONS, prepare
from kvchat.chat.store_writes import write_changes
from kvchat.engine.errors import KvchatError

CHATS = 40


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, dict]]:
    """A database's bytes, and the chats in it."""
    store = Store(tmp_path_factory.mktemp("sound") / "chats.db")
    images = {}
    for n in range(CHATS):
        chat = Conversation(id=f"chat{n}", title=f"title {n}")
        for m in range(4):
            say(chat, f"message {n} {m} " + "公园 words " * 20, list(range(m * 10)))
        store.save(chat)
        images[chat.id] = image(chat)
    store.close()
    return store.path.read_bytes(), images


def use(store: Store) -> None:
    """Everything one does with a store; only errors for users may come of it."""
    for act in (
        store.chats,
        lambda: store.search("公园"),
        lambda: store.search("words"),
        lambda: [store.load(f"chat{n}") for n in range(CHATS)],
        lambda: store.ledger("chat1"),
        lambda: store.duplicate("chat2"),
        lambda: store.save(Conversation()),
        store.tidy,
    ):
        with suppress(KvchatError):
            act()


def intact(store: Store, images: dict[str, dict]) -> int:
    found = 0
    for chat_id, expected in images.items():
        with suppress(KvchatError):
            found += image(store.load(chat_id)) == expected
    return found


def texts_left(store: Store, images: dict[str, dict]) -> float:
    """The share of messages that still say what they said."""
    texts = {node_id: node[3] for one in images.values() for node_id, node in one["nodes"].items()}
    left = 0
    for chat_id in images:
        with suppress(KvchatError):
            for node in store.load(chat_id):
                left += texts.get(node.id) == node.content
    return left / len(texts)


def test_pages_that_are_destroyed_cost_what_was_on_them(tmp_path: Path, sound) -> None:
    data, images = sound
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    broken = bytearray(data)
    for n in (10, 20, 30):
        page = data.index(f"message {n} 2 ".encode()) // 4096 * 4096
        broken[page : page + 4096] = bytes(4096)
    store.path.write_bytes(broken)
    use(store)
    assert len(told) == 1
    assert "damaged" in told[0]
    (aside,) = tmp_path.glob("chats.db.damaged-*[0-9]")
    assert aside.read_bytes() == broken
    assert intact(store, images) >= CHATS // 2
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    assert store.search("words")
    store.close()


@pytest.mark.parametrize("migrated", [False, True])
@pytest.mark.parametrize("lost", ["first page", "another page"])
def test_a_damaged_database_of_an_older_version(tmp_path: Path, lost: str, migrated: bool) -> None:
    store = Store(tmp_path / "chats.db", tell=lambda _: None)
    images = {}
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        prepare(db, store.path, MIGRATIONS[:1])
        for n in range(CHATS):
            chat = Conversation(id=f"chat{n}", title=f"title {n}")
            say(chat, f"message {n} " + "words " * 100, list(range(40)))
            write_changes(db, Tracker(chat).changes())
            images[chat.id] = image(chat)
    if migrated:
        store.chats()
        store.close()
    data = store.path.read_bytes()
    at = 0 if lost == "first page" else data.index(b"message 20 ") // 4096 * 4096
    size = 4096 if at else 100
    store.path.write_bytes(data[:at] + bytes(size) + data[at + size :])
    use(store)
    assert len(store.chats()) >= CHATS
    assert sum(chat.title.startswith("title") for chat in store.chats()) >= CHATS - 1
    assert intact(store, images) >= CHATS - 8
    assert len(store.search("words", limit=1000)) >= CHATS - 8
    store.close()


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_truncated_database(tmp_path: Path, sound, share: float) -> None:
    data, images = sound
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    store.path.write_bytes(data[: int(len(data) // 4096 * share) * 4096])
    use(store)
    assert len(told) == 1
    assert intact(store, images) >= CHATS * (share - 0.3)
    new = Conversation()
    say(new, "still works", [])
    store.save(new)
    assert image(Store(store.path).load(new.id)) == image(new)
    store.close()


@pytest.mark.parametrize("data", [b"garbage " * 5000, b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_file_that_is_no_database(tmp_path: Path, data: bytes) -> None:
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    store.path.write_bytes(data)
    with suppress(KvchatError):
        store.chats()
    if told:
        assert store.chats() == []
        assert [file.read_bytes() for file in tmp_path.glob("*.damaged-*[0-9]")] == [data]
    else:  # its version is beyond what this program knows
        assert store.path.read_bytes() == data
    store.close()


def test_a_destroyed_first_page_costs_little(tmp_path: Path, sound) -> None:
    data, images = sound
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    store.path.write_bytes(bytes(100) + data[100:])
    use(store)
    assert len(told) == 1
    assert intact(store, images) == CHATS
    store.close()


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_never_crash(tmp_path: Path, sound, seed: int) -> None:
    data, images = sound
    chance = random.Random(seed)
    broken = bytearray(data)
    flips = chance.choice([1, 4, 64])
    for _ in range(flips):
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
    store = Store(tmp_path / "chats.db", tell=lambda _: None)
    store.path.write_bytes(broken)
    use(store)
    use(store)
    newer = False
    try:
        store.chats()
    except KvchatError:
        newer = broken[60:64] != data[60:64]
        assert newer
    assert newer or flips > 4 or texts_left(store, images) >= 0.5
    store.close()


def test_a_reply_whose_record_is_lost_keeps_its_text(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Conversation()
    nodes = [say(chat, f"message {n}", [n, n + 1]) for n in range(4)]
    store.save(chat)
    store.close()
    rows = "(SELECT row FROM nodes WHERE id = ?)"
    with closing(sqlite3.connect(store.path)) as db:
        db.execute(f"UPDATE parts SET start = 1 WHERE node = {rows}", (nodes[0].id,))
        db.execute(f"UPDATE parts SET candidates = x'00' WHERE node = {rows}", (nodes[1].id,))
        db.execute(f"UPDATE replies SET params = '[' WHERE node = {rows}", (nodes[2].id,))
        db.execute("DELETE FROM nodes WHERE id = ?", (nodes[3].parent,))
        db.commit()
    again = store.load(chat.id)
    for node in nodes[:3]:
        assert again.nodes[node.id].content == node.content
        assert again.nodes[node.id].edited
        assert not again.nodes[node.id].running
    orphan = again.nodes[nodes[3].id]
    assert again.nodes[orphan.parent].content == LOST
    assert orphan.reply.token_ids == nodes[3].reply.token_ids
    assert image(store.load(chat.id)) == image(again)


def test_messages_in_a_ring_are_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Conversation()
    first = say(chat, "one", [1])
    last = say(chat, "two", [2])
    store.save(chat)
    with closing(sqlite3.connect(store.path)) as db:
        db.execute("UPDATE nodes SET parent = ? WHERE id = ?", (last.id, first.parent))
        db.commit()
    assert store.load(chat.id).active_path() == []
    assert store.load(chat.id).nodes == {}


def rows_of(store: Store, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(store.path)) as db:
        return db.execute(statement).fetchall()


@pytest.mark.parametrize(
    "damage",
    [
        "its page",
        "UPDATE search_data SET block = randomblob(length(block)) WHERE id > 10",
        "DELETE FROM search_data",
        "DELETE FROM search_config",
        "UPDATE search_data SET block = substr(block, 1, length(block) / 2)",
    ],
)
def test_a_damaged_index_costs_no_chat_and_is_made_anew(tmp_path: Path, sound, damage: str) -> None:
    data, images = sound
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    store.path.write_bytes(data)
    with closing(sqlite3.connect(store.path)) as db:
        if damage == "its page":
            (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'search_data'")
        else:
            db.execute(damage)
        db.commit()
    if damage == "its page":
        at = (page[0] - 1) * 4096
        store.path.write_bytes(data[:at] + bytes(4096) + data[at + 4096 :])
    use(store)
    assert len(store.search("words", limit=1000)) >= len(store.search("公园", limit=1000)) > 0
    assert intact(store, images) == CHATS
    assert len(told) == 1 and "damaged" in told[0]
    assert rows_of(store, "PRAGMA integrity_check") == [("ok",)]
    new = Conversation()
    say(new, "pelican", [])
    store.save(new)
    assert [hit.chat_id for hit in store.search("pelican")] == [new.id]
    store.close()
