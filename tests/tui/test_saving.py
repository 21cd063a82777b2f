"""Saving waits for the disk on a thread of its own, never on the screen's or the engine's."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from chat.store_threads import watch
from running_chat import chat, dictate

from kvchat.chat import attachments
from kvchat.chat.saver import Saver
from kvchat.chat.store import Store
from kvchat.models.load import LanguageModel
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.modals.line_editor import LineEditor


async def test_neither_the_screen_nor_the_engine_touches_the_database(
    llm: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = watch(monkeypatch)
    dictate(llm, "One.", "Two.", "Three.")
    async with chat() as c:
        await c.say("a")
        await c.pilot.press("ctrl+r")
        await c.idle()
        await c.pilot.press("ctrl+n")
        await c.say("b")
        assert c.app.keeper is not None and c.app.worker is not None
        assert c.app.keeper._saver.flush()
        assert seen and seen.isdisjoint({"MainThread", c.app.worker._thread.name})
    assert sorted(each.messages for each in Store(tmp_path / "data" / "chats.db").chats()) == [2, 3]


async def test_the_list_of_chats_waits_for_nobody_s_write(
    llm: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("a")
        await c.pilot.press("ctrl+n")
        await c.say("b")
        assert c.app.keeper is not None and c.app.keeper.flush()
        # What the test itself uses is connected before anybody watches.
        store = Store()
        assert len(store.chats()) == 2
        with closing(sqlite3.connect(tmp_path / "data" / "chats.db")) as other:
            seen = watch(monkeypatch)
            await c.pilot.press("ctrl+l")
            chats = c.app.screen
            assert isinstance(chats, ChatList)
            await c.until(lambda: len(chats._rows) == 2)
            other.execute("BEGIN IMMEDIATE")
            await c.pilot.press("down", "down", "f4", "f3", "f5", "x", "enter")
            assert [row.pinned for row in chats._rows] == [False, False]
            await c.pilot.press("escape")  # what was asked for goes on without the list
            await c.until(lambda: c.app.screen is c.screen)
            other.rollback()
        await c.until(lambda: len(store.chats()) == 3)
        await c.until(lambda: [chat.tags for chat in store.chats()].count(("x",)) == 1)
        pinned = sorted(chat.tags for chat in store.chats() if chat.pinned)
        assert pinned == [(), ("x",)]  # the copy was made of a chat that was pinned by then
        c.screen.action_tags()
        await c.until(lambda: isinstance(c.app.screen, LineEditor))
        await c.pilot.press("end", " ", "y", "enter")
        await c.until(lambda: any("y" in chat.tags for chat in store.chats()))
        assert seen and "MainThread" not in seen


async def test_the_files_of_a_message_are_read_on_another_thread(
    llm: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dictate(llm, "One.")
    (tmp_path / "notes.txt").write_text("Otters.")
    monkeypatch.chdir(tmp_path)
    threads = []
    read = attachments._read

    def noted(path: Path, limit: int) -> tuple[str, int]:
        threads.append(threading.current_thread().name)
        return read(path, limit)

    monkeypatch.setattr(attachments, "_read", noted)
    async with chat() as c:
        c.screen.prompt.message = "see @notes.txt"
        await c.until(lambda: "notes.txt" in c.screen.prompt.attached)
        await c.say("see @notes.txt")
        assert "Otters." in c.said[0][1]
    assert len(threads) >= 2 and "MainThread" not in threads


async def test_what_could_not_be_written_is_told_when_the_screen_is_gone(
    llm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("a")
        assert c.app.keeper is not None and c.app.keeper.flush()
        monkeypatch.setattr(Saver, "flush", lambda *_: False)
    assert c.app.last_words == ["Some of this chat could not be written to the disk."]
