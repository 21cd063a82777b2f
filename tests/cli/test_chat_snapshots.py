"""`kvchat chats snapshots`: which are there, how large they are or would be, and none any more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_helpers import STATS, say

from kvchat.chat.conversation import Conversation
from kvchat.chat.snapshots import folder_beside
from kvchat.chat.store import Store

Kvchat = Callable[..., Any]


@pytest.fixture
def chat(kvchat: Kvchat) -> str:
    """The id of a chat in the store."""
    conversation, store = Conversation(title="Otters"), Store()
    say(conversation, "Hello", [1, 2])
    store.save(conversation)
    store.close()
    return conversation.id


def put(chat_id: str, size: int = 3 << 20) -> Path:
    folder = folder_beside(Store().path)
    folder.put(chat_id, lambda path: Path(path).write_bytes(bytes(size)) and None)
    return folder.file(chat_id)


def listed(kvchat: Kvchat) -> list[dict[str, Any]]:
    return json.loads(kvchat("chats", "snapshots", "list", "--json").out)


def test_none_are_here(kvchat: Kvchat, chat: str) -> None:
    assert listed(kvchat) == []
    ran = kvchat("chats", "snapshots")
    assert ran.status == 0 and "no snapshots are here" in ran.err


def test_the_size_is_told_before_it_is_written(kvchat: Kvchat, chat: str) -> None:
    ran = kvchat("chats", "snapshots", "on", chat[:8])
    assert ran.status == 0 and "at most 0.0 MiB" in ran.err
    (row,) = listed(kvchat)
    assert (row["id"], row["kept"], row["bytes"]) == (chat, True, None)
    assert row["expected_bytes"] == STATS.kv_bytes
    assert "at most" in kvchat("chats", "snapshots").out


def test_they_are_listed_with_their_sizes(kvchat: Kvchat, chat: str) -> None:
    os.utime(put(chat), (0, 0))
    ran = kvchat("chats", "snapshots")
    assert "3.0 MiB" in ran.out and "Otters" in ran.out and "as set" in ran.out
    assert "3.0 MiB of 2,048 MiB are used" in ran.err
    (row,) = listed(kvchat)
    assert row["bytes"] == 3 << 20 and row["used"].startswith("19")


def test_one_of_a_deleted_chat_is_there_until_the_chat_is_gone_for_good(
    kvchat: Kvchat, chat: str
) -> None:
    file = put(chat)
    assert kvchat("chats", "delete", chat).status == 0
    assert [row["id"] for row in listed(kvchat)] == [chat]
    store = Store()
    store.tidy(keep_deleted=-1)
    folder_beside(store.path).prune(store.keeping())
    assert not file.exists()


def test_off_removes_it(kvchat: Kvchat, chat: str) -> None:
    file = put(chat)
    ran = kvchat("chats", "snapshots", "off", chat)
    assert ran.status == 0 and "3.0 MiB are free again" in ran.err
    assert not file.exists()
    assert Store().load(chat).keep_cache is False
    assert "there was no snapshot" in kvchat("chats", "snapshots", "off", chat).err


def test_all_are_cleared_and_chats_go_on_keeping(kvchat: Kvchat, chat: str) -> None:
    assert kvchat("chats", "snapshots", "on", chat).status == 0
    files = [put(chat), put("abc")]
    ran = kvchat("chats", "snapshots", "clear")
    assert ran.status == 0 and "free again" in ran.err
    assert not any(file.exists() for file in files)
    assert Store().load(chat).keep_cache is True


def test_one_is_cleared(kvchat: Kvchat, chat: str) -> None:
    files = [put(chat), put("abc")]
    assert kvchat("chats", "snapshots", "clear", chat[:6]).status == 0
    assert [file.exists() for file in files] == [False, True]


def test_a_wrong_id_is_told(kvchat: Kvchat, chat: str) -> None:
    ran = kvchat("chats", "snapshots", "on", "nobody")
    assert ran.status == 1 and "nobody" in ran.err
