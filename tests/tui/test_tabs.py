"""Several chats open at once: what each keeps, and what the one worker does for them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from helpers import wait_until
from rich.cells import cell_len
from running_chat import Chat, chat, dictate

from kvchat.chat import own_model
from kvchat.chat.events import TurnFinished
from kvchat.chat.keeper import LAST, Keeper
from kvchat.chat.store import Store
from kvchat.models import load as load_module
from kvchat.settings import Settings, remember
from kvchat.tui.app import KvchatApp
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.widgets.tab_row import ChatTab

pytestmark = pytest.mark.usefixtures("own_folders")


def row(c: Chat) -> list[tuple[str, str, bool]]:
    tabs = c.screen.tab_row.query(ChatTab)
    return [(tab.view.title, tab.view.state, tab.has_class("-active")) for tab in tabs]


async def hold(c: Chat, text: str) -> None:
    """Send a message, and hold the reply at its first token."""
    c.screen.action_pause()
    await c.type(text)
    await c.until(lambda: c.screen.speed._phase == "paused")


async def listed(c: Chat, count: int) -> ChatList:
    await c.pilot.press("ctrl+l")
    await c.until(lambda: isinstance(c.app.screen, ChatList) and len(c.app.screen._rows) == count)
    return c.app.screen


async def test_one_chat_has_no_row_of_tabs(llm):
    async with chat() as c:
        assert not c.screen.tab_row.display
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.screen.tab_row.display)
        assert row(c) == [("New chat", "", False), ("New chat", "", True)]
        await c.pilot.press("ctrl+f4")
        await c.until(lambda: not c.screen.tab_row.display)
        assert len(c.screen.query("ChatPane")) == 1
        assert c.screen.focused is c.screen.prompt


async def test_each_tab_keeps_its_messages_its_place_and_its_draft(llm):
    dictate(llm, "a\n" * 25, "Second.")
    async with chat((80, 24)) as c:
        await c.say("first")
        c.screen.transcript.scroll_to(y=3, animate=False)
        await c.until(lambda: c.screen.transcript.scroll_y == 3)
        c.screen.prompt.message = "half a thought"
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.screen.focused is c.screen.prompt and c.screen.tab_row.display)
        assert c.said == []
        assert c.screen.prompt.message == ""
        await c.say("second")
        second = c.screen.pane
        await c.pilot.press("ctrl+pageup")
        await c.until(lambda: c.screen.transcript.size and c.screen.focused is c.screen.prompt)
        assert c.said[0] == ("user", "first")
        assert c.screen.transcript.scroll_y == 3
        assert c.screen.prompt.message == "half a thought"
        assert c.screen.prompt.past == ["first"]
        await c.pilot.press("alt+right")
        await c.until(lambda: c.screen.pane is second)
        assert c.said == [("user", "second"), ("assistant", "Second.")]


async def test_a_reply_goes_on_in_its_tab_while_another_is_looked_at(llm):
    dictate(llm, "abcdefghij", "Second.")
    async with chat() as c:
        await hold(c, "first")
        first = c.screen.pane
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.screen.pane is not first)
        assert row(c) == [("first", "writing", False), ("New chat", "", True)]
        assert not c.screen.busy
        await c.pilot.press("escape")  # it stops only what is in view
        await c.type("second")
        await c.until(lambda: row(c)[1][1] == "waiting")
        status = c.screen.transcript._status
        assert "waits until the reply in “first”" in status.lines[-1].text
        assert [q.queued.text for q in c.screen.queue.query("QueuedMessage")] == ["second"]
        assert not first.queue.query("QueuedMessage")
        c.screen.action_pause()
        await c.until(lambda: len(c.said) == 2)
        await c.idle()
        assert c.said == [("user", "second"), ("assistant", "Second.")]
        assert first.conversation.active_path()[-1].content == "abcdefghij"
        assert first.transcript.copy_text(first.transcript.current_node_id) == "abcdefghij"
        assert row(c) == [("first", "unread", False), ("second", "", True)]
        assert c.screen.transcript._status is None
        await c.pilot.press("ctrl+pagedown")
        await c.until(lambda: row(c)[0] == ("first", "", True))


async def test_looking_at_another_tab_leaves_the_cache_alone_and_coming_back_is_free(llm):
    dictate(llm, "One.", "Two.", "Three.")
    told = []
    async with chat() as c:
        put = c.app.bridge.put
        c.app.bridge.put = lambda event: (told.append(event), put(event))
        await c.say("first")
        held = list(llm.engine.ids)
        await c.pilot.press("ctrl+t")
        await c.until(lambda: len(c.screen.tabs.panes) == 2)
        await c.pilot.press("ctrl+pageup", "ctrl+pagedown")
        await c.idle()
        assert list(llm.engine.ids) == held
        await c.say("second")
        await c.pilot.press("ctrl+pageup")
        await c.say("third")
        turn = [event.turn for event in told if isinstance(event, TurnFinished)][-1]
        assert turn.reused >= len(held)
        assert turn.restored
        assert c.said[-1] == ("assistant", "Three.")


async def test_tabs_are_gone_to_and_closed_by_the_mouse(llm):
    async with chat() as c:
        await c.pilot.press("ctrl+t")
        await c.until(lambda: len(c.screen.tab_row.query(ChatTab)) == 2)
        first, second = c.screen.tabs.panes
        await c.pilot.click(c.screen.tab_row.query(ChatTab).first(), offset=(2, 0))
        await c.until(lambda: c.screen.pane is first)
        await c.pilot.click(".tab-row--new")
        await c.until(lambda: len(c.screen.tab_row.query(ChatTab)) == 3)
        assert c.screen.pane not in (first, second)
        await c.pilot.click(c.screen.tab_row.query(ChatTab).first(), offset=(2, 0), button=2)
        await c.until(lambda: first not in c.screen.tabs.panes)
        await c.until(lambda: len(c.screen.tab_row.query(ChatTab)) == 2)
        await c.pilot.click(".chat-tab--close")
        await c.until(lambda: len(c.screen.tabs.panes) == 1)


async def test_a_tab_with_unsent_text_is_closed_on_the_second_try(llm):
    async with chat() as c:
        await c.pilot.press("ctrl+t")
        await c.until(lambda: len(c.screen.tabs.panes) == 2)
        c.screen.prompt.message = "half a thought"
        await c.pilot.press("ctrl+f4")
        assert len(c.screen.tabs.panes) == 2
        assert any("not sent" in n.message for n in c.app._notifications)
        await c.pilot.press("ctrl+f4")
        await c.until(lambda: len(c.screen.tabs.panes) == 1)


async def test_closing_a_tab_ends_its_reply_and_keeps_what_came(llm):
    dictate(llm, "abcdefghij", "Second.")
    async with chat() as c:
        await hold(c, "first")
        chat_id = c.screen.pane.conversation.id
        await c.pilot.press("ctrl+t")
        await c.until(lambda: len(c.screen.tabs.panes) == 2)
        c.screen.tabs.close(c.screen.tabs.panes[0])
        await c.idle()
        await c.until(lambda: len(c.screen.query("ChatPane")) == 1)
        assert not c.screen.tab_row.display
        llm.engine.sampler.dictated = []
        dictate(llm, "Second.")
        await c.say("second")
        assert c.said[-1] == ("assistant", "Second.")
        other = Store()  # another program may have the chat now
        await c.until(lambda: other.load(chat_id).active_path()[-1].reply.finish_reason)
        await c.until(lambda: _can_claim(other, chat_id))
        assert other.load(chat_id).active_path()[-1].content.startswith("a")
        other.close()


def _can_claim(store: Store, chat_id: str) -> bool:
    from kvchat.chat.store_errors import ChatInUseError

    try:
        store.claim(chat_id)
    except ChatInUseError:
        return False
    return True


async def test_an_open_chat_is_gone_to_and_not_opened_twice(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("first")
        first = c.screen.pane
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.screen.pane is not first)
        await c.say("second")
        chats = await listed(c, 2)
        assert {row.id for row in chats._rows} <= {chats._current, *chats._open_ids}
        await c.pilot.press("down", "down", "enter")
        await c.until(lambda: c.screen.pane is first)
        assert len(c.screen.tabs.panes) == 2


async def test_a_chat_of_the_list_can_go_into_a_tab_of_its_own(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("first")
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        await c.say("second")
        await listed(c, 2)
        await c.pilot.press("down", "down", "ctrl+t")
        await c.until(lambda: len(c.screen.tabs.panes) == 2)
        await c.until(lambda: c.said == [("user", "first"), ("assistant", "One.")])
        assert len(c.screen.pane.turns) == 1
        await c.until(lambda: [title for title, *_ in row(c)] == ["second", "first"])


async def test_a_new_chat_waits_for_no_reply(llm):
    dictate(llm, "abcdefghij")
    async with chat() as c:
        await hold(c, "first")
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        assert len(c.screen.tabs.panes) == 2  # the reply has to go on somewhere
        c.screen.action_pause()
        await c.idle()
        assert c.screen.tabs.panes[0].conversation.active_path()[-1].content == "abcdefghij"


async def test_a_rename_in_the_list_is_on_the_tab(llm):
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await c.pilot.press("ctrl+t")
        await c.until(lambda: len(c.screen.tabs.panes) == 2)
        await listed(c, 1)
        await c.pilot.press("down", "f2", "end", "!", "enter", "escape")
        await c.until(lambda: row(c)[0][0] == "first!")
        assert [chat.title for chat in c.app.keeper.store.chats()] == ["first!"]


async def test_another_model_is_there_for_all_tabs(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("first")
        first = c.screen.pane
        await c.pilot.press("ctrl+t")
        await c.until(lambda: c.screen.pane is not first)
        from kvchat.tui.modals.model_picker import ModelChoice

        c.screen._load(ModelChoice("another", False))
        await c.idle()
        await c.pilot.press("ctrl+pageup")
        await c.say("second")
        assert first.conversation.active_path()[-1].content == "Two."


async def test_titles_of_the_model_are_on_the_tabs(llm, monkeypatch):
    monkeypatch.setenv("KVCHAT_TITLES", "true")
    dictate(llm, "One.", "A Greeting")
    async with chat() as c:
        await c.say("first")
        await c.until(lambda: c.screen.pane.title == "A Greeting")
        await c.until(lambda: [t.title for t in c.app.keeper.store.chats()] == ["A Greeting"])


async def test_many_tabs_fit_and_the_one_in_view_is_shown(llm):
    async with chat((80, 24)) as c:
        for n in range(12):
            await c.pilot.press("ctrl+t")
            await c.until(lambda n=n: len(c.screen.tab_row.query(ChatTab)) == n + 2)
        active = [tab for tab in c.screen.tab_row.query(ChatTab) if tab.has_class("-active")]
        await wait_until(c.pilot, lambda: active[0].region.right <= c.screen.tab_row.region.right)
        assert c.screen.tab_row.size.height == 1


async def test_the_open_tabs_come_back_with_the_last_chat(llm):
    dictate(llm, "One.", "Two.", "Three.", "Four.")
    async with chat() as c:
        for nth, text in enumerate(("first", "second", "third")):
            if nth:
                await c.pilot.press("ctrl+t")
            await c.say(text)
        await c.pilot.press("ctrl+pageup")
        await c.until(lambda: c.said[0] == ("user", "second"))
        await c.say("more")
    async with chat(resume=LAST) as c:
        assert [tab[0] for tab in row(c)] == ["first", "second", "third"]
        assert c.said[-1] == ("assistant", "Four.")
        assert c.screen.focused is c.screen.prompt
        await c.pilot.press("ctrl+pageup")
        await c.until(lambda: c.said == [("user", "first"), ("assistant", "One.")])
        ids = [pane.conversation.id for pane in c.screen.tabs.panes]
    # One of them gone, one in use elsewhere, and another chat that was the last.
    Store().delete(ids[0])
    other = Store()
    other.claim(ids[2])
    async with chat(resume=LAST) as c:
        assert [tab.conversation.id for tab in c.screen.tabs.panes] == [ids[1]]
    async with chat() as c:
        dictate(llm, "Five.")
        await c.say("fourth")
    remember(tabs=ids)
    async with chat(resume=LAST) as c:
        assert c.said[0] == ("user", "fourth") and len(c.screen.tabs.panes) == 1
    other.close()


async def test_what_is_sent_while_the_last_chat_is_looked_up_goes_to_it(llm, monkeypatch):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("first")
    found = threading.Event()
    resume = Keeper.resume
    monkeypatch.setattr(Keeper, "resume", lambda *args: (found.wait(10), resume(*args))[1])
    settings, problems = Settings.load({"max_tokens": 60})
    app = KvchatApp(settings, problems, resume=LAST)
    async with app.run_test(size=(120, 36)) as pilot:
        c = Chat(app, pilot)
        await c.until(lambda: app.keeper is not None)
        await c.type("second")
        found.set()
        await c.until(lambda: c.said[2:] == [("user", "second"), ("assistant", "Two.")])


@pytest.mark.parametrize(("flags", "asked"), [({}, "otter"), ({"model": "smollm2"}, "smollm2")])
async def test_a_chat_comes_back_with_its_own_model(llm, monkeypatch, flags, asked):
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
    monkeypatch.setattr(own_model, "_located", Path)
    monkeypatch.setattr(own_model, "last_author", lambda *_: {"model": "otter", "path": "otter"})
    loaded = []
    monkeypatch.setattr(load_module, "load", lambda name, **_: loaded.append(name) or llm)
    async with chat(resume=LAST, **flags):
        assert loaded == [asked]


async def test_the_cache_panel_says_whose_cache_it_shows(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        lines = lambda: c.screen.cache.render().plain  # noqa: E731
        await c.say("first")
        assert "“" not in lines()
        await c.pilot.press("ctrl+t")
        await c.until(lambda: "of “first”" in lines() and "another tab" in lines())
        await c.say("second")
        await c.until(lambda: "“" not in lines())
        await c.pilot.press("ctrl+pageup")
        await c.until(lambda: "of “second”" in lines())
        c.screen.cache.compact = True
        assert "of “second”" in lines()
        c.screen.cache.compact = False
        c.screen.chats.renamed(c.screen.tabs.panes[1].conversation.id, "公园" * 20)
        [line] = [line for line in lines().split("\n") if "another tab" in line]
        assert cell_len(line) == c.screen.cache.content_size.width and "…”" in line
        await c.pilot.press("ctrl+pagedown", "ctrl+n")
        await c.until(lambda: "closed" in lines())
