"""A verification on the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvchat.bench.report import milliseconds
from kvchat.bench.verify import Outcome, Verification
from kvchat.chat.plain_text import one_line


def table(found: Verification) -> RenderableType:
    """One line for each reply, and what it comes to."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lines.add_column("reply")
    for column in ("reused", "new", "TTFT", "uncached", "logit gap"):
        lines.add_column(column, justify="right")
    if not found.exact:
        lines.add_column("KL", justify="right")
    lines.add_column("tokens")
    different = found.different
    for turn in found.turns:
        cells = [
            turn.name,
            f"{turn.reused:,}",
            f"{turn.new:,}",
            _or_dash(turn.ttft_ms, milliseconds),
            _or_dash(turn.cold_ttft_ms, milliseconds),
            _or_dash(turn.logit_gap, "{:.1e}".format),
        ]
        if not found.exact:
            cells.append(_or_dash(turn.kl, "{:.1e}".format))
        lines.add_row(*map(Text, cells), _verdict(turn, different=turn in different))
    threads = f"{found.threads} thread" + "s" * (found.threads != 1)
    where = f"{found.device}, {found.dtype}, quant {found.quant}, {threads}"
    heading = Text(f"{one_line(found.model)}  ", style="bold").append(where, style="not bold dim")
    return Group(heading, lines, summary(found))


def summary(found: Verification) -> Text:
    """What a verification comes to, in one sentence."""
    written = sum(turn.decoded for turn in found.turns)
    what = f"{len(found.turns)} replies, {written} tokens; largest logit gap {found.logit_gap:.1e}"
    if found.failed:
        n = len(found.different)
        return Text(f"Different: {n} of {what}.", style="bold red")
    if found.exact:
        return Text(f"Equal with the cache and without it: {what}.", style="bold green")
    same = len(found.turns) - len(found.different)
    return Text(
        f"{same} of {what}, mean KL {found.kl:.1e} nats. Only float32 promises the same tokens: "
        "elsewhere kernels differ with the number of rows."
    )


def as_data(found: Verification) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    return {
        **asdict(found),
        "exact": found.exact,
        "equal": not found.different,
        "logit_gap": found.logit_gap,
        "kl": found.kl,
    }


def _verdict(turn: Outcome, *, different: bool) -> Text:
    if turn.difference is not None:
        return Text(one_line(turn.difference), style="red")
    if different:
        return Text(f"equal, but logits differ by more than {turn.tolerance:.1e}", style="red")
    compared = turn.decoded or turn.finish_reason == "stop"
    return Text("equal" if compared else "none", style="green" if compared else "dim")


def _or_dash(value: float | None, write: Any) -> str:
    return "–" if value is None else str(write(value))
