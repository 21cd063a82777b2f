"""What a terminal without Unicode is sent instead of signs it would garble."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_LOOKALIKES = {
    **dict.fromkeys("─━═╌╍┄┅╺╸╴╶▔▁", "-"),
    **dict.fromkeys("│┃║▏▎▍▌▐▕╎┆╵╷╹╻", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛┣┫┳┻╋╔╗╚╝", "+"),
    **dict.fromkeys("▂▃▄▅▆▇█■▀", "#"),
    **dict.fromkeys("·•∙", "-"),
    **dict.fromkeys("●◆", "*"),
    **dict.fromkeys("○◇", "o"),
    **dict.fromkeys("▸▶›→", ">"),
    **dict.fromkeys("◂◀‹←", "<"),
    **dict.fromkeys("▼▾↓", "v"),
    **dict.fromkeys("▲▴↑", "^"),
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("‘’‚", "'"),
    **dict.fromkeys("–—‐‑", "-"),
    "…": "~",
    "×": "x",
    "⟦": "[",
    "⟧": "]",
    "⏎": "^",
    "⌫": "<",
    "\N{NO-BREAK SPACE}": " ",
}
_NO_UNICODE = ("vt", "ansi", "cons")
"""How the names of terminals begin that have the few signs of a character ROM."""


def speaks_unicode(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the terminal shows Unicode: by its locale, unless there is none, and its kind.

    Python itself takes the locale "C" for UTF-8 (PEP 540), so it cannot be asked.
    """
    locale = next((v for n in ("LC_ALL", "LC_CTYPE", "LANG") if (v := environment.get(n))), "")
    if locale and os.name != "nt" and "utf8" not in locale.lower().replace("-", ""):
        return False
    return not environment.get("TERM", "").startswith(_NO_UNICODE)


class AsciiFilter(LineFilter):
    """Replaces what is not ASCII by something like it that takes the same cells."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments with other text."""
        return [
            segment if segment.text.isascii() else segment._replace(text=in_ascii(segment.text))
            for segment in segments
        ]


@lru_cache(4096)
def in_ascii(text: str) -> str:
    """Return `text` in ASCII, as wide as before."""
    if text.isascii():
        return text
    plain = "".join(map(_in_ascii, text))
    missing = cell_len(text) - len(plain)  # a sequence that makes one emoji is narrower than both
    return plain[:missing] if missing < 0 else plain + " " * missing


@lru_cache(4096)
def _in_ascii(sign: str) -> str:
    if sign.isascii() or sign in _LOOKALIKES:
        return _LOOKALIKES.get(sign, sign)
    width = cell_len(sign)
    base = unicodedata.normalize("NFKD", sign)[0]
    return base.ljust(width) if width and base.isascii() and base.isprintable() else "?" * width
