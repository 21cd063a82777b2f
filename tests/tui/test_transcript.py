from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection

from kvchat.tui.widgets.message_block import Mark, MessageBlock, MessageView
from kvchat.tui.widgets.transcript import Transcript


class Host(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        yield Transcript([("Enter", "send"), ("F1", "help")])

    def on_transcript_action_requested(self, event: Transcript.ActionRequested) -> None:
        self.requests.append((event.node_id, event.action))

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)


def rows(transcript: Transcript) -> list[str]:
    """What is in view, row by row, without the marker of the current message."""
    found = [transcript.render_line(y).text for y in range(transcript.size.height)]
    return [row.replace("▌", " ", 1).rstrip() for row in found]


def chat(count: int, words: int = 60) -> list[MessageView]:
    return [
        MessageView(
            f"n{i}", ("user", "assistant")[i % 2], f"m{i} " + "- word\n" * (i % 7) + "w " * words
        )
        for i in range(count)
    ]


async def test_an_empty_transcript_greets_with_its_keys() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        await wait_until(pilot, lambda: any("kvchat" in row for row in rows(app.transcript)))
        assert any("Enter" in row and "send" in row for row in rows(app.transcript))
        app.transcript.show(chat(1))
        assert not any("kvchat" in row for row in rows(app.transcript))


async def test_the_scrollbar_appears_where_the_view_is() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        app.transcript.show([MessageView("a", "user", "short")])
        await pilot.pause()
        assert not app.transcript.show_vertical_scrollbar
        app.transcript.show([MessageView("a", "user", "line\n" * 50)])
        await wait_until(pilot, lambda: app.transcript.show_vertical_scrollbar)
        assert app.transcript.vertical_scrollbar.position == app.transcript.scroll_y > 0


async def test_a_message_has_header_thinking_body_and_ledger() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)):
        view = MessageView(
            "a", "assistant", "Some **bold** text", "Let me think", True, "length", (1, 3), "new 3"
        )
        app.transcript.show([view])
        assert [row.strip() for row in rows(app.transcript) if row] == [
            "Assistant · edited  ‹ 2/3 ›",
            "▸ Thinking · 12 characters",
            "Some bold text",
            "cut off at the limit · new 3",
        ]
        app.transcript.toggle_thinking("a")
        assert "   │ Let me think" in rows(app.transcript)
        app.transcript.toggle_markdown("a")
        assert "   Some **bold** text" in rows(app.transcript)


async def test_messages_may_come_before_the_screen_does() -> None:
    class Early(Host):
        def compose(self) -> ComposeResult:
            transcript = Transcript()
            transcript.show([MessageView("u", "user", "hi")])
            transcript.begin_reply(MessageView("a", "assistant", ""))
            transcript.add("early")
            yield transcript

    app = Early()
    async with app.run_test(size=(60, 20)) as pilot:
        await wait_until(pilot, lambda: "   early" in rows(app.transcript))


async def test_only_what_is_in_view_is_laid_out() -> None:
    app = Host()
    async with app.run_test(size=(80, 24)):
        app.transcript.show(chat(1000))
        laid_out = [block.node_id for block in app.transcript.blocks() if block.rows]
        assert laid_out == [f"n{i}" for i in range(1000 - len(laid_out), 1000)]
        assert len(laid_out) < 24


async def test_untrusted_text_is_text() -> None:
    text = "[bold]x[/] [/] \x1b]52;c;aGk=\x07 \x00 \r\x9b31m a\tb"
    app = Host()
    async with app.run_test(size=(80, 24)):
        app.transcript.show([MessageView("u", "user", text), MessageView("a", "assistant", text)])
        shown = rows(app.transcript)
        assert sum("[bold]x[/] [/] ␛]52;c;aGk=␇ ␀" in row for row in shown) == 2
        assert all(char.isprintable() for row in shown for char in row)
        assert app.transcript.copy_text("u") == text


async def test_a_reply_streams_and_becomes_markdown() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)):
        transcript = app.transcript
        transcript.show([MessageView("u", "user", "hi")])
        transcript.begin_reply(MessageView("a", "assistant", ""))
        transcript.add("hm", thinking=True)
        transcript.add("hm", thinking=True)
        for piece in ("So **", "this** is", "\n\n- it", ", 中文", "\n"):
            transcript.add(piece)
        shown = [row.strip() for row in rows(transcript) if row]
        assert shown == [
            *("You", "hi", "Assistant", "▸ Thinking · 4 characters"),
            *("So **this** is", "- it, 中文"),
        ]
        text = transcript.copy_text("a")
        transcript.end_reply(MessageView("a", "assistant", text, "hmhm", finish_reason="cancelled"))
        shown = [row.strip() for row in rows(transcript) if row]
        assert shown[-3:] == ["So this is", "• it, 中文", "stopped"]
        transcript.add("too late")
        assert transcript.copy_text("a") == text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["word ", "中文", "\n", "\n\n", "\t", "e\u0301", "x" * 50, "👨\u200d👩", ""]
            ),
            st.sampled_from(["text", "text", "text", "thinking", "mark"]),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_a_grown_block_is_as_one_laid_out_at_once(
    added: list[tuple[str, str]], unfolded: bool
) -> None:
    grown = MessageBlock(MessageView("a", "assistant", ""), live=True)
    grown.unfolded = unfolded
    grown.lay_out(40)
    for text, kind in added:
        before = [(grown.lines[line], start, end) for line, start, end in grown.rows]
        if kind == "mark":
            first = grown.mark(text)
        elif kind == "thinking" and not grown.view.text:
            first = grown.add(text, thinking=True)
        else:
            first = grown.add(text, thinking=False)
        after = [(grown.lines[line], start, end) for line, start, end in grown.rows]
        assert [row[1:] for row in before[:first]] == [row[1:] for row in after[:first]]
    whole = MessageBlock(grown.view, live=True)
    whole.unfolded = unfolded
    whole.lay_out(40)
    assert grown.rows == whole.rows
    assert [line.text for line in grown.lines] == [line.text for line in whole.lines]
    assert [line.copy() for line in grown.lines] == [line.copy() for line in whole.lines]


async def test_marks_stand_in_the_stream_and_are_not_copied() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)):
        transcript = app.transcript
        transcript.begin_reply(MessageView("a", "assistant", ""))
        transcript.add("before ")
        transcript.mark("temperature 0.8→1.2")
        transcript.add("after")
        assert "   before ⟨temperature 0.8→1.2⟩after" in rows(transcript)
        assert transcript.get_selection(Selection(None, None))[0].strip() == "before after"
        view = MessageView("a", "assistant", "before after", marks=(Mark(7, "top-k 5"),))
        transcript.end_reply(view)
        assert "   before after" in rows(transcript)
        transcript.toggle_markdown()
        assert "   before ⟨top-k 5⟩after" in rows(transcript)


@pytest.mark.parametrize("up", [4, 5])  # to a line of text, and to an empty one
async def test_the_view_follows_the_end_until_scrolled_and_then_never_jumps(up: int) -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        transcript = app.transcript
        transcript.show(chat(30))
        transcript.begin_reply(MessageView("r", "assistant", ""))
        transcript.focus()
        for number in range(40):
            transcript.add(f"line {number}\n\n")
        assert "   line 39" in rows(transcript)

        await pilot.press(*["up"] * up)
        shown = rows(transcript)
        for number in range(40, 60):
            transcript.add(f"line {number}\n\n")
        transcript.status("paused")
        assert rows(transcript) == shown
        transcript.end_reply(MessageView("r", "assistant", transcript.copy_text("r")))
        assert rows(transcript)[0] == shown[0] and rows(transcript) == shown
        transcript.show([*chat(30), MessageView("r", "assistant", transcript.copy_text("r"))])
        assert rows(transcript) == shown

        await pilot.press("end")
        assert "   paused" in rows(transcript)
        transcript.begin_reply(MessageView("s", "assistant", ""))
        transcript.add("new")
        assert "   new" in rows(transcript)


async def test_scrolling_to_the_end_follows_again() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        transcript = app.transcript
        transcript.show(chat(30))
        transcript.begin_reply(MessageView("r", "assistant", ""))
        transcript.focus()
        await pilot.press("pageup", "pagedown", "pagedown")
        transcript.add("one\n\ntwo\n\nthree")
        assert "   three" in rows(transcript)


@pytest.mark.parametrize("key", ["up", "pageup"])
async def test_scrolling_back_moves_by_as_much_as_asked(key: str) -> None:
    """Heights that were estimated wrongly are put right without moving what is in view."""
    app = Host()
    async with app.run_test(size=(50, 20)) as pilot:
        transcript = app.transcript
        transcript.show(chat(40, words=99))
        transcript.focus()
        await pilot.press("up")
        seen = rows(transcript)
        step = 1 if key == "up" else transcript.size.height
        for _ in range(60):
            await pilot.press(key)
            now = rows(transcript)
            assert [*now[:step], *seen][: len(now)] == now
            seen = now if step == 1 else []
        await pilot.press("home")
        await wait_until(pilot, lambda: rows(transcript)[1] == "   You" or transcript.scroll_y == 0)


async def test_every_row_is_met_once_on_the_way_up() -> None:
    app = Host()
    async with app.run_test(size=(50, 20)) as pilot:
        transcript = app.transcript
        messages = chat(12, words=50)
        transcript.show(messages)
        transcript.focus()
        met: list[str] = rows(transcript)
        while transcript.scroll_y > 0:
            before = transcript.scroll_y, transcript.virtual_size.height
            await pilot.press("up")
            moved = before[0] - transcript.scroll_y
            grown = transcript.virtual_size.height - before[1]
            met[:0] = rows(transcript)[: round(moved + grown)]
        transcript.show([])
        transcript.show(messages)
        everything = []
        for block in transcript.blocks():
            block.lay_out(46)
            everything += [block.lines[n].lead + block.lines[n].text[a:b] for n, a, b in block.rows]
        assert [row.strip() for row in met] == [row.strip() for row in everything]


async def test_a_new_width_keeps_the_place() -> None:
    app = Host()
    async with app.run_test(size=(100, 24)) as pilot:
        transcript = app.transcript
        words = " ".join(f"word{n}" for n in range(3000))
        transcript.show([MessageView("a", "user", words), MessageView("b", "assistant", words)])
        transcript.focus()
        await pilot.press(*["pageup"] * 4)
        top = rows(transcript)[0].split()[0]
        for width in (61, 97, 40, 100):
            await pilot.resize_terminal(width, 24)
            await wait_until(pilot, lambda width=width: transcript.size.width == width)
            assert top in rows(transcript)[0]


async def test_wild_resizing_while_streaming_loses_nothing() -> None:
    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        transcript = app.transcript
        transcript.show(chat(20))
        transcript.begin_reply(MessageView("r", "assistant", ""))
        for number, size in enumerate([(20, 5), (200, 60), (1, 1), (80, 2), (61, 20)]):
            transcript.add(f"piece{number} 中文 ")
            await pilot.resize_terminal(*size)
            transcript.add("and\n")
        await wait_until(pilot, lambda: transcript.size.width == 61)
        assert sum("piece" in row for row in rows(transcript)) == 5


async def drag(pilot: Pilot[None], start: tuple[int, int], end: tuple[int, int]) -> None:
    await pilot.mouse_down(Transcript, offset=start)
    await pilot.hover(Transcript, offset=end)
    await pilot.mouse_up(Transcript, offset=end)


async def test_selected_text_has_no_line_feeds_of_wrapping() -> None:
    text = "one two three four five six seven\n\teight 中文 nine"
    app = Host()
    async with app.run_test(size=(24, 20)) as pilot:
        app.transcript.show([MessageView("a", "user", text), MessageView("b", "user", "last")])
        shown = rows(app.transcript)
        first = next(y for y, row in enumerate(shown) if "one" in row)
        last = next(y for y, row in enumerate(shown) if "nine" in row)
        column = shown[last].index("nine") + 2  # 中文 takes two cells more
        await drag(pilot, (7, first), (column + 2, last))
        assert app.screen.get_selected_text() == text.removeprefix("one ").removesuffix("e")

        await drag(pilot, (0, first), (20, last + 3))
        assert app.screen.get_selected_text() == f"{text}\n\nlast"


async def test_a_selection_lasts_while_later_messages_change() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        transcript = app.transcript
        first = MessageView("a", "user", "one two")
        transcript.show([first])
        y = next(y for y, row in enumerate(rows(transcript)) if "one" in row)
        await drag(pilot, (3, y), (5, y))
        transcript.show([first, MessageView("b", "user", "more")])
        transcript.begin_reply(MessageView("c", "assistant", ""))
        transcript.add("text")
        transcript.end_reply(MessageView("c", "assistant", "text"))
        transcript.status("paused")
        assert app.screen.get_selected_text() == "one"
        transcript.show([MessageView("a", "user", "other")])
        assert app.screen.get_selected_text() is None


async def test_selecting_follows_the_text_to_another_width() -> None:
    app = Host()
    async with app.run_test(size=(24, 20)) as pilot:
        app.transcript.show([MessageView("a", "user", "one two three four five six seven")])
        first = next(y for y, row in enumerate(rows(app.transcript)) if "one" in row)
        await drag(pilot, (7, first), (5, first + 1))
        selected = app.screen.get_selected_text()
        await pilot.resize_terminal(60, 20)
        await wait_until(pilot, lambda: app.transcript.size.width == 60)
        assert app.screen.get_selected_text() == selected


async def test_a_double_click_selects_a_word_and_a_triple_click_a_line() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        app.transcript.show([MessageView("a", "user", "one twenty three\nfour")])
        y = next(y for y, row in enumerate(rows(app.transcript)) if "one" in row)
        await pilot.click(Transcript, offset=(9, y), times=2)
        assert app.screen.get_selected_text() == "twenty"
        await pilot.click(Transcript, offset=(9, y), times=3)
        assert app.screen.get_selected_text() == "one twenty three"


async def test_an_emoji_is_selected_as_a_whole() -> None:
    family = "👨\u200d👩\u200d👧"
    app = Host()
    async with app.run_test(size=(60, 20)):
        app.transcript.show([MessageView("a", "user", f"a{family}b")])
        number = len(app.transcript.blocks()[0].lines) - 1
        selection = Selection(Offset(2, number), Offset(3, number))
        assert app.transcript.get_selection(selection)[0] == family


async def test_keys_ask_for_actions_on_the_current_message() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        transcript = app.transcript
        messages = chat(9)
        messages[7] = replace(messages[7], siblings=(0, 2))
        transcript.show(messages)
        transcript.focus()
        await pilot.press(
            "left", "c", "ctrl+up", "x", "right", "j", "j", "e", "k", "k", "k", "delete"
        )
        assert app.requests == [
            *(("n8", "copy"), ("n7", "copy_code"), ("n7", "next_sibling")),
            *(("n8", "edit"), ("n5", "delete")),
        ]
        assert transcript.current_node_id == "n5"
        painted = [transcript.render_line(y).text for y in range(transcript.size.height)]
        marked = [row for row in painted if row.startswith(" ▌")]
        assert "Assistant" in marked[0] and not any("You" in row for row in marked)
        transcript.show(messages[:4])
        assert transcript.current_node_id == "n3"


async def test_without_messages_keys_do_nothing() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        app.transcript.focus()
        await pilot.press("c", "ctrl+up", "ctrl+down", "m", "t", "home", "end", "pageup")
        assert app.requests == [] and app.transcript.current_node_id is None


async def test_clicks_reach_versions_thinking_and_messages() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        transcript = app.transcript
        view = MessageView("a", "assistant", "text", "thought", siblings=(1, 3))
        transcript.show([view, MessageView("b", "user", "more")])
        header = next(y for y, row in enumerate(rows(transcript)) if "‹" in row)
        row = rows(transcript)[header]
        await pilot.click(Transcript, offset=(row.index("‹"), header))
        await pilot.click(Transcript, offset=(row.index("›"), header))
        await wait_until(pilot, lambda: len(app.requests) == 2)
        assert app.requests == [("a", "previous_sibling"), ("a", "next_sibling")]
        assert transcript.current_node_id == "a"
        await pilot.click(Transcript, offset=(5, header + 1))
        await wait_until(
            pilot, lambda: "   │ thought" in [r.replace("▌", " ") for r in rows(transcript)]
        )


async def test_what_the_model_no_longer_sees_is_said() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)):
        view = MessageView("a", "user", "old")
        app.transcript.show([view])
        plain = app.transcript.render_line(2)
        app.transcript.update_message(replace(view, dropped=True))
        assert "   You · no longer seen by the model" in rows(app.transcript)
        assert app.transcript.render_line(2).text == plain.text
        assert app.transcript.render_line(2) != plain


async def test_copying_gives_texts_and_code() -> None:
    app = Host()
    async with app.run_test(size=(60, 20)):
        text = "See **this**:\n\n```sh\nls\n```\n"
        app.transcript.show([MessageView("a", "assistant", text)])
        assert app.transcript.copy_text("a") == text
        assert app.transcript.code_blocks("a") == ["ls"]
        assert (
            app.transcript.copy_text("nobody") == "" and app.transcript.code_blocks("nobody") == []
        )


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "ansi-dark"])
async def test_a_theme_changes_colours_and_no_text(theme: str) -> None:
    app = Host()
    async with app.run_test(size=(60, 20)) as pilot:
        app.theme = "gruvbox"
        app.transcript.show([MessageView("a", "assistant", "# head\n`code`\n```py\nx = 1\n```")])
        await pilot.pause()
        before = [app.transcript.render_line(y) for y in range(20)]
        app.theme = theme
        await wait_until(pilot, lambda: app.transcript.render_line(2) != before[2])
        now = [app.transcript.render_line(y).text for y in range(20)]
        assert now == [strip.text for strip in before]
