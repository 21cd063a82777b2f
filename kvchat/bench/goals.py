"""The figures we want to reach, beside those that were measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Comparator = Literal["≤", "≥"]

HOLDS: dict[Comparator, Callable[[float, float], bool]] = {"≤": operator.le, "≥": operator.ge}


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and how far it should go."""

    figure: str
    """Name of the attribute that holds it."""
    name: str
    comparator: Comparator
    limit: float
    form: str
    """How to write a value of it."""

    def reached(self, value: float) -> bool:
        """Whether a measured value is good enough."""
        return HOLDS[self.comparator](value, self.limit)


CHAT = (
    Goal("ttft_growth", "wait in turn 10 / in turn 2", "≤", 2, "{:.1f} ×"),
    Goal("ttft_saving", "turn 10 without the cache / with it", "≥", 15, "{:.1f} ×"),
    Goal("branch_switch_ms", "switching to a stashed branch", "≤", 50, "{:.1f} ms"),
    Goal("bookkeeping_ms_at_200_turns", "bookkeeping after 200 turns", "≤", 10, "{:.1f} ms"),
    Goal("send_to_first_event_ms", "sending to the first event", "≤", 5, "{:.2f} ms"),
)

SAMPLER = (
    Goal("top_k_49152_ms", "top-k 50 of 49,152", "≤", 0.4, "{:.2f} ms"),
    Goal("top_k_151936_ms", "top-k 50 of 151,936", "≤", 0.8, "{:.2f} ms"),
    Goal("flat_49152_ms", "top-p 0.95 of 49,152 alike", "≤", 1.5, "{:.2f} ms"),
    Goal("flat_151936_ms", "top-p 0.95 of 151,936 alike", "≤", 4, "{:.2f} ms"),
)

SCREEN = (
    Goal("first_paint_s", "first paint", "≤", 0.7, "{:.2f} s"),
    Goal("idle_cpu", "CPU while idle", "≤", 0.01, "{:.1%}"),
    Goal("exit_s", "quitting while it writes", "≤", 1, "{:.2f} s"),
    Goal("open_ms", "opening a chat of 1,000 messages", "≤", 500, "{:.0f} ms"),
)

STREAM = (
    Goal("refreshes_per_s", "refreshes a second", "≥", 12, "{:.1f}"),
    Goal("token_ms_p95", "token to screen, 95%", "≤", 120, "{:.0f} ms"),
    Goal("key_ms_p95", "key to screen, 95%", "≤", 50, "{:.0f} ms"),
)

RESUME = (
    Goal("load_s", "loading the snapshot", "≤", 0.5, "{:.2f} s"),
    Goal("resumed_share", "wait after opening / with the chat open", "≤", 1.3, "{:.2f} ×"),
)


STORE = (
    Goal("hand_over_ms_max", "a reply waits for its saving, at most", "≤", 5, "{:.2f} ms"),
    Goal("saving_share", "a reply takes longer when saved", "≤", 0.02, "{:.1%}"),
    Goal("saving_cpu_share", "CPU time of saving / a reply's time", "≤", 0.02, "{:.1%}"),
    Goal("list_ms", "listing the chats", "≤", 100, "{:.0f} ms"),
    Goal("search_ms_max", "the slowest search", "≤", 200, "{:.0f} ms"),
    Goal("open_ms", "opening a chat", "≤", 200, "{:.1f} ms"),
    Goal("start_longer_ms", "a start takes longer than without chats", "≤", 10, "{:.1f} ms"),
)


def speed_kept(threads: int, cores: int) -> Goal:
    """The share of the decoding speed that is left beside the screen."""
    limit = 0.80 if threads >= cores else 0.92 if threads == 1 else 0.95
    return Goal("speed_kept", "decode with the screen / without", "≥", limit, "{:.0%}")


def table(goals: Sequence[Goal], result: object) -> Iterator[RenderableType]:
    """Every goal that was measured: the figure, the goal, and whether it is reached."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    grid.add_column()
    for goal in goals:
        value = getattr(result, goal.figure)
        if value is not None:
            met = goal.reached(value)
            grid.add_row(
                goal.name,
                goal.form.format(value),
                f"goal {goal.comparator} {goal.form.format(goal.limit)}",
                Text("reached", "green") if met else Text("missed", "bold red"),
            )
    if grid.row_count:
        yield grid
