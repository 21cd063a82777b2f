"""Untrusted text for a terminal that would obey it."""

from __future__ import annotations

_KEPT = "\n\t"
_DROPPED = "\r"
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Embeddings, overrides and isolates: they reorder what is shown (Unicode, UAX #9)."""

_SAFE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT},
    **{code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x80, 0xA0), *_BIDI)},
    **{code: "\N{REPLACEMENT CHARACTER}" for code in range(0xD800, 0xE000)},
    0x7F: "\N{SYMBOL FOR DELETE}",
    ord(_DROPPED): "",
}


def printable(text: str) -> str:
    """Return `text` without anything a terminal takes for a command.

    Control codes become visible characters, line feeds and tabs stay, carriage returns go. Lone
    surrogates, which no terminal can be sent, become U+FFFD. It works character by character, so
    streamed pieces may be passed one by one.
    """
    return text.translate(_SAFE)


def one_line(text: str) -> str:
    """Return `text` as a single printable line."""
    return printable(" ".join(text.split()))
