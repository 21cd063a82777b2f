"""The whole screen over a real worker and a tiny model whose words are dictated."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from helpers import wait_until
from running_chat import chat, dictate
from textual import constants, events
from textual.command import CommandPalette

from kvchat.chat.events import Paused, WorkerEvent
from kvchat.chat.keeper import LAST
from kvchat.chat.store_search import Hit
from kvchat.chat.worker import STATUS_EVERY
from kvchat.engine.errors import KvchatError
from kvchat.models import load as load_module
from kvchat.models.pull_staging import PullProgress
from kvchat.settings import Settings
from kvchat.tui.app import KvchatApp
from kvchat.tui.main_screen import MainScreen
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.modals.help import HelpScreen
from kvchat.tui.modals.model_picker import ModelPicker
from kvchat.tui.modals.overflow import OverflowQuestion
from kvchat.tui.modals.text_editor import TextEditor
from kvchat.tui.views import message_view, turn_spans
from kvchat.tui.widgets.key_line import KeyLine
from kvchat.tui.widgets.transcript import Transcript

pytestmark = pytest.mark.usefixtures("own_folders")


async def test_a_reply_that_is_ahead_of_the_screen_is_shown_once(llm, monkeypatch):
    dictate(llm, "Hello there.")
    async with chat() as c:
        with monkeypatch.context() as held:
            held.setattr(c.app.bridge, "drain", lambda handle: None)
            c.app.worker.pause()
            await c.type("Hi")
            await c.until(lambda: c.said[-1:] == [("assistant", "H")])
        c.app.bridge.drain(c.screen.handle_events)
        await c.until(lambda: c.screen.speed._phase == "paused")
        assert c.screen.transcript.copy_text(c.screen.transcript.current_node_id) == "H"


async def test_a_message_is_answered_and_stands_in_the_transcript(llm):
    dictate(llm, "Hello there.")
    async with chat() as c:
        await c.say("Hi")
        assert c.said == [("user", "Hi"), ("assistant", "Hello there.")]
        assert c.screen.prompt.message == ""
        node = c.screen.pane.conversation.active_path()[-1]
        assert c.screen.transcript.copy_text(node.id) == "Hello there."
        assert c.screen.pane.turns[node.id].decoded == len("Hello there.")


async def test_enter_does_not_overtake_letters_of_the_same_burst(llm):
    dictate(llm, "Hello there.")
    async with chat() as c:
        c.screen.prompt.focus()
        for key in ("H", "i", "enter"):  # posted at once, as a slow line delivers them
            c.app.post_message(events.Key(key, key if len(key) == 1 else "\r"))
        await c.until(lambda: len(c.said) == 2)
        await c.idle()
        assert c.said[0] == ("user", "Hi")


async def test_no_key_overtakes_letters_of_the_same_burst(llm):
    async with chat() as c:
        c.screen.prompt.focus()
        for key in ("a", "b", "ctrl+j", "c", "left", "d"):
            c.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await c.until(lambda: c.screen.prompt.message == "ab\ndc")


async def test_typing_goes_to_the_prompt_from_the_transcript(llm):
    dictate(llm, "Hello there.")
    async with chat() as c:
        await c.say("Hi")
        c.screen.transcript.focus()
        await c.pilot.press("W", "h", "o")
        assert c.screen.prompt.message == "Who"


@pytest.mark.parametrize("focused", ["transcript", "_first_slider"])
async def test_a_burst_typed_elsewhere_arrives_whole_and_in_order(llm, focused):
    dictate(llm, "Hello there.")
    async with chat() as c:
        getattr(c.screen, focused).focus()
        for key in ("W", "h", "o", "enter"):
            c.app.post_message(events.Key(key, key if len(key) == 1 else "\r"))
        await c.until(lambda: len(c.said) == 2)
        await c.idle()
        assert c.said[0] == ("user", "Who")
        assert c.screen.prompt.message == ""


async def test_a_number_typed_at_a_slider_stays_there(llm):
    async with chat() as c:
        slider = c.screen._first_slider
        slider.focus()
        for key, character in (("1", "1"), ("full_stop", "."), ("5", "5"), ("enter", "\r")):
            c.app.post_message(events.Key(key, character))
        await c.until(lambda: c.app.worker.params.temperature == 1.5)
        assert c.screen.focused is slider
        assert c.screen.prompt.message == ""


async def test_escape_goes_to_the_prompt_when_nothing_is_written(llm):
    async with chat() as c:
        for widget in (c.screen.transcript, c.screen._first_slider):
            widget.focus()
            await c.pilot.press("escape")
            assert c.screen.focused is c.screen.prompt


async def test_a_branch_from_an_earlier_reply(llm):
    dictate(llm, "One.", "Two.", "Three.")
    async with chat() as c:
        await c.say("a")
        first = c.screen.feed.session.last_reply()
        await c.say("b")
        c.screen.transcript.focus()
        c.screen.transcript.selected_id = first.id
        await c.pilot.press("b")
        await c.until(lambda: len(c.said) == 2)
        await c.say("c")
        assert c.said == [
            ("user", "a"),
            ("assistant", "One."),
            ("user", "c"),
            ("assistant", "Three."),
        ]
        assert c.screen.pane.conversation.siblings(
            c.screen.pane.conversation.active_path()[2].id
        ) == (1, 2)


async def test_a_second_turn_reuses_the_first(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("a")
        await c.say("b")
        turn = list(c.screen.pane.turns.values())[-1]
        assert turn.reused > turn.new


async def test_the_context_fills_while_a_reply_is_written(llm):
    dictate(llm, "abcdefghij" * 5)
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.cache._spans)
        before = c.screen.cache._spans[0].tokens
        for _ in range(STATUS_EVERY):
            c.app.worker.step()
        await c.until(lambda: c.screen.cache._spans[0].tokens >= before + STATUS_EVERY - 2)
        assert len(c.screen.cache._spans) == 1
        await c.pilot.press("escape")
        await c.idle()


async def test_escape_stops_and_keeps_what_came(llm):
    dictate(llm, "abcdefghij" * 5)
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.busy)
        c.screen.paused = True
        for n in range(3):
            await c.pilot.press("f8")
            await c.until(lambda n=n: len(c.said) == 2 and len(c.said[-1][1]) >= n + 1)
        await c.pilot.press("escape")
        await c.idle()
        assert c.said[-1][1].startswith("abc")
        assert len(c.said[-1][1]) < 12
        assert not c.screen.paused


async def test_regenerate_keeps_both_and_the_arrows_go_between_them(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("Hi")
        await c.pilot.press("ctrl+r")
        await c.until(lambda: c.said[-1][1] == "Second.")
        await c.idle()
        c.screen.transcript.focus()
        await c.pilot.press("left")
        await c.until(lambda: c.said[-1][1] == "First.")
        await c.pilot.press("right")
        await c.until(lambda: c.said[-1][1] == "Second.")


async def test_editing_a_message_answers_it_anew(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("Hi")
        await c.pilot.press("f12")
        await c.until(lambda: isinstance(c.app.screen, TextEditor))
        await c.pilot.press("!")
        c.app.screen.dismiss("Hi!")
        await c.until(lambda: c.said == [("user", "Hi!"), ("assistant", "Second.")])
        await c.idle()


async def test_saving_does_not_overtake_letters_of_the_same_burst(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("Hi")
        await c.pilot.press("f12")
        await c.until(lambda: isinstance(c.app.screen, TextEditor))
        for key in ("a", "b", "ctrl+s"):
            c.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await c.until(lambda: c.said == [("user", "Hiab"), ("assistant", "Second.")])
        await c.idle()


async def test_a_slider_acts_on_the_next_token_and_leaves_a_mark(llm):
    dictate(llm, "abcdefghij")
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.busy and len(c.said) == 2 and c.said[-1][1])
        slider = c.screen._first_slider
        slider.focus()
        await c.pilot.press("right")
        await c.until(lambda: c.app.worker.params.temperature > 0)
        c.app.worker.resume()
        await c.idle()
        node = c.screen.pane.conversation.active_path()[-1]
        temperatures = [params.temperature for _, params in node.reply.params]
        assert len(temperatures) == 2
        assert temperatures[0] == 0 < temperatures[1]
        [mark] = message_view(c.screen.pane.conversation, node, {}, llm).marks
        assert mark.offset == node.reply.params[1][0]  # one character a token
        assert mark.text.startswith("temperature 0 → ")


async def test_a_mark_stands_before_the_token_however_its_events_come(llm, monkeypatch):
    def one_by_one(screen: MainScreen, told: list[WorkerEvent]) -> None:
        for event in told:
            screen.feed.handle([event])

    monkeypatch.setattr(MainScreen, "handle_events", one_by_one)
    dictate(llm, "abcdefghij")
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.speed._phase == "paused")
        c.app.worker.params = c.app.worker.params.updated(temperature=1)
        c.app.worker.step()
        await c.until(lambda: c.screen.transcript._reply.view.text == "ab")
        marks = c.screen.transcript._reply.view.marks
        assert [(mark.offset, mark.text) for mark in marks] == [(1, "temperature 0 → 1")]


async def test_messages_sent_while_it_writes_wait_and_can_be_withdrawn(llm):
    dictate(llm, "First.", "Third.")
    async with chat() as c:
        c.app.worker.pause()
        await c.type("one")
        await c.until(lambda: c.screen.busy)
        await c.type("two")
        await c.type("three")
        await c.until(lambda: len(c.screen.queue.query("QueuedMessage")) == 2)
        c.screen.queue.query("QueuedMessage").first().focus()
        await c.pilot.press("delete")
        await c.until(lambda: len(c.screen.queue.query("QueuedMessage")) == 1)
        c.app.worker.resume()
        await c.until(lambda: len(c.said) == 4)
        await c.idle()
        assert [text for role, text in c.said if role == "user"] == ["one", "three"]


async def test_deleting_can_be_undone(llm):
    dictate(llm, "First.")
    async with chat() as c:
        await c.say("Hi")
        c.screen.transcript.focus()
        await c.pilot.press("delete")
        await c.until(lambda: len(c.said) < 2)
        await c.pilot.press("f10")
        await c.until(lambda: len(c.said) == 2)


async def test_a_file_is_attached_by_name(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("Otters sleep.\n")
    (tmp_path / "image.bin").write_bytes(b"\0\1")
    dictate(llm, "Fine.")
    async with chat() as c:
        await c.say("Sum up @notes.txt and @image.bin")
        assert "Otters sleep." in c.said[0][1]
        assert "@image.bin" in c.said[0][1]
        assert any("image.bin" in n.message for n in c.app._notifications)


async def test_the_path_of_a_file_is_pasted_and_told_before_it_is_sent(llm, tmp_path):
    (tmp_path / "my notes.txt").write_text("Otters sleep.\n")
    dictate(llm, "Fine.")
    async with chat() as c:
        c.screen.prompt.focus()
        await c.pilot.press(*"see")
        c.screen.prompt.post_message(events.Paste(f"'{tmp_path}/my notes.txt'"))
        path = f'"{tmp_path}/my notes.txt"'
        await c.until(lambda: c.screen.prompt.message == f"see @{path} ")
        await c.until(lambda: "new" in c.screen.prompt.cost)
        shown = str(c.screen.prompt.border_subtitle)
        assert shown == f"attached: {tmp_path}/my notes.txt (14 bytes) · {c.screen.prompt.cost}"
        await c.pilot.press("enter")
        await c.until(lambda: len(c.said) == 2)
        await c.idle()
        assert "Otters sleep." in c.said[0][1]
        assert str(c.screen.prompt.border_subtitle) == ""


async def test_while_a_reply_is_written_the_cost_is_told_as_far_as_it_is_known(llm):
    dictate(llm, "Fine.", "abcdefghij" * 5)
    async with chat() as c:
        await c.say("Hi")
        c.app.worker.pause()
        await c.type("Go on")
        await c.until(lambda: c.screen.busy)
        await c.pilot.press(*"more")
        await c.until(lambda: c.screen.prompt.cost)
        # The template's own tokens and those that are reused are not known yet.
        assert c.screen.prompt.cost in ("4 tokens · at once", "4 tokens · about 0.1 s")
        await c.pilot.press("escape")
        await c.until(lambda: "new tokens" in c.screen.prompt.cost)
        assert "reused" in c.screen.prompt.cost
        await c.idle()
        await c.until(lambda: not c.app.bridge._outstanding)


async def test_another_model_is_offered_once_and_takes_no_keys(llm, monkeypatch):
    named = replace(llm, name="smollm2")
    monkeypatch.setattr(load_module, "load", lambda *_, **__: named)
    dictate(llm, "Hello.", "Hello.")
    async with chat() as c:
        await c.say("你好，你是谁？请介绍一下自己。")
        await c.say("你好，你是谁？请介绍一下自己。")
        assert c.app.screen is c.screen
        assert c.screen.focused is c.screen.prompt
        offers = [n for n in c.app._notifications if "not made for this language" in n.message]
        assert len(offers) == 1
        assert "F4" in offers[0].message
        await c.pilot.press("f4")
        await c.until(lambda: isinstance(c.app.screen, ModelPicker) and c.app.screen._choices)
        assert "Chinese come first" in str(c.app.screen.query_one(".dialog--note").render())


async def test_a_chat_is_kept_and_found_again(llm):
    dictate(llm, "The otter sleeps.", "Second.", "Third.")
    async with chat() as c:
        await c.say("Tell me of an animal")
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        await c.say("Something else")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatList) and c.app.screen._rows)
        await c.pilot.press(*"otter")
        await c.until(lambda: any(isinstance(row, Hit) for row in c.app.screen._rows))
        await c.pilot.press("enter")
        await c.until(lambda: c.said[-1:] == [("assistant", "The otter sleeps.")])
        await c.idle()
        assert len(c.screen.pane.turns) == 1
        await c.say("Go on")
        assert c.said[-1] == ("assistant", "Third.")


@pytest.mark.parametrize("another", [True, False])
async def test_a_message_that_was_found_is_gone_to(llm, another):
    filler = "x\n" * 30
    dictate(llm, "The otter sleeps.", "Second.")
    async with chat(max_tokens=20) as c:
        await c.say("Tell me of an animal")
        otter = c.screen.pane.conversation.active_path()[-1].id
        await c.say(filler)
        assert c.screen.transcript.scroll_y > 0
        if another:
            await c.pilot.press("ctrl+n")
            await c.until(lambda: c.said == [])
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatList) and c.app.screen._rows)
        await c.pilot.press(*"otter")
        await c.until(lambda: any(isinstance(row, Hit) for row in c.app.screen._rows))
        hits = [isinstance(row, Hit) for row in c.app.screen._rows]
        await c.pilot.press("down", *["down"] * hits.index(True), "enter")
        await c.until(lambda: c.screen.transcript.has_focus)
        assert c.screen.transcript.current_node_id == otter
        assert c.screen.transcript.scroll_y < c.screen.transcript.max_scroll_y


async def test_the_last_chat_goes_on_after_a_restart(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("Hi")
        before = c.screen.pane.conversation
    async with chat(resume=LAST) as c:
        after = c.screen.pane.conversation
        assert after is not before
        assert c.said == [("user", "Hi"), ("assistant", "First.")]
        assert after.context_ids(after.active_path()[-1].id) == before.context_ids(
            before.active_path()[-1].id
        )
        await c.say("And?")
        assert c.said[-1] == ("assistant", "Second.")


async def test_a_chat_can_be_renamed_pinned_copied_deleted_and_brought_back(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("Hi")
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        await c.say("Other")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatList) and len(c.app.screen._rows) == 2)
        chats = c.app.screen
        titles = lambda: [row.title for row in chats._rows]  # noqa: E731
        await c.pilot.press("down", "down", "f4")
        await c.until(lambda: titles() == ["Hi", "Other"] and chats._rows[0].pinned)
        await c.pilot.press("up", "f2")
        await c.pilot.press("end", "!", "enter")
        await c.until(lambda: titles() == ["Hi!", "Other"])
        chats.action_into_list()
        await c.pilot.press("f3")
        await c.until(lambda: len(chats._rows) == 3)
        await c.pilot.press("home", "delete")
        await c.until(lambda: len(chats._rows) == 2)
        await c.pilot.press("f10")
        await c.until(lambda: len(chats._rows) == 3)


async def test_an_overflow_is_asked_about_and_the_text_comes_back(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("a" * 200)
        await c.type("b" * 120)
        await c.until(lambda: isinstance(c.app.screen, OverflowQuestion))
        await c.pilot.press("escape")
        await c.until(lambda: c.screen.prompt.message == "b" * 120)
        assert len(c.said) == 2
        await c.pilot.press("enter")
        await c.until(lambda: isinstance(c.app.screen, OverflowQuestion))
        c.app.screen.dismiss("drop-oldest")
        await c.until(lambda: len(c.said) == 4)
        await c.idle()
        assert c.said[-1][1] == "Second."
        conversation = c.screen.pane.conversation
        spans = turn_spans(conversation, conversation.active_path())
        last = conversation.active_path()[-1]
        assert sum(span.tokens for span in spans) == len(conversation.context_ids(last.id))
        assert [span.label for span in spans] == ["2"]


async def test_a_full_context_can_be_used_to_its_end(llm):
    dictate(llm, "First.", "Second.")
    async with chat() as c:
        await c.say("a" * 200)
        await c.type("b" * 70)
        await c.until(lambda: isinstance(c.app.screen, OverflowQuestion))
        c.app.screen.dismiss("stop")
        await c.until(lambda: len(c.said) == 4)
        await c.idle()
        assert not c.screen.pane.conversation.dropped


async def test_what_is_being_fetched_has_a_bar(llm):
    async with chat() as c:
        c.screen.handle_events([PullProgress(49_000_000, 98_000_000, "downloading")])
        told = c.screen.transcript._status.lines[-1].text
        assert told == "━" * 12 + "─" * 12 + " downloading · 50% of 98 MB"
        c.screen.handle_events([PullProgress(49_000_000, None, "downloading")])
        assert c.screen.transcript._status.lines[-1].text == "downloading"


async def test_a_model_that_does_not_load_is_told_and_the_screen_stays_usable(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise KvchatError("the file is damaged; fetch it again")

    monkeypatch.setattr(load_module, "load", fail)
    settings, problems = Settings.load({})
    app = KvchatApp(settings, problems)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await wait_until(pilot, lambda: app._notifications)
        assert any("damaged" in n.message for n in app._notifications)
        assert "no model is loaded" in app._main_screen.transcript._status.lines[-1].text
        app._main_screen.prompt.message = "Hi"
        await pilot.press("enter")
        await wait_until(pilot, lambda: app._main_screen.prompt.message == "Hi")


async def test_model_output_is_shown_as_text(llm):
    nasty = "[bold]x[/] \x1b[31mred\x1b]52;c;aGk=\x07 \x00 \r end"
    dictate(llm, nasty)
    async with chat() as c:
        await c.say("Hi")
        assert c.said[-1][1] == nasty
        shown = c.app.export_screenshot()
        assert "\x1b" not in shown
        assert "[bold]x[/]".replace("[", "&#91;") in shown or "[bold]x[/]" in shown


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_all_that_matters_is_there_at_every_size(llm, size):
    dictate(llm, "Hello.")
    async with chat(size) as c:
        await c.say("Hi")
        assert c.screen.sidebar.display == (size[0] >= 100)
        await c.pilot.press("f2")
        assert c.screen.sidebar.display
        assert c.screen.focused is c.screen._first_slider
        assert c.screen.transcript.size.height >= 8
        assert c.screen.prompt.size.height >= 1
        await c.pilot.press("f2")
        assert not c.screen.sidebar.display
        assert c.screen.focused is c.screen.prompt


@pytest.mark.parametrize("following", [True, False])
async def test_a_reply_goes_on_while_the_terminal_is_too_small(llm, following):
    dictate(llm, "a\n" * 25, "abcdefghij" * 5)
    async with chat((60, 20)) as c:
        await c.say("Hi")
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.busy)
        if not following:
            c.screen.transcript.scroll_home(animate=False)
        await c.pilot.resize_terminal(50, 15)
        await c.until(lambda: not c.screen.transcript.size)
        for n in range(4):
            c.app.worker.step()
            await c.until(lambda n=n: len(c.said) == 4 and len(c.said[-1][1]) > n + 1)
        c.screen.transcript.action_move(-1)
        await c.pilot.resize_terminal(60, 20)
        await c.until(lambda: c.screen.transcript.size)
        assert c.screen.transcript.is_vertical_scroll_end is following
        assert c.app._exception is None
        await c.pilot.press("escape")
        await c.idle()


async def test_a_terminal_that_is_too_small_gets_a_sentence(llm):
    async with chat((50, 15)) as c:
        assert c.screen.query_one("#too-small").display
        assert not c.screen.query_one("#main").display
        await c.pilot.resize_terminal(100, 30)
        await c.until(lambda: c.screen.query_one("#main").display)


async def test_help_shows_every_key_of_the_screen(llm):
    async with chat() as c:
        await c.pilot.press("f1")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))
        shown = {what for group in c.app.screen._groups for _, what in group.keys}
        for binding in MainScreen.BINDINGS:
            assert binding.description in shown


@pytest.mark.parametrize("focused", ["prompt", "transcript", "_first_slider"])
async def test_every_key_of_the_screen_works_wherever_the_focus_is(llm, focused):
    async with chat() as c:
        getattr(c.screen, focused).focus()
        await c.pilot.pause()
        active = c.screen.active_bindings
        for binding in (*MainScreen.BINDINGS, *KvchatApp.BINDINGS):
            for key in binding.key.split(","):
                assert active[key].binding.action == binding.action, key


async def test_the_line_of_keys_shows_what_is_needed_most_now(llm):
    dictate(llm, "word " * 20)
    async with chat((60, 20)) as c:
        line = c.screen.query_one(KeyLine)

        def shown() -> list[str]:
            return [key.description for key in line.keys]

        assert shown()[:4] == ["Send", "Help", "Commands", "Sliders"]
        assert line.render().plain.startswith("Enter Send  F1 Help  ^P Commands")
        await c.pilot.press("f7")  # there is nothing to hold
        assert not c.screen.paused
        worker = c.app.worker
        worker.pause()
        await c.type("Hi")
        await c.until(lambda: shown()[:4] == ["Send", "Stop", "Pause", "Step"])
        worker.resume()
        await c.idle()
        await c.until(lambda: "Stop" not in shown())


async def test_a_click_presses_what_the_line_of_keys_shows(llm):
    async with chat((100, 30)) as c:
        await c.pilot.click(KeyLine, offset=(15, 0))
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))


async def test_the_palette_offers_all_that_can_be_done_now(llm):
    async with chat() as c:
        titles = {command.title for command in c.app.get_system_commands(c.screen)}
        assert {"Model", "Theme", "Quit", "Help"} <= titles
        assert not {"Stop", "Regenerate", "Continue"} & titles
        assert {f"Message: {b.description}" for b in Transcript.BINDINGS} <= titles


async def test_the_palette_carries_out_what_is_chosen(llm):
    dictate(llm, "First.")
    async with chat() as c:
        await c.say("Hi")
        await c.pilot.press("ctrl+p")
        await c.until(lambda: isinstance(c.app.screen, CommandPalette))
        c.app.screen.query_one("CommandInput").value = "Message: Delete"
        await c.until(lambda: c.app.screen.query_one("CommandList").option_count == 1)
        await c.pilot.press("enter")
        await c.until(lambda: len(c.said) == 1)


async def test_many_problems_with_the_settings_are_one_notification(llm):
    settings, _ = Settings.load({})
    app = KvchatApp(settings, [f"problem {n}" for n in range(9)])
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_until(pilot, lambda: app._notifications)
        (told,) = app._notifications
        assert "problem 0" in told.message
        assert "6 more" in told.message


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 20)])
async def test_many_notifications_stay_off_the_prompt_and_the_newest_is_in_view(llm, size):
    settings, _ = Settings.load({})
    app = KvchatApp(settings, [f"problem {n}: " + "word " * 20 for n in range(4)])
    async with app.run_test(size=size, notifications=True) as pilot:
        await wait_until(pilot, lambda: app.screen.query("Toast"))
        app.notify("The model is gone; fetch it again.", severity="error")
        await wait_until(pilot, lambda: len(app.screen.query("Toast")) == 2)
        prompt, newest = app.screen.prompt.region, app.screen.query("Toast").last()

        def is_whole() -> bool:
            region = newest.region
            corners = region.offset, region.bottom_right - (1, 1)
            return all(app.screen.get_widget_at(*corner)[0] is newest for corner in corners)

        await wait_until(pilot, is_whole)
        assert newest.region.bottom <= prompt.y
        assert newest.region.right <= prompt.right + 1


async def test_a_terminal_of_few_colours_is_told_of_once(llm, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(constants, "COLOR_SYSTEM", "standard")
    settings, _ = Settings.load({"theme": "paper"})
    for starts in range(2):
        app = KvchatApp(settings)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await wait_until(pilot, lambda app=app: app.worker is not None)
            told = ["16 colours" in note.message for note in app._notifications]
            assert told.count(True) == (starts == 0)


async def test_events_that_come_while_the_screen_is_going_are_dropped(llm):
    async with chat() as c:
        pass
    handled: list[object] = []
    c.app.bridge.put(Paused())
    c.app.bridge._hand_over(handled.extend)
    assert handled == []
    assert c.app._exception is None


async def test_keys_can_be_bound_anew(llm, tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.toml").write_text('[keys]\nchat.help = "ctrl+b"\n')
    async with chat() as c:
        await c.pilot.press("ctrl+b")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
async def test_a_signal_ends_it_in_order(llm):
    dictate(llm, "abc" * 15)
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.busy)
        os.kill(os.getpid(), signal.SIGTERM)
        await c.until(lambda: c.app.return_code == 128 + signal.SIGTERM)


async def test_quitting_while_it_writes_ends_the_worker(llm):
    dictate(llm, "abc" * 15)
    async with chat() as c:
        c.app.worker.pause()
        await c.type("Hi")
        await c.until(lambda: c.screen.busy)
        worker = c.app.worker
    assert not worker._thread.is_alive()
