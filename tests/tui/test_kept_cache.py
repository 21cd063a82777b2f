"""The KV snapshot of a chat, from the screen: switched on with its size, used when it is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from running_chat import Chat, chat, dictate
from tiny_chat import tiny_llm

from kvchat.chat.keeper import LAST
from kvchat.models import load as load_module
from kvchat.models.load import LanguageModel

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LanguageModel:
    """A tiny model with a file, so that it can be told from others; loaded anew each time."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"weights")
    model = replace(tiny_llm(ctx=400), path=path)
    monkeypatch.setattr(load_module, "load", lambda *_, **__: model)
    return model


def entry(c: Chat) -> str:
    """What the palette says beside the entry."""
    commands = c.app.get_system_commands(c.screen)
    return next(each.help for each in commands if each.title == "Keep the cache of this chat")


def use_entry(c: Chat) -> None:
    commands = c.app.get_system_commands(c.screen)
    next(each for each in commands if each.title == "Keep the cache of this chat").callback()


def panel(c: Chat) -> str:
    return c.screen.cache.render().plain


async def test_it_is_switched_on_with_its_size_and_used_when_the_chat_is_opened(llm):
    dictate(llm, "One.", "Two.", "Three.")
    async with chat() as c:
        await c.say("first")
        assert entry(c).startswith("off now") and "MiB" in entry(c)
        assert "snapshot" not in panel(c)
        c.app.worker._quiet = 0.05
        use_entry(c)
        await c.idle()
        folder = c.app.keeper.snapshots.folder
        chat_id = c.screen.pane.conversation.id
        await c.until(lambda: folder.size(chat_id) > 0)
        await c.until(lambda: "snapshot on disk" in panel(c) and "not written" not in panel(c))
        assert entry(c).startswith("on now") and "on the disk" in entry(c)
        await c.say("second")
    fresh = tiny_llm(ctx=400).engine
    llm.engine._context = fresh._context
    llm.engine.stash.clear()
    async with chat(resume=LAST) as c:
        assert c.screen.pane.conversation.keep_cache is True
        assert len(llm.engine.ids) > 0
        await c.say("third")
        turn = c.screen.feed.session.ledger[-1]
        assert turn.loaded > 0
        assert "from disk" in panel(c)
        use_entry(c)
        await c.idle()
        assert not folder.file(chat_id).exists()
        assert entry(c).startswith("off now")


async def test_a_chat_in_view_that_the_model_has_not_read_has_no_size_yet(llm):
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.said == [])
        assert "once the model has read it" in entry(c)
