"""Characters that stand in for others while a chat template runs."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvchat.engine.errors import TemplateError

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Private-use code points; the first of them keep a text at two bytes a character in memory."""


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Yield private-use characters that none of the texts has."""
    return _unused(_beyond_ascii(texts))


def stand_ins(starts: Iterable[str], texts: Sequence[str], avoid: str) -> dict[str, str]:
    """Map every character of `texts` that can begin a control token to an unused one.

    Args:
        starts: first characters of the control tokens.
        texts: what the mapping is for.
        avoid: characters that are not unused either.

    Returns:
        Each such character and its stand-in. A character counts as the beginning of a token too
        when a tokenizer that normalises its input might come to see it as that.
    """
    first = {_plain(char) for char in starts}
    found = _beyond_ascii(texts)
    unused = _unused(found.union(avoid))
    found.update(map(chr, range(128)))
    candidates = (char for char in found if not char.isspace() and _plain(char) in first)
    return {
        char: next(unused) for char in sorted(candidates) if any(char in text for text in texts)
    }


def _beyond_ascii(texts: Iterable[str]) -> set[str]:
    """Return the characters of those texts that have some outside ASCII."""
    return set().union(*(text for text in texts if not text.isascii()))


def _unused(used: set[str]) -> Iterator[str]:
    for code in chain(*_PRIVATE):
        if chr(code) not in used:
            yield chr(code)
    raise TemplateError("The conversation uses up Unicode's private-use characters: shorten it.")


def replace_all(text: str, table: Mapping[str, str]) -> str:
    """Return the text with every key of the table replaced; `str.translate` takes ten times as
    long when few characters are concerned."""
    for old, new in table.items():
        text = text.replace(old, new)
    return text


def _plain(char: str) -> str:
    return unicodedata.normalize("NFKD", char)[:1].casefold()
