"""What a conversation is made of: messages, and how each reply came about."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from kvchat.engine.types import (
    Candidates,
    FinishReason,
    GenerationStats,
    SamplingParams,
    TokenGenerated,
)

Role = Literal["user", "assistant"]
ReplyEnd = FinishReason | Literal["interrupted"]
"""`interrupted`: the program ended, or failed, while the reply was being written."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the model had in its context when a reply ended: the prompt, the reply, the stop id.

    Stored as the difference from the context of the reply before it on the same path.
    """

    kept: int
    """How many leading ids are those of the reply before; 0 for the first."""
    ids: array[int]
    """All ids after them, type code 'i'."""


@dataclass(slots=True)
class Reply:
    """How an assistant's message was written. The lists have one entry for each token."""

    thinking: str | None = None
    """Reasoning, kept apart from the answer."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    """As generated, thinking included, stop id excluded."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ms: array[float] = field(default_factory=lambda: array("f"))
    """Time since the token before."""
    before: list[Candidates] = field(default_factory=list)
    """Top candidates as the model had them."""
    after: list[Candidates] = field(default_factory=list)
    """Top candidates as the sampler left them."""
    params: list[tuple[int, SamplingParams]] = field(default_factory=list)
    """Settings over time: each holds from the token with that index on."""
    seed: int | None = None
    finish_reason: ReplyEnd | None = None
    """None while the reply is being written."""
    stop_id: int | None = None
    stats: GenerationStats | None = None
    context: Context | None = None
    """While a reply is taken up again or forked, what it goes on from. None while it is written
    for the first time, and when it ended without anybody knowing its context."""

    def add(self, event: TokenGenerated) -> None:
        """Record one token."""
        if not self.params or self.params[-1][1] != event.params:
            self.params.append((len(self.token_ids), event.params))
        self.token_ids.append(event.id)
        self.logprobs.append(event.logprob)
        self.ms.append(event.ms)
        self.before.append(event.before)
        self.after.append(event.after)

    def add_typed(self, token_id: int) -> None:
        """Record a token that the user wrote."""
        nothing = Candidates(array("i"), array("f"))
        self.token_ids.append(token_id)
        self.logprobs.append(math.nan)
        self.ms.append(math.nan)
        self.before.append(nothing)
        self.after.append(nothing)

    def first(self, n: int) -> Reply:
        """Return a running reply that has the first `n` tokens of this one and its context then."""
        context = self.context
        if context is not None:
            dropped = len(self.token_ids) - n + (self.stop_id is not None)
            context = replace(context, ids=context.ids[: len(context.ids) - dropped])
        return replace(
            self,
            token_ids=self.token_ids[:n],
            logprobs=self.logprobs[:n],
            ms=self.ms[:n],
            before=self.before[:n],
            after=self.after[:n],
            params=[change for change in self.params if change[0] < n],
            finish_reason=None,
            stop_id=None,
            stats=None,
            context=context,
        )


@dataclass(slots=True)
class Node:
    """One message. Its place among its siblings is kept by the conversation."""

    id: str
    parent: str | None
    """The message it follows; None for the first of the conversation."""
    role: Role
    content: str
    created: datetime
    reply: Reply | None = None
    """Present exactly in assistant messages."""
    edited: bool = False
    """The user rewrote this reply: `content` is theirs, `reply` still tells of the original."""

    @property
    def running(self) -> bool:
        """Whether this is a reply that is still being written."""
        return self.reply is not None and self.reply.finish_reason is None
