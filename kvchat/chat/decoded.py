"""A sequence of token ids and its text side by side, kept up to date at the cost of the new tokens.

Texts that hold control tokens are written here in one string, in which a control token is spelled
by two lone surrogates. No text decoded from UTF-8 contains those, so comparing two such strings
compares text as text and control tokens by id, and a message that merely says `<|im_end|>` never
equals the token.
"""

from __future__ import annotations

import codecs
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from kvchat.engine.token_ids import common_prefix

CONTROL = re.compile("([\ud800-\udbff][\udc00-\udfff])")
"""One spelled control token; splitting by it alternates between texts and spelled tokens."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class PlainTokenizer(Protocol):
    """What is needed of a tokenizer here, such as `kvchat.models.tokenizer.Tokenizer`."""

    def encode_plain(self, text: str, at_start: bool = False) -> list[int]:
        """Return the ids of ordinary text at the start of a sequence or after a control token."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes an id stands for."""

    def is_control(self, token_id: int, /) -> bool:
        """Whether only a template, or the model itself, may write this id."""


@lru_cache(maxsize=1024)
def spell(control_id: int) -> str:
    """Return how a control token is spelled."""
    high, low = divmod(control_id, 1024)
    return chr(0xD800 + high) + chr(0xDC00 + low)


def unspell(spelled: str) -> int:
    """Return the id that `spell` wrote."""
    return (ord(spelled[0]) - 0xD800) * 1024 + ord(spelled[1]) - 0xDC00


def text_of(tokenizer: PlainTokenizer, ids: Iterable[int]) -> str:
    """Return the ids' text, control tokens as their files write them."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


class DecodedContext:
    """Token ids, their text, and where in the text each token ends.

    Attributes:
        ids: the ids; change them with `update` only.
        text: their text, control tokens spelled. A character that a control token or the end of
            a generated span cuts short is one U+FFFD there, as it was when it was streamed.
        generated: the spans of `ids` that the model wrote, ascending.
    """

    def __init__(
        self,
        tokenizer: PlainTokenizer,
        ids: Sequence[int] = (),
        generated: Iterable[range] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._array = array("i")  # the ids once more, quick to compare
        self.text = ""
        self.generated: list[range] = []
        # Twice the text's length after each token, plus one inside an incomplete character:
        # ascending, so a place in the text is found by bisection.
        self._ends = array("q")
        self._after_controls: list[int] = []
        self._encoded: dict[tuple[str, bool], str] = {}
        self._encoded_before: dict[tuple[str, bool], str] = {}
        self.update(ids, generated)

    def update(self, ids: Sequence[int], generated: Iterable[range] = ()) -> None:
        """Hold these ids now, decoding only those after the first that changed."""
        new = array("i", ids)
        kept = common_prefix(self._array, new)
        while kept and self._unsettled(kept):
            kept -= 1
        self._array = new
        self.ids[kept:] = new[kept:].tolist()
        self.text = self.text[: self.end(kept)]
        self.generated = [span for span in generated if span]
        del self._ends[kept:]
        del self._after_controls[bisect_right(self._after_controls, kept) :]
        self._decode(kept)

    def end(self, n: int) -> int:
        """Return where in the text the first `n` tokens end."""
        return self._ends[n - 1] >> 1 if n else 0

    def tokens_before(self, place: int) -> int:
        """Return how many tokens lie whole before this place in the text."""
        n = bisect_right(self._ends, 2 * place)
        while n and self._ends[n - 1] & 1:
            n -= 1
        return n

    def tokens_until(self, place: int) -> int:
        """Return after how many tokens the text has reached this place, at a whole character."""
        n = bisect_left(self._ends, 2 * place) + 1 if place else 0
        while 0 < n <= len(self._ends) and self._ends[n - 1] & 1:
            n += 1
        return min(n, len(self._ends))

    def safe_cut(self, place: int) -> int:
        """Return how many tokens may be kept when the text is the same up to `place`.

        What follows the cut is encoded anew, so the cut must be where a fresh encoding has a
        token boundary too: after a control token. What the model wrote is kept token by token
        however a fresh encoding would split it, so inside and at the end of a generated span
        every token boundary will do.
        """
        n = self.tokens_before(place)
        control = self.last_control_before(n)
        spans = bisect_left(self.generated, n, key=lambda span: span.start)
        written = min(self.generated[spans - 1].stop, n) if spans else 0
        return max(control, written)

    def last_control_before(self, n: int) -> int:
        """Return the position right after the last control token of the first `n`, else 0."""
        controls = bisect_right(self._after_controls, n)
        return self._after_controls[controls - 1] if controls else 0

    def written_control(self, place: int) -> int | None:
        """Return the control token in a generated span that begins at this place in the text."""
        n = self.tokens_before(place)
        spans = bisect_right(self.generated, n, key=lambda span: span.start)
        inside = spans > 0 and n < self.generated[spans - 1].stop and self.end(n) == place
        return self.ids[n] if inside and self.tokenizer.is_control(self.ids[n]) else None

    def begin_rendering(self) -> None:
        """Forget what `as_encoded` was not asked for since the last rendering began."""
        self._encoded_before, self._encoded = self._encoded, {}

    def as_encoded(self, text: str, *, at_start: bool) -> str:
        """Return what the ids of a plain text say, where the tokenizer changes it."""
        key = text, at_start
        found = self._encoded.get(key) or self._encoded_before.get(key)
        if found is None:
            found = text_of(self.tokenizer, self.tokenizer.encode_plain(text, at_start))
        self._encoded[key] = found
        return found

    def _unsettled(self, n: int) -> bool:
        """Whether what comes after the first `n` tokens could still complete their last character.

        U+FFFD may be one that was flushed only because nothing came after it yet.
        """
        cut_short = self.text.startswith(_REPLACEMENT, self.end(n) - 1)
        return cut_short or bool(self._ends[n - 1] & 1)

    def _decode(self, start: int) -> None:
        token_bytes, is_control = self.tokenizer.token_bytes, self.tokenizer.is_control
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        flush_at = {span.stop for span in self.generated} | {len(self.ids)}
        ends, pieces, length = self._ends, [self.text], len(self.text)
        for n, token_id in enumerate(self.ids[start:], start + 1):
            control = is_control(token_id)
            if control and utf8.getstate()[0]:
                pieces.append(utf8.decode(b"", final=True))
                length += len(pieces[-1])
                ends[-1] = 2 * length
            if control:
                piece = spell(token_id)
                self._after_controls.append(n)
            else:
                piece = utf8.decode(token_bytes(token_id), final=n in flush_at)
            pieces.append(piece)
            length += len(piece)
            ends.append(2 * length + bool(utf8.getstate()[0]))
        self.text = "".join(pieces)
