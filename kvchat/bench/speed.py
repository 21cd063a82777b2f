"""How fast an engine reads and writes, measured through `Engine.generate` as a user gets it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.engine import Engine
from kvchat.engine.sampling import Draw, Sampler
from kvchat.engine.types import GenerationFinished, SamplingParams, TokenGenerated


@dataclass(frozen=True, slots=True)
class Reply:
    """One timed reply."""

    ids: list[int]
    ttft_ms: float
    """From the call to the first token in the caller's hands."""
    token_ms: list[float]
    """Time between two tokens; one fewer than there are tokens."""
    reused: int
    new: int

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first one."""
        return len(self.token_ms) / sum(self.token_ms) * 1e3


class _Silent:
    """A text stream for replies whose text nobody reads."""

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Unending:
    """A sampler that never draws certain ids."""

    def __init__(self, sampler: Sampler, never: Collection[int]) -> None:
        self._sampler = sampler
        self._never = torch.tensor(sorted(never), dtype=torch.long)

    @torch.inference_mode()
    def sample(self, logits: Tensor, *context: Any) -> Draw:
        logits[..., self._never.to(logits.device)] = -torch.inf
        return self._sampler.sample(logits, *context)


def forbid(engine: Engine, never: Collection[int] = ()) -> None:
    """Let replies run to max_tokens: no id that ends a reply is drawn, and none of `never`."""
    ids = {*never, *engine.eog_ids}
    engine.sampler = _Unending(engine.sampler, ids)  # type: ignore[assignment]


@contextmanager
def forced_length(engine: Engine, never: Collection[int] = ()) -> Iterator[None]:
    """`forbid`, for a while."""
    sampler = engine.sampler
    forbid(engine, never)
    try:
        yield
    finally:
        engine.sampler = sampler


def forget(engine: Engine) -> None:
    """Empty the cache and the stash."""
    engine.truncate(0)
    engine.stash.clear()


def reply(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    tokens: int,
) -> Reply:
    """Generate exactly `tokens` tokens after `ids`, on top of whatever is cached; time them."""
    asked = params.updated(max_tokens=tokens)
    started = time.perf_counter()
    times: list[float] = []
    drawn: list[int] = []
    with forced_length(engine):
        for event in engine.generate(ids, lambda: asked, _Silent()):
            if isinstance(event, TokenGenerated):
                times.append(time.perf_counter())
                drawn.append(event.id)
            elif isinstance(event, GenerationFinished):
                stats = event.stats
    between = [(b - a) * 1e3 for a, b in pairwise(times)]
    return Reply(drawn, (times[0] - started) * 1e3, between, stats.reused, stats.new)


def prefill_ms(engine: Engine, ids: Sequence[int], params: SamplingParams) -> float:
    """Time from an empty cache to the first token after `ids`."""
    forget(engine)
    return reply(engine, ids, params, tokens=1).ttft_ms


@dataclass(frozen=True, slots=True)
class BranchSwitch:
    """What coming back to another branch costs."""

    switch_ms: float | None
    """None when the branch is larger than the stash."""
    prefill_ms: float
    """Running the same tokens instead."""


def branch_switch(engine: Engine, trunk: Sequence[int], branch: Sequence[int]) -> BranchSwitch:
    """Leave a branch for another one and come back to it."""
    other = [*trunk, *reversed(branch[:16])]
    whole = [*trunk, *branch]
    forget(engine)
    _fill(engine, trunk)
    prefilling = _fill(engine, whole)
    _fill(engine, other)
    stashed = engine.reusable(whole) >= len(whole) - 1
    switching = _fill(engine, whole)
    return BranchSwitch(switching if stashed else None, prefilling)


def _fill(engine: Engine, ids: Sequence[int]) -> float:
    """Make the cache hold `ids`; returns how long it took in milliseconds."""
    started = time.perf_counter()
    for _ in engine.prefill(ids):
        pass
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3
