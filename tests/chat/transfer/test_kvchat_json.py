"""Our own format: nothing is lost, and nothing wrong gets in."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict
from datetime import datetime
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich_chat import rich_chat

from kvchat.chat.conversation import Conversation
from kvchat.chat.transfer import BadRecord, kvchat_json, read, write
from kvchat.chat.transfer.records import RecordError
from kvchat.engine.errors import KvchatError


def told(chat: Conversation) -> dict[str, Any]:
    """All of a conversation, in a form in which NaN is equal to itself."""
    return {
        "about": (chat.id, chat.title, chat.system, chat.started, sorted(chat.dropped.items())),
        "children": chat.children,
        "active": chat.active,
        "nodes": {node.id: repr(node) for node in chat},
    }


def record() -> dict[str, Any]:
    value = json.loads(kvchat_json.write(rich_chat()))
    assert isinstance(value, dict)
    return value


def test_a_conversation_comes_back_whole(tmp_path: Path) -> None:
    chats = [rich_chat(), Conversation(title="empty"), rich_chat()]
    path = tmp_path / "chats.json"
    with path.open("w", encoding="utf-8") as file:
        assert write(iter(chats), "json", file) == 3
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 3
    back = list(read(path))
    assert all(isinstance(chat, Conversation) for chat in back)
    # The time zone's name may differ where its offset does not.
    assert [told(chat)["about"] for chat in back] == [told(chat)["about"] for chat in chats]
    for chat, original in zip(back, chats, strict=True):
        assert isinstance(chat, Conversation)
        again, first = told(chat), told(original)
        assert (again["children"], again["active"]) == (first["children"], first["active"])
        assert [n.created for n in chat] == [n.created for n in original]
        for node, before in zip(chat, original, strict=True):
            assert repr(node.reply) == repr(before.reply)
            assert (node.content, node.role, node.edited) == (
                before.content,
                before.role,
                before.edited,
            )
            assert chat.context_ids(node.id) == original.context_ids(node.id)
        assert [n.id for n in chat.active_path()] == [n.id for n in original.active_path()]


@given(st.floats(width=32))
def test_numbers_of_single_precision_are_exact(value: float) -> None:
    (written,) = json.loads(json.dumps(kvchat_json._floats_out([value]), allow_nan=False))
    back = kvchat_json._floats({"x": [written]}, "x", 1)[0]
    assert (isnan(value) and isnan(back)) or struct.pack("f", value) == struct.pack("f", back)


@given(st.text(), st.text(), st.text(min_size=1), st.datetimes(min_value=datetime(1971, 1, 1)))
def test_any_text_comes_back(title: str, system: str, content: str, started: datetime) -> None:
    chat = Conversation(title=title, system=system, started=started.astimezone())
    chat.add_user(content)
    back = kvchat_json.read(json.loads(kvchat_json.write(chat)))
    assert (back.title, back.system, back.started) == (title, system, chat.started)
    assert back.active_path()[0].content == content


def test_a_reply_that_was_being_written_is_interrupted() -> None:
    chat = Conversation()
    chat.start_reply(chat.add_user("?").id)
    reply = kvchat_json.read(json.loads(kvchat_json.write(chat))).active_path()[1].reply
    assert reply is not None and reply.finish_reason == "interrupted"


def change(value: dict[str, Any], path: str, new: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        value = value[int(name) if isinstance(value, list) else name]
    value[last] = new


def test_stats_of_an_older_version_lack_what_came_later() -> None:
    value = record()
    message = value["messages"][1]
    stats = message["reply"]["stats"]
    assert stats.pop("proposed") == stats.pop("accepted") == 0
    reply = kvchat_json.read(value).node(message["id"]).reply
    assert reply is not None and reply.stats is not None
    assert asdict(reply.stats) == {**stats, "proposed": 0, "accepted": 0}


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("kvchat", 2, "version 2"),
        ("kvchat", True, "whole number"),
        ("id", "", "id is empty"),
        ("system", None, "'system' must be text"),
        ("started", "yesterday", "no time"),
        ("messages", {}, "must be a list"),
        ("messages.1.role", "user", "message 2: users and assistants"),
        ("messages.0.parent", "nobody", "parent does not stand before"),
        ("messages.1.parent", ["x"], "parent does not stand before"),
        ("messages.1.reply", None, "'reply' must be an object"),
        ("messages.1.reply.token_ids", [1, 2, 2**40, 4], "token ids"),
        ("messages.1.reply.token_ids", [-1, 2, 3, 4], "negative"),
        ("messages.1.reply.token_ids", [1], "entries for 1 tokens"),
        ("messages.1.reply.logprobs", [0.5, None, [], 1], "list of numbers"),
        ("messages.1.reply.logprobs", [0.5, 10**400, 1, 1], "list of numbers"),
        ("messages.1.reply.after", [], "0 entries for 4 tokens"),
        ("messages.1.reply.before", [3] * 4, "'before' must be an object"),
        ("messages.1.reply.params", [{"from": 0, "top_p": 7}], "top_p must be"),
        ("messages.1.reply.params", [{"from": 0, "stop": 7}], "'stop' must be a list"),
        ("messages.1.reply.stats", {"reused": "many"}, "must be a number"),
        ("messages.1.reply.finish_reason", "bored", "'finish_reason' must be one of"),
        ("messages.1.reply.context", {"kept": 9, "ids": []}, "keeps more"),
        ("messages.1.id", "SAME", ""),
    ],
)
def test_what_is_wrong_is_named(path: str, new: Any, said: str) -> None:
    value = record()
    if new == "SAME":
        new, said = value["messages"][0]["id"], "id is that of another"
    change(value, path, new)
    with pytest.raises((RecordError, KvchatError), match=said):
        kvchat_json.read(value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.data())
def test_no_change_of_a_record_crashes(data: st.DataObject) -> None:
    value: Any = record()
    at: Any = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
        else:
            break
    at[key] = data.draw(_JSON)
    try:
        chat = kvchat_json.read(value)
    except (RecordError, KvchatError):
        return
    write([chat], "html", io.StringIO())
    kvchat_json.read(json.loads(kvchat_json.write(chat)))


def test_a_bad_chat_among_good_ones_is_named(tmp_path: Path) -> None:
    bad = record() | {"messages": [{}]}
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([record(), bad, record()]), encoding="utf-8")
    first, second, third = read(path)
    assert isinstance(first, Conversation) and isinstance(third, Conversation)
    assert second == BadRecord(2, "message 1: there is no 'id'")
