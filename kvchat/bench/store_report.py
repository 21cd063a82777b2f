"""A benchmark of the store on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench import goals
from kvchat.bench.report import megabytes, milliseconds
from kvchat.bench.store import StoreResult


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Figures and goals, for a rich console to print."""

    result: StoreResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what was kept, the goals, and each search."""
        result = self.result
        kept = f"{result.chats:,} chats with {result.messages:,} messages"
        yield Text(f"{kept}, {megabytes(result.store_bytes)}", style="bold")
        yield from goals.table(goals.STORE, result)
        yield ""
        searches = Table.grid(padding=(0, 2))
        searches.add_column(style="dim")
        searches.add_column(justify="right")
        for query, ms in result.search_ms.items():
            searches.add_row(f"search for {query}", milliseconds(ms))
        yield searches
