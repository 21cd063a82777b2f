"""Chats as Markdown, and such files back as messages."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from chat.store_helpers import say
from hypothesis import given
from hypothesis import strategies as st

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer import Author, BadRecord, read, write
from kvchat.engine.errors import KvchatError

LINES = st.sampled_from(
    ["text", "", "> quoted", "## You", "## tiny", "\\## You", "\\\\## System ", "# T", "```",
     "公园", "2026-11-30 20:01, tiny", "> *Thinking*", ">", "## Yours", "- a"]
)  # fmt: skip
TEXT = st.lists(LINES, min_size=1, max_size=6).map("\n".join).map(lambda text: text.strip("\n"))


def a_chat(texts: list[str], thinking: str = "", system: str = "") -> Conversation:
    chat = Conversation(system=system)
    for asked, answered in zip(texts[::2], texts[1::2], strict=True):
        node = say(chat, asked, [1])
        node.content = answered
        node.reply.thinking = thinking or None
    return chat


def messages(chat: Conversation) -> list[tuple[str, str, str]]:
    return [
        (n.role, n.content, (n.reply.thinking or "") if n.reply else "") for n in chat.active_path()
    ]


def back(folder: Path, *chats: Conversation, model: str = "tiny") -> list[Conversation]:
    file = io.StringIO()
    write(chats, "markdown", file, lambda _: Author(model))
    path = folder / "chats.md"
    path.write_text(file.getvalue(), encoding="utf-8")
    found = list(read(path))
    assert not any(isinstance(each, BadRecord) for each in found)
    return found


def test_messages_title_system_prompt_and_date_come_back(tmp_path: Path) -> None:
    first = a_chat(
        ["Hi", "Hello\n\n# A title\n\nOf a part"], "Hm.\n\n> well", "Be brief.\n\nOr so."
    )
    second = a_chat(["Two", "2"])
    second.title = "Another *title*"
    found = back(tmp_path, first, second)
    assert [messages(chat) for chat in found] == [messages(first), messages(second)]
    assert [chat.title for chat in found] == ["", "Another *title*"]
    assert [chat.system for chat in found] == ["Be brief.\n\nOr so.", ""]
    assert found[0].started == first.started.replace(second=0, microsecond=0)


@given(texts=st.lists(TEXT.filter(bool), min_size=2, max_size=2), thinking=TEXT)
def test_nothing_that_was_said_passes_for_another_message(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], thinking: str
) -> None:
    chat = a_chat(texts, thinking, system=texts[0])
    [found] = back(tmp_path_factory.mktemp("files"), chat)
    assert messages(found) == messages(chat)
    assert found.system == chat.system


@pytest.mark.parametrize("model", ["You", "System", "a+b (c)", "/models/x.gguf"])
def test_any_model_s_name_will_do(tmp_path: Path, model: str) -> None:
    chat = a_chat(["Hi", "Hello"])
    [found] = back(tmp_path, chat, model=model)
    assert messages(found) == messages(chat)


def test_a_chat_without_messages_is_named_and_the_others_come(tmp_path: Path) -> None:
    path = tmp_path / "chats.md"
    good = "# A\n\n2026-11-30 20:01, m\n\n## You\n\nHi\n"
    path.write_text(f"{good}\n# B\n\n2026-11-30 20:01, m\n\n{good}".replace("\n", "\r\n"), "utf-8")
    first, bad, last = read(path)
    assert isinstance(bad, BadRecord) and bad.number == 2 and "no messages" in bad.reason
    assert messages(first) == messages(last) == [("user", "Hi", "")]


@pytest.mark.parametrize("text", ["# Notes\n\nof mine\n", "Notes\n\n# A\n\n2026-11-30 20:01, m\n"])
def test_other_markdown_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.md").write_text(text)
    with pytest.raises(KvchatError, match="nor Markdown as kvchat writes it"):
        list(read(tmp_path / "notes.md"))
