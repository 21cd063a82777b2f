"""The ledger: what each turn cost, what the cache saved, and why it saved no more."""

from __future__ import annotations

from dataclasses import dataclass

from kvchat.chat.prefix import Divergence
from kvchat.engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a chat's KV snapshot when the chat was opened."""

    tokens: int = 0
    """How many it brought into the cache."""
    problem: str = ""
    """Why it was not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply's line in the ledger."""

    reply_id: str
    reused: int
    """Prompt tokens that were in the cache, or came back into it by a copy."""
    restored: int
    """How many of the reused ones came back from the stash."""
    new: int
    """Prompt tokens that were run."""
    decoded: int
    finish_reason: FinishReason
    prefill_ms: float
    ttft_ms: float
    """From asking to the first token, rendering and encoding included."""
    decode_tps: float
    uncached_ttft_ms: float | None
    """Estimated TTFT with an empty cache; None before any prefill has been measured."""
    divergence: Divergence | None
    """Where and why the cached ids stopped being those of the prompt; None when all were kept."""
    dropped_turns: int = 0
    """Old turns that were left out because the context was full."""
    seed: int = 0
    proposed: int = 0
    """Tokens that speculation drafted and ran."""
    accepted: int = 0
    """Drafted tokens that were drawn."""
    loaded: int = 0
    """How many of the reused tokens came from a snapshot on the disk, since the turn before."""
    snapshot_problem: str = ""
    """Why a snapshot was not used."""
    reuse_ended: str = ""
    """Where and why cached tokens had to be given up, since the turn before; "" if none had."""

    @property
    def saved_ms(self) -> float | None:
        """Estimated time the cache saved before the first token; None if none came."""
        if self.uncached_ttft_ms is None or not self.decoded:
            return None
        return max(0.0, self.uncached_ttft_ms - self.ttft_ms)

    def line(self) -> str:
        """Return the turn in one unobtrusive line."""
        parts = [f"reused {self.reused:,}", f"new {self.new:,}"]
        if self.decoded:
            parts.append(f"{self.ttft_ms / 1e3:.2f} s to first token")
        if self.decode_tps:
            parts.append(f"{self.decode_tps:.0f} tok/s")
        if self.proposed:
            parts.append(f"drafts {self.accepted:,} of {self.proposed:,}")
        if self.saved_ms is not None and self.saved_ms >= 50:
            parts.append(f"saved {self.saved_ms / 1e3:.1f} s")
        if self.dropped_turns:
            turns = "turn" if self.dropped_turns == 1 else "turns"
            parts.append(f"dropped {self.dropped_turns} old {turns}")
        if self.loaded:
            parts.append(f"{self.loaded:,} from the snapshot")
        if self.snapshot_problem:
            parts.append(f"snapshot not used: {self.snapshot_problem}")
        if self.reuse_ended:
            parts.append(f"reuse ended {self.reuse_ended}")
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class Price:
    """What a turn would cost before it is made."""

    reused: int
    new: int
    ms: float | None
    """Estimated time to the first token; None before any prefill has been measured."""


class PrefillSpeed:
    """Predicts how long a prefill takes, from those that were measured.

    Running m tokens after s cached ones costs a·m for the weights and b·((s + m)² - s²) / 2 for
    attention over what came before; a and b are fitted by least squares.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []  # tokens, pairs, ms

    def add(self, start: int, tokens: int, ms: float) -> None:
        """Record that `tokens` after `start` cached ones took `ms`."""
        if tokens > 0 and ms > 0:
            self._samples.append((float(tokens), self._pairs(start, tokens), ms))
            del self._samples[:-64]

    def estimate(self, tokens: int, start: int = 0) -> float | None:
        """Return the expected time in ms of a prefill; None if none has been measured yet."""
        if not self._samples:
            return None
        a, b = self._fit()
        return a * tokens + b * self._pairs(start, tokens)

    def _fit(self) -> tuple[float, float]:
        tt = sum(t * t for t, _, _ in self._samples)
        tp = sum(t * p for t, p, _ in self._samples)
        pp = sum(p * p for _, p, _ in self._samples)
        tm = sum(t * ms for t, _, ms in self._samples)
        pm = sum(p * ms for _, p, ms in self._samples)
        determinant = tt * pp - tp * tp
        if determinant > 1e-6 * tt * pp:
            a = (pp * tm - tp * pm) / determinant
            b = (tt * pm - tp * tm) / determinant
            if a > 0 and b >= 0:
                return a, b
        return tm / tt, 0.0

    @staticmethod
    def _pairs(start: int, tokens: int) -> float:
        return ((start + tokens) ** 2 - start**2) / 2
