"""The prompt: what is sent is exactly what was typed and pasted."""

from __future__ import annotations

import pytest
from helpers import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from textual import events
from textual.app import App, ComposeResult

from kvchat.tui.widgets.message_area import PASTE_CHARACTERS, PASTE_LINES, MessageArea
from kvchat.tui.widgets.prompt import PromptArea

LONG = "All work and no play. " * 100
LINES = "\n".join(f"line {n}" for n in range(321))


class Host(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.edited: list[str] = []

    def compose(self) -> ComposeResult:
        yield PromptArea()

    def on_mount(self) -> None:
        self.prompt.focus()

    @property
    def prompt(self) -> PromptArea:
        return self.query_one(PromptArea)

    def on_prompt_area_submitted(self, event: PromptArea.Submitted) -> None:
        self.sent.append(event.text)

    def on_message_area_edited(self, event: MessageArea.Edited) -> None:
        self.edited.append(event.text)


async def test_enter_sends_and_empties():
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("h", "i", "enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == ["hi"]
        assert app.prompt.text == ""


async def test_nothing_but_space_is_not_sent():
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("enter", "space", "ctrl+j", "enter")
        await pilot.pause()
        assert app.sent == []
        assert app.prompt.text == " \n"


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter"])
async def test_a_line_is_added(key: str):
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("a", key, "b", "enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == ["a\nb"]


async def test_it_grows_with_its_text_up_to_ten_lines():
    app = Host()
    async with app.run_test(size=(60, 30)) as pilot:
        heights = []
        for _ in range(14):
            await pilot.press("x", "ctrl+j")
            heights.append(app.prompt.size.height)
        assert heights == sorted(heights)
        assert (heights[0], heights[-1]) == (2, 10)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.prompt.size.height == 1)


async def test_composed_input_arrives_whole():
    app = Host()
    async with app.run_test() as pilot:
        for character in "你好👩‍👩‍👧é می\u200cخواهم":  # as Textual reports what is committed
            app.prompt.post_message(events.Key(character, character))
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == ["你好👩‍👩‍👧é می\u200cخواهم"]


@pytest.mark.parametrize("pasted", [LONG, LINES, LINES + "\n"], ids=["long", "lines", "ending"])
async def test_a_large_paste_folds_and_is_sent_in_full(pasted: str):
    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("a", "space")
        app.prompt.post_message(events.Paste(pasted))
        await wait_until(pilot, lambda: "⟧" in app.prompt.text)
        assert app.prompt.document.line_count == 1
        assert f"{len(pasted):,} characters" in app.prompt.text
        await pilot.press("space", "b", "enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == [f"a {pasted} b"]


async def test_lines_are_counted_as_people_count_them():
    app = Host()
    async with app.run_test():
        app.prompt.paste(LINES + "\n")
        assert app.prompt.text == f"⟦pasted {len(LINES) + 1:,} characters, 321 lines⟧"


async def test_a_small_paste_stays_text():
    app = Host()
    async with app.run_test():
        small = "x" * PASTE_CHARACTERS
        app.prompt.paste(small)
        assert app.prompt.text == small
        app.prompt.message = ""
        app.prompt.paste("y\n" * (PASTE_LINES - 1))
        assert app.prompt.text == "y\n" * (PASTE_LINES - 1)


async def test_line_ends_of_all_systems_become_line_feeds():
    app = Host()
    async with app.run_test():
        app.prompt.paste("a\r\nb\rc\nd")
        assert app.prompt.message == "a\nb\nc\nd"


async def test_pastes_of_one_size_are_kept_apart():
    app = Host()
    async with app.run_test():
        for letter in "aba":
            app.prompt.paste(letter * 2000)
        assert app.prompt.message == "a" * 2000 + "b" * 2000 + "a" * 2000


async def test_a_pasted_label_is_only_text():
    app = Host()
    async with app.run_test():
        app.prompt.paste("⟦pasted 2,000 characters, 1 line⟧")
        app.prompt.paste("x" * 3000)
        assert app.prompt.message == "⟦pasted 2,000 characters, 1 line⟧" + "x" * 3000


async def test_a_megabyte_is_one_line_and_exact():
    app = Host()
    megabyte = "0123456789abcde\n" * 65_536
    async with app.run_test() as pilot:
        app.prompt.paste(megabyte)
        await pilot.press("!", "enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == [megabyte + "!"]


CONTROLS = "red \x1b[31m bell \a null \0 osc \x1b]52;c;eA==\x07 bs \b ff \f nel \x85 sep \u2028."


async def test_control_codes_never_reach_the_terminal_and_are_sent_as_they_are():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.paste(CONTROLS)
        await pilot.pause()
        assert "with control codes" in app.prompt.text
        shown = [s.text for strip in app.screen._compositor.render_strips() for s in strip]
        assert not any(ord(char) < 32 for text in shown for char in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.sent == [CONTROLS]


async def test_opened_control_codes_are_signs():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.paste("\x1b[31m\a")
        await pilot.press("ctrl+o")
        assert app.prompt.message == "␛[31m␇"


async def test_a_fold_opens_on_a_key():
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("a")
        app.prompt.paste(LINES)
        await pilot.press("b", "ctrl+o")
        assert app.prompt.text == f"a{LINES}b"
        await pilot.press("ctrl+z")
        assert app.prompt.document.line_count == 1
        assert app.prompt.message == f"a{LINES}b"


async def test_many_lines_can_be_undone_and_redone():
    app = Host()
    async with app.run_test(size=(40, 10)) as pilot:
        await pilot.press("a")
        app.prompt.paste("\n".join("bcdefghijklmnopq"))
        for key in ("ctrl+z", "ctrl+y", "ctrl+z"):
            await pilot.press(key)
            await pilot.pause()
        assert app.prompt.text == "a"


async def test_the_fold_at_the_cursor_opens():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.paste("x" * 2000)
        await pilot.press("space")
        app.prompt.paste("y" * 2000)
        await pilot.press("home", "ctrl+o")
        assert app.prompt.text.startswith("x" * 2000)
        assert app.prompt.text.endswith("⟧")


@pytest.mark.parametrize("keys", [["backspace"], ["left", "delete"], ["ctrl+w"]], ids=str)
async def test_a_fold_is_deleted_as_a_whole(keys: list[str]):
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("a", "space")
        app.prompt.paste(LONG)
        await pilot.press(*keys)
        assert app.prompt.text == "a "
        await pilot.press("ctrl+z")
        assert app.prompt.message == f"a {LONG}"


async def test_the_cursor_steps_over_a_fold():
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("a")
        app.prompt.paste(LONG)
        await pilot.press("b", "left", "left", "x")
        assert app.prompt.message == f"ax{LONG}b"
        await pilot.press("right", "y")
        assert app.prompt.message == f"ax{LONG}yb"


async def test_a_click_lands_beside_a_fold():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.paste(LONG)
        await pilot.press("ctrl+j")
        await pilot.click(PromptArea, offset=(8, 1))
        await pilot.press("x")
        assert app.prompt.message == f"x{LONG}\n"


async def test_a_copied_fold_is_copied_in_full():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.paste(LONG)
        await pilot.press("alt+a", "ctrl+c")
        assert app.clipboard == LONG
        await pilot.press("ctrl+x")
        assert app.prompt.text == ""
        await pilot.press("ctrl+v")
        assert app.prompt.message == LONG


async def test_history_goes_up_and_down():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.past = ["one", "two\nlines", LINES]
        seen = []
        for key in ("up", "up", "up", "up"):
            await pilot.press(key)
            seen.append(app.prompt.message)
        assert seen == [LINES, "two\nlines", "one", "one"]
        await pilot.press("down")
        assert app.prompt.message == "two\nlines"
        assert app.prompt.cursor_at_end_of_text
        await pilot.press("down")
        assert app.prompt.message == LINES
        await pilot.press("down")
        assert app.prompt.message == ""


async def test_history_leaves_a_text_of_the_users_alone():
    app = Host()
    async with app.run_test() as pilot:
        app.prompt.past = ["one"]
        await pilot.press("x", "up")
        assert app.prompt.message == "x"
        await pilot.press("end", "backspace", "up", "!", "up", "down")
        assert app.prompt.message == "one!"
        app.prompt.past = []
        await pilot.press("up", "down")
        assert app.prompt.message == "one!"


async def test_the_app_hears_of_a_pause_once_with_the_exact_text():
    app = Host()
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: not app.edited or app.edited == [""])
        app.edited.clear()
        await pilot.press(*"abc")
        app.prompt.paste(LONG)
        await wait_until(pilot, lambda: app.edited)
        assert app.edited == [f"abc{LONG}"]


async def test_the_cost_is_shown_as_text_and_goes_with_the_message():
    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        app.prompt.cost = "37 tokens · 412 reused [/]"
        await pilot.pause()
        shown = "".join(s.text for strip in app.screen._compositor.render_strips() for s in strip)
        assert "37 tokens · 412 reused [/]" in shown
        await pilot.press("x", "enter")
        await wait_until(pilot, lambda: app.sent)
        assert app.prompt.cost == ""


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(message=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_message_is_kept_exactly(message: str):
    assert MessageArea(message).message == message
