from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvchat.tui.widgets.line import Line
from kvchat.tui.widgets.markdown_lines import code_blocks, markdown_lines


def shown(text: str, width: int = 60) -> list[str]:
    return [line.lead + line.text for line in markdown_lines(text, width, 2)]


def copied(text: str, width: int = 60) -> str:
    return "\n".join(line.copy() for line in markdown_lines(text, width, 2) if line.copied)


def styles(text: str) -> dict[str, str]:
    return {
        line.text[span.start : span.end]: span.style
        for line in markdown_lines(text, 60, 2)
        for span in line.spans
    }


def test_paragraphs_keep_their_line_feeds() -> None:
    assert shown("one\ntwo\n\nthree") == ["one", "two", "", "three"]


def test_lists_nest_and_count() -> None:
    text = "- a\n- b\n  more\n  1. x\n  2. y\n\nend"
    assert shown(text) == ["• a", "• b", "  more", "  1. x", "  2. y", "", "end"]
    assert copied(text) == text


def test_quotations_have_a_bar_and_are_copied_as_written() -> None:
    assert shown("> a\n> b\n>\n> c") == ["│ a", "│ b", "│ ", "│ c"]
    assert copied("> a\n> b\n>\n> c") == "> a\n> b\n>\n> c"


def test_inline_styles_combine() -> None:
    found = styles("plain **bold *both*** `code` ~~gone~~ [name](http://x.org)")
    assert found == {
        "bold ": "strong",
        "both": "strong em",
        "code": "code",
        "gone": "struck",
        "name": "link",
        " (http://x.org)": "faint",
    }


def test_code_is_highlighted_and_copied_alone() -> None:
    text = "```python\ndef f():\n\treturn 1\n```"
    lines = markdown_lines(text, 60, 2)
    assert [line.text for line in lines] == ["python", "def f():", "\treturn 1"]
    assert {line.style for line in lines} == {"code-block"}
    assert styles(text)["def"] == "code-keyword"
    assert copied(text) == "def f():\n\treturn 1"


@pytest.mark.parametrize("info", ["nosuchlanguage", "", "\x00", "a" * 999])
def test_code_of_no_known_language_is_plain(info: str) -> None:
    assert "x = [1]" in shown(f"```{info}\nx = [1]\n```")


def test_code_blocks_give_the_code() -> None:
    text = "a\n```py\nx\n\ny\n```\n- b\n  ```\n  z\n  ```\n\nend\n```\nunclosed"
    assert code_blocks(text) == ["x\n\ny", "z", "unclosed"]


def test_a_table_fits_its_width() -> None:
    text = "| name | note |\n|---|--:|\n| a | " + "long words " * 9 + "|\n| 中文 | 1 |"
    lines = markdown_lines(text, 40, 2)
    assert lines[0].text.split() == ["name", "note"]
    assert lines[-1].text.startswith("中文") and lines[-1].text.endswith(" 1")
    assert max(cell_len(line.text) for line in lines) == 40
    narrow = markdown_lines("|" + "a|" * 30 + "\n|" + "-|" * 30 + "\n|" + "b|" * 30, 40, 2)
    assert [line.text.split() for line in narrow] == [["a"] * 30, ["b"] * 30]


@pytest.mark.parametrize(
    "text",
    ["&#27;[31m", "\x1b[31m", "`\x1b[31m`", "```\n\x1b[31m\n```", "<b>\x1b[31m", "[a](\x1b)"],
)
def test_no_control_character_comes_through(text: str) -> None:
    assert not any(ord(char) < 32 and char != "\t" for line in shown(text) for char in line)


def test_html_is_text() -> None:
    assert shown("a <b>x</b> </kbd>\n\n<div>\ny\n</div>") == [
        "a <b>x</b> </kbd>",
        "",
        "<div>",
        "y",
        "</div>",
    ]


def test_lines_know_where_they_come_from() -> None:
    lines = markdown_lines("a\n\n- b\n- c\n\n```py\nd\n```\nlast\nline", 60, 2)
    sources = {line.text: line.source for line in lines if line.text not in ("", "py")}
    assert sources == {
        "a": (2, 0),
        "b": (2, 2),
        "c": (2, 3),
        "d": (2, 6),
        "last": (2, 8),
        "line": (2, 9),
    }
    assert [line.source for line in lines] == sorted(line.source for line in lines)


MARKUP = [
    "*",
    "**",
    "_",
    "`",
    "```",
    "\n",
    "\n\n",
    "> ",
    "- ",
    "1. ",
    "    ",
    "# ",
    "|",
    "-",
    "[",
    "]",
]
WORDS = [
    "(",
    ")",
    "<",
    ">",
    "!",
    "&",
    "\\",
    "~~",
    "---",
    "a",
    "word",
    "中",
    "\t",
    "\x1b",
    "é",
    "<b>",
]


@given(st.lists(st.sampled_from(MARKUP + WORDS), max_size=60).map("".join), st.integers(4, 60))
def test_whatever_is_written_becomes_lines(text: str, width: int) -> None:
    lines = markdown_lines(text, width, 2)
    assert all("\n" not in line.text and cell_len(line.lead) <= width for line in lines)
    for line in lines:
        ends = [0, *(end for span in line.spans for end in (span.start, span.end))]
        assert ends == sorted(ends) and ends[-1] <= len(line.text)


@given(st.lists(st.sampled_from(["word", "中文", " ", "\n", "\n\n", "**", "_", "> ", "- ", "`"])))
def test_letters_stay(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = "".join(line.text for line in markdown_lines(text, 60, 2))
    for word in ("word", "中文"):
        assert found.count(word) == text.count(word)


def test_an_empty_text_has_one_line() -> None:
    assert markdown_lines("", 60, 2) == [Line(source=(2, 0))]
