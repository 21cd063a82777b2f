"""A decode step whose calls are the same for every token, so that a GPU can replay them.

On a GPU, making a call from Python takes longer than most of them run. Captured as a CUDA graph, a
whole step is started by one call. A graph names memory, not values: the token's id and position are
written into memory before it runs, its logits are read from memory after it, and the cache may not
move. Attention cannot be as long as the cache is at each token; there is a graph for each of a few
lengths, made when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvchat.engine.kv_cache import GROWTH, KVCache
from kvchat.engine.model import Transformer
from kvchat.engine.ops import StaticOps
from kvchat.engine.step import EagerStep

Work = Callable[[], None]
"""Reads and writes memory that stays where it is, and nothing else."""

Recorder = Callable[[Work], Work]
"""Turns work into something that does the same again, quicker."""

log = logging.getLogger(__name__)


def span_for(n: int, capacity: int) -> int:
    """Return how many positions to attend to where `n` count: up to a quarter more, of few lengths.

    They are multiples of 256 up to 2,048 and four to a doubling from there on.
    """
    step = max(GROWTH, 1 << max((n - 1).bit_length() - 3, 0))
    return min(-(-n // step) * step, capacity)


@dataclass(slots=True)
class _Recordings:
    """What was recorded for a cache at one place in memory."""

    values: Tensor
    """The cache's last tensor to move."""
    rotations: Tensor
    record: Recorder
    by_span: dict[int, Work] = field(default_factory=dict)


class StaticStep:
    """The forward pass over memory that stays where it is.

    Args:
        model: the Transformer, on its device.
        new_recorder: makes what records the step, anew for each place of the cache; by default
            nothing is recorded. Where recording fails, tokens are run eagerly from then on.
    """

    def __init__(
        self, model: Transformer, new_recorder: Callable[[], Recorder] = lambda: lambda work: work
    ) -> None:
        self.model = model
        self._new_recorder = new_recorder
        self._id = torch.zeros(1, dtype=torch.long, device=model.device)
        self._position = torch.zeros_like(self._id)
        self._logits = torch.empty(model.config.vocab_size, device=model.device)
        self._recordings: _Recordings | None = None
        self._eager: EagerStep | None = None

    @torch.inference_mode()
    def __call__(self, token_id: int, cache: KVCache) -> Tensor:
        """Run the step at the cache's end."""
        if self._eager is None:
            cache.reserve(1)
            self._id.fill_(token_id)
            self._position.fill_(cache.length)
            try:
                replay = self._recorded(cache)
            except Exception as error:
                self._eager = EagerStep(self.model)
                self._recordings = None
                log.warning("Tokens are run call by call, which is slower: %s", _cause(error))
        if self._eager is not None:
            return self._eager(token_id, cache)
        replay()
        cache.advance(1)
        return self._logits.clone()

    def _recorded(self, cache: KVCache) -> Work:
        """Return what runs the next token, recorded now if it is the first of its span."""
        recordings = self._recordings
        if recordings is None or recordings.values is not cache.values[-1]:
            self._recordings = None  # before more memory is taken
            self._recordings = recordings = self._settle(cache)
        span = span_for(cache.length + 1, cache.capacity)
        if span not in recordings.by_span:
            work = self._work(cache, recordings.rotations, span)
            recordings.by_span[span] = recordings.record(work)
        return recordings.by_span[span]

    def _settle(self, cache: KVCache) -> _Recordings:
        """Prepare for a cache at a new place."""
        for tensors in cache.planes.values():
            for t in tensors:
                t[:, cache.length :] = 0  # what was never written may be NaN, which no mask hides
        rotations = self.model.rotary(0, cache.capacity, self.model.device)
        return _Recordings(cache.values[-1], rotations, self._new_recorder())

    def _work(self, cache: KVCache, rotations: Tensor, span: int) -> Work:
        def work() -> None:
            ops = StaticOps(self._id, self._position, rotations, cache, span)
            self._logits.copy_(self.model.logits(self.model.hidden(ops), ops)[0])

        return work


def _cause(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory has no room for a captured step; a smaller --ctx leaves some"
    return f"the step could not be captured ({str(error).partition(chr(10))[0]})"
