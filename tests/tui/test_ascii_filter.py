"""What a terminal without Unicode is sent."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from textual.app import App, ComposeResult
from textual.widgets import Static

from kvchat.tui.ascii_filter import AsciiFilter, in_ascii, speaks_unicode


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
        ({"LANG": "POSIX"}, False),
        ({"LANG": "", "LC_CTYPE": "UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "TERM": "vt220"}, False),
        ({"LANG": "en_US.UTF-8", "TERM": "xterm-256color"}, True),
    ],
)
def test_the_locale_and_the_kind_of_terminal_decide(environment, expected):
    assert speaks_unicode(environment) is expected


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "╭─ Model ─╮",
        "reused 1 · new 2",
        "café",
        "你好吗",
        "🌱👩‍♀️ x",
        "e\u0301",
        "ﬁn",
        "─" * 80,
    ],
)
def test_text_becomes_ascii_and_stays_as_wide(text):
    assert in_ascii(text).isascii()
    assert len(in_ascii(text)) == cell_len(text)


def test_letters_stay_letters_and_lines_stay_lines():
    assert in_ascii("café") == "cafe"
    assert in_ascii("╭─┬─╮") == "+-+-+"
    assert in_ascii("你") == "??"


async def test_everything_that_is_shown_goes_through_it():
    class Plain(App[None]):
        def get_line_filters(self):
            return [*super().get_line_filters(), AsciiFilter()]

        def compose(self) -> ComposeResult:
            box = Static("你好 · café")
            box.styles.border = ("round", "red")
            yield box

    app = Plain()
    async with app.run_test(size=(30, 5)) as pilot:
        await pilot.pause()
        lines = [
            "".join(segment.text for segment in strip)
            for strip in app.screen._compositor.render_strips()
        ]
        assert "cafe" in "".join(lines)
        assert "".join(lines).isascii()
