"""Thread counts measured anew, and the choice that is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench.plan import LoadSettings
from kvchat.bench.result import rounded
from kvchat.engine.errors import SettingError
from kvchat.models import threads
from kvchat.models.load import load


@dataclass(frozen=True, slots=True)
class ThreadsResult:
    """The fields are the keys of the JSON."""

    model: str
    cores: int
    """What this process may keep busy."""
    decode_ms: dict[int, float]
    """A step by thread count, beside a thread as busy as the screen."""
    threads: int
    """The count that is used from now on where none is asked for."""

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ThreadsReport:
    """All counts, one a line, for a rich console to print."""

    result: ThreadsResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table and the choice."""
        result = self.result
        yield Text(result.model, style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("threads", "a token takes", "decode"):
            table.add_column(title, justify="right")
        for count, ms in result.decode_ms.items():
            style = "bold green" if count == result.threads else ""
            table.add_row(str(count), f"{ms:.2f} ms", f"{1e3 / ms:,.1f} tok/s", style=style)
        yield table
        yield Text(
            f"{result.threads} of {result.cores} cores, beside a busy screen; kept for this model "
            "on this machine. --threads overrides it."
        )


def measure(
    settings: LoadSettings, progress: Callable[[str], None] = lambda _: None
) -> ThreadsResult:
    """Load a model, measure the thread counts and keep the best one.

    Raises:
        KvchatError: the model does not load, or does not run on the CPU.
    """
    progress("loading the model")
    # One thread, so that loading does not measure too.
    llm = load(settings.model, **replace(settings, threads=1).arguments())
    if llm.model.device.type != "cpu":
        raise SettingError("threads matter on the CPU only; use --device cpu")
    progress("measuring thread counts")
    best, times = threads.tune(llm.model, llm.engine.step, llm.path, llm.weights)
    return ThreadsResult(llm.name, threads.usable_cores(), times, best)
