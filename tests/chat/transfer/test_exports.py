"""What is written: lists of messages, Markdown, HTML."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from math import log, nan
from pathlib import Path
from typing import Any

import pytest
from rich_chat import rich_chat, token

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer import WRITERS, Author, format_of, read, write
from kvchat.engine.types import SamplingParams


def written(format: str, *chats: Conversation, model: str = "Assistant", pieces: Any = None) -> str:
    file = io.StringIO()
    assert write(chats, format, file, lambda _: Author(model, pieces)) == len(chats)
    return file.getvalue()


def thoughtful() -> Conversation:
    chat = Conversation(system="Be brief.", title="Parks")
    node = chat.start_reply(chat.add_user("公园?").id)
    chat.add_text(node.id, "Hm.", thinking=True)
    chat.add_text(node.id, "Line 1\nline 2")
    chat.finish_reply(node.id, "stop")
    chat.add_user("Why?")
    return chat


@pytest.mark.parametrize("format", ["openai", "sharegpt"])
def test_messages_come_back(format: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(written(format, thoughtful(), thoughtful()), encoding="utf-8")
    back = list(read(path))
    assert len(back) == 2
    for chat in back:
        assert isinstance(chat, Conversation)
        assert (chat.title, chat.system) == ("Parks", "Be brief.")
        path_ = [(n.role, n.content, n.reply and n.reply.thinking) for n in chat.active_path()]
        assert path_ == [
            ("user", "公园?", None),
            ("assistant", "Line 1\nline 2", "Hm."),
            ("user", "Why?", None),
        ]


def test_message_files_have_the_names_other_programs_expect() -> None:
    openai = json.loads(written("openai", thoughtful()))
    assert openai["messages"][2] == {
        "role": "assistant",
        "content": "Line 1\nline 2",
        "reasoning_content": "Hm.",
    }
    sharegpt = json.loads(written("sharegpt", thoughtful()))
    assert sharegpt["conversations"][:2] == [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "公园?"},
    ]


def test_nothing_is_written_for_the_silent_user(tmp_path: Path) -> None:
    path = tmp_path / "greeting.jsonl"
    path.write_text('{"conversations": [{"from": "gpt", "value": "Hello!"}]}')
    (chat,) = read(path)
    assert isinstance(chat, Conversation)
    assert json.loads(written("sharegpt", chat)) == json.loads(path.read_text())


def test_markdown_has_the_active_path() -> None:
    text = written("markdown", thoughtful(), thoughtful(), model="tiny")
    assert text.count("# Parks\n") == 2
    assert "## tiny\n\n> *Thinking*\n>\n> Hm.\n\nLine 1\nline 2\n\n## You\n\nWhy?\n" in text


def test_half_a_surrogate_pair_spoils_no_file() -> None:
    chat = Conversation()
    chat.add_user("oh \ud83d")
    for format in WRITERS:
        written(format, chat).encode("utf-8")


def test_no_conversations_make_sound_files() -> None:
    assert json.loads(written("json")) == []
    assert written("openai") == ""
    assert "</html>" in written("html")


class Page(HTMLParser):
    """Checks that tags are closed, and collects what is shown and how."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shown: list[tuple[str, str | None, str | None]] = []
        self.tags: set[str] = set()
        self.attributes: list[dict[str, str | None]] = [{}]
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
            self.attributes.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.attributes.pop()

    def handle_data(self, data: str) -> None:
        here = self.attributes[-1]
        self.shown.append((data, here.get("class"), here.get("title")))

    @property
    def text(self) -> str:
        return "".join(data for data, _, _ in self.shown)


def test_html_is_sound_and_harmless() -> None:
    chat = Conversation(title="<script>alert(1)</script>", system="a & b")
    evil = "<img src=x onerror=alert(1)> \x1b[31m \x00 \u202e </div></article> \"'"
    node = chat.start_reply(chat.add_user(evil).id)
    chat.add_text(node.id, evil, thinking=True)
    chat.add_text(node.id, evil)
    chat.finish_reply(node.id, "stop")
    text = written("html", chat, rich_chat(), model="<b>tiny</b>")
    page = Page(text)
    assert not page.tags & {"script", "img", "link", "b", "iframe"}
    assert "default-src 'none'" in text
    assert page.text.count("</div></article> \"'") == 3
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert "<b>tiny</b>" in page.text


def test_html_colours_tokens_by_their_probability() -> None:
    chat = Conversation()
    node = chat.start_reply(chat.add_user("?").id)
    probabilities = [1.0, 0.7, 0.3, 0.1, 0.01, 0.95, 1.0]
    texts = ["<think>", "Hm", "</think>", "\n\n", "a <", "b> c", " d"]
    for n, probability in enumerate(probabilities):
        chat.add_token(node.id, token(n, n, probability, SamplingParams()))
    assert node.reply is not None
    node.reply.logprobs[6] = nan
    chat.add_text(node.id, "Hm", thinking=True)
    chat.add_text(node.id, "a <b> c d")
    chat.finish_reply(node.id, "stop")

    def pieces(ids: Sequence[int]) -> Iterable[str]:
        return (texts[id_] for id_ in ids)

    shown = [s for s in Page(written("html", chat, pieces=pieces)).shown if s[2]]
    assert shown == [
        ("Hm", "p4", "70.0%"),
        ("a <", "p1", "1.0%"),
        ("b> c", None, "95.0%"),
        (" d", "typed", "typed"),
    ]
    assert log(0.7) == pytest.approx(node.reply.logprobs[1])


def test_html_without_token_texts_or_with_others_stays_plain() -> None:
    chat = rich_chat()
    for pieces in (None, lambda ids: ["?" for _ in ids]):
        page = Page(written("html", chat, pieces=pieces))
        assert "To the *zoo*." in page.text
        assert not any(title for _, _, title in page.shown)


def test_formats_go_by_the_ends_of_names() -> None:
    assert {
        name: format_of(Path(f"x{writer.suffixes[0]}")) for name, writer in WRITERS.items()
    } == {name: name for name in WRITERS}
    assert format_of(Path("A.SHAREGPT.JSONL")) == "sharegpt"
    assert format_of(Path("notes.txt")) is None
    assert all(re.fullmatch(r"(\.\w+)+", s) for w in WRITERS.values() for s in w.suffixes)
