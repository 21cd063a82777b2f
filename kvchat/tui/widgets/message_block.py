"""One message of the transcript: its lines, wrapped when they are needed, and its growth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kvchat.chat.plain_text import one_line, printable
from kvchat.tui.widgets.line import MARK, Line, Span, joined, text_lines
from kvchat.tui.widgets.markdown_lines import markdown_lines
from kvchat.tui.widgets.wrapping import wrap

MAX_MARKDOWN = 200_000
"""Characters of a reply beyond which it stays text."""
MAX_BRACKETS = 5_000
"""Opening brackets likewise: the parser's time grows with their square."""

_LABELS = {"user": "You", "assistant": "Assistant", "system": "System"}
_ENDS = {
    "length": "cut off at the limit",
    "cancelled": "stopped",
    "interrupted": "interrupted",
}
_HEADER, _THINKING, _BODY, _FOOTER = range(4)
"""Parts of a message, from top to bottom."""
_THINKING_HEADER = (_THINKING, -1)


class Mark(NamedTuple):
    """A note in the stream of a reply: what was changed before the character at `offset`."""

    offset: int
    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class MessageView:
    """What the transcript shows of a message."""

    node_id: str
    role: str
    text: str
    thinking: str = ""
    edited: bool = False
    finish_reason: str | None = None
    siblings: tuple[int, int] = (0, 1)
    """Place among the alternatives, from 0, and how many there are."""
    ledger: str = ""
    """One line about what the turn cost."""
    dropped: bool = False
    """The model no longer sees it."""
    marks: tuple[Mark, ...] = ()


class Place(NamedTuple):
    """A place in a block that outlives another wrapping or rendering."""

    source: tuple[int, int]
    offset: int


class Block:
    """Lines in rows of a width. Rows exist for one width at a time, or not yet."""

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        self.node_id = ""
        self.dropped = False
        self.lines = list(lines)
        self.rows: list[tuple[int, int, int]] = []
        """Line, start and end of each row."""
        self._width = 0

    def height(self, width: int) -> int:
        """Return the number of rows: exact once laid out, an estimate before."""
        return len(self.rows) if self._width == width else self._estimate(width)

    def lay_out(self, width: int) -> int:
        """Wrap the lines, unless that is done, and return the number of rows."""
        if self._width != width:
            self._width = width
            self._make_lines(width)
            self.rows = []
            for number in range(len(self.lines)):
                self._wrap(number)
        return len(self.rows)

    def forget(self) -> None:
        """Lay out anew the next time."""
        self._width = 0

    def place(self, row: int) -> Place:
        """Return what stands in `row`."""
        line, start, _ = self.rows[min(row, len(self.rows) - 1)]
        return Place(self.lines[line].source, start)

    def row_of(self, place: Place) -> int:
        """Return the last row that is not behind `place`."""
        after = bisect_right(self.rows, place, key=lambda r: Place(self.lines[r[0]].source, r[1]))
        return max(0, after - 1)

    def _make_lines(self, width: int) -> None:
        """Make the lines, where they are not given."""

    def _estimate(self, width: int) -> int:
        return len(self.lines)

    def _wrap(self, number: int, start: int = 0) -> None:
        """Append the rows of a line, from the character `start` on."""
        line = self.lines[number]
        width = max(2, self._width - line.hang)
        if not start and 2 * len(line.text) <= width and "\t" not in line.text:
            self.rows.append((number, 0, len(line.text)))
            return
        starts = wrap(line.text, width, start=start)
        self.rows += [(number, *row) for row in pairwise([*starts, len(line.text)])]


class MessageBlock(Block):
    """A message. While its reply is being written, only the last row is ever wrapped again."""

    def __init__(self, view: MessageView, live: bool = False) -> None:
        super().__init__()
        self.as_text = False
        self.unfolded = False
        self.show(view, live)

    def show(self, view: MessageView, live: bool = False) -> None:
        """Become another state of the message."""
        self.view, self.live = view, live
        self.node_id, self.dropped = view.node_id, view.dropped
        self.forget()

    def add(self, text: str, thinking: bool) -> int:
        """Append to the running reply and return the first row that changed."""
        view = self.view
        begins = not (view.thinking if thinking else view.text)
        if thinking:
            self.view = replace(view, thinking=view.thinking + text)
        else:
            self.view = replace(view, text=view.text + text)
        if begins or not self._width:
            return self._again()
        if not thinking:
            return self._extend(printable(text), "")
        header = next(n for n, line in enumerate(self.lines) if line.source == _THINKING_HEADER)
        first = next(row for row, (line, _, _) in enumerate(self.rows) if line == header)
        self.lines[header] = self._thinking_header()
        self.rows[first] = (header, 0, len(self.lines[header].text))
        if self.unfolded:
            self._extend(printable(text), "")
        return first

    def mark(self, text: str) -> int:
        """Note a change of settings where the running reply is; return the row."""
        view = self.view
        thinking = bool(view.thinking) and not view.text
        mark = Mark(len(view.thinking if thinking else view.text), one_line(text), thinking)
        self.view = replace(view, marks=(*view.marks, mark))
        if not self._width or not mark.offset or (thinking and not self.unfolded):
            return self._again()
        return self._extend(_shown(mark), MARK)

    def _again(self) -> int:
        width, self._width = self._width, 0
        if width:
            self.lay_out(width)
        return 0

    def _extend(self, text: str, style: str) -> int:
        """Append to the last line; wrap its last row and the new lines."""
        first, *others = text.split("\n")
        last, start, _ = self.rows.pop()
        row = len(self.rows)
        line = self.lines[last]
        piece, spans = joined([(line.text, ""), (first, style)])
        self.lines[last] = replace(line, text=piece, spans=line.spans + spans)
        self._wrap(last, start)
        part, number = line.source
        for count, other in enumerate(others, 1):
            piece, spans = joined([(other, style)])
            self.lines.append(replace(line, text=piece, spans=spans, source=(part, number + count)))
            self._wrap(len(self.lines) - 1)
        return row

    def _make_lines(self, width: int) -> None:
        view = self.view
        self.lines = [Line(source=(_HEADER, 0)), self._header()]
        if view.thinking:
            self.lines.append(self._thinking_header())
            if self.unfolded:
                form = Line(style="thinking", lead="│ ", rest="│ ", lead_style="faint")
                self.lines += text_lines(self._pieces(thinking=True), _THINKING, form)
            if view.text:
                self.lines.append(Line(source=(_BODY, -1)))
        if view.text:
            self.lines += self._body(width)
        notes = [_ENDS.get(view.finish_reason or "", ""), one_line(view.ledger)]
        if footer := " · ".join(filter(None, notes)):
            self.lines.append(Line(footer, style="faint", source=(_FOOTER, 0), copied=False))

    def _body(self, width: int) -> list[Line]:
        view = self.view
        plain = self.live or self.as_text or view.role != "assistant"
        too_much = len(view.text) > MAX_MARKDOWN or view.text.count("[") > MAX_BRACKETS
        if plain or too_much:
            return text_lines(self._pieces(thinking=False), _BODY, Line())
        return markdown_lines(view.text, width, _BODY)

    def _pieces(self, thinking: bool) -> Iterator[tuple[str, str]]:
        """Yield the text with its marks, as (text, style)."""
        text = self.view.thinking if thinking else self.view.text
        done = 0
        for mark in self.view.marks:
            if mark.thinking == thinking:
                yield printable(text[done : mark.offset]), ""
                yield _shown(mark), MARK
                done = mark.offset
        yield printable(text[done:]), ""

    def _header(self) -> Line:
        view = self.view
        index, count = view.siblings
        role = view.role if view.role in _LABELS else "system"
        pieces = [(_LABELS.get(view.role, one_line(view.role)), f"label-{role}", "")]
        if view.edited:
            pieces.append((" · edited", "faint", ""))
        if view.dropped:
            pieces.append((" · no longer seen by the model", "faint", ""))
        if count > 1:
            pieces.append(("  ‹ ", "siblings", "previous_sibling"))
            pieces.append((f"{index + 1}/{count}", "faint", ""))
            pieces.append((" › ", "siblings", "next_sibling"))
        text = ""
        spans = []
        for piece, style, action in pieces:
            spans.append(Span(len(text), len(text) + len(piece), style, action))
            text += piece
        return Line(text, tuple(spans), source=(_HEADER, 1), copied=False)

    def _thinking_header(self) -> Line:
        arrow = "▾" if self.unfolded else "▸"
        text = f"{arrow} Thinking · {len(self.view.thinking):,} characters"
        spans = (Span(0, len(text), "faint", "toggle_thinking"),)
        return Line(text, spans, source=_THINKING_HEADER, copied=False)

    def _estimate(self, width: int) -> int:
        view = self.view
        shown = [view.text, view.thinking if self.unfolded else ""]
        text_rows = sum(_cells(t) // width + t.count("\n") + 1 for t in shown if t)
        return 2 + bool(view.thinking) + text_rows + bool(view.ledger)


def _shown(mark: Mark) -> str:
    return f"⟨{one_line(mark.text)}⟩"


def _cells(text: str) -> int:
    """Estimate the cells of `text`: wide characters take three bytes, narrow ones one or two."""
    return len(text) if text.isascii() else (len(text) + len(text.encode(errors="replace"))) // 2
