"""What a benchmark run found, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvchat.bench.plan import Plan


@dataclass(frozen=True, slots=True)
class Contestant:
    """Medians of one program over all its processes, same file and threads as the others."""

    name: str
    settings: str
    prefill_tps: float
    decode_tps: float
    ready_s: float
    """From the start of the process to a model that can answer."""
    peak_memory_bytes: int | None


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
    long_decode_tps: float | None
    """With `plan.long_context` tokens cached; None when that was not measured."""
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
    bandwidth_gbps: float
    bytes_per_token: float
    """Read from memory for one token at `decode_tps`: weights and the mean length of the cache."""
    bandwidth_fraction: float
    compared: list[Contestant]
    plan: Plan
    """Lengths and repeats behind the figures."""
    notes: list[str]
    """What was measured otherwise than asked, in sentences."""

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(_rounded(asdict(self)), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(inner) for key, inner in value.items()}
        case list():
            return [_rounded(inner) for inner in value]
    return value
