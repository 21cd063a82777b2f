"""The engine's vocabulary: sampling parameters, events, statistics, protocols.

This module must stay free of torch: the chat, the screen and the command line speak these types
before torch is loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, Protocol

from kvchat.engine.errors import SettingError

FinishReason = Literal["stop", "length", "cancelled"]
"""`stop`: end-of-generation id or stop string; `length`: token limit or end of context."""

CANDIDATES = 20
"""How many candidates every token event carries."""

GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature the most probable token is taken without a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; swapped whole while a reply runs, read once per token.

    Order: penalties, temperature, top-k, top-p, min-p, draw. Neutral values skip their step.
    """

    temperature: float = 0.8
    """Divides the logits; at or below 1e-4 the most probable token is taken."""
    top_k: int = 50
    """Keep the k most probable tokens, and all that tie with the k-th; 0 is off."""
    top_p: float = 0.9
    """Keep the fewest tokens whose probabilities reach p; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable; 0 is off."""
    repetition_penalty: float = 1.1
    """Divide positive, multiply negative logits of ids already in the context; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every id in the context."""
    frequency_penalty: float = 0.0
    """Subtracted from an id's logit once for each time it occurs in the context."""
    penalty_window: int = 256
    """How many of the last context tokens the penalties look at; -1 is all of them."""
    penalise_all: bool = False
    """Penalise control tokens, punctuation and white space too, which are spared otherwise."""
    temperature_last: bool = False
    """Apply the temperature after the truncations instead of before them."""
    max_tokens: int | None = None
    """Longest reply in tokens; None is as long as the context holds."""
    seed: int | None = None
    """Seeds the draws of a reply when it starts; None takes a fresh one and reports it."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply; they are not part of it."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, list):
            object.__setattr__(self, "stop", tuple(self.stop))
        problems = _out_of_range(self)
        if problems:
            raise SettingError("; ".join(problems))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all parameters, in the order of declaration."""
        return tuple(field.name for field in fields(cls))

    def updated(self, **changes: Any) -> SamplingParams:
        """Return a copy with the given values; `None` values leave theirs as they are."""
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken without a draw."""
        return self.temperature <= GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of one sampling parameter, shared by validation, flags and sliders."""

    low: float
    high: float
    whole: bool = False
    low_excluded: bool = False


LIMITS: dict[str, Limit] = {
    "temperature": Limit(0.0, 100.0),
    "top_k": Limit(0, 2**31 - 1, whole=True),
    "top_p": Limit(0.0, 1.0, low_excluded=True),
    "min_p": Limit(0.0, 1.0),
    "repetition_penalty": Limit(0.0, 10.0, low_excluded=True),
    "presence_penalty": Limit(-100.0, 100.0),
    "frequency_penalty": Limit(-100.0, 100.0),
    "penalty_window": Limit(-1, 2**31 - 1, whole=True),
    "max_tokens": Limit(1, 2**31 - 1, whole=True),
    "seed": Limit(0, 2**63 - 1, whole=True),
}


_OPTIONAL = ("max_tokens", "seed")
"""Parameters that may be None."""


def _out_of_range(params: SamplingParams) -> list[str]:
    problems = []
    for name, limit in LIMITS.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        sound = (
            _is_number(value)
            and limit.low <= value <= limit.high
            and not (limit.low_excluded and value == limit.low)
            and not (limit.whole and value % 1)
        )
        if not sound:
            kind = "a whole number" if limit.whole else "a number"
            start = "above" if limit.low_excluded else "from"
            low, high = (f"{n:,}" if limit.whole else f"{n:g}" for n in (limit.low, limit.high))
            problems.append(f"{name} must be {kind} {start} {low} to {high}, not {value!r:.40}")
    stop = params.stop
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        problems.append("stop must be a list of strings, none of them empty")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Candidates:
    """A few token ids, most probable first, with natural-log probabilities, kept compactly."""

    ids: array[int]
    """Type code 'i'."""
    logprobs: array[float]
    """Type code 'f'; same length as ids."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading has read `done` of `total` bytes of weights."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `new` prompt tokens have been run; `reused` were in the cache already."""

    reused: int
    new: int
    done: int


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The prompt is in the cache; `reused + new` is its length in tokens."""

    reused: int
    new: int
    restored: int
    """How many of the reused tokens came back from the stash."""
    ms: float
    seed: int
    """The seed of this reply's draws, also when none was asked for."""


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """One token of the reply. Final: an event is held back while a stop string may still match."""

    index: int
    """0 for the first token of the reply."""
    id: int
    text: str
    """What this token added to the text; empty while a character is incomplete."""
    logprob: float
    """Natural-log probability the model gave it, before the sampler."""
    ms: float
    """Time since the token before it (for the first: since prefill ended)."""
    before: Candidates
    """Top candidates as the model had them."""
    after: Candidates
    """Top candidates as the sampler left them, renormalised."""
    params: SamplingParams
    """The settings this token was drawn with."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one reply cost."""

    reused: int
    new: int
    completion_tokens: int
    prefill_ms: float
    ttft_ms: float
    """From the call to the first drawn token."""
    decode_ms: float
    """From the first drawn token to the last."""
    kv_bytes: int
    """Bytes allocated for K and V when the reply ended."""
    proposed: int = 0
    """Tokens that speculation drafted and ran."""
    accepted: int = 0
    """Drafted tokens that were drawn, each of which spared a decode step."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.reused + self.new

    @property
    def prefill_tps(self) -> float:
        """New prompt tokens per second of prefill."""
        return self.new / self.prefill_ms * 1e3 if self.prefill_ms > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first one."""
        steps = self.completion_tokens - 1
        return steps / self.decode_ms * 1e3 if steps > 0 and self.decode_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """The reply is over.

    The prompt's ids, the ids of all token events and `stop_id` (when there is one) are what the
    model has seen or said; the last of these may not be in the cache yet.
    """

    reason: FinishReason
    text: str
    """Text not carried by a token event: the end of an incomplete character, or what stood
    before a stop string inside its token."""
    stop_id: int | None
    """The end-of-generation id that was drawn, not part of the reply's text."""
    stats: GenerationStats


GenerationEvent = PrefillProgress | PrefillFinished | TokenGenerated | GenerationFinished
"""What `generate` yields: progress while prefilling, one finish of prefill, tokens, one end."""


class TextStream(Protocol):
    """Turns token ids into text as they come; see `kvchat.models.tokenizer.StreamDecoder`."""

    def step(self, token_id: int) -> str:
        """Return the text this id completes, or an empty string."""

    def flush(self) -> str:
        """Return what is left of an incomplete character, as U+FFFD."""


class CacheEngine(Protocol):
    """What the chat needs from an engine; `kvchat.engine.engine.Engine` is the one we have.

    All methods are called from one thread, except `cancel`.
    """

    @property
    def ids(self) -> Sequence[int]:
        """The ids whose K and V are in the cache, exactly."""

    @property
    def max_seq_len(self) -> int:
        """How many tokens the context holds."""

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for K and V."""

    @property
    def stash_bytes(self) -> int:
        """Host memory held by stashed suffixes."""

    def reusable(self, ids: Sequence[int]) -> int:
        """How many leading ids need no prefill: cached, or stashed and ready to come back."""

    def truncate(self, n: int) -> None:
        """Forget all positions from `n` on; what is cut off goes to the stash."""

    def prefill(self, ids: Sequence[int]) -> Iterator[PrefillProgress]:
        """Make the cache hold exactly `ids`, running only those it does not have."""

    def generate(
        self,
        ids: Sequence[int],
        params: Callable[[], SamplingParams],
        stream: TextStream,
    ) -> Iterator[GenerationEvent]:
        """Prefill what is missing of `ids`, then decode until something ends the reply.

        `params` is asked once per token. At least one token is always run.
        """

    def cancel(self) -> None:
        """End the running prefill or reply at the next check; callable from any thread."""

    @property
    def snapshot_bytes(self) -> int:
        """About how many bytes `save` would write."""

    def save(self, path: str, about: Mapping[str, str], check: Callable[[], None]) -> None:
        """Write the cache and its ids as a safetensors file.

        `about` is what a reader has to agree on; `check` is called now and then, and may raise
        `Cancelled`. Raises `OSError` if it cannot be written.
        """

    def load(self, path: str, about: Mapping[str, str], check: Callable[[], None]) -> None:
        """Replace the cache by one that `save` wrote.

        Raises `SnapshotError` if it is damaged or was made with something else; nothing is held
        then.
        """
