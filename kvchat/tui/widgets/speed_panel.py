"""The speed panel: tokens per second, and how long each of the last tokens took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Digits, Static

from kvchat.chat.plain_text import one_line
from kvchat.tui.glyphs import UNICODE, Glyphs

_RATE_TOKENS = 32
"""The rate is that of so many tokens: it settles, and still follows."""
_KEPT = 256
_TITLE_WIDTH = 7
_CEILING = 3.0
"""Multiples of the median at which a column is full: one stall must not flatten all others."""


class SpeedPanel(Widget):
    """Decode speed. It repaints when it is told something, and never by itself."""

    DEFAULT_CSS = """
    SpeedPanel {
        height: 7;
        layout: vertical;
        & Horizontal { height: 1; }
        & .speed--name { color: $foreground-muted; text-style: bold; width: 7; }
        & .speed--phase {
            width: 1fr;
            color: $foreground-muted;
            text-align: right;
            text-wrap: nowrap;
            text-overflow: ellipsis;
        }
        & .speed--big { height: 3; margin: 1 0 0 0; }
        & Digits { width: auto; color: $primary; text-style: bold; }
        & #rate { width: auto; color: $primary; text-style: bold; padding: 1 0 0 0; }
        & .speed--unit { color: $foreground-muted; width: 1fr; height: 3; padding: 0 0 0 1; }
        & .speed--line { color: $primary; height: 2; }
        &.-compact {
            height: 2;
            & .speed--big { display: none; }
            & .speed--line { height: 1; }
        }
    }
    """

    compact: reactive[bool] = reactive(False, toggle_class="-compact")
    """Two lines: the figures, and the sparkline."""

    def __init__(self, *, glyphs: Glyphs = UNICODE, id: str | None = None) -> None:
        """Build an empty panel that draws with these signs."""
        super().__init__(id=id)
        self._glyphs = glyphs
        self._ms: deque[float] = deque(maxlen=_KEPT)
        self._phase = "idle"
        self._told: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Title and phase, the rate in large, the sparkline."""
        with Horizontal():
            yield Static("SPEED", classes="speed--name")
            yield Static(classes="speed--phase", markup=False)
        with Horizontal(classes="speed--big"):
            if self._glyphs.large_digits:
                yield Digits()
            else:
                yield Static(id="rate", markup=False)
            yield Static(classes="speed--unit", markup=False)
        yield Static(classes="speed--line", markup=False)

    def on_mount(self) -> None:
        """Show that nothing has been measured."""
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        """Fit the sparkline to the width."""
        self._show()

    def watch_compact(self) -> None:
        """The figures move into the first line, or out of it."""
        if self.is_mounted:
            self._show()

    @property
    def rate(self) -> float:
        """Tokens per second over the last tokens; 0 before any."""
        last = list(self._ms)[-_RATE_TOKENS:]
        mean = fmean(last) if last else 0.0
        return 1e3 / mean if mean > 0 else 0.0

    def add_tokens(self, ms: Sequence[float]) -> None:
        """Add the milliseconds that new tokens took, oldest first."""
        self._ms.extend(value for value in ms if value >= 0)
        self._show()

    def phase(self, text: str) -> None:
        """Say what the engine is doing."""
        self._phase = one_line(text)
        self._show()

    def clear(self) -> None:
        """Forget what was measured, as when another model is loaded."""
        self._ms.clear()
        self._show()

    def _show(self) -> None:
        if not self.is_mounted:
            return
        width = self.content_size.width
        rate = "" if not self._ms else f"{self.rate:.0f}" if self.rate >= 10 else f"{self.rate:.1f}"
        phase = self._phase
        both = f"{rate} tok/s {self._glyphs.dot} {phase}"
        if self.compact and rate and len(both) <= width - _TITLE_WIDTH:
            phase = both
        recent = list(self._ms)[-width:] if width else []
        each = f"{fmean(recent):.1f} ms a token" if recent else ""
        self._show_rate(rate)
        self._tell(".speed--phase", phase)
        self._tell(".speed--unit", f"\ntok/s\n{each}" if rate else "")
        rows = sparkline(recent, 1 if self.compact else 2, self._glyphs.levels)
        self._tell(".speed--line", "\n".join(rows))

    def _show_rate(self, rate: str) -> None:
        if self._told.get("rate") != rate:
            self._told["rate"] = rate
            if self._glyphs.large_digits:
                self.query_one(Digits).update(rate)
            else:
                self.query_one("#rate", Static).update(Content(rate))

    def _tell(self, which: str, text: str) -> None:
        if self._told.get(which) != text:
            self._told[which] = text
            self.query_one(which, Static).update(Content(text), layout=False)


def sparkline(values: Sequence[float], rows: int, levels: str) -> list[str]:
    """Draw one column a value, from zero to three times their median; longer ones are cut off.

    Args:
        values: None of them negative.
        rows: How many rows high, top first.
        levels: Signs of rising height.
    """
    if not values:
        return [""] * rows
    full = _CEILING * median(values) or max(values) or 1.0
    steps = len(levels)
    heights = [max(1, round(min(value / full, 1.0) * rows * steps)) for value in values]
    drawn = []
    for row in range(rows - 1, -1, -1):
        above = (min(max(height - row * steps, 0), steps) for height in heights)
        drawn.append("".join(levels[height - 1] if height else " " for height in above))
    return drawn
