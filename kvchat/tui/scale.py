"""The scale of a slider: which values lie where on a track, and how they are read and written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal

from kvchat.engine.types import Limit

Value = float | None
"""A number, or None where a scale has a word for "no number"."""

_MARGIN = 0.08
"""The part of a track that belongs to the value beside the numbers, where there is one."""

_COARSER = (10, 5, 2, 1)
_PREFERRED = ("1", "1.2", "1.4", "1.6", "1.8", "2", "2.5", "3", "3.5", "4", "4.5", "5", "6", "7",
              "8", "9")  # fmt: skip
"""Round mantissas with about equal ratios: the steps of a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps values to positions from 0 to 1 and back, in round steps.

    `low` and `high` bound what a track shows; `limit` bounds what may be typed.
    """

    low: float
    high: float
    step: float
    limit: Limit
    log: bool = False
    """Steps are ratios: low must be above 0."""
    words: Mapping[Value, str] = field(default_factory=dict)
    """Values that are written as a word, such as {0: "off"}."""
    beside: tuple[Value, Literal["low", "high"]] | None = None
    """One value that is not among the numbers from low to high, and the end where it is found."""

    @property
    def first(self) -> Value:
        """The value at the track's left end."""
        return self.beside[0] if self.beside and self.beside[1] == "low" else self._plain(self.low)

    @property
    def last(self) -> Value:
        """The value at the track's right end."""
        return (
            self.beside[0] if self.beside and self.beside[1] == "high" else self._plain(self.high)
        )

    @property
    def range_text(self) -> str:
        """What may be typed, in a few words."""
        low = f"{'>' if self.limit.low_excluded else ''}{self.limit.low:g}"
        return f"{low} or more" if self.limit.high >= 1e9 else f"{low} to {self.limit.high:g}"

    def clamp(self, value: Value) -> Value:
        """Return the nearest value that is allowed; raises ValueError for NaN and a wrong None."""
        if value is None:
            if self.beside is None or self.beside[0] is not None:
                raise ValueError("this scale has no value None")
            return None
        if math.isnan(value):
            raise ValueError("NaN is not a position on a scale")
        least = self.limit.low + (self.step if self.limit.low_excluded else 0)
        above_low = value > self.limit.low if self.limit.low_excluded else value >= least
        return self._plain(min(value, self.limit.high) if above_low else least)

    def position(self, value: Value) -> float:
        """Return where a value stands, from 0 to 1; values out of sight stand at the ends."""
        start, span = self._stretch()
        if self.beside and value == self.beside[0]:
            return 0.0 if self.beside[1] == "low" else 1.0
        assert value is not None
        shown = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(shown / self.low) / math.log(self.high / self.low)
        else:
            part = (shown - self.low) / (self.high - self.low)
        return start + span * part

    def value_at(
        self, position: float, *, resolution: float = 0.0, magnets: Iterable[Value] = ()
    ) -> Value:
        """Return the value for a position on the track.

        Args:
            position: From 0 to 1.
            resolution: The width of a cell; the wider, the rounder the values.
            magnets: Values that win within half a cell of where they stand.
        """
        position = min(max(position, 0.0), 1.0)
        distances = [(abs(self.position(value) - position), value) for value in magnets]
        near = [pair for pair in distances if pair[0] <= resolution / 2 + 1e-9]
        if near:
            return min(near, key=lambda pair: pair[0])[1]
        start, span = self._stretch()
        if self.beside and abs(position - self.position(self.beside[0])) < _MARGIN / 2:
            return self.beside[0]
        part = min(max((position - start) / span, 0.0), 1.0)
        if self.log:
            exact = self.low * (self.high / self.low) ** part
            round_values = [*self._grid_around(exact), self.low, self.high]
            nearest = min(round_values, key=lambda value: abs(math.log(value / exact)))
        else:
            exact = self.low + (self.high - self.low) * part
            cell = (self.high - self.low) * resolution / span
            coarse = next((n for n in _COARSER if n * self.step <= cell), 1) * self.step
            nearest = float(Decimal(str(coarse)) * round(exact / coarse))
        return self._plain(min(max(nearest, self.low), self.high))

    def stepped(self, value: Value, steps: int) -> Value:
        """Return the value some steps further up (or down, where negative) on the round ones."""
        up = steps > 0
        for _ in range(abs(steps)):
            value = self._next(value, up)
        return value

    def parse(self, text: str) -> Value:
        """Read what a user typed; raises ValueError with a short reason."""
        text = text.strip().casefold()
        for value, word in self.words.items():
            if text == word.casefold():
                return value
        number = _number(text, whole=self.limit.whole)
        in_range = self.limit.low <= number <= self.limit.high
        if not in_range or (self.limit.low_excluded and number == self.limit.low):
            raise ValueError(self.range_text)
        return self._plain(number)

    def format(self, value: Value) -> str:
        """Write a value: as its word, or with as many decimals as a step has, or it needs."""
        if value in self.words:
            return self.words[value]
        assert value is not None
        if self.limit.whole:
            return str(int(value))
        decimals = -min(0, int(Decimal(str(self.step)).as_tuple().exponent))
        text = f"{value:.{decimals}f}"
        return text if float(text) == value else f"{value:.6g}"

    def _plain(self, value: float) -> float:
        return int(value) if self.limit.whole else float(value)

    def _stretch(self) -> tuple[float, float]:
        """Return where the numbers start on the track, and how much of it they take."""
        if self.beside is None:
            return 0.0, 1.0
        return (_MARGIN if self.beside[1] == "low" else 0.0), 1.0 - _MARGIN

    def _next(self, value: Value, up: bool) -> Value:
        end = "high" if up else "low"
        if self.beside and value == self.beside[0]:
            if end == self.beside[1]:
                return value
            return self._plain(self.low if up else self.high)
        assert value is not None
        following = self._round_value_after(value, up)
        bound = self.high if up else self.low
        if following <= bound if up else following >= bound:
            return self._plain(following)
        if value < bound if up else value > bound:
            return self._plain(bound)
        return self.beside[0] if self.beside and end == self.beside[1] else value

    def _round_value_after(self, value: float, up: bool) -> float:
        if self.log and value > 0:
            slack = 1 + 1e-9
            grid = self._grid_around(value)
            if up:
                return min(x for x in grid if x > value * slack)
            return max((x for x in grid if x < value / slack), default=0.0)
        # Decimals are exact where 0.3 / 0.05 and seeds of 19 digits are not in binary floats.
        step = Decimal(str(self.step))
        index = Decimal(str(value)) / step
        if up:
            index = index.to_integral_value(ROUND_FLOOR) + 1
        else:
            index = index.to_integral_value(ROUND_CEILING) - 1
        exact = index * step
        return int(exact) if self.limit.whole else float(exact)

    def _grid_around(self, value: float) -> list[float]:
        exponent = math.floor(math.log10(value))
        grid = (float(f"{m}e{e}") for e in range(exponent - 1, exponent + 3) for m in _PREFERRED)
        return [x for x in grid if not self.limit.whole or x == int(x)]


def _number(text: str, *, whole: bool) -> float:
    """Read a number as people write it: 1,024 tokens, a temperature of 0,8, a seed of 19 digits."""
    head, *groups = text.split(",")
    thousands = bool(groups) and bool(head) and all(len(group) == 3 for group in groups)
    text = text.replace(",", "" if whole and thousands else ".")
    kind = "a whole number" if whole else "a number"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"not {kind}") from None
    if not math.isfinite(number) or (whole and number != int(number)):
        raise ValueError(f"not {kind}")
    return int(number) if whole else number
