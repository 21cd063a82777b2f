"""What chats as a whole look like: tabs, the list of chats, files of chats, personas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from running_chat import Chat, dictate
from store_helpers import say as store_say
from test_snapshots import _same_everywhere, model, say, settled, shows  # noqa: F401 (fixtures)

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.settings import Persona
from kvchat.tui.modals.chat_files import ExportDialog, ImportDialog
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.modals.persona_picker import PersonaPicker

NOW = datetime(2026, 3, 14, 15, 9, tzinfo=UTC)
DAY = 86_400
PERSONAS = [
    Persona("poet", "", None, "Answer in verse, four lines at the most.", "creative", {}),
    Persona("校对", "", "qwen3-1.7b", "检查拼写和语法,不要改变意思。", None, {"temperature": 0.2}),
    Persona("plain", "", None, None, None, {"top_k": 1, "max_tokens": 200}),
]

sizes = pytest.mark.parametrize(
    ("size", "theme"), [((120, 36), "dusk"), ((80, 24), "paper")], ids=["wide", "narrow"]
)


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def saved(folder: Path) -> tuple[Store, list[str]]:
    """Chats of some days, the first of them open."""
    store, ids = Store(folder / "list.db"), []
    for days, title, tags, texts in (
        (0, "", (), ["Why do otters hold hands while they sleep?"]),
        (0, "Sourdough, second try", ("kitchen",), ["How warm should the dough be?"] * 3),
        (1, "周末去公园的计划", ("出游", "family"), ["公园几点开门?", "可以带狗吗?"]),
        (9, "Review of the cache: what is kept, what is cut, and what it costs in the long run",
         ("work",), ["Look at truncate()."]),
        (40, "A letter to the landlord", (), ["The heating in the park side rooms is off."]),
    ):  # fmt: skip
        chat = Conversation(title=title)
        for text in texts:
            store_say(chat, text, [5, 6])
        store.save(chat)
        store.tag(chat.id, tags)
        when = NOW.timestamp() - days * DAY - len(ids) * 777
        store._database.write(
            lambda db, id_=chat.id, when=when: db.execute(
                "UPDATE chats SET changed = ? WHERE id = ?", (when, id_)
            )
        )
        ids.append(chat.id)
    store.pin(ids[3])
    return store, ids


async def listed(c: Chat, folder: Path) -> ChatList:
    store, ids = saved(folder)
    chats = ChatList(store, ids[0], ids[2:3], now=lambda: NOW)
    c.app.push_screen(chats)
    await c.until(lambda: len(chats._rows) == len(ids))
    return chats


@sizes
def test_tabs(model, shows, size, theme):  # noqa: F811
    dictate(model, "It sleeps on its back.", "Twenty-four degrees.", "abcdefgh")

    async def scene(c: Chat) -> None:
        await say(c, "How does an otter sleep?")
        await c.pilot.press("ctrl+t")
        await say(c, "How warm should the dough be?")
        await c.pilot.press("ctrl+t")
        c.app.worker.pause()
        await c.type("Say the alphabet.")
        await c.until(lambda: c.screen.speed._phase == "paused")
        await c.pilot.press("ctrl+pageup")
        await c.until(lambda: c.screen.pane is c.screen.tabs.panes[1])

    assert shows(scene, size, theme)


@sizes
def test_the_list_of_chats(in_utc, model, shows, tmp_path, size, theme):  # noqa: F811
    async def scene(c: Chat) -> None:
        await listed(c, tmp_path)

    assert shows(scene, size, theme)


def test_a_search_in_all_chats(in_utc, model, shows, tmp_path):  # noqa: F811
    async def scene(c: Chat) -> None:
        chats = await listed(c, tmp_path)
        await c.pilot.press(*"公园")
        await c.until(lambda: len(chats._rows) == 2)

    assert shows(scene, (80, 24))


def test_tags_of_a_chat_in_the_list(in_utc, model, shows, tmp_path):  # noqa: F811
    async def scene(c: Chat) -> None:
        chats = await listed(c, tmp_path)
        await c.pilot.press("down", "f5")
        await c.until(lambda: chats._editing)

    assert shows(scene, (80, 24), "paper")


@sizes
def test_export(model, shows, size, theme):  # noqa: F811
    async def scene(c: Chat) -> None:
        c.app.push_screen(ExportDialog("otters"))
        await c.until(lambda: isinstance(c.app.screen, ExportDialog))

    assert shows(scene, size, theme)


def test_import_of_a_file_that_is_not_there(model, shows):  # noqa: F811
    async def scene(c: Chat) -> None:
        c.app.push_screen(ImportDialog())
        await c.until(lambda: isinstance(c.app.screen, ImportDialog))
        await c.pilot.press(*"/no/where.json", "enter")

    assert shows(scene, (80, 24))


@sizes
def test_personas(model, shows, size, theme):  # noqa: F811
    async def scene(c: Chat) -> None:
        c.app.push_screen(PersonaPicker(PERSONAS, ""))
        await c.until(lambda: isinstance(c.app.screen, PersonaPicker))

    assert shows(scene, size, theme)


def test_no_personas_yet(model, shows):  # noqa: F811
    async def scene(c: Chat) -> None:
        c.screen.action_personas()
        await c.until(lambda: isinstance(c.app.screen, PersonaPicker))

    assert shows(scene, (80, 24))
