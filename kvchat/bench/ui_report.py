"""A benchmark of the screen on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvchat.bench import goals
from kvchat.bench.report import milliseconds
from kvchat.bench.ui import Stream, UiResult


@dataclass(frozen=True, slots=True)
class UiReport:
    """Figures and goals, for a rich console to print."""

    result: UiResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the program's figures, then those of each number of threads."""
        result = self.result
        yield Text(f"The screen, {result.model}", style="bold")
        yield Text(f"ready after {result.ui.ready_s:.2f} s", style="dim")
        yield from goals.table(goals.SCREEN, result.ui)
        for stream in result.ui.streams:
            yield ""
            threads = "1 thread" if stream.threads == 1 else f"{stream.threads} threads"
            yield Text(f"A reply, {threads} on {result.cores} cores", style="bold")
            yield Text(_speeds(stream), style="dim")
            kept = goals.speed_kept(stream.threads, result.cores)
            yield from goals.table((kept, *goals.STREAM), stream)


def _speeds(stream: Stream) -> str:
    parts = [
        f"{stream.decode_tps:.1f} tok/s, without a screen {stream.headless_decode_tps:.1f}",
        f"half of the tokens within {milliseconds(stream.token_ms_p50)}",
    ]
    if stream.key_ms_p50 is not None:
        parts.append(f"half of the keys within {milliseconds(stream.key_ms_p50)}")
    return "; ".join(parts)
