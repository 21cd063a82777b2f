"""Markdown as lines of the transcript. What a model writes is untrusted: nothing in it can fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kvchat.chat.plain_text import one_line, printable
from kvchat.tui.widgets.code_spans import code_spans
from kvchat.tui.widgets.line import Line, Span, joined
from kvchat.tui.widgets.table_lines import Cell, table_lines

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

Piece = tuple[str, str]
"""Text and its styles."""

_BULLETS = "•◦▪"
_INLINE = {"strong": "strong", "em": "em", "s": "struck"}


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable(["strikethrough", "table"])


def markdown_lines(text: str, width: int, part: int) -> list[Line]:
    """Return the lines of `text` as Markdown.

    Args:
        text: Any text.
        width: Cells in a row; only tables depend on it.
        part: Of the message, for `Line.source`.
    """
    writer = _Writer(width, part)
    tokens = _parser().parse(printable(text))
    writer.write(tokens)
    return writer.lines or [Line(source=(part, 0))]


def code_blocks(text: str) -> list[str]:
    """Return what stands in the code blocks of `text`, without the last line feed."""
    tokens = _parser().parse(text)
    fences = (token for token in tokens if token.type in ("fence", "code_block"))
    return [token.content.removesuffix("\n") for token in fences]


@dataclass(slots=True)
class _Container:
    """A list item or a quotation: what stands to the left of its lines."""

    lead: str
    rest: str
    copied_lead: str
    copied_rest: str
    used: bool = False


@dataclass(slots=True)
class _List:
    number: int | None
    """Of the next item; None in a list of bullets."""


class _Writer:
    """Turns the parser's tokens into lines, one pass, no recursion."""

    def __init__(self, width: int, part: int) -> None:
        self.lines: list[Line] = []
        self._width = width
        self._part = part
        self._row = 0
        self._containers: list[_Container] = []
        self._lists: list[_List] = []
        self._style = ""
        self._prefix = ""
        self._table: list[list[Cell]] | None = None
        self._after_gap = True

    def write(self, tokens: Sequence[Token]) -> None:
        """Append the lines of all tokens."""
        for token in tokens:
            if token.map:
                self._row = token.map[0]
            if token.nesting > 0:
                self._open(token)
            elif token.nesting < 0:
                self._close(token)
            else:
                self._leaf(token)

    def _open(self, token: Token) -> None:
        match token.type:
            case "paragraph_open" if not token.hidden:
                self._gap()
            case "heading_open":
                self._gap()
                self._style = "heading"
                self._prefix = f"{'#' * int(token.tag[1:])} "
            case "blockquote_open":
                self._gap()
                self._containers.append(_Container("│ ", "│ ", "> ", "> "))
            case "bullet_list_open" | "ordered_list_open":
                self._open_list(token)
            case "list_item_open":
                self._open_item(token)
            case "table_open":
                self._gap()
                self._table = []
            case "tr_open" if self._table is not None:
                self._table.append([])
            case "th_open" | "td_open" if self._table:
                align = str(token.attrs.get("style", "")).rpartition(":")[2]
                self._table[-1].append(Cell("", (), align))

    def _close(self, token: Token) -> None:
        match token.type:
            case "heading_close":
                self._style = self._prefix = ""
            case "bullet_list_close" | "ordered_list_close":
                self._lists.pop()
            case "list_item_close" | "blockquote_close":
                if not self._containers[-1].used:
                    self._emit([])
                self._containers.pop()
            case "table_close" if self._table is not None:
                taken = sum(len(container.rest) for container in self._containers)
                for line in table_lines(self._table, self._width - taken):
                    self._place(line)
                self._table = None

    def _leaf(self, token: Token) -> None:
        match token.type:
            case "inline":
                self._inline(token.children or [])
            case "fence" | "code_block":
                self._gap()
                self._code(token.content, one_line(token.info))
            case "html_block":
                self._gap()
                for piece in printable(token.content).rstrip("\n").split("\n"):
                    self._emit([(piece, "")])
            case "hr":
                self._gap()
                self._place(Line(lead="─" * 24, lead_style="faint", copied_lead="---"))

    def _open_list(self, token: Token) -> None:
        if not self._lists:
            self._gap()
        ordered = token.type == "ordered_list_open"
        self._lists.append(_List(int(token.attrs.get("start", 1)) if ordered else None))

    def _open_item(self, token: Token) -> None:
        current = self._lists[-1]
        if current.number is None:
            bullet = _BULLETS[(len(self._lists) - 1) % len(_BULLETS)]
            lead, copied = f"{bullet} ", f"{token.markup} "
        else:
            lead = copied = f"{current.number}{token.markup} "
            current.number += 1
        rest = " " * len(lead)
        self._containers.append(_Container(lead, rest, copied, rest))

    def _inline(self, children: Sequence[Token]) -> None:
        rows = _inline_rows(children, self._style)
        if self._table is not None:
            text, spans = joined([(piece.replace("\n", " "), style) for piece, style in rows])
            self._table[-1][-1] = replace(self._table[-1][-1], text=text, spans=spans)
            return
        pieces: list[Piece] = []
        for text, style in rows:
            first, *others = text.split("\n")
            pieces.append((first, style))
            for other in others:
                self._emit(pieces, copied_lead=self._prefix)
                self._row += 1
                pieces = [(other, style)]
        self._emit(pieces, copied_lead=self._prefix)

    def _code(self, code: str, info: str) -> None:
        code = printable(code).removesuffix("\n")
        frame = Line(style="code-block", inset=1)
        if info:
            label = (Span(0, len(info), "code-label"),)
            self._place(replace(frame, text=info, spans=label, copied=False))
        highlighted = code_spans(code, info.partition(" ")[0])
        for text, spans in zip(code.split("\n"), highlighted, strict=True):
            self._row += 1
            self._place(replace(frame, text=text, spans=tuple(spans)))

    def _emit(self, pieces: Sequence[Piece], copied_lead: str = "") -> None:
        text, spans = joined(pieces)
        self._place(Line(text, spans, copied_lead=copied_lead))

    def _place(self, line: Line) -> None:
        """Append `line`, behind what its containers put before it."""
        lead = rest = copied = ""
        for container in self._containers:
            lead += container.rest if container.used else container.lead
            rest += container.rest
            copied += container.copied_rest if container.used else container.copied_lead
            container.used = True
        room = self._width // 2
        self.lines.append(
            replace(
                line,
                lead=(lead + line.lead)[-room:],
                rest=(rest + line.rest)[-room:],
                lead_style=line.lead_style or ("bullet" if lead else ""),
                copied_lead=copied + line.copied_lead,
                source=(self._part, self._row),
            )
        )
        self._after_gap = False

    def _gap(self) -> None:
        """Append an empty line, unless there is one or nothing stands above."""
        if self._after_gap:
            return
        lead = "".join(container.rest for container in self._containers if container.used)
        copied = "".join(c.copied_rest for c in self._containers if c.used).rstrip()
        above = self.lines[-1].source[1] if self.lines else 0
        source = (self._part, max(above, self._row - 1))  # the empty line before what follows
        self.lines.append(
            Line(lead=lead, rest=lead, lead_style="bullet", copied_lead=copied, source=source)
        )
        self._after_gap = True


def _inline_rows(children: Sequence[Token], style: str) -> list[Piece]:
    """Return the pieces of a paragraph; line feeds are where its lines end."""
    return [(printable(text), styles) for text, styles in _inline_pieces(children, style) if text]


def _inline_pieces(children: Sequence[Token], style: str) -> Iterator[Piece]:
    styles = [style] if style else []
    links: list[str] = []
    shown = ""
    for token in children:
        kind, _, edge = token.type.rpartition("_")
        current = " ".join(dict.fromkeys(styles))
        if edge == "open" and kind in _INLINE:
            styles.append(_INLINE[kind])
        elif edge == "close" and kind in _INLINE:
            styles.remove(_INLINE[kind])
        elif token.type == "link_open":
            links.append(str(token.attrs.get("href", "")))
            styles.append("link")
            shown = ""
        elif token.type == "link_close":
            styles.remove("link")
            target = links.pop()
            if target not in (shown, f"mailto:{shown}"):
                yield f" ({target})", "faint"
        elif token.type in ("softbreak", "hardbreak"):
            yield "\n", ""
        elif token.type == "code_inline":
            shown += token.content
            yield token.content, f"{current} code".strip()
        elif token.type == "image":
            yield token.content or "image", f"{current} link".strip()
            yield f" ({token.attrs.get('src', '')})", "faint"
        else:
            shown += token.content
            yield token.content, current
