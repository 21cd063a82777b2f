"""What stands in a transcript that has no messages yet."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from kvchat.tui.widgets.line import Line, Span, joined

_TITLE = "kvchat"
_SUBTITLE = "Your words stay on this machine."
_GAP = "   "


def greeting(hints: Sequence[tuple[str, str]], width: int, height: int) -> list[Line]:
    """Return lines for the middle of a view, as much of them as there is room for.

    Args:
        hints: Keys and what they do.
        width: Cells in a row.
        height: Rows of the view.
    """
    rows = [joined([(_TITLE, "greeting")]), ("", ()), joined([(_SUBTITLE, "faint")])]
    if hints:
        key_width = max(cell_len(key) for key, _ in hints)
        text_width = max(cell_len(text) for _, text in hints)
        rows.append(("", ()))
        for key, text in hints:
            before = " " * (key_width - cell_len(key))
            after = " " * (text_width - cell_len(text))
            rows.append(joined([(before, ""), (key, "key"), (f"{_GAP}{text}{after}", "faint")]))
    rows = rows[:height]
    lines = [Line(copied=False)] * ((height - len(rows)) // 2)
    return lines + [_centred(text, spans, width) for text, spans in rows]


def _centred(text: str, spans: tuple[Span, ...], width: int) -> Line:
    lead = " " * max(0, (width - cell_len(text)) // 2)
    return Line(text, spans, lead=lead, rest=lead, copied=False)
