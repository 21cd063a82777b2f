"""kvchat beside llama.cpp: the ratios that have goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvchat.bench.goals import Goal
from kvchat.bench.result import BenchResult, Contestant

MEMORY_BOUND = 250 * 10**6
"""Bytes of weights from which on reading them leaves less room to be ahead."""

MEMORY_SHARE = 1.3
"""What a short reply may take of llama.cpp's memory, on top of torch's own import."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Our figures as multiples of the best that llama.cpp did with any settings, or None."""

    result: BenchResult

    @property
    def decode(self) -> float | None:
        """Short context; more is better."""
        return self._ratio("decode_tps", max)

    @property
    def long_decode(self) -> float | None:
        """On top of the first of `plan.long_contexts`; more is better."""
        return self._ratio("long_decode_tps", max)

    @property
    def prefill(self) -> float | None:
        """More is better."""
        return self._ratio("prefill_tps", max)

    @property
    def turn_ttft(self) -> float | None:
        """The wait in the last turn of the chat; less is better."""
        return self._ratio("turn_ttft_ms", min)

    @property
    def memory(self) -> float | None:
        """After a short reply, as a multiple of what is allowed; less is better."""
        ours, theirs = self._ours, self._theirs("reply_memory_bytes")
        if ours is None or not theirs:
            return None
        if ours.reply_memory_bytes is None or ours.import_memory_bytes is None:
            return None
        return ours.reply_memory_bytes / (MEMORY_SHARE * min(theirs) + ours.import_memory_bytes)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What each should be."""
        decode = 1.1 if self.result.weight_bytes >= MEMORY_BOUND else 1.3
        long = min(self.result.plan.long_contexts, default=0)
        turn = len(self.result.ttft_ms_by_turn)
        form = "{:.2f} ×"
        return (
            Goal("decode", "decode / llama.cpp's", "≥", decode, form),
            Goal("long_decode", f"decode at {long:,} cached / llama.cpp's", "≥", 1.4, form),
            Goal("prefill", "prefill / llama.cpp's", "≥", 3, form),
            Goal("turn_ttft", f"TTFT of turn {turn} / llama.cpp's", "≤", 0.8, form),
            Goal("memory", "memory / (1.3 llama.cpp's + torch's import)", "≤", 1, form),
        )

    @property
    def _ours(self) -> Contestant | None:
        return next((each for each in self.result.compared if each.name == "kvchat"), None)

    def _theirs(self, figure: str) -> list[float]:
        values = [getattr(c, figure) for c in self.result.compared if c.name == "llama.cpp"]
        return [value for value in values if value is not None]

    def _ratio(self, figure: str, best: Callable[[list[float]], float]) -> float | None:
        ours, theirs = getattr(self._ours, figure, None), self._theirs(figure)
        return None if ours is None or not theirs else ours / best(theirs)
