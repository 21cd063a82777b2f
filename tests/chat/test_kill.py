"""Killed at any moment while a reply is written, a program loses nothing that was on the disk."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chat.tiny_chat import tokenizer_of

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")

KILLS = 100
REPLY = "The quick brown fox jumps over the lazy dog. " * 3

NURSERY = f"""
import os, sys
from pathlib import Path
import torch
from chat.saver_desk import Desk
from chat.tiny_chat import dictate, tiny_llm
from kvchat.chat.commands import Send
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store

torch.set_num_threads(1)
tiny_llm()  # what children share

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def chat(chat_id):
    desk = Desk(Store(Path(sys.argv[1])), Conversation(id=chat_id))
    desk.session.params = desk.session.params.updated(max_tokens=1000)
    def told():
        node = desk.chat.active_path()[-1]
        tell("said", len(desk.chat.nodes), len(node.reply.token_ids))
        if len(node.reply.token_ids) % 16 == 0 and desk.saver.flush():
            tell("saved", len(desk.chat.nodes), len(node.reply.token_ids))
    desk.on_token = told
    while True:
        dictate(desk.session, {REPLY!r})
        desk.do(Send("message"))

for line in sys.stdin:
    child = os.fork()
    if not child:
        chat(line.strip())
    tell("pid", child)
    os.waitpid(child, 0)
    tell("dead")
"""


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks one with a chat for every id it is given, which takes no time."""
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(tmp_path / "chats.db")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def killed(
    nursery: subprocess.Popen[str], chat_id: str, since: str, after: float
) -> list[tuple[int, int]]:
    """Let a chat be written for a while, and return what had reached the disk for certain.

    Args:
        nursery: begins it.
        chat_id: its id.
        since: `pid` or `said`: when it has begun, or the first token is there.
        after: so many seconds it lives.

    Returns:
        Numbers of messages, and of tokens in the last of them.
    """
    assert nursery.stdin is not None and nursery.stdout is not None
    print(chat_id, file=nursery.stdin, flush=True)
    pid, saved = 0, []
    for line in nursery.stdout:
        what, *numbers = line.split()
        if what == "pid":
            pid = int(numbers[0])
        if what == since and pid:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
            pid = 0
        if what == "saved":
            saved.append((int(numbers[0]), int(numbers[1])))
        if what == "dead":
            return saved
    raise AssertionError("the nursery has ended")


def is_sound(chat: Conversation) -> None:
    """Every reply is a beginning of what was dictated, with all that belongs to it."""
    tokenizer = tokenizer_of("chatml")
    *whole, last = [node for node in chat.active_path() if node.reply]
    for node in (*whole, last):
        reply = node.reply
        assert reply is not None
        assert REPLY.startswith(node.content)
        assert node.content == tokenizer.decode(list(reply.token_ids))
        assert len(reply.logprobs) == len(reply.before) == len(reply.token_ids)
        ended = [reply.stop_id] if reply.stop_id is not None else []
        if reply.context is not None:
            ids = chat.context_ids(node.id)
            assert ids[len(ids) - len(reply.token_ids) - len(ended) :] == [
                *reply.token_ids,
                *ended,
            ]
    assert all(node.content == REPLY and node.reply.finish_reason == "stop" for node in whole)
    assert last.reply.finish_reason in ("stop", "interrupted")


def test_killed_at_a_hundred_moments(tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    chance = random.Random(5)
    path = tmp_path / "chats.db"
    reached = []
    for n in range(KILLS):
        since = "said" if n % 4 else "pid"
        saved = killed(nursery, f"chat{n}", since, chance.uniform(0, 0.1))
        store = Store(path)
        store.tidy()
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        if saved or any(chat.id == f"chat{n}" for chat in store.chats()):
            store.claim(f"chat{n}")
            chat = store.load(f"chat{n}")
            is_sound(chat)
            last = chat.active_path()[-1]
            reached.append((len(chat.nodes), len(last.reply.token_ids) if last.reply else 0))
            assert reached[-1] >= max(saved, default=(0, 0))
        store.close()
    store = Store(path)
    for chat in store.chats():
        is_sound(store.load(chat.id))
    # They were killed at different moments, in the middle of replies too.
    assert len(set(reached)) > KILLS // 4
    store.close()
