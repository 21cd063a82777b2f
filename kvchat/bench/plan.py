"""What a benchmark run measures, and on which model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from kvchat.engine.errors import SettingError

if TYPE_CHECKING:
    from kvchat.models.weights import Quant


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The arguments of `kvchat.load`, so that another process can load the same."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quant: Quant = "auto"
    ctx: int | None = None
    threads: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return them as keyword arguments, all but the model's name."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "quant": self.quant,
            "ctx": self.ctx,
            "threads": self.threads,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured; every number is in the JSON beside the figures."""

    repeats: int = 3
    """Of everything but the turns, which are played once; medians are reported."""
    prefill_tokens: int = 1000
    decode_prompt: int = 100
    decode_tokens: int = 128
    long_contexts: tuple[int, ...] = (4000, 8000)
    """Tokens already cached when decoding is measured once more."""
    turns: int = 10
    user_tokens: int = 40
    reply_tokens: int = 280
    branch_tokens: int = 2000
    starts: int = 2
    """Processes started to measure how long it takes until the model is ready."""
    rounds: int = 2
    """Processes started of each program that is compared."""
    light_repeats: int = 9
    """Of what takes milliseconds: sending to an idle worker, bookkeeping of a long chat."""

    def __post_init__(self) -> None:
        _check_sizes(self, {"decode_tokens": 2, "reply_tokens": 2})

    @classmethod
    def quick(cls) -> Self:
        """A run of some seconds on a small model, for a first look."""
        return cls(
            repeats=1,
            prefill_tokens=500,
            decode_tokens=64,
            long_contexts=(),
            turns=4,
            reply_tokens=64,
            branch_tokens=500,
            starts=1,
            rounds=1,
        )

    def fitted(self, max_seq_len: int) -> Self:
        """Return the same plan with prompts that a context of `max_seq_len` tokens holds.

        The turns are not shortened here; the chat ends early when the context is full.
        """
        reply = min(self.decode_tokens, max(2, max_seq_len // 2))
        room = max(1, max_seq_len - reply)
        return replace(
            self,
            prefill_tokens=min(self.prefill_tokens, room),
            decode_prompt=min(self.decode_prompt, room),
            decode_tokens=reply,
            long_contexts=tuple(n for n in self.long_contexts if n <= room),
            branch_tokens=min(self.branch_tokens, max(1, room - self.decode_prompt)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UiPlan:
    """How much is measured of the screen program."""

    repeats: int = 3
    """Of everything; medians are reported."""
    reply_tokens: int = 256
    keys: int = 40
    """Typed in each round while a reply is written."""
    idle_s: float = 5.0
    messages: int = 1000
    """Of the chat that is opened."""

    def __post_init__(self) -> None:
        _check_sizes(self, {"reply_tokens": 32, "messages": 2})

    @classmethod
    def quick(cls) -> Self:
        """A run of half a minute on a small model, for a first look."""
        return cls(repeats=1, reply_tokens=128, keys=10, idle_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityPlan:
    """How much text the quality of the weights is measured over."""

    tokens: int = 2048
    window: int = 512
    """Tokens of one run, each from an empty cache."""

    def __post_init__(self) -> None:
        _check_sizes(self, {"tokens": 2, "window": 2})

    @classmethod
    def quick(cls) -> Self:
        """A quarter of the text."""
        return cls(tokens=512)


def _check_sizes(plan: Plan | UiPlan | QualityPlan, lowest: dict[str, int]) -> None:
    """Refuse sizes below the lowest that make sense, which is 1 unless said otherwise.

    Raises:
        SettingError: a size is too small.
    """
    for name in plan.__dataclass_fields__:
        value, least = getattr(plan, name), lowest.get(name, 1)
        if min(value, default=least) < least if isinstance(value, tuple) else value < least:
            raise SettingError(f"{name} must be at least {least}")
