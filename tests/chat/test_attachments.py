"""Files in messages: which are attached, how they stand there, and what stays text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvchat.chat.attachments import Attachment, as_mention, expand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("alpha\n")
    (tmp_path / "my notes.txt").write_text("notes")
    (tmp_path / "公园.md").write_text("花", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("x = 1\n")
    return tmp_path


def test_a_files_text_goes_after_the_words(folder: Path) -> None:
    expanded = expand("Read @a.txt, please.", folder)
    assert expanded.text == "Read a.txt, please.\n\na.txt (6 bytes):\n```\nalpha\n```"
    assert expanded.attachments == (Attachment("a.txt", folder / "a.txt", 6),)
    assert expanded.problems == ()


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        ("@a.txt", "a.txt", ["a.txt"]),
        ('See @"my notes.txt"!', "See my notes.txt!", ["my notes.txt"]),
        ("See @'my notes.txt'", "See my notes.txt", ["my notes.txt"]),
        ("(@sub/b.py)", "(sub/b.py)", ["sub/b.py"]),
        ("看 @公园.md。", "看 公园.md。", ["公园.md"]),
        ("@a.txt and @a.txt and @./a.txt", "a.txt and a.txt and ./a.txt", ["a.txt"]),
        ("@a.txt\n@sub/b.py...", "a.txt\nsub/b.py...", ["a.txt", "sub/b.py"]),
    ],
)
def test_mentions(folder: Path, text: str, words: str, names: list[str]) -> None:
    expanded = expand(text, folder)
    assert expanded.text.split("\n\n")[0] == words
    assert [each.name for each in expanded.attachments] == names


@pytest.mark.parametrize(
    "text",
    [
        "@someone, look",
        "me@a.txt",
        "@ a.txt",
        '@"a.txt',
        '@"nothing here.txt"',
        "@",
        "@@a.txt",
        "see you @. @.. @/ @~",
        "a.txt",
        "@" + "x" * 5000,
        "@\0",
        "@~nobody-of-this-name/x",
        "```\n@a.txt\n```",
        "~~~python\n@a.txt\n```\n@a.txt\n~~~",
        "````\n```\n@a.txt\n",
    ],
)
def test_everything_else_stays_as_typed(folder: Path, text: str) -> None:
    expanded = expand(text, folder)
    assert (expanded.text, expanded.attachments, expanded.problems) == (text, (), ())


def test_code_ends_where_its_fence_ends(folder: Path) -> None:
    expanded = expand("```\n@sub/b.py\n```\n@a.txt", folder)
    assert [each.name for each in expanded.attachments] == ["a.txt"]


def test_what_was_expanded_is_not_expanded_again(folder: Path) -> None:
    (folder / "nest.txt").write_text("@a.txt\n```\n@a.txt\n````\n@a.txt\n")
    once = expand("Read @nest.txt", folder)
    assert len(once.attachments) == 1
    again = expand(once.text, folder)
    assert (again.text, again.attachments) == (once.text, ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x7fELF\x00\x01", "NUL bytes"),
        (b"caf\xe9 \xff", "no UTF-8 text (see byte 3)"),
        (b"x" * 101, "more than 100 bytes"),
        ("wide".encode("utf-16"), "no text"),
    ],
)
def test_what_is_no_text_is_refused(folder: Path, content: bytes, said: str) -> None:
    (folder / "bad").write_bytes(content)
    expanded = expand("@bad and @bad but @a.txt", folder, limit=100)
    assert expanded.text.startswith("@bad and @bad but a.txt\n\n")
    (problem,) = expanded.problems
    assert problem.startswith("bad is not attached: ") and said in problem
    assert len(expanded.attachments) == 1


def test_folders_pipes_and_forbidden_files_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    expanded = expand("@sub @pipe", folder)
    assert expanded.text == "@sub @pipe"
    assert "is a folder" in expanded.problems[0] and "pipe" in expanded.problems[1]


def test_a_refused_file_alone_stays_as_it_was_pasted(folder: Path) -> None:
    (folder / "bad").write_bytes(b"\0")
    expanded = expand(f"'{folder / 'bad'}'", folder)
    assert expanded.text == f"'{folder / 'bad'}'"
    assert len(expanded.problems) == 1


def test_the_limit_is_a_size_that_fits(folder: Path) -> None:
    (folder / "full").write_bytes(b"x" * 100)
    (folder / "empty").write_bytes(b"")
    expanded = expand("@full @empty", folder, limit=100)
    assert [each.size for each in expanded.attachments] == [100, 0]
    assert "empty (0 bytes):\n```\n```" in expanded.text


def test_byte_order_marks_and_line_ends_of_windows(folder: Path) -> None:
    (folder / "w.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert expand("@w.txt", folder).text.endswith("```\none\ntwo\n```")


def test_a_pasted_path_is_a_mention(folder: Path) -> None:
    path = folder / "my notes.txt"
    spellings = [
        str(path),
        f"'{path}'",
        f'"{path}" ',
        str(path).replace(" ", "\\ "),
        path.as_uri(),
    ]
    for pasted in spellings:
        assert as_mention(pasted, folder) == f'@"{path}"', pasted
        (attachment,) = expand(pasted, folder).attachments
        assert attachment.path == path


@pytest.mark.parametrize(
    "pasted", ["a.txt", "", "'", "/no/such/file", "/tmp", "file://[", "~", "/tmp\n/tmp", "\0"]
)
def test_other_pastes_are_no_mentions(folder: Path, pasted: str) -> None:
    assert as_mention(pasted, folder) is None
    assert expand(pasted, folder).text == pasted


@given(st.text(alphabet="@ab.t'\"/`~ \n\\x", max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_crashes_or_loses_words(tmp_path: Path, text: str) -> None:
    assert expand(text, tmp_path / "nowhere").attachments == ()
    assert expand(text, tmp_path / "nowhere").text == text
