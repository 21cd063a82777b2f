"""`python -m kvchat.bench.resume_child`: one start of a program that opens a long chat.

Reads an `Errand` as JSON from stdin, prints its measurements as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from kvchat.bench.long_chat import REPLY_TOKENS, USER_TOKENS, chat_of
from kvchat.bench.plan import LoadSettings
from kvchat.bench.process import run_module
from kvchat.bench.speed import forbid
from kvchat.bench.texts import message
from kvchat.chat.events import TurnFinished
from kvchat.chat.ledger import Turn
from kvchat.chat.session import ChatSession
from kvchat.chat.snapshots import Snapshots, folder_beside
from kvchat.chat.store import Store
from kvchat.models.load import load

LIVE = 3
"""Turns behind the median of a chat that was not closed."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What to measure."""

    load: dict[str, Any]
    """Fields of `LoadSettings`."""
    folder: str
    """Of the database and the snapshots."""
    kind: Literal["write", "resume", "cold"]
    """`write` makes a chat and its snapshot; the others open it, with the snapshot or without."""
    tokens: int
    """About how long the chat is."""


@dataclass(slots=True, kw_only=True)
class Found:
    """The measurements; those of other kinds of errand stay at nothing."""

    tokens: int = 0
    """That the next turn is certain to begin with."""
    nbytes: int = 0
    """Of the snapshot."""
    file_ms: float = 0.0
    """Writing the snapshot, or loading it."""
    ttft_ms: float = 0.0
    """Of the first turn after the start."""
    loaded: int = 0
    """Tokens of that turn that came from the snapshot."""
    live_ttft_ms: float = 0.0
    """Of turns like it in the same place with the chat open; the median of some."""


def measure(errand: Errand) -> Found:
    """Run an errand in a fresh process.

    Raises:
        KvchatError: the process failed.
    """
    lines = run_module("kvchat.bench.resume_child", asdict(errand), "Opening a chat again")
    return Found(**json.loads(lines[-1][1]))


def perform(errand: Errand) -> Found:
    """Make or open the chat, then measure.

    Raises:
        KvchatError: the model does not load, or a reply fails.
    """
    settings = LoadSettings(**errand.load)
    llm = load(settings.model, **settings.arguments())
    forbid(llm.engine, llm.tokenizer.control_ids)
    store = Store(Path(errand.folder) / "chats.db")
    snapshots = Snapshots(folder_beside(store.path, sys.maxsize), always=True)
    if errand.kind == "write":
        turns = max(1, round(errand.tokens / (USER_TOKENS + REPLY_TOKENS)))
        store.save(chat_of(llm.tokenizer, 2 * turns))
    chat = store.load(store.chats()[0].id)
    params = llm.defaults.updated(seed=0, max_tokens=2)
    session = ChatSession(llm, conversation=chat, params=params, overflow="stop")
    found = Found(tokens=len(session.certain()))
    match errand.kind:
        case "write":
            for _ in session.settle():
                pass
            started = time.perf_counter()
            snapshots.save(session, _go_on)
            found.file_ms = (time.perf_counter() - started) * 1e3
            found.nbytes = snapshots.folder.size(chat.id)
        case "resume":
            started = time.perf_counter()
            snapshots.load(session, _go_on)
            found.file_ms = (time.perf_counter() - started) * 1e3
            first, *others = [_turn(session, nth) for nth in range(1 + LIVE)]
            found.ttft_ms, found.loaded = first.ttft_ms, first.loaded
            found.live_ttft_ms = median(turn.ttft_ms for turn in others)
        case "cold":
            found.ttft_ms = _turn(session, 0).ttft_ms
    store.close()
    return found


def _turn(session: ChatSession, nth: int) -> Turn:
    """Say something that was not said before, and take it back."""
    for _ in session.settle() if session.ledger else ():
        pass
    text = message(session.llm.tokenizer, USER_TOKENS, nth)
    turn = next(event.turn for event in session.send(text) if isinstance(event, TurnFinished))
    session.delete(session.conversation.active_path()[-2].id)
    return turn


def _go_on() -> None:
    """Nothing else is to be done."""


def main() -> None:
    """Do the errand that stands on stdin."""
    found = perform(Errand(**json.load(sys.stdin)))
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
