"""What a benchmark run found, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from kvchat.bench.plan import Plan


@dataclass(frozen=True, slots=True)
class Contestant:
    """Medians of one program over all its processes, same file and threads as the others."""

    name: str
    settings: str
    prefill_tps: float | None
    decode_tps: float | None
    long_decode_tps: float | None
    """With the first of `plan.long_contexts` cached."""
    turn_ttft_ms: float | None
    """TTFT of the last turn of the scripted chat, what came before it being cached."""
    ready_s: float
    """From the start of the process to a model that can answer."""
    reply_memory_bytes: int | None
    """The most memory a process had taken after its first short reply."""
    peak_memory_bytes: int | None
    """The same at its end."""
    import_memory_bytes: int | None
    """The same with the libraries imported and nothing loaded."""


@dataclass(frozen=True, slots=True)
class LongDecode:
    """Decoding on top of a long cache."""

    cached: int
    decode_tps: float
    token_ms: float
    """Median time of a token."""
    cache_ms: float
    """What reading the keys and values takes at the measured bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerTimes:
    """Medians of choosing one token, by size of the vocabulary."""

    top_k_49152_ms: float
    top_k_151936_ms: float
    """With our own defaults, top-k 50 among them, and penalties over 256 tokens."""
    flat_49152_ms: float
    flat_151936_ms: float
    """With top-k off and top-p 0.95, all tokens being about equally probable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All figures of one run; the fields are the keys of the JSON."""

    kvchat: str
    """Our version."""
    torch: str
    model: str
    device: str
    dtype: str
    quant: str
    threads: int
    weight_bytes: int
    kv_bytes_per_token: int
    ready_s: float
    peak_memory_bytes: int | None
    """Of a process that loads the model, prefills and decodes as here; None where unknown."""
    prefill_tps: float
    decode_tps: float
    decode_ms_p50: float
    decode_ms_p95: float
    long_decodes: list[LongDecode]
    """For each of `plan.long_contexts` that fits."""
    sampler: SamplerTimes
    ttft_ms_by_turn: list[float]
    reused_by_turn: list[int]
    new_by_turn: list[int]
    bookkeeping_ms_by_turn: list[float]
    """Part of the TTFT: rendering, comparing, encoding."""
    idle_tokens_by_turn: list[int]
    """Prefilled between this turn and the next, while a user would read."""
    idle_ms_by_turn: list[float]
    decode_tps_by_turn: list[float]
    naive_ttft_ms_by_turn: list[float]
    """The same prompts, each from an empty cache; all of them measured."""
    branch_switch_ms: float | None
    branch_prefill_ms: float
    bookkeeping_ms_at_200_turns: float
    """Rendering, encoding and comparing the prompt of a chat of 200 turns with 300 tokens each."""
    send_to_first_event_ms: float
    """From handing a message to an idle worker to its saying that it began."""
    send_to_reply_started_ms: float
    """From handing it over to the prompt being known and the reply being in the tree."""
    bandwidth_gbps: float
    bytes_per_token: float
    """Read from memory for one token at `decode_tps`: weights and the mean length of the cache."""
    bandwidth_fraction: float
    compared: list[Contestant]
    plan: Plan
    """Lengths and repeats behind the figures."""
    notes: list[str]
    """What was measured otherwise than asked, in sentences."""

    @property
    def ttft_growth(self) -> float | None:
        """The wait in turn 10 as a multiple of that in turn 2; None for a shorter chat."""
        waits = self.ttft_ms_by_turn
        return waits[9] / waits[1] if len(waits) >= 10 else None

    @property
    def ttft_saving(self) -> float | None:
        """How many times longer turn 10 waits without the cache; None for a shorter chat."""
        waits = self.ttft_ms_by_turn
        return self.naive_ttft_ms_by_turn[9] / waits[9] if len(waits) >= 10 else None

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


def percentile_95(values: Sequence[float]) -> float:
    """Return the value that 95% of the others do not exceed, interpolated."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def rounded(value: Any) -> Any:
    """Return a JSON value with five significant digits in every figure."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: rounded(inner) for key, inner in value.items()}
        case list():
            return [rounded(inner) for inner in value]
    return value
