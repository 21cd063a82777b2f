"""Full-text search: words, beginnings of words, and scripts without spaces."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chat.store_helpers import say, write
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.chat.changes import Tracker
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.chat.store_search import excerpt, expression, terms

TEXTS = {
    "park": "昨天我们去了公园里散步。",
    "tokyo": "東京タワーへ行きました",
    "half": "ﾀﾜｰ",
    "mixed": "用GPT模型写代码",
    "wide": "ＡＢＣ１２３",
    "cafe": "Das Café Straße",
    "cats": "Many cats sleep; foo-bar and C++ → done",
    "thai": "ผมชอบกินข้าวผัด",
    "hindi": "हिन्दी में लिखो",
    "korean": "공원에서 산책했다",
    "emoji": "well done 🎉 100%",
    "edge": "这是园",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("search") / "chats.db")
    for name, text in TEXTS.items():
        chat = Conversation(id=name)
        say(chat, text, [])
        store.save(chat)
    return store


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("公园", {"park"}),
        ("公", {"park"}),
        ("园", {"park", "edge"}),
        ("里", {"park"}),
        ("去了公园", {"park"}),
        ("公里", set()),
        ("公园 散步", {"park"}),
        ("公园 東京", set()),
        ("東京", {"tokyo"}),
        ("タワ", {"tokyo", "half"}),
        ("gpt", {"mixed"}),
        ("GPT模型", {"mixed"}),
        ("abc123", {"wide"}),
        ("cafe", {"cafe"}),
        ("CAFÉ strasse", {"cafe"}),
        ("cat", {"cats"}),
        ("ats", set()),
        ("foo-bar", {"cats"}),
        ('"cats sleep"', {"cats"}),
        ('"sleep cats"', set()),
        ('"cat"', set()),
        ("c++", {"cats", "cafe"}),
        ("กินข้าว", {"thai"}),
        ("हिन्दी", {"hindi"}),
        ("공원", {"korean"}),
        ("→", {"cats"}),
        ("🎉", {"emoji"}),
        ("%", {"emoji"}),
        ("_", set()),
        ("   ", set()),
    ],
)
def test_finds(store: Store, query: str, found: set[str]) -> None:
    assert {hit.chat_id for hit in store.search(query)} == found


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "a OR",
        "NOT",
        "terms:x",
        "(a",
        "a*",
        "'",
        "\0",
        "a\ud800",
        "\ud800",
        '""',
        "^a",
        "a NEAR b",
    ],
)
def test_nothing_in_a_query_is_syntax(store: Store, query: str) -> None:
    assert isinstance(store.search(query), list)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(), max_size=20))
def test_any_query_can_be_asked(store: Store, query: str) -> None:
    store.search(query)


@settings(max_examples=200, deadline=None)
@given(text=st.text("公园里散步去了", min_size=1, max_size=12), data=st.data())
def test_any_part_of_unspaced_text_is_found(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    part = text[start : data.draw(st.integers(start + 1, len(text)))]
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE VIRTUAL TABLE t USING fts5 (terms)")
        db.execute("INSERT INTO t VALUES (?)", (terms(text),))
        match = "SELECT count(*) FROM t WHERE t MATCH ?"
        assert db.execute(match, (expression(part),)).fetchone() == (1,)


def test_hits_are_newest_first_and_say_where(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Conversation(title="Walks")
    say(chat, "the park", [1])
    say(chat, "again", [])
    tracker = Tracker(chat)
    store.write(tracker.changes())
    user = chat.add_user("x " * 200 + "a PARK, parking " + "y " * 200)
    store.write(tracker.changes())
    hits = store.search("park")
    assert [hit.node_id for hit in hits] == [user.id, chat.active_path()[0].id]
    assert (hits[0].title, hits[0].role, hits[0].when) == ("Walks", "user", user.created)
    marked = [hits[0].excerpt[start:end] for start, end in hits[0].marks]
    assert marked == ["PARK", "park"]
    assert hits[0].excerpt.startswith("…")
    assert hits[0].excerpt.endswith("…")
    assert len(store.search("park", limit=1)) == 1
    assert store.search("park", chat_id="other") == []


def test_what_changed_is_found_by_its_new_words_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Conversation()
    node = chat.start_reply(chat.add_user("hello").id)
    tracker = Tracker(chat)
    write(chat, node, [11])
    store.write(tracker.changes())
    assert store.search("11") == []  # while it is written
    chat.finish_reply(node.id, "length")
    store.write(tracker.changes())
    assert len(store.search("11")) == 1
    chat.continue_reply(node.id)
    write(chat, node, [22])
    chat.finish_reply(node.id, "stop")
    store.write(tracker.changes())
    assert len(store.search("11 22")) == 1
    chat.delete(node.id)
    store.write(tracker.changes())
    assert store.search("22") == []


@pytest.mark.parametrize(
    ("content", "query", "marked"),
    [
        ("Das Café, CAFE", "cafe", ["CAFE"]),
        ("Das Café", "cafe", ["Café"]),
        ("ＡＢＣ here", "abc", ["ＡＢＣ"]),
        ("去了公园。公园好", "公园", ["公园", "公园"]),
        ("a.b (c)", "(c)", ["(c)"]),
        ("concat cat", "cat", ["cat"]),
        ("nothing", "missing", []),
        ("line\r\nbreak\x1b[0m", "break", ["break"]),
        ("", "x", []),
    ],
)
def test_excerpts_mark_the_matches(content: str, query: str, marked: list[str]) -> None:
    shown, marks = excerpt(content, query)
    assert [shown[start:end] for start, end in marks] == marked
    assert not {"\n", "\r", "\x1b"} & set(shown)


def test_what_a_reply_thought_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    chat = Conversation(title="Walks \ud800")
    node = chat.start_reply(chat.add_user("where").id)
    chat.add_text(node.id, "A park, 公园里 → maybe", thinking=True)
    chat.add_text(node.id, "Home.")
    tracker = Tracker(chat)
    store.write(tracker.changes())
    assert store.search("park") == []  # while it is written
    chat.finish_reply(node.id, "stop")
    store.write(tracker.changes())
    for query in ("park", "公园", "→", "home park"):
        assert [hit.node_id for hit in store.search(query)] == [node.id]
    hit = store.search("park")[0]
    assert hit.in_thinking and hit.title == "Walks \ud800"
    assert [hit.excerpt[start:end] for start, end in hit.marks] == ["park"]
    (hit,) = store.search("home")
    assert not hit.in_thinking and hit.excerpt == "Home."
    assert store.search('"home a"') == []
    copy = store.duplicate(chat.id)
    assert {hit.chat_id for hit in store.search("park")} == {chat.id, copy}
