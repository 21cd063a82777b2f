"""A scripted chat, with the cache and without it: what a turn waits for its first token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvchat.bench import texts
from kvchat.bench.speed import Reply, forced_length, forget, reply
from kvchat.chat import ledger
from kvchat.chat.events import TurnFinished
from kvchat.chat.session import ChatSession
from kvchat.engine.errors import ContextOverflowError
from kvchat.engine.types import GenerationFinished, SamplingParams
from kvchat.models.load import LanguageModel


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the scripted chat."""

    prompt: list[int]
    """The whole conversation up to the reply."""
    reply: list[int]
    cost: ledger.Turn
    bookkeeping_ms: float
    """The part of the TTFT before the engine is asked: rendering, comparing, encoding."""
    idle_tokens: int
    """Prefilled after the reply, while a user would read it."""
    idle_ms: float


def play(
    llm: LanguageModel, params: SamplingParams, *, turns: int, user_tokens: int, reply_tokens: int
) -> Iterator[Turn]:
    """Play a chat of user messages and replies of fixed lengths, as the program does it.

    Ends early when the context is full.
    """
    forget(llm.engine)
    session = ChatSession(llm, params=params.updated(max_tokens=reply_tokens))
    for nth in range(turns):
        text = texts.message(llm.tokenizer, user_tokens, nth)
        try:
            with forced_length(llm.engine, llm.tokenizer.control_ids):
                yield _turn(session, text)
        except ContextOverflowError:
            return


def without_cache(
    llm: LanguageModel, params: SamplingParams, prompts: Sequence[Sequence[int]]
) -> Iterator[Reply]:
    """Run every prompt from an empty cache, up to its first token."""
    for prompt in prompts:
        forget(llm.engine)
        yield reply(llm.engine, prompt, params, tokens=1)


def _turn(session: ChatSession, text: str) -> Turn:
    for event in session.send(text):
        if isinstance(event, GenerationFinished):
            stats = event.stats
        elif isinstance(event, TurnFinished):
            cost = event.turn
    written = session.last_reply().reply
    assert written is not None
    started = time.perf_counter()
    settled = [progress.new for progress in session.settle()]
    return Turn(
        prompt=session.conversation.context_ids(cost.reply_id)[: stats.prompt_tokens],
        reply=list(written.token_ids),
        cost=cost,
        bookkeeping_ms=cost.ttft_ms - stats.ttft_ms,
        idle_tokens=settled[0] if settled else 0,
        idle_ms=(time.perf_counter() - started) * 1e3,
    )
