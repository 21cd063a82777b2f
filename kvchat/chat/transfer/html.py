"""A conversation's active path as HTML that needs nothing else: no script, no font, no network.

Where the tokens' texts are known, their background tells how probable the model found them, and
hovering tells the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from kvchat.chat.changes import heading
from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node, Reply
from kvchat.chat.plain_text import one_line, printable

Pieces = Callable[[Sequence[int]], Iterable[str]]
"""From a reply's token ids to the text that each of them adds."""

_LEVELS = ((0.9, ""), (0.5, "p4"), (0.2, "p3"), (0.05, "p2"), (0.0, "p1"))
"""From which probability on a token has which class."""
_TYPED = "typed"

BEGIN = """<!DOCTYPE html>
<html lang="">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="generator" content="kvchat">
<title>Chats</title>
<style>
:root { color-scheme: light dark; --text: #23272e; --page: #fbfaf7; --faint: #6c7280;
  --line: #dfdcd4; --heat: 196, 86, 20; }
@media (prefers-color-scheme: dark) {
  :root { --text: #d9dce2; --page: #16181d; --faint: #8b919e; --line: #30343d;
    --heat: 226, 128, 52; } }
body { margin: 0 auto; max-width: 46rem; padding: 2.5rem 1.25rem 5rem; background: var(--page);
  color: var(--text); font: 1rem/1.6 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 3rem 0 0; }
article:first-of-type h1 { margin-top: 0; }
h2 { font-size: .8rem; font-weight: 600; color: var(--faint); margin: 2rem 0 .35rem; }
.about, .legend { color: var(--faint); font-size: .85rem; margin: .35rem 0; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.user { border-left: 3px solid var(--line); padding-left: .9rem; }
.thinking { color: var(--faint); margin-bottom: .75rem; }
.thinking summary { cursor: pointer; font-size: .85rem; }
.p4 { background: rgba(var(--heat), .10); } .p3 { background: rgba(var(--heat), .22); }
.p2 { background: rgba(var(--heat), .38); }
.p1 { background: rgba(var(--heat), .55); text-decoration: underline dotted; }
.typed { border-bottom: 1px solid var(--faint); }
</style>
</head>
<body>
"""

END = "</body>\n</html>\n"

_LEGEND = (
    '<p class="legend">Token probability: above 90 % plain, '
    '<span class="p4">above 50 %</span>, <span class="p3">above 20 %</span>, '
    '<span class="p2">above 5 %</span>, <span class="p1">below</span>; '
    '<span class="typed">typed by the user</span>. Hover over a token for its figure.</p>\n'
)


def to_html(conversation: Conversation, model: str, pieces: Pieces | None = None) -> str:
    """Return a conversation as an element to stand between `BEGIN` and `END`.

    Args:
        conversation: whose active path is written.
        model: what to call the one that replies.
        pieces: gives the tokens' texts; without it there are no colours.
    """
    return "".join(_article(conversation, model, pieces))


def _article(conversation: Conversation, model: str, pieces: Pieces | None) -> Iterator[str]:
    yield f"<article>\n<h1>{_line(heading(conversation))}</h1>\n"
    yield f'<p class="about">{conversation.started:%Y-%m-%d %H:%M}, {_line(model)}</p>\n'
    if pieces is not None:
        yield _LEGEND
    if conversation.system:
        yield f'<h2>System</h2>\n<div class="text user">{_escaped(conversation.system)}</div>\n'
    for node in conversation.active_path():
        index, count = conversation.siblings(node.id)
        branch = f" · {index + 1} of {count}" if count > 1 else ""
        who = "You" if node.role == "user" else _line(model)
        yield f"<h2>{who}{branch}</h2>\n"
        yield from _message(node, pieces)
    yield "</article>\n"


def _message(node: Node, pieces: Pieces | None) -> Iterator[str]:
    if node.reply is None:
        yield f'<div class="text user">{_escaped(node.content)}</div>\n'
        return
    tokens = _Tokens(node.reply, pieces if not node.edited else None)
    if node.reply.thinking:
        yield '<details class="thinking"><summary>Thinking</summary><div class="text">'
        yield f"{tokens.take(node.reply.thinking)}</div></details>\n"
    yield f'<div class="text">{tokens.take(node.content)}</div>\n'


class _Tokens:
    """A reply's tokens, handed out from the first to the last."""

    def __init__(self, reply: Reply, pieces: Pieces | None) -> None:
        texts = list(pieces(reply.token_ids)) if pieces is not None else []
        self._tokens = list(zip(texts, reply.logprobs, strict=False))
        self._text = "".join(texts)
        self._at = 0

    def take(self, text: str) -> str:
        """Return the next occurrence of a text among the tokens with their colours, or it plain.

        Thinking stands between tags in what was generated, and the answer after them.
        """
        start = self._text.find(text, self._at)
        if start < 0 or not self._tokens:
            return _escaped(text)
        self._at = end = start + len(text)
        spans, at = [], 0
        for piece, logprob in self._tokens:
            shown = piece[max(0, start - at) : max(0, end - at)]
            at += len(piece)
            if shown:
                spans.append(_span(shown, logprob))
        return "".join(spans)


def _span(text: str, logprob: float) -> str:
    if math.isnan(logprob):
        return f'<span class="{_TYPED}" title="typed">{_escaped(text)}</span>'
    probability = min(1.0, math.exp(logprob))
    level = next(name for least, name in _LEVELS if probability >= least)
    named = f' class="{level}"' if level else ""
    return f'<span{named} title="{probability:.1%}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    return escape(printable(text))


def _line(text: str) -> str:
    return escape(one_line(text))
