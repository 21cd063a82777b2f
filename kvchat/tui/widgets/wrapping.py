"""Breaking a line of text into rows that fit, by grapheme clusters and terminal cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from rich.cells import split_graphemes

TAB = 4
"""Cells between tab stops, counted from the start of the row."""

_SPACES = frozenset(" \t")
_NO_ROW_START = frozenset(
    "、。，．・：；？！）］｝〕〉》」』】〗’”…‥ー々〻ぁぃぅぇぉっゃゅょァィゥェォッャュョ,.:;?!)]}%"
)
_NO_ROW_END = frozenset("（［｛〔〈《「『【〖‘“([{")
"""What must not begin or end a row of Chinese or Japanese text."""

_NARROW = re.compile(
    "[ -~\N{NO-BREAK SPACE}-\N{NOT SIGN}\N{REGISTERED SIGN}-\u02ff\u0370-\u0482"
    "\N{HYPHEN}-\N{HYPHENATION POINT}\N{PER MILLE SIGN}-\N{VERTICAL FOUR DOTS}]*"
)
"""Text of one cell a character: most of what is written in Latin, Greek and Cyrillic."""

_REGIONAL = range(0x1F1E6, 0x1F200)
"""Regional indicators: two make one flag."""


def clusters(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, cells) of each grapheme cluster of `text`; a tab is one of no cells."""
    base = 0
    for number, piece in enumerate(text.split("\t")):
        if number:
            yield base, base + 1, 0
            base += 1
        for start, end, cells in _pairing_flags(piece):
            yield base + start, base + end, cells
        base += len(piece)


def _pairing_flags(text: str) -> Iterator[tuple[int, int, int]]:
    flag: tuple[int, int, int] | None = None
    for start, end, cells in split_graphemes(text)[0]:
        regional = ord(text[start]) in _REGIONAL
        if flag and regional:
            yield flag[0], end, flag[2] + cells
            flag = None
            continue
        if flag:
            yield flag
        flag = (start, end, cells) if regional else None
        if not flag:
            yield start, end, cells
    if flag:
        yield flag


def wrap(text: str, width: int, *, hang: int = 0, start: int = 0) -> list[int]:
    """Return where each row of a line begins.

    Rows are joined without loss: each ends where the next begins. Spaces at the end of a row
    belong to it and may stand over its edge. A row of a growing line is final as soon as another
    follows it, so only the last one has to be wrapped again.

    Args:
        text: One line: no line feeds, no control characters but tabs.
        width: Cells in a row, at least 2.
        hang: Cells that all rows but the first have less.
        start: Where to begin: 0, or the beginning of a later row.
    """
    rest = max(2, width - hang)
    first = rest if start else max(2, width)
    tail = text[start:]
    starts = (_wrap_narrow if _NARROW.fullmatch(tail) else _wrap_clusters)(tail, first, rest)
    return [start + offset for offset in starts]


def rows(text: str, width: int) -> list[str]:
    """Return `text` in rows of at most `width` cells, without the spaces at their ends."""
    ends = [*wrap(text, width), len(text)]
    return [text[start:end].rstrip(" \t") for start, end in pairwise(ends)]


def whole_clusters(text: str, start: int, end: int) -> tuple[int, int]:
    """Widen a piece of `text` to whole grapheme clusters."""
    start, end = min(start, len(text)), min(end, len(text))
    if _NARROW.fullmatch(text):
        return start, end
    for first, last, _ in clusters(text):
        if first < start < last:
            start = first
        if first < end < last:
            return start, last
    return start, end


def _wrap_narrow(text: str, width: int, rest: int) -> list[int]:
    """Wrap text in which every character takes one cell."""
    starts = [0]
    row = 0
    while (edge := row + width) < len(text):
        cut = edge if text[edge] == " " else text.rfind(" ", row, edge) + 1
        if not text[row:cut].strip(" "):
            cut = edge
        while cut < len(text) and text[cut] == " ":
            cut += 1
        if cut == len(text):
            break
        starts.append(cut)
        row, width = cut, rest
    return starts


def _wrap_clusters(text: str, width: int, rest: int) -> list[int]:
    spans = list(clusters(text))
    starts = [0]
    row = cut = here = column = 0
    inked = False
    before, before_size = "", 0
    while here < len(spans):
        start, end, cells = spans[here]
        char = text[start:end]
        size = TAB - column % TAB if char == "\t" else cells
        if char not in _SPACES:
            if inked and _may_break(before, before_size, char, size):
                cut = here
            if column + size > width and here > row:
                row = here = cut if cut > row else here
                starts.append(spans[row][0])
                column, inked, width = 0, False, rest
                continue
            inked = True
        column += size
        before, before_size = char, size
        here += 1
    return starts


def _may_break(before: str, before_size: int, char: str, size: int) -> bool:
    """Tell whether a row may end between two clusters, the second of which is no space."""
    if before in _SPACES:
        return True
    wide = before_size > 1 or size > 1
    return wide and before[0] not in _NO_ROW_END and char[0] not in _NO_ROW_START
