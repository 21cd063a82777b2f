"""`kvchat verify`: scripted chats answered with the cache, then every reply again without it.

In float32 both runs must give the same tokens from the same logits; elsewhere kernels differ with
the number of rows, and the gap is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvchat.bench.speed import forget
from kvchat.bench.verify_scripts import Step, scripts
from kvchat.chat.events import TurnFinished
from kvchat.chat.ledger import Turn
from kvchat.chat.session import ChatSession
from kvchat.engine.sampling import Draw, Sampler
from kvchat.engine.token_ids import common_prefix
from kvchat.engine.types import (
    GenerationFinished,
    PrefillProgress,
    SamplingParams,
    TokenGenerated,
)
from kvchat.models.load import LanguageModel

ABSOLUTE, RELATIVE = 1e-4, 1e-5
"""Logits are equal in float32 if they differ by no more than the larger of the first and the
second times the largest logit: rounding grows with what is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One reply with the cache and without it."""

    name: str
    reused: int
    new: int
    decoded: int
    dropped_turns: int
    """Old turns left out of the prompt."""
    finish_reason: str
    ttft_ms: float | None
    """None when the reply was stopped before its first token; so are the next two."""
    cold_ttft_ms: float | None
    logit_gap: float | None
    """Largest difference to the logits of one run over the whole text in a fresh cache."""
    tolerance: float
    """Largest gap that passes for equal in float32."""
    kl: float | None
    """Mean divergence in nats from the distributions of that run."""
    difference: str | None
    """The first difference in words; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a verification found."""

    model: str
    device: str
    dtype: str
    quant: str
    threads: int
    turns: list[Outcome]

    @property
    def exact(self) -> bool:
        """Whether this model has to answer the same with the cache and without it."""
        return self.dtype == "float32" and self.quant == "none"

    @property
    def different(self) -> list[Outcome]:
        """The replies whose tokens differ, or in float32 their logits by more than rounding."""
        return [
            turn
            for turn in self.turns
            if turn.difference is not None
            or (self.exact and turn.logit_gap is not None and not turn.logit_gap <= turn.tolerance)
        ]

    @property
    def failed(self) -> bool:
        """Whether there is a difference where there must be none."""
        return self.exact and bool(self.different)

    @property
    def logit_gap(self) -> float:
        """The largest gap of all."""
        return max((t.logit_gap for t in self.turns if t.logit_gap is not None), default=0.0)

    @property
    def kl(self) -> float:
        """The mean divergence over all tokens, in nats."""
        weighed = [(t.kl, t.decoded) for t in self.turns if t.kl is not None]
        return sum(kl * n for kl, n in weighed) / max(1, sum(n for _, n in weighed))


@dataclass(frozen=True, slots=True)
class _Played:
    """A reply that was written with the cache."""

    name: str
    turn: Turn
    params: SamplingParams
    context: list[int]
    """Prompt, reply and stop id."""
    logits: list[Tensor]
    """Each (vocab_size,) float32: what each id after the prompt was chosen from."""
    cache_is_sound: bool

    @property
    def prompt(self) -> list[int]:
        return self.context[: self.turn.reused + self.turn.new]

    @property
    def written(self) -> list[int]:
        return self.context[self.turn.reused + self.turn.new :]


class _Recorder:
    """A sampler that keeps the logits it is shown."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, *context: Any) -> Draw:
        self.logits.append(logits.detach().reshape(-1).to("cpu", torch.float32, copy=True))
        return self.sampler.sample(logits, *context)


def verify(llm: LanguageModel, progress: Callable[[str], None] = lambda _: None) -> Verification:
    """Play the chats with the cache, then every reply of them without.

    Args:
        llm: the model; its cache and stash are emptied.
        progress: called with what is done next.

    Raises:
        KvchatError: the model cannot answer, or its context is too small for the chat.
    """
    forget(llm.engine)
    played = []
    for each in _play(llm):
        progress(f"with the cache: {each.name}")
        played.append(each)
    progress("one run over each branch")
    references = _score(llm, [each.context for each in played])
    turns = []
    for each, reference in zip(played, references, strict=True):
        progress(f"without the cache: {each.name}")
        turns.append(_compare(llm, each, reference))
    return Verification(
        model=llm.name,
        device=llm.device,
        dtype=llm.dtype,
        quant=llm.quant,
        threads=torch.get_num_threads(),
        turns=turns,
    )


def _play(llm: LanguageModel) -> Iterator[_Played]:
    for chat, script in scripts(llm):
        engine, greedy = chat.llm.engine, chat.params
        recorder = _Recorder(engine.sampler)
        engine.sampler = recorder  # type: ignore[assignment]
        try:
            for step in script(chat):
                chat.params = greedy.updated(**step.params)
                recorder.logits = []
                turn = _run(chat, step)
                context = chat.conversation.context_ids(turn.reply_id)
                yield _Played(
                    name=step.name,
                    turn=turn,
                    params=chat.params,
                    context=context,
                    # Tokens that a stop string took back were drawn too.
                    logits=recorder.logits[: len(context) - turn.reused - turn.new],
                    cache_is_sound=list(engine.ids) == context[: len(engine.ids)],
                )
                for _ in chat.settle():
                    pass
        finally:
            engine.sampler = recorder.sampler


def _run(chat: ChatSession, step: Step) -> Turn:
    cancel = chat.llm.engine.cancel
    for event in step.events:
        match event:
            case PrefillProgress(new=new, done=done) if step.cancel_after == 0 and done == new:
                cancel()
            case TokenGenerated(index=index) if step.cancel_after == index + 1:
                cancel()
            case TurnFinished(turn=turn):
                return turn
    raise AssertionError("a reply ends with TurnFinished")


def _score(llm: LanguageModel, contexts: Sequence[list[int]]) -> list[Tensor]:
    """Return the logits (T, vocab_size) of each context, run in a fresh cache.

    A context that begins another one is not run: its logits are the first rows of the other's.
    """
    scored: list[tuple[list[int], Tensor]] = []
    for context in sorted(contexts, key=len, reverse=True):
        if not any(whole[: len(context)] == context for whole, _ in scored):
            scored.append((context, llm.score(context).cpu()))
    return [
        next(logits[: len(context)] for whole, logits in scored if whole[: len(context)] == context)
        for context in contexts
    ]


def _compare(llm: LanguageModel, played: _Played, reference: Tensor) -> Outcome:
    turn = played.turn
    gap = kl = cold_ttft_ms = None
    tolerance = ABSOLUTE
    difference = None if played.cache_is_sound else "the cache does not hold what was said"
    if played.logits:
        warm = torch.stack(played.logits)
        fresh = reference[len(played.prompt) - 1 :][: len(warm)]
        gap = (warm - fresh).abs().max().item()
        tolerance = max(ABSOLUTE, RELATIVE * fresh.abs().max().item())
        logs = torch.log_softmax(fresh, dim=-1)
        divergence = (logs.exp() * (logs - torch.log_softmax(warm, dim=-1))).sum(-1)
        kl = max(0.0, divergence.mean().item())
    if played.written:  # the stop id alone is a reply too
        cold, cold_ttft_ms = _without_cache(llm, played)
        difference = difference or _first_difference(llm, played.written, cold)
    return Outcome(
        name=played.name,
        reused=turn.reused,
        new=turn.new,
        decoded=turn.decoded,
        dropped_turns=turn.dropped_turns,
        finish_reason=turn.finish_reason,
        ttft_ms=turn.ttft_ms if turn.decoded else None,
        cold_ttft_ms=cold_ttft_ms,
        logit_gap=gap,
        tolerance=tolerance,
        kl=kl,
        difference=difference,
    )


def _without_cache(llm: LanguageModel, played: _Played) -> tuple[list[int], float | None]:
    """Write a reply anew from its prompt; return its ids, the stop id included, and its TTFT."""
    params = played.params
    if played.turn.finish_reason == "cancelled":
        params = params.updated(max_tokens=played.turn.decoded)
    forget(llm.engine)
    ids: list[int] = []
    ttft_ms = None
    started = time.perf_counter()
    stream = llm.tokenizer.stream_decoder(continues=True)
    for event in llm.engine.generate(played.prompt, lambda: params, stream):
        match event:
            case TokenGenerated():
                ttft_ms = ttft_ms or (time.perf_counter() - started) * 1e3
                ids.append(event.id)
            case GenerationFinished(stop_id=int(stop_id)):
                ids.append(stop_id)
    return ids, ttft_ms


def _first_difference(llm: LanguageModel, warm: list[int], cold: list[int]) -> str | None:
    if warm == cold:
        return None
    at = common_prefix(warm, cold)
    with_cache, without = (llm.tokenizer.decode(ids[at : at + 1]) for ids in (warm, cold))
    return f"token {at}: {with_cache!r} with the cache, {without!r} without"
