"""`python -m kvchat.bench.worker_child`: the engine's thread without a screen.

Reads an `Errand` as JSON from stdin, prints its measurements as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from statistics import median
from typing import Any

from kvchat.bench.plan import LoadSettings
from kvchat.bench.process import run_module
from kvchat.chat.commands import Command, Load, Send
from kvchat.chat.events import (
    CacheStatus,
    CommandFailed,
    CommandFinished,
    CommandStarted,
    ModelLoaded,
    ReplyStarted,
    WorkerEvent,
)
from kvchat.chat.session import ChatSession
from kvchat.chat.worker import Worker
from kvchat.engine.types import SamplingParams, TokenGenerated

WARM_UP = 16
"""Tokens of a reply that do not count: the first ones pay for what is done once."""

STORY = "Tell me a long story about a lighthouse keeper."
"""What replies of a measured length are asked with."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What to measure."""

    load: dict[str, Any]
    """Fields of `LoadSettings`."""
    reply_tokens: int = 0
    """Length of the timed reply; 0 leaves it out."""
    sends: int = 1
    """How often the idle worker is sent something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The measurements."""

    decode_tps: float | None
    send_to_first_event_ms: float
    """From `submit` to the worker saying that it began."""
    send_to_reply_started_ms: float
    """From `submit` to the prompt being known and the reply being in the tree."""


def measure(errand: Errand) -> Found:
    """Run an errand in a fresh process.

    Raises:
        KvchatError: the process failed.
    """
    lines = run_module("kvchat.bench.worker_child", asdict(errand), "Measuring the worker")
    return Found(**json.loads(lines[-1][1]))


class Timed:
    """A worker whose events come with the time they were told at."""

    def __init__(self) -> None:
        self._events: SimpleQueue[tuple[float, WorkerEvent]] = SimpleQueue()
        self.worker = Worker(
            lambda event: self._events.put((time.perf_counter(), event)), overflow="drop-oldest"
        )

    def carry_out(self, command: Command) -> list[tuple[float, WorkerEvent]]:
        """Submit a command and return what is told up to its end and the idle work after it."""
        self.worker.submit(command)
        told: list[tuple[float, WorkerEvent]] = []
        ended = False
        while not (ended and isinstance(told[-1][1], CacheStatus)):
            told.append(self._events.get())
            event = told[-1][1]
            if isinstance(event, CommandFailed):
                raise event.error
            ended = ended or isinstance(event, CommandFinished)
        return told


def perform(errand: Errand) -> Found:
    """Load, then measure.

    Raises:
        KvchatError: the model does not load, or a reply fails.
    """
    timed = Timed()
    load = LoadSettings(**errand.load)
    told = timed.carry_out(Load(load.model, load.arguments()))
    session = next(event.session for _, event in told if isinstance(event, ModelLoaded))
    unending(session)
    decode_tps = None
    if errand.reply_tokens:
        timed.worker.params = story_params(session, errand.reply_tokens)
        decode_tps = tokens_per_second(
            [at for at, event in timed.carry_out(Send(STORY)) if isinstance(event, TokenGenerated)]
        )
    timed.worker.params = story_params(session, 1)
    first, started = [], []
    for _ in range(errand.sends):
        time.sleep(0.05)  # idle means asleep, not just done
        sent = time.perf_counter()
        told = timed.carry_out(Send("And then?"))
        first.append(_wait(told, sent, CommandStarted))
        started.append(_wait(told, sent, ReplyStarted))
    timed.worker.shutdown()
    return Found(
        decode_tps=decode_tps,
        send_to_first_event_ms=median(first),
        send_to_reply_started_ms=median(started),
    )


def _wait(told: Sequence[tuple[float, WorkerEvent]], since: float, kind: type) -> float:
    return (next(at for at, event in told if isinstance(event, kind)) - since) * 1e3


def unending(session: ChatSession) -> None:
    """Let all replies of a session run to their limit."""
    from kvchat.bench.speed import forbid

    forbid(session.llm.engine, session.llm.tokenizer.control_ids)


def story_params(session: ChatSession, max_tokens: int | None) -> SamplingParams:
    """Return the model's own settings with a fixed seed and length."""
    return session.llm.defaults.updated(seed=0, max_tokens=max_tokens)


def tokens_per_second(times: Sequence[float]) -> float:
    """Return the speed of a reply whose tokens came at these times."""
    counted = times[WARM_UP:]
    return (len(counted) - 1) / (counted[-1] - counted[0])


def main() -> None:
    """Do the errand that stands on stdin."""
    found = perform(Errand(**json.load(sys.stdin)))
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
