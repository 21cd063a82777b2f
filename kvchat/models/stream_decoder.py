"""From token ids to text, one id at a time: bytes from a table, characters as they complete."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping

REPLACED_SPACE = "▁"
"""How SentencePiece spells a space inside a token (U+2581)."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + nth)
    for nth, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTABLE)
}
"""GPT-2's byte alphabet: a printable Latin-1 byte is itself, the others follow from U+0100 on.

Source: `encoder.py` of GPT-2 (Radford et al., 2019).
"""

CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes a byte-level token stands for.

    A token with any character outside the byte alphabet, as some control tokens have, is taken
    as it stands.
    """
    try:
        return bytes(CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes a SentencePiece token stands for: `▁` is a space, `<0xNN>` a byte."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(REPLACED_SPACE, " ").encode()


_END_OF_IDS = 1 << 32
"""The library's ids are 32 bits wide."""


class TokenBytes(dict[int, bytes]):
    """The table id -> bytes, filled as ids are asked for; ids that have no token are empty."""

    def __init__(self, token: Callable[[int], str | None], spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token = token
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id) if 0 <= token_id < _END_OF_IDS else None
        found = self[token_id] = self._spell(token) if token is not None else b""
        return found


class StreamDecoder:
    """Turns token ids into text as they come, in constant time for each.

    The pieces of `step`, and `flush` at the end, join to the text of the whole sequence, whatever
    bytes come: an incomplete character is held back, and each maximal invalid run of bytes becomes
    one U+FFFD, as Unicode recommends (section 3.9, "U+FFFD Substitution of Maximal Subparts").
    """

    __slots__ = ("_at_start", "_skipped", "_table", "_utf8")

    def __init__(
        self,
        table: Mapping[int, bytes],
        *,
        skipped: frozenset[int] = frozenset(),
        strip_space: bool = False,
    ) -> None:
        """Read bytes from `table`; ids in `skipped` give no text.

        `strip_space` drops one space at the very beginning of the text.
        """
        self._table = table
        self._skipped = skipped
        self._at_start = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """Return the text this id completes, or an empty string."""
        if token_id in self._skipped:
            return ""
        text = self._utf8.decode(self._table[token_id])
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return what is left of an incomplete character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)
