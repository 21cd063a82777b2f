"""A benchmark run on the terminal: a table of figures and a chart of the wait by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench import goals
from kvchat.bench.result import BenchResult, Contestant

BAR_WIDTH = 48
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a run found, for a rich console to print."""

    result: BenchResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield table, chart, comparison and notes."""
        result = self.result
        yield from figures(result)
        if result.ttft_ms_by_turn:
            yield ""
            yield from chart(result, ascii_only=options.ascii_only)
        yield ""
        yield from goals.table(goals.CHAT, result)
        if result.compared:
            yield ""
            yield from comparison(result.compared)
        for note in result.notes:
            yield Text(f"Note: {note.rstrip('.')}.")


def figures(result: BenchResult) -> Iterator[RenderableType]:
    """The single figures, one a line."""
    yield Text(result.model, style="bold")
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    yield Text(f"{result.device}, {result.dtype}, quant {result.quant}, {threads}", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _lines(result):
        table.add_row(name, value)
    yield table


def chart(result: BenchResult, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """Time to first token by turn, with the cache and without it, to one scale."""
    waits = list(zip(result.ttft_ms_by_turn, result.naive_ttft_ms_by_turn, strict=True))
    longest = max(max(pair) for pair in waits)
    yield Text.assemble(
        ("Time to first token by turn: ", "bold"),
        ("with the cache", "green"),
        " and ",
        ("without it", "yellow"),
    )
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column()
    for nth, pair in enumerate(waits, start=1):
        for turn, ms, style in zip((str(nth), ""), pair, ("green", "yellow"), strict=True):
            length = bar(ms / longest, ascii_only=ascii_only)
            table.add_row(turn, Text.assemble((length, style), f" {milliseconds(ms)}"))
    yield table
    cached, naive = waits[-1]
    yield Text(f"Turn {len(waits)} begins {naive / cached:.1f} times sooner with the cache.")


def comparison(contestants: Sequence[Contestant]) -> Iterator[RenderableType]:
    """Programs beside each other, then the ratio of each of our runs to each of the others."""
    table = Table(box=None, pad_edge=False)
    table.add_column("program")
    for column in ("prefill tok/s", "decode tok/s", "ready after", "peak memory"):
        table.add_column(column, justify="right")
    for each in contestants:
        table.add_row(
            f"{each.name}, {each.settings}",
            f"{each.prefill_tps:,.0f}",
            f"{each.decode_tps:,.1f}",
            f"{each.ready_s:.1f} s",
            megabytes(each.peak_memory_bytes),
        )
    yield table
    ours = [each for each in contestants if each.name == "kvchat"]
    for other in (each for each in contestants if each.name != "kvchat"):
        for mine in ours:
            yield Text(
                f"kvchat, {mine.settings} / {other.name}: prefill "
                f"{mine.prefill_tps / other.prefill_tps:.2f}, decode "
                f"{mine.decode_tps / other.decode_tps:.2f}, ready "
                f"{other.ready_s / mine.ready_s:.1f} × sooner"
            )


def bar(fraction: float, *, ascii_only: bool = False) -> str:
    """Draw a fraction of the full width, to an eighth of a cell, and never nothing."""
    eighths = max(1, round(fraction * BAR_WIDTH * 8))
    if ascii_only:
        return "#" * max(1, round(eighths / 8))
    full, part = divmod(eighths, 8)
    return "█" * full + EIGHTHS[part].strip()


def milliseconds(ms: float) -> str:
    """Write a time in the unit that suits it."""
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def megabytes(n: int | None) -> str:
    """Write bytes in millions."""
    return "unknown" if n is None else f"{n / 1e6:,.0f} MB"


def _lines(result: BenchResult) -> Iterator[tuple[str, str]]:
    plan = result.plan
    yield "ready after", f"{result.ready_s:.2f} s"
    yield f"prefill, {plan.prefill_tokens:,} tokens", f"{result.prefill_tps:,.0f} tok/s"
    yield f"decode, {plan.decode_prompt:,} tokens cached", f"{result.decode_tps:,.1f} tok/s"
    if result.long_decode_tps is not None:
        yield f"decode, {plan.long_context:,} tokens cached", f"{result.long_decode_tps:,.1f} tok/s"
    yield "a token takes", f"{result.decode_ms_p50:.2f} ms (95%: {result.decode_ms_p95:.2f})"
    yield "memory bandwidth", f"{result.bandwidth_gbps:.1f} GB/s"
    yield "used by decoding", f"{result.bandwidth_fraction:.0%}"
    limit = result.bandwidth_gbps * 1e9 / result.bytes_per_token
    yield "the limit would be", f"{limit:,.0f} tok/s"
    yield f"{plan.branch_tokens:,}-token branch, prefill", milliseconds(result.branch_prefill_ms)
    if result.branch_switch_ms is not None:
        yield "the same from the stash", milliseconds(result.branch_switch_ms)
    yield "weights", megabytes(result.weight_bytes)
    yield "KV cache per token", f"{result.kv_bytes_per_token:,} bytes"
    yield "peak memory", megabytes(result.peak_memory_bytes)
