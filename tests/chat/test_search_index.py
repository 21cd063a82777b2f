"""A search index that is damaged in silence is found out in a quiet moment and made anew."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from chat.store_helpers import image, say

from kvchat.chat.conversation import Conversation
from kvchat.chat.saver import Saver
from kvchat.chat.store import Store
from kvchat.chat.store_index import REMADE

DAMAGE = {
    "a message is missing": "DELETE FROM search WHERE rowid = 3",
    "words are missing": "UPDATE search_content SET c0 = 'other words' WHERE id = 3",
    "pages are empty": "UPDATE search_data SET block = zeroblob(length(block)) WHERE id > 10",
    "sizes are gone": "DELETE FROM search_docsize",
    "everything is gone": "DELETE FROM search_data WHERE id > 10",
}


@pytest.fixture
def chats(tmp_path: Path) -> list[Conversation]:
    store, made = Store(tmp_path / "chats.db"), []
    for text in ("otters in the 公园", "a quick fox"):
        chat = Conversation()
        say(chat, text, [5, 6])
        chat.start_reply(chat.add_user("unfinished").id)
        store.save(chat)
        made.append(chat)
    store.close()
    return made


def search(path: Path) -> tuple[list[str], ...]:
    store = Store(path)
    found = tuple(
        [hit.excerpt for hit in store.search(text)] for text in ("公园", "quick", "6", "unfinished")
    )
    store.close()
    return found


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_it_is_made_anew_and_told(chats: list[Conversation], tmp_path: Path, damage: str) -> None:
    path = tmp_path / "chats.db"
    sound = search(path)
    assert all(sound)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    told: list[str] = []
    store = Store(path, tell=told.append)
    store.check_search()
    assert told == [REMADE]
    store.check_search()
    assert told == [REMADE]
    assert search(path) == sound
    assert [image(store.load(chat.id)) for chat in chats] == [
        image(Store(path).load(chat.id)) for chat in chats
    ]


def test_a_sound_one_is_left_alone(chats: list[Conversation], tmp_path: Path) -> None:
    told: list[str] = []
    Store(tmp_path / "chats.db", tell=told.append).check_search()
    assert told == []


def test_it_is_looked_over_once_when_nothing_is_to_be_written(
    chats: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    check = Store.check_search
    monkeypatch.setattr(Store, "check_search", lambda self: (looked.append(0), check(self)))
    with closing(sqlite3.connect(tmp_path / "chats.db")) as db, db:
        db.execute(DAMAGE["a message is missing"])
    told: list[str] = []
    saver = Saver(Store(tmp_path / "chats.db", tell=told.append), told.append, quiet=0.02)
    until(lambda: told == [REMADE])
    time.sleep(0.1)
    assert len(looked) == 1
    assert saver.close()


def test_where_it_cannot_be_made_anew_nothing_is_told(
    chats: list[Conversation], tmp_path: Path
) -> None:
    told: list[str] = []
    store = Store(tmp_path / "chats.db", tell=told.append)
    store._database.read(lambda db: db.execute("PRAGMA query_only = ON"))
    saver = Saver(store, told.append, tidy=lambda: None)
    saver._look_over()
    saver.close()
    assert told == []


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
