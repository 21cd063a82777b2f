"""The few signs our widgets draw with: one set for Unicode terminals, one for all others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Single-cell signs, by what they mean."""

    filled: str
    filled_alternate: str
    """Beside `filled`, told from it without colour."""
    rest: str
    thumb: str
    thumb_at_default: str
    default_tick: str
    focus: str
    cursor: str
    dot: str
    ellipsis: str
    levels: str
    """Rising heights of a sparkline."""
    large_digits: bool = True


UNICODE = Glyphs(
    filled="━",
    filled_alternate="═",
    rest="─",
    thumb="●",
    thumb_at_default="○",
    default_tick="┼",
    focus="▸",
    cursor="▏",
    dot="·",
    ellipsis="…",
    levels="▁▂▃▄▅▆▇█",
)

ASCII = Glyphs(
    filled="=",
    filled_alternate="#",
    rest="-",
    thumb="O",
    thumb_at_default="o",
    default_tick="+",
    focus=">",
    cursor="_",
    dot="-",
    ellipsis="~",
    levels="_.:-=+*#",
    large_digits=False,
)
