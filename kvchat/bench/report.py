"""A benchmark run on the terminal: a table of figures and a chart of the wait by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench import goals
from kvchat.bench.beside import Beside
from kvchat.bench.result import BenchResult, Contestant

BAR_WIDTH = 48
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a run found, for a rich console to print."""

    result: BenchResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield tables, chart, comparison and notes."""
        result = self.result
        yield from figures(result)
        if result.ttft_ms_by_turn:
            yield ""
            yield from chart(result, ascii_only=options.ascii_only)
        yield heading("The cache and its bookkeeping")
        yield from goals.table(goals.CHAT, result)
        yield heading("Choosing a token")
        yield from goals.table(goals.SAMPLER, result.sampler)
        if result.compared:
            yield heading("Beside other programs")
            yield from comparison(result)
        for note in result.notes:
            yield Text(f"Note: {note.rstrip('.')}.")


def heading(text: str) -> Text:
    """Write a heading with a blank line before it."""
    return Text(f"\n{text}", style="bold")


def figures(result: BenchResult) -> Iterator[RenderableType]:
    """The single figures, one a line, some with a remark."""
    yield Text(result.model, style="bold")
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    yield Text(f"{result.device}, {result.dtype}, quant {result.quant}, {threads}", style="dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for line in _lines(result):
        table.add_row(*line)
    yield table


def chart(result: BenchResult, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """Time to first token by turn, with the cache and without it, to one scale."""
    waits = list(zip(result.ttft_ms_by_turn, result.naive_ttft_ms_by_turn, strict=True))
    longest = max(max(pair) for pair in waits)
    yield Text.assemble(
        ("Time to first token by turn: ", "bold"),
        ("with the cache (above)", "green"),
        " and ",
        ("without it (below)", "yellow"),
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


Figure = tuple[str, str, Callable[[float], str], bool]
"""Attribute of a contestant, title, how to write it, whether more is better."""


def comparison(result: BenchResult) -> Iterator[RenderableType]:
    """Programs beside each other, then our runs against the best that each of the others did."""
    names = dict.fromkeys(each.name for each in result.compared if each.name != "kvchat")
    columns = [c for c in _columns(result) if any(_values(result.compared, c))]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("program")
    for _, title, _, _ in columns:
        table.add_column(title, justify="right")
    for each in result.compared:
        table.add_row(
            f"{each.name}, {each.settings}",
            *(_written(getattr(each, figure), write) for figure, _, write, _ in columns),
        )
    table.add_section()
    for mine in (each for each in result.compared if each.name == "kvchat"):
        for name in names:
            theirs = [each for each in result.compared if each.name == name]
            ratios = [_ratio(column, mine, theirs) for column in columns]
            table.add_row(f"kvchat, {mine.settings} / {name}", *ratios, style="bold")
    yield table
    if any(len([each for each in result.compared if each.name == name]) > 1 for name in names):
        yield Text("Each ratio is to the better of a program's settings.", style="dim")
    beside = Beside(result)
    yield from goals.table(beside.goals, beside)


def _written(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


def _ratio(column: Figure, mine: Contestant, theirs: Sequence[Contestant]) -> str:
    """Our figure as a multiple of the best of theirs."""
    figure, _, _, more_is_better = column
    own, others = getattr(mine, figure), _values(theirs, column)
    if own is None or not others:
        return ""
    return f"{own / (max(others) if more_is_better else min(others)):.2f} ×"


def _values(contestants: Sequence[Contestant], column: Figure) -> list[float]:
    values = [getattr(each, column[0]) for each in contestants]
    return [value for value in values if value is not None]


def _columns(result: BenchResult) -> list[Figure]:
    plan = result.plan
    long = f"at {min(plan.long_contexts, default=0):,}"
    return [
        ("prefill_tps", "prefill\ntok/s", "{:,.0f}".format, True),
        ("decode_tps", "decode\ntok/s", "{:,.1f}".format, True),
        ("long_decode_tps", f"{long}\ncached", "{:,.1f}".format, True),
        ("turn_ttft_ms", f"TTFT of\nturn {len(result.ttft_ms_by_turn)}", milliseconds, False),
        ("ready_s", "ready\nafter", "{:.2f} s".format, False),
        ("reply_memory_bytes", "memory,\none reply", _mb, False),
        ("peak_memory_bytes", "memory,\nall", _mb, False),
    ]


def _mb(n: float) -> str:
    return f"{n / 1e6:,.0f} MB"


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


def _lines(result: BenchResult) -> Iterator[tuple[str, ...]]:
    plan = result.plan
    yield "ready after", f"{result.ready_s:.2f} s"
    yield f"prefill, {plan.prefill_tokens:,} tokens", f"{result.prefill_tps:,.0f} tok/s"
    yield (
        f"decode, {plan.decode_prompt:,} tokens cached",
        f"{result.decode_tps:,.1f} tok/s",
        f"{result.decode_ms_p50:.2f} ms a token (95%: {result.decode_ms_p95:.2f})",
    )
    for long in result.long_decodes:
        yield (
            f"decode, {long.cached:,} tokens cached",
            f"{long.decode_tps:,.1f} tok/s",
            f"{long.token_ms:.2f} ms a token; reading the cache takes {long.cache_ms:.2f}",
        )
    limit = result.bandwidth_gbps * 1e9 / result.bytes_per_token
    yield (
        "limit of decoding",
        f"{limit:,.0f} tok/s",
        f"{result.bandwidth_gbps:.1f} GB/s, {result.bandwidth_fraction:.0%} of it used",
    )
    yield f"{plan.branch_tokens:,}-token branch, prefill", milliseconds(result.branch_prefill_ms)
    if result.branch_switch_ms is not None:
        yield "the same from the stash", milliseconds(result.branch_switch_ms)
    yield "weights", megabytes(result.weight_bytes)
    yield "KV cache per token", f"{result.kv_bytes_per_token:,} bytes"
    yield "peak memory", megabytes(result.peak_memory_bytes)
