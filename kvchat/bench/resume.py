"""What a chat that was closed waits for its next turn: with its KV snapshot, and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench import goals
from kvchat.bench.plan import LoadSettings
from kvchat.bench.report import megabytes, milliseconds
from kvchat.bench.result import rounded
from kvchat.bench.resume_child import Errand, measure
from kvchat.engine.errors import KvchatError, SettingError

TOKENS = 4000
"""About how long the chat is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeResult:
    """What a run found; medians over processes, each of which opens the chat once."""

    model: str
    tokens: int
    """Of the chat that is in the cache before the next message."""
    snapshot_bytes: int
    save_ms: float
    load_ms: float
    """Reading the snapshot, verified, until the cache holds it."""
    resumed_ttft_ms: float
    """Of the first turn in a new process, after loading."""
    live_ttft_ms: float
    """Of the same turn with the chat open."""
    cold_ttft_ms: float
    """Of the first turn in a new process without a snapshot."""
    repeats: int

    @property
    def load_s(self) -> float:
        """Seconds for reading the snapshot."""
        return self.load_ms / 1e3

    @property
    def resumed_share(self) -> float:
        """The wait in a resumed chat as a multiple of that in one that was never closed."""
        return self.resumed_ttft_ms / self.live_ttft_ms

    @property
    def saving(self) -> float:
        """How many times longer a new process waits without a snapshot."""
        return self.cold_ttft_ms / (self.load_ms + self.resumed_ttft_ms)

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


def run(
    settings: LoadSettings,
    repeats: int,
    *,
    tokens: int = TOKENS,
    progress: Callable[[str], None] = lambda _: None,
) -> ResumeResult:
    """Make a chat with a snapshot, and open it in processes of their own.

    Raises:
        KvchatError: the model does not load, or its snapshot is not used.
        SettingError: there is nothing to repeat.
    """
    if repeats < 1:
        raise SettingError("repeats must be at least 1")
    with TemporaryDirectory(prefix="kvchat-bench-") as folder:

        def start(kind: str) -> Errand:
            return Errand(asdict(settings), folder, kind, tokens)  # type: ignore[arg-type]

        progress(f"a chat of {tokens:,} tokens")
        written = measure(start("write"))
        resumed = []
        for nth in range(repeats):
            progress(f"opening it, {nth + 1} of {repeats}")
            resumed.append(measure(start("resume")))
        if not all(each.loaded for each in resumed):
            raise KvchatError("the snapshot was not used, so there is nothing to compare")
        progress("opening it without a snapshot")
        cold = measure(start("cold"))
    return ResumeResult(
        model=settings.model,
        tokens=written.tokens,
        snapshot_bytes=written.nbytes,
        save_ms=written.file_ms,
        load_ms=median(each.file_ms for each in resumed),
        resumed_ttft_ms=median(each.ttft_ms for each in resumed),
        live_ttft_ms=median(each.live_ttft_ms for each in resumed),
        cold_ttft_ms=cold.ttft_ms,
        repeats=repeats,
    )


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """Figures and goals, for a rich console to print."""

    result: ResumeResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the figures, then the goals."""
        result = self.result
        yield Text(f"A chat of {result.tokens:,} tokens opened again, {result.model}", "bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_row("its snapshot", megabytes(result.snapshot_bytes))
        table.add_row("writing it", milliseconds(result.save_ms))
        table.add_row("loading it", milliseconds(result.load_ms))
        table.add_row("first token, chat open", milliseconds(result.live_ttft_ms))
        table.add_row("first token, with the snapshot", milliseconds(result.resumed_ttft_ms))
        table.add_row("first token, without it", milliseconds(result.cold_ttft_ms))
        yield table
        yield from goals.table(goals.RESUME, result)
