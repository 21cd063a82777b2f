"""The cache panel: what fills the context, and what the cache saved this turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rich.cells import cell_len
from textual.app import RenderResult
from textual.content import Content
from textual.reactive import reactive
from textual.style import Style
from textual.widget import Widget

from kvchat.chat.ledger import Turn
from kvchat.chat.plain_text import one_line
from kvchat.tui.glyphs import UNICODE, Glyphs

_COLOURS = 3
"""Odd, while the signs alternate: turns on both sides of one too short to be seen differ too."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Neighbouring tokens of the context that belong to one turn."""

    tokens: int
    label: str
    """A letter or number that names the turn in the bar."""


class CachePanel(Widget):
    """A bar of the context, turn by turn, and the figures of the last turn.

    Turns differ in colour, in the sign they are drawn with, and by the label they begin with.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "cache-panel--title",
        "cache-panel--figure",
        "cache-panel--text",
        "cache-panel--saved",
        "cache-panel--free",
        "cache-panel--owner",
        *(f"cache-panel--turn-{n}" for n in range(_COLOURS)),
    }

    DEFAULT_CSS = """
    CachePanel {
        height: 12;
        text-wrap: nowrap;
        &.-compact { height: 7; }
        & > .cache-panel--title { color: $foreground-muted; text-style: bold; }
        & > .cache-panel--figure { color: $foreground; }
        & > .cache-panel--text { color: $foreground-muted; }
        & > .cache-panel--saved { color: $text-success; }
        & > .cache-panel--owner { color: $text-warning; }
        & > .cache-panel--free { color: $foreground 25%; }
        & > .cache-panel--turn-0 { color: $primary; }
        & > .cache-panel--turn-1 { color: $accent; }
        & > .cache-panel--turn-2 { color: $success; }
    }
    """

    compact: reactive[bool] = reactive(False, toggle_class="-compact")
    """Fewer lines: the figures run together."""

    def __init__(self, *, glyphs: Glyphs = UNICODE, id: str | None = None) -> None:
        """Build an empty panel that draws with these signs."""
        super().__init__(id=id)
        self._glyphs = glyphs
        self._spans: tuple[TurnSpan, ...] = ()
        self._capacity = 0
        self._kv_bytes = 0
        self._stash_bytes = 0
        self._stash_budget = 0
        self._kept = False
        self._snapshot_bytes = 0
        self._turn: Turn | None = None
        self._owner = ("", "")

    def update_owner(self, title: str, where: str) -> None:
        """Show that all this is of a chat that is not in view, and where it is; "" if it is."""
        if (title, where) != self._owner:
            self._owner = title, where
            self.refresh()

    def update_cache(
        self,
        turns: Sequence[TurnSpan],
        capacity: int,
        kv_bytes: int,
        stash_bytes: int,
        stash_budget: int,
    ) -> None:
        """Show what the cache holds.

        Args:
            turns: What the context is filled with, oldest first.
            capacity: Tokens the context holds.
            kv_bytes: Bytes allocated for K and V.
            stash_bytes: Bytes of stashed suffixes.
            stash_budget: Bytes they may grow to.
        """
        self._spans = tuple(span for span in turns if span.tokens > 0)
        self._capacity = capacity
        self._kv_bytes = kv_bytes
        self._stash_bytes = stash_bytes
        self._stash_budget = stash_budget
        self.refresh()

    def update_snapshot(self, kept: bool, nbytes: int) -> None:
        """Show whether the cache is kept on the disk, and how much is there already."""
        self._kept = kept
        self._snapshot_bytes = nbytes
        self.refresh()

    def update_turn(self, turn: Turn | None) -> None:
        """Show what the last turn cost; None before there is one."""
        self._turn = turn
        self.refresh()

    def render(self) -> RenderResult:
        """Draw the bar and the figures."""
        width = self.content_size.width
        used = sum(span.tokens for span in self._spans)
        if not self._capacity:
            nothing = Content.styled(self._glyphs.rest * width, self._style("free"))
            return Content("\n").join(
                [self._row("CONTEXT", "no model yet", width, "title", "text"), nothing]
            )
        count = f"{used:,} of {self._capacity:,}"
        lines = [
            self._row("CONTEXT", count, width, left_style="title"),
            self._bar(max(self._capacity, used), width, labelled=False),
            self._bar(max(used, 1), width, labelled=True) if used else Content(""),
        ]
        owner = self._whose(width) if self._owner[1] else None
        memory = f"KV {mebibytes(self._kv_bytes)}"
        stash = f"stash {_mib(self._stash_bytes)}/{mebibytes(self._stash_budget)}"
        if self.compact:
            lines[2] = owner or lines[2]
            lines.append(self._row(memory, stash, width, left_style="figure"))
            lines += self._short_figures(width)
        else:
            free = f"{max(0, self._capacity - used):,} free"
            lines += [
                owner or self._row(f"{used / self._capacity:.0%} used", free, width),
                self._row("KV cache", mebibytes(self._kv_bytes), width),
                self._row(
                    "stash",
                    f"{_mib(self._stash_bytes)} of {mebibytes(self._stash_budget)}",
                    width,
                ),
                self._snapshot(width),
                *self._figures(width),
            ]
        return Content("\n").join(lines)

    def _whose(self, width: int) -> Content:
        """Name the chat that the cache is of while another one is in view."""
        title, where = self._owner
        named = Content(f"of “{one_line(title)}”")
        room = max(width - cell_len(where) - 1, 0)
        if named.cell_length > room:
            named = (
                Content(f"of “{one_line(title)}").truncate(max(room - 1, 0), ellipsis=True) + "”"
            )
        gap = " " * max(1, width - named.cell_length - cell_len(where))
        style = self._style("owner")
        return Content.assemble(named.stylize(style), gap, (where, style))

    def _snapshot(self, width: int) -> Content:
        if not (self._kept or self._snapshot_bytes):
            return Content("")
        size = mebibytes(self._snapshot_bytes) if self._snapshot_bytes else "not written yet"
        return self._row("snapshot on disk", size, width)

    def _figures(self, width: int) -> list[Content]:
        turn = self._turn
        if turn is None:
            return []
        restored = f" ({turn.restored:,} from stash)" if turn.restored else ""
        if turn.loaded:
            restored = f" ({turn.loaded:,} from disk)"
        # A stop string may cut off drafted tokens again.
        drafted = min(turn.accepted / max(turn.decoded, 1), 1.0)
        drafts = f" ({drafted:.0%} from drafts)" if turn.accepted else ""
        return [
            self._row("LAST TURN", _saved(turn), width, left_style="title", right_style="saved"),
            self._row("reused", f"{turn.reused:,}{restored}", width),
            self._row("new", f"{turn.new:,}", width),
            self._row("decoded", f"{turn.decoded:,}{drafts}", width),
            self._row("first token", _seconds(turn), width),
        ]

    def _short_figures(self, width: int) -> list[Content]:
        turn = self._turn
        if turn is None:
            return []
        dot = self._glyphs.dot
        return [
            self._row(f"reused {turn.reused:,} {dot} new {turn.new:,}", "", width, "figure"),
            self._row(f"decoded {turn.decoded:,}", f"TTFT {_seconds(turn)}", width, "figure"),
            self._row(_saved(turn), "", width, "saved"),
        ]

    def _row(
        self,
        left: str,
        right: str,
        width: int,
        left_style: str = "text",
        right_style: str = "figure",
    ) -> Content:
        gap = max(1, width - len(left) - len(right))
        return Content.assemble(
            (left, self._style(left_style)), " " * gap, (right, self._style(right_style))
        )

    def _bar(self, total: int, width: int, *, labelled: bool) -> Content:
        parts: list[tuple[str, Style]] = []
        for turn, cells in enumerate(share_cells([s.tokens for s in self._spans], total, width)):
            sign = self._glyphs.filled_alternate if turn % 2 else self._glyphs.filled
            label = one_line(self._spans[turn].label) if labelled else ""
            if cell_len(label) > cells:
                label = ""
            text = label + sign * (cells - cell_len(label))
            parts.append((text, self._style(f"turn-{turn % _COLOURS}")))
        free = width - sum(cell_len(text) for text, _ in parts)
        return Content.assemble(*parts, (self._glyphs.rest * free, self._style("free")))

    def _style(self, part: str) -> Style:
        return self.get_visual_style(f"cache-panel--{part}", partial=True)


def share_cells(amounts: Sequence[int], total: int, cells: int) -> list[int]:
    """Return how many of a bar's cells each amount takes, true to scale where they begin and end.

    Whatever there is of the amounts takes at least one cell together.
    """
    ends = [0]
    sum_so_far = 0
    for amount in amounts:
        sum_so_far += amount
        ends.append(round(sum_so_far * cells / total))
    if amounts and sum_so_far and ends[-1] == 0:
        ends[-1] = min(1, cells)
    return [end - begin for begin, end in pairwise(ends)]


def mebibytes(n: int) -> str:
    """Write a number of bytes in MiB, or in GiB where it is large."""
    return f"{n / 2**30:.1f} GiB" if n >= 10 * 2**30 else f"{_mib(n)} MiB"


def _mib(n: int) -> str:
    mib = n / 2**20
    return f"{mib:.0f}" if mib >= 100 or n == 0 else f"{mib:.1f}"


def _seconds(turn: Turn) -> str:
    return f"{turn.ttft_ms / 1e3:.2f} s" if turn.decoded else "none"


def _saved(turn: Turn) -> str:
    if turn.saved_ms is None or turn.saved_ms < 50:
        return ""
    return f"saved about {turn.saved_ms / 1e3:.1f} s"
