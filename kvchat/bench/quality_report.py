"""What the precision of the weights costs, on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench.quality import QualityResult


@dataclass(frozen=True, slots=True)
class QualityReport:
    """All variants, one a line, for a rich console to print."""

    result: QualityResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table and what its figures mean."""
        result = self.result
        yield Text(result.model, style="bold")
        yield Text(
            f"Mean divergence from the float32 run over {result.tokens:,} tokens, in nats, and how "
            "often both find the same token most probable.",
            style="dim",
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("\nweights")
        table.add_column("\nmostly")
        for title in ("\nsize", "prefill\nKL", "decode\nKL", "\nsame", "\ngoal"):
            table.add_column(title, justify="right")
        table.add_column()
        for loss in result.variants:
            verdict = Text("reached", "green") if loss.reached else Text("missed", "bold red")
            table.add_row(
                loss.name,
                loss.weights,
                f"{loss.weight_bytes / 1e6:,.0f} MB",
                f"{loss.prefill_kl:.5f}",
                f"{loss.decode_kl:.5f}",
                f"{min(loss.prefill_same_top, loss.decode_same_top):.1%}",
                "" if loss.goal is None else f"≤ {loss.goal:g}",
                "" if loss.goal is None else verdict,
            )
        yield table
