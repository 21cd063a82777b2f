"""Painting one row of the transcript."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.selection import Selection
from textual.strip import Strip

from kvchat.tui.widgets.line import Line, Span
from kvchat.tui.widgets.wrapping import TAB, whole_clusters

MARGIN = 3
"""Cells left of the text."""

_MARKER = " ▌ "
_NO_MARKER = " " * MARGIN
_PLAIN = Span(0, 0, "")


def paint(
    line: Line,
    start: int,
    end: int,
    *,
    number: int,
    width: int,
    style: Callable[[str], Style],
    marked: bool,
    selection: Selection | None,
) -> Strip:
    """Return a row of `line`.

    Every cell carries the character it stands for, as (character, line), so that selecting and
    clicking work whatever is drawn around the text.

    Args:
        line: What to paint.
        start: First character of the row.
        end: Character after its last.
        number: Of the line in the whole transcript.
        width: Cells for the text, its lead included; the margin comes in addition.
        style: Gives the style for names separated by spaces.
        marked: Whether the message is the current one.
        selection: What is selected, in characters and lines.
    """
    segments = [
        *_cells(_MARKER if marked else _NO_MARKER, style("marker"), start, number),
        *_cells(line.rest if start else line.lead, style(line.lead_style), start, number),
        *_cells(" " * line.inset, style(line.style), start, number),
    ]
    column = 0
    for first, last, names, action in _pieces(line, start, end, selection, number):
        look = style(f"{line.style} {names}")
        for at, shown in _shown(line.text[first:last], column):
            meta: dict[str, object] = {"offset": (first + at, number)}
            if action:
                meta["action"] = action
            segments.append(Segment(shown, look + Style.from_meta(meta)))
            column += cell_len(shown)
    missing = width - line.hang - column
    if line.style and missing > 0:
        look = style(line.style) + Style.from_meta({"offset": (end, number)})
        segments.append(Segment(" " * missing, look))
    return Strip(segments)


def _pieces(
    line: Line, start: int, end: int, selection: Selection | None, number: int
) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, end, styles, action) of the pieces that look alike."""
    end = start + len(line.text[start:end].rstrip(" \t"))
    selected = selected_part(line, selection, number)
    edges = {start, end, *selected}
    for styled in line.spans:
        edges |= {styled.start, styled.end}
    spans = iter(line.spans)
    span: Span | None = next(spans, None)
    for first, last in pairwise(sorted(edge for edge in edges if start <= edge <= end)):
        while span and span.end <= first:
            span = next(spans, None)
        inside = span if span and span.start <= first else _PLAIN
        names, action = inside.style, inside.action
        if selected[0] <= first < selected[1]:
            names += " selected"
        yield first, last, names, action


def selected_part(line: Line, selection: Selection | None, number: int) -> tuple[int, int]:
    """Return the first selected character of `line` and the one after the last."""
    span = selection.get_span(number) if selection else None
    if span is None:
        return 0, 0
    start, end = span
    return whole_clusters(line.text, start, len(line.text) if end == -1 else end)


def _shown(text: str, column: int) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of pieces without tabs; each cell of a tab by itself."""
    at = 0
    for number, piece in enumerate(text.split("\t")):
        if number:
            stop = TAB - column % TAB
            yield from ((at, " ") for _ in range(stop))
            at, column = at + 1, column + stop
        if piece:
            yield at, piece
        at, column = at + len(piece), column + cell_len(piece)


def _cells(text: str, style: Style, at: int, number: int) -> list[Segment]:
    """Return cells that all stand for one character."""
    look = style + Style.from_meta({"offset": (at, number)})
    return [Segment(char, look) for char in text]
