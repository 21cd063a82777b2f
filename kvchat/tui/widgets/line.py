"""A line of the transcript before it is wrapped: text, its styles, and what copying it gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len

MARK = "mark"
"""Style of a note in the text that is none of it: copying leaves it out."""


class Span(NamedTuple):
    """A piece of a line that looks or acts in its own way. Spans of a line do not overlap."""

    start: int
    end: int
    style: str
    """Names of styles, separated by spaces."""
    action: str = ""
    """What a click on it does."""
    copied: bool = True
    """Whether copying the line includes it."""


@dataclass(frozen=True, slots=True)
class Line:
    """What ends with a line feed in the original, however many rows it takes on the screen."""

    text: str = ""
    spans: tuple[Span, ...] = ()
    style: str = ""
    """Of the whole row, to its right end; spans add to it."""
    lead: str = ""
    """Drawn before the first row: a bullet, a bar, an indentation."""
    rest: str = ""
    """Drawn before all other rows; as wide as `lead`."""
    lead_style: str = ""
    inset: int = 0
    """Cells between lead and text, in the style of the row."""
    copied_lead: str = ""
    """What copying puts before the text: the bullet as it was typed."""
    source: tuple[int, int] = (0, 0)
    """Part of the message and line in it: where to find this place in another rendering."""
    copied: bool = True

    @property
    def hang(self) -> int:
        """Cells that every row has less than the screen."""
        return cell_len(self.lead) + self.inset

    def copy(self, start: int = 0, end: int | None = None) -> str:
        """Return what copying the characters from `start` to `end` gives."""
        end = len(self.text) if end is None else min(end, len(self.text))
        parts = [self.copied_lead] if start == 0 and (end or not self.text) else []
        for span in self.spans:
            if not span.copied and span.end > start:
                parts.append(self.text[start : min(span.start, end)])
                start = max(start, span.end)
        return "".join([*parts, self.text[start:end]])


def joined(spans: Iterable[tuple[str, str]]) -> tuple[str, tuple[Span, ...]]:
    """Return text and spans for pieces of (text, style)."""
    text = ""
    found = []
    for piece, style in spans:
        if piece and style:
            found.append(Span(len(text), len(text) + len(piece), style, copied=style != MARK))
        text += piece
    return text, tuple(found)


def text_lines(pieces: Iterable[tuple[str, str]], part: int, form: Line) -> list[Line]:
    """Return the lines of plain text in pieces of (text, style), each styled and led as `form`."""
    rows: list[list[tuple[str, str]]] = [[]]
    for text, style in pieces:
        first, *others = text.split("\n")
        rows[-1].append((first, style))
        rows += [[(other, style)] for other in others]
    lines = []
    for number, row in enumerate(rows):
        text, spans = joined(row)
        source = (part, number)
        line = Line(text, spans, form.style, form.lead, form.rest, form.lead_style, source=source)
        lines.append(line)
    return lines
