"""Files whose contents are wrong on purpose: each record is imported or told about."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich_chat import rich_chat
from test_imports import CHATGPT, WEBUI

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.chat.transfer import WRITERS, BadRecord, kvchat_json, read, write

OPENAI = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "reasoning_content": "t"},
    ],
    "title": "T",
    "created": 1,
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "<think>\nx\n</think>\n\nb"},
    ],
    "system": "s",
}
OURS = json.loads(kvchat_json.write(rich_chat()))

NUMBERS = (0, -1, 1.5, 2**31, 2**63, 2**64, 10**400, -(10**30), *map(float, ("nan", "inf", "-inf")))
TEXTS = ("", "\0", "\ud800", "\x1b[2J", "a" * 9_999, "\u202e", "1e999", "user", "assistant")
TIMES = ("9999-99-99", "0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "2024-01-01T00:00+23:59")
SHAPES = ([], {}, [[]], [None], [{}], {"a": {}}, {"": None}, ["x"] * 1000, {"parts": [None, {}, 1]})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = (None, True, False, *NUMBERS, *TEXTS, *TIMES, *SHAPES, nested(400))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("hostile") / "chats.db")


def disturb(record: Any, data: st.DataObject) -> None:
    """Put something hostile in the place of something in a record, or take that out."""
    at = record
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.integers(0, 3)):
            at = at[key]
        else:
            break
    if data.draw(st.integers(0, 5)):
        at[key] = copy.deepcopy(data.draw(st.sampled_from(HOSTILE)))
    else:
        del at[key]


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_hostile_records_are_kept_or_told_about(
    tmp_path: Path, store: Store, data: st.DataObject
) -> None:
    record = copy.deepcopy(data.draw(st.sampled_from([OURS, CHATGPT, WEBUI, OPENAI, SHAREGPT])))
    for _ in range(data.draw(st.integers(1, 2))):
        if record:
            disturb(record, data)
    path = tmp_path / "some.json"
    path.write_text(json.dumps([record, OPENAI]))
    first, second = read(path)
    assert isinstance(second, Conversation)
    if isinstance(first, BadRecord):
        assert first.reason and len(first.reason) < 400
        return
    store.save(first)
    again = store.load(first.id)
    for name in WRITERS:
        write([again], name, io.StringIO())
    assert isinstance(kvchat_json.read(json.loads(kvchat_json.write(again))), Conversation)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("reply", "seed"), 2**64, "'seed' is too large a number"),
        (("reply", "stop_id"), 10**40, "'stop_id' is too large a number"),
        (("reply", "stats", "ttft_ms"), float("nan"), "'ttft_ms' of the stats must be a number"),
        (("reply", "stats", "ttft_ms"), 10**400, "'ttft_ms' of the stats must be a number"),
        (("reply", "params", 0, "penalise_all"), float("nan"), "'penalise_all' must be a boolean"),
    ],
)
def test_numbers_that_nothing_can_hold_are_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, said: str
) -> None:
    record = copy.deepcopy(OURS)
    *parents, last = path
    at = record["messages"][1]
    for key in parents:
        at = at[key]
    at[last] = value
    (tmp_path / "x.json").write_text(json.dumps([record]))
    (bad,) = read(tmp_path / "x.json")
    assert isinstance(bad, BadRecord) and said in bad.reason


@pytest.mark.parametrize(
    "title", ["\0", "\ud800x", "\x1b]0;x\x07", "'; DROP TABLE chats; --", "%_\\"]
)
def test_hostile_titles_and_tags_are_texts(store: Store, title: str) -> None:
    chat = Conversation(title=title)
    chat.add_user(title)
    store.save(chat)
    store.rename(chat.id, title)
    store.tag(chat.id, [title])
    listed = next(each for each in store.chats() if each.id == chat.id)
    assert (listed.title, listed.tags) == (title, (title,))
    assert any(each.id == chat.id for each in store.chats(title))
    store.search(title)
    assert store.load(store.duplicate(chat.id)).title.startswith(title)
