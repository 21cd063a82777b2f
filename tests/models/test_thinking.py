"""Reasoning and answer of a reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_zoo import ZOO

from kvchat.models.template import ChatTemplate, Message
from kvchat.models.thinking import THINK, ThinkingSplitter, ThinkingTags, split_thinking, tags_in


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("Four.", False, (None, "Four.")),
        ("", False, (None, "")),
        ("", True, ("", "")),
        ("<think>\nhm\n</think>\n\nFour.", False, ("hm", "Four.")),
        ("\n<think>hm</think> Four.", False, ("hm", " Four.")),
        ("<think>\nhm", False, ("hm", "")),
        ("<think>\n\n</think>\n\nFour.", False, ("", "Four.")),
        ("hm\n</think>\n\nFour.", True, ("hm", "Four.")),
        ("still at it", True, ("still at it", "")),
        ("<think>\nhm\n</think>\nFour.", True, ("hm", "Four.")),
        ("Use <think> and </think>.", False, (None, "Use <think> and </think>.")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_split(text: str, opened: bool, parts: tuple[str | None, str]) -> None:
    assert split_thinking(text, opened=opened) == parts


def test_a_split_reply_is_rendered_as_the_model_wrote_it() -> None:
    written = "<think>\n a\n\nb \n</think>\n\n Four.\n"
    thinking, answer = split_thinking(written)
    rendered = (
        ZOO["qwen3"]
        .chat_template()
        .render(
            [Message("user", "?"), Message("assistant", answer, thinking)],
            add_generation_prompt=False,
        )
    )
    assert f"assistant\n{written}<|im_end|>" in rendered


def test_tags_are_those_the_template_mentions() -> None:
    assert tags_in("no tags at all") == THINK
    tags = tags_in("{{ '[THINK]' + m.thinking + '[/THINK]' }}")
    assert split_thinking("[THINK]hm[/THINK]Four.", tags=tags) == ("hm", "Four.")
    assert ZOO["deepseek"].chat_template().thinking_tags == THINK


def test_whether_the_prompt_opens_thinking() -> None:
    asked = [Message("user", "What does <think> mean?")]
    assert ZOO["deepseek"].chat_template().opens_thinking(asked)
    assert not ZOO["chatml"].chat_template().opens_thinking(asked)
    assert not ZOO["phi3"].chat_template().opens_thinking(asked)
    qwen = ZOO["qwen3"].chat_template()
    assert qwen.supports_thinking_switch
    assert not qwen.opens_thinking(enable_thinking=False)
    switch = "{% if add_generation_prompt %}A:{% if enable_thinking %}<think>{% endif %}{% endif %}"
    assert ChatTemplate(switch).opens_thinking(enable_thinking=True)
    assert not ChatTemplate(switch).opens_thinking(enable_thinking=False)


PIECES = (
    "<think>",
    "</think>",
    "<",
    "</",
    "</thin",
    "think>",
    "\n",
    "\n\n",
    " ",
    "a",
    "hm",
    "<think",
)


@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10),
    opened=st.booleans(),
    tags=st.sampled_from([THINK, ThinkingTags("<", "a"), ThinkingTags("<think", "hm")]),
)
def test_pieces_are_split_as_the_whole_is(
    pieces: list[str], opened: bool, tags: ThinkingTags
) -> None:
    splitter = ThinkingSplitter(tags, opened=opened)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    thinking, answer = split_thinking("".join(pieces), opened=opened, tags=tags)
    assert "".join(thought for thought, _ in parts) == (thinking or "")
    assert "".join(said for _, said in parts) == answer


def test_nothing_is_held_back_longer_than_needed() -> None:
    splitter = ThinkingSplitter(THINK)
    assert splitter.push("Use ") == ("", "Use ")
    assert splitter.push("<think>") == ("", "<think>")
    splitter = ThinkingSplitter(THINK)
    assert splitter.push("<thi") == ("", "")
    assert splitter.thinking is None
    assert splitter.push("nk>\nso</") == ("so", "")
    assert splitter.thinking is True
    assert splitter.push("b>\n") == ("</b>", "")
    assert splitter.push("</think>\n") == ("", "")
    assert splitter.thinking is False
    assert splitter.push("\nFour.\n") == ("", "Four.\n")
    assert splitter.flush() == ("", "")
