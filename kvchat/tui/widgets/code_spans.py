"""Highlighting code, in the styles of the transcript."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvchat.tui.widgets.line import Span

MAX_HIGHLIGHTED = 50_000
"""Characters; some lexers take far more than linear time."""

_STYLES = {
    "Comment": "code-comment",
    "Keyword": "code-keyword",
    "Operator.Word": "code-keyword",
    "Literal.String": "code-string",
    "Literal.String.Doc": "code-comment",
    "Literal.Number": "code-number",
    "Name.Function": "code-name",
    "Name.Class": "code-name",
    "Name.Decorator": "code-name",
    "Name.Tag": "code-keyword",
    "Name.Attribute": "code-name",
    "Name.Builtin": "code-builtin",
    "Name.Constant": "code-number",
    "Generic.Deleted": "code-deleted",
    "Generic.Inserted": "code-string",
    "Generic.Heading": "code-keyword",
    "Generic.Subheading": "code-comment",
}


@lru_cache(maxsize=512)
def _style(token: tuple[str, ...]) -> str:
    for length in range(len(token), 0, -1):
        if style := _STYLES.get(".".join(token[:length])):
            return style
    return ""


@lru_cache(maxsize=64)
def _lexer(language: str) -> Any:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


def code_spans(code: str, language: str) -> list[list[Span]]:
    """Return the spans of each line of `code`; none where the language is not known."""
    spans: list[list[Span]] = [[] for _ in range(code.count("\n") + 1)]
    lexer = _lexer(language.lower()) if language and len(code) <= MAX_HIGHLIGHTED else None
    if lexer is None:
        return spans
    line = column = 0
    for _, token, value in lexer.get_tokens_unprocessed(code):
        style = _style(tuple(token))
        for number, piece in enumerate(value.split("\n")):
            if number:
                line, column = line + 1, 0
            if style and piece and line < len(spans):
                spans[line].append(Span(column, column + len(piece), style))
            column += len(piece)
    return spans
