"""Laying out a table in a given width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len

from kvchat.tui.widgets.line import Line, Span
from kvchat.tui.widgets.wrapping import wrap

_GAP = "  "
_NARROWEST = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one cell, on one line."""

    text: str
    spans: tuple[Span, ...]
    align: str


def table_lines(rows: Sequence[Sequence[Cell]], width: int) -> list[Line]:
    """Return the lines of a table whose first row is its head.

    Too wide columns wrap inside; where even that has no room, cells follow one another.
    """
    count = max(map(len, rows), default=0)
    if count * (_NARROWEST + len(_GAP)) > width:
        return [Line(_GAP.join(cell.text for cell in row)) for row in rows]
    widths = [
        max((cell_len(row[n].text) for row in rows if n < len(row)), default=0) or 1
        for n in range(count)
    ]
    room = width - len(_GAP) * (count - 1)
    while (excess := sum(widths) - room) > 0:
        widest = max(widths)
        second = max((w for w in widths if w < widest), default=_NARROWEST)
        column = widths.index(widest)
        widths[column] = max(_NARROWEST, second - 1, widest - excess)
    head, *body = rows
    lines = _row_lines(head, widths, "strong")
    lines.append(Line("─" * (sum(widths) + len(_GAP) * (count - 1)), style="faint", copied=False))
    for row in body:
        lines += _row_lines(row, widths, "")
    return lines


def _row_lines(row: Sequence[Cell], widths: Sequence[int], style: str) -> list[Line]:
    """Return as many lines as the cell with the most rows needs."""
    cells = [
        list(pairwise([*wrap(cell.text, width), len(cell.text)]))
        for cell, width in zip(row, widths, strict=False)
    ]
    lines = []
    for number in range(max(map(len, cells), default=0)):
        text = ""
        spans: list[Span] = []
        for cell, width, bounds in zip(row, widths, cells, strict=False):
            start, end = bounds[number] if number < len(bounds) else (0, 0)
            piece = cell.text[start:end].rstrip()
            space = max(0, width - cell_len(piece))
            before = {"right": space, "center": space // 2}.get(cell.align, 0)
            shift = len(text) + before - start
            spans += [
                Span(max(s.start, start) + shift, min(s.end, start + len(piece)) + shift, s.style)
                for s in cell.spans
                if s.start < start + len(piece) and s.end > start
            ]
            text += " " * before + piece + " " * (space - before) + _GAP
        lines.append(Line(text.rstrip(), tuple(spans), style=style))
    return lines
