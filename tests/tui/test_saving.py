"""Saving waits for the disk on a thread of its own, never on the screen's or the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat.store_threads import watch
from running_chat import chat, dictate

from kvchat.chat.store import Store
from kvchat.models.load import LanguageModel


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
