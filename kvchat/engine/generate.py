"""From a prompt to a reply: prefill once, then decode one token at a time.

These functions know a model, a cache and a sampler, and nothing of who calls them. They keep
`context.ids` equal to what the cache holds after every forward pass, so whatever interrupts them,
the ids whose keys and values are cached are known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvchat.engine.errors import Cancelled
from kvchat.engine.kv_cache import KVCache
from kvchat.engine.model import Transformer
from kvchat.engine.sampling import Draw, Sampler
from kvchat.engine.speculation import PassCosts, Speculation
from kvchat.engine.step import DecodeStep
from kvchat.engine.stop_strings import StopStrings
from kvchat.engine.types import (
    FinishReason,
    GenerationEvent,
    GenerationFinished,
    GenerationStats,
    PrefillFinished,
    PrefillProgress,
    SamplingParams,
    TextStream,
    TokenGenerated,
)


@dataclass(slots=True)
class Context:
    """A cache and the ids whose keys and values are in it; always of equal length."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)

    def truncate(self, n: int) -> None:
        """Forget all positions from `n` on."""
        del self.ids[n:]
        self.cache.truncate(n)


class Clock:
    """Seconds of work: stopped while whoever takes the events has them, and perhaps pauses."""

    def __init__(self) -> None:
        self._idle = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._idle

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count what happens inside."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._idle += time.perf_counter() - since


def prefill(
    model: Transformer,
    context: Context,
    new_ids: Sequence[int],
    *,
    chunk_size: int,
    check: Callable[[], None] | None = None,
) -> Generator[int, None, Tensor]:
    """Run known tokens through the model, chunk by chunk.

    Yields how many of them are done after each chunk; returns the logits (vocab_size,) that
    follow the last one. Chunks that were finished stay in the cache when `check` raises.
    """
    logits = torch.empty(1, 1, 0)
    for start in range(0, len(new_ids), chunk_size):
        chunk = list(new_ids[start : start + chunk_size])
        input_ids = torch.tensor([chunk], device=model.device)
        logits, _, _ = model(input_ids, context.cache, len(context.ids), check=check)
        context.ids += chunk
        yield start + len(chunk)
    return logits[0, -1]


def decode_one_token(step: DecodeStep, context: Context, token_id: int) -> Tensor:
    """Feed the id that was drawn last; return the logits (vocab_size,) that follow it."""
    logits = step(token_id, context.cache)
    context.ids.append(token_id)
    return logits


class Lookahead:
    """Feeds drawn ids like `decode_one_token`, with a draft behind them where that pays.

    Keys and values of a draft are written behind the cache's length, where nothing counts. An id
    that was drafted and is then drawn is counted without a pass of its own; a draft that turns out
    wrong only has to be left there. So the cache holds the ids that were fed, and no draft, at all
    times.
    """

    def __init__(
        self,
        model: Transformer,
        step: DecodeStep,
        context: Context,
        speculation: Speculation | None,
    ) -> None:
        self.speculation = speculation
        self._model = model
        self._step = step
        self._context = context
        self._ahead: deque[tuple[int, Tensor]] = deque()
        """Drafted ids not drawn yet, each with the logits that follow it."""

    def decode(self, token_id: int, room: int) -> Tensor:
        """Feed the id that was drawn last; return the logits (vocab_size,) that follow it.

        At most `room` ids may come after it.
        """
        context, speculation = self._context, self.speculation
        if speculation is None:
            return decode_one_token(self._step, context, token_id)
        speculation.append(token_id)
        if self._ahead and self._ahead[0][0] == token_id:
            _, logits = self._ahead.popleft()
            context.cache.advance(1)
            context.ids.append(token_id)
            speculation.accepted += 1
            return logits
        self._ahead.clear()
        draft = speculation.draft(min(room, context.cache.max_seq_len - len(context.ids) - 1))
        if not draft:
            return decode_one_token(self._step, context, token_id)
        fed = len(context.ids)
        input_ids = torch.tensor([[token_id, *draft]], device=self._model.device)
        rows, _, _ = self._model(input_ids, context.cache, fed, all_logits=True)
        context.cache.truncate(fed + 1)
        context.ids.append(token_id)
        self._ahead.extend(zip(draft, rows[0, 1:], strict=True))
        following: Tensor = rows[0, 0]
        return following


def generate(
    context: Context,
    ids: Sequence[int],
    params: Callable[[], SamplingParams],
    stream: TextStream,
    *,
    model: Transformer,
    step: DecodeStep,
    sampler: Sampler,
    eog_ids: frozenset[int],
    generator: torch.Generator,
    chunk_size: int,
    clock: Clock,
    restored: int = 0,
    pass_costs: PassCosts | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[GenerationEvent]:
    """Run what is missing of the prompt `ids`, then decode until something ends the reply.

    Args:
        context: holds a true prefix of `ids`, shorter than `ids`.
        ids: the whole prompt.
        params: asked once for the seed and once per token.
        stream: turns the reply's ids into text.
        model: runs the prompt.
        step: runs one token.
        sampler: draws one token.
        eog_ids: ids that end a reply.
        generator: source of the draws, seeded here.
        chunk_size: tokens per prefill chunk.
        clock: measures the times that events and statistics tell.
        restored: how many of the held ids came from the stash, for the record.
        pass_costs: lets drafts be run where they pay by these costs; None runs none.
        check: raises Cancelled when the reply shall end.
    """
    speculation = Speculation(ids, pass_costs, eog_ids) if pass_costs else None
    lookahead = Lookahead(model, step, context, speculation)
    reply = _Reply(context, list(ids), speculation, clock)
    try:
        first = params()
        seed = int(first.seed) if first.seed is not None else generator.seed() % 2**63
        generator.manual_seed(seed)
        yield PrefillProgress(reply.reused, reply.new, 0)
        prefilling = prefill(
            model, context, ids[reply.reused :], chunk_size=chunk_size, check=check
        )
        while True:
            check()
            try:
                done = next(prefilling)
            except StopIteration as finished:
                logits = finished.value
                break
            yield PrefillProgress(reply.reused, reply.new, done)
        reply.prefilled()
        yield PrefillFinished(reply.reused, reply.new, restored, reply.prefill_ms, seed)
        while True:
            current = params()
            draw = sampler.sample(logits, reply.ids, current, generator)
            if draw.id in eog_ids:
                yield from reply.finish("stop", stream.flush(), stop_id=draw.id)
                return
            yield from reply.take(draw, stream.step(draw.id), current)
            if reply.stopped_at is not None:
                yield from reply.finish_at_stop_string()
                return
            full = len(reply.ids) >= context.cache.max_seq_len
            if full or reply.count == current.max_tokens:
                yield from reply.finish("length", stream.flush())
                return
            check()
            limit = current.max_tokens or context.cache.max_seq_len
            logits = lookahead.decode(draw.id, limit - reply.count - 1)
    except Cancelled:
        yield from reply.finish("cancelled", stream.flush())


class _Reply:
    """Counts, clocks and held-back events of one reply."""

    def __init__(
        self, context: Context, ids: list[int], speculation: Speculation | None, clock: Clock
    ) -> None:
        self.context = context
        self.ids = ids
        """Prompt and reply so far, the last id perhaps not yet fed."""
        self.speculation = speculation
        self.reused = len(context.ids)
        self.new = len(ids) - self.reused
        self.count = 0
        self.prefill_ms = 0.0
        self.stopped_at: int | None = None
        self._held = StopStrings()
        self._emitted = 0
        self._clock = clock
        self._started = self._last = clock()
        self._ttft_ms = 0.0

    def prefilled(self) -> None:
        self._last = self._clock()
        self.prefill_ms = (self._last - self._started) * 1e3

    def take(self, draw: Draw, text: str, params: SamplingParams) -> Iterator[TokenGenerated]:
        now = self._clock()
        event = TokenGenerated(
            index=self.count,
            id=draw.id,
            text=text,
            logprob=draw.logprob,
            ms=(now - self._last) * 1e3,
            before=draw.before,
            after=draw.after,
            params=params,
        )
        self.ids.append(draw.id)
        self._last = now
        if self.count == 0:
            self._ttft_ms = (now - self._started) * 1e3
        self.count += 1
        for ready in self._held.push(event, params.stop):
            self._emitted += 1
            yield ready
        self.stopped_at = self._held.match(params.stop)

    def finish(
        self, reason: FinishReason, text: str, stop_id: int | None = None
    ) -> Iterator[GenerationEvent]:
        for event in self._held.release():
            self._emitted += 1
            yield event
        total_ms = (self._last - self._started) * 1e3
        stats = GenerationStats(
            reused=self.reused,
            new=self.new,
            completion_tokens=self._emitted,
            prefill_ms=self.prefill_ms,
            ttft_ms=self._ttft_ms,
            decode_ms=max(0.0, total_ms - self._ttft_ms),
            kv_bytes=self.context.cache.nbytes,
            proposed=self.speculation.proposed if self.speculation else 0,
            accepted=self.speculation.accepted if self.speculation else 0,
        )
        yield GenerationFinished(reason, text, stop_id, stats)

    def finish_at_stop_string(self) -> Iterator[GenerationEvent]:
        """End the reply, and the cache with it, where the text before the stop string ends."""
        assert self.stopped_at is not None
        kept, rest = self._held.cut(self.stopped_at)
        for event in kept:
            self._emitted += 1
            yield event
        prompt = self.reused + self.new
        self.context.truncate(prompt + self._emitted)
        self._held = StopStrings()
        yield from self.finish("stop", rest)
