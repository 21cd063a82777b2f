"""Which tokens in the KV cache the next prompt may keep, and which ids the rest of it is made of.

Every turn, the chat template renders the whole conversation anew. Encoding that rendering from
its beginning would waste the cache: a reply was written as one sequence of ids, and its text often
encodes to another one ("a" + "b" was drawn, "ab" comes back), so the ids would differ from the
cached ones at the first such place. Text alone decides instead, in three steps:

1. Compare. The cached ids, decoded, and the rendering are walked side by side to the first
   difference; control tokens are compared by id (`kvchat.chat.decoded`).
2. Cut. All ids before the last safe boundary in the common text are taken as they are. A boundary
   is safe right after a control token, which no encoding merges with anything, and anywhere in
   what the model wrote, which must never be encoded again. Templates without control tokens are
   cut at replies.
3. Encode the rest, piece by piece between control tokens, except for replies that come back after
   the cut, because their thinking was dropped or the system prompt before them has changed. Their
   ids are put where their text stands.

Then `kept` is simply how many ids the old and the new sequence share. It can lie beyond the cut,
since text encoded afresh often comes to the ids that were there before, and nothing depends on
it but work: the new ids spell the rendering in any case. Where a tokenizer changes text (NFC, a
space before the first word), what it makes of the text is compared and spelled. Text the model
wrote stays as written.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvchat.chat.decoded import (
    CONTROL,
    DecodedContext,
    PlainTokenizer,
    spell,
    text_of,
    unspell,
)
from kvchat.engine.token_ids import common_prefix
from kvchat.models.surrogates import without_surrogates

_EXCERPT = 32
"""Characters of an excerpt, and more tokens than it can need."""

_OCCURRENCES = 64
"""How often a passage is looked for; a reply such as "a" occurs everywhere."""

_GUARDS = "\n.a"

_STRETCH_END = re.compile(r"\s*(?:[\ud800-\udfff]|\Z)")
_EDGE = re.compile(r"[\s\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Passage:
    """One message of the conversation, as it may stand in the rendering."""

    text: str
    ids: Sequence[int] = ()
    """The ids the model wrote it with, its thinking included; empty for what was typed."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Why reuse stopped where it did."""

    position: int
    """How many ids the cache and the prompt share."""
    expected: str
    """The cached text from there on, a short excerpt."""
    found: str
    """The prompt's text from there on; empty where the prompt ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next prompt, and how much of it is cached."""

    ids: list[int]
    """The whole prompt."""
    kept: int
    """How many leading ids are those of the cache."""
    generated: list[range]
    """The spans of `ids` that the model wrote, ascending."""
    divergence: Divergence | None
    """None when all cached ids are kept."""


def plan(
    base: DecodedContext, segments: Iterable[int | str], passages: Sequence[Passage] = ()
) -> Plan:
    """Return the ids of a rendering that keep the most of `base`.

    Args:
        base: the ids in the cache, or those of the last reply's context.
        segments: the rendering: ids of control tokens, and plain texts.
        passages: the messages that were rendered, in order. Typed ones only tell replies and
            other text apart.
    """
    rendering = _Rendering(base, segments)
    cut = base.safe_cut(rendering.matched)
    ids = base.ids[:cut]
    generated = [range(s.start, min(s.stop, cut)) for s in base.generated if s.start < cut]

    rest, done = rendering.rest(base.end(cut)), 0
    for reply in _replies_in(rest, passages, base.tokenizer, rendering.bounded):
        _encode(base.tokenizer, rest[done : reply.start], ids)
        generated.append(range(len(ids), len(ids) + len(reply.ids)))
        ids += reply.ids
        done = reply.stop
    _encode(base.tokenizer, rest[done:], ids)

    kept = cut + common_prefix(base.ids[cut:], ids[cut:])
    return Plan(ids, kept, generated, _divergence(base.tokenizer, base.ids, ids, kept))


def divergence(tokenizer: PlainTokenizer, cached: list[int], ids: list[int]) -> Divergence | None:
    """Return where `ids` stop being those in the cache; None where all cached ids are kept."""
    return _divergence(tokenizer, cached, ids, common_prefix(cached, ids))


def _divergence(
    tokenizer: PlainTokenizer, cached: Sequence[int], ids: Sequence[int], kept: int
) -> Divergence | None:
    if kept == len(cached):
        return None
    expected, found = (
        text_of(tokenizer, side[kept : kept + _EXCERPT])[:_EXCERPT] for side in (cached, ids)
    )
    return Divergence(kept, expected, found)


class _Rendering:
    """The rendering as one string, compared with a base.

    Attributes:
        matched: how far the two texts are the same.
        bounded: whether control tokens end its texts, not only begin the whole.
    """

    def __init__(self, base: DecodedContext, segments: Iterable[int | str]) -> None:
        joined = _joined(segments)
        is_text = [isinstance(segment, str) for segment in joined]
        self.bounded = True in is_text and False in is_text[is_text.index(True) :]
        self._raw = [without_surrogates(s) if isinstance(s, str) else spell(s) for s in joined]

        # Nearly always most of it stands in the base to the letter: one comparison finds that out.
        ends = list(accumulate(map(len, self._raw)))
        equal = bisect_right(ends, common_prefix(base.text, "".join(self._raw)))

        # Up to the first difference: each segment as its comparison went furthest, and its place.
        self._compared = self._raw[:equal]
        self._starts = [0, *ends][:equal]
        place = ends[equal - 1] if equal else 0
        base.begin_rendering()
        for n, raw in enumerate(self._raw[equal:], equal):
            text, same = _agreeing(base, place, raw)
            if same < len(text) and is_text[n] and place + same < len(base.text):
                encoded, further = _agreeing(base, place, base.as_encoded(raw, at_start=n == 0))
                if further > same:
                    text, same = encoded, further
            self._compared.append(text)
            self._starts.append(place)
            place += same
            if same < len(text):
                break
        self.matched = place

    def rest(self, place: int) -> str:
        """Return what follows this place, which is not beyond `matched`."""
        if not self._starts:
            return ""
        n = bisect_right(self._starts, place) - 1
        inside = place - self._starts[n]
        head = self._compared[n][inside:] if inside else self._raw[n]
        return head + "".join(self._raw[n + 1 :])


def _joined(segments: Iterable[int | str]) -> list[int | str]:
    """Join texts that stand next to each other: they are one to the tokenizer."""
    joined: list[int | str] = []
    for segment in segments:
        if isinstance(segment, str) and joined and isinstance(joined[-1], str):
            joined[-1] += segment
        elif segment != "":
            joined.append(segment)
    return joined


def _agreeing(base: DecodedContext, place: int, text: str) -> tuple[str, int]:
    """Return `text` and how much of it stands at this place of the base.

    A control token that the model put into its reply is spelled in the base; to the template it
    is text of the reply, and is spelled here too where it is the same.
    """
    same = _same(base, place, text)
    while same < len(text) and (control := base.written_control(place + same)) is not None:
        shown = text_of(base.tokenizer, [control])
        if not text.startswith(shown, same):
            break
        text = text[:same] + spell(control) + text[same + len(shown) :]
        same += _same(base, place + same, text[same:])
    return text, same


def _same(base: DecodedContext, place: int, text: str) -> int:
    """Return how much of `text` stands at this place of the base."""
    if base.text.startswith(text, place):
        return len(text)
    return common_prefix(base.text[place : place + len(text)], text)


def _encode(tokenizer: PlainTokenizer, spelled: str, ids: list[int]) -> None:
    """Append the ids of a string that may hold spelled control tokens."""
    for nth, part in enumerate(CONTROL.split(spelled)):
        if nth % 2:
            ids.append(unspell(part))
        elif part and ids and not tokenizer.is_control(ids[-1]):
            ids += _encode_inside(tokenizer, part)
        elif part:
            ids += tokenizer.encode_plain(part, at_start=not ids)


def _encode_inside(tokenizer: PlainTokenizer, text: str) -> list[int]:
    """Return the ids of text that follows other text.

    Some SentencePiece tokenizers begin every text with a space. A character in front of it takes
    that space, and both are dropped; it must be one that does not merge with the text.
    """
    ids = tokenizer.encode_plain(text)
    if text_of(tokenizer, ids) == text:
        return ids
    for guard in _GUARDS:
        alone, guarded = tokenizer.encode_plain(guard), tokenizer.encode_plain(guard + text)
        if guarded[: len(alone)] == alone:
            return guarded[len(alone) :]
    return ids


@dataclass(frozen=True, slots=True)
class _Reply:
    """A part of a text, and the ids the model wrote it with."""

    start: int
    stop: int
    ids: Sequence[int]


def _replies_in(
    text: str, passages: Sequence[Passage], tokenizer: PlainTokenizer, bounded: bool
) -> list[_Reply]:
    """Find the replies in `text`, in the order of the text.

    Looking starts at the end, with the last passage, and every passage found closes off what
    comes after it. So of two equal replies each gets its own ids, and a reply quoted in a later
    message is not taken for the reply. A template that uses control tokens ends every reply with
    one; else a reply must stand alone between white space.
    """
    ends_like_a_reply = _ends_stretch if bounded else _stands_alone
    found: list[_Reply] = []
    limit = len(text)
    for passage in reversed(passages):
        fits = ends_like_a_reply if passage.ids else _anywhere
        place = _locate(text, without_surrogates(passage.text), limit, fits)
        if place is None:
            continue
        limit = place.start
        if passage.ids and (reply := _written(tokenizer, passage.ids, text, place)):
            found.append(reply)
    found.reverse()
    return found


def _locate(
    text: str, wanted: str, limit: int, fits: Callable[[str, int, int], bool]
) -> range | None:
    """Return the last place before `limit` where `wanted` stands, as it is or else trimmed."""
    trimmed = wanted.strip()
    if not trimmed:
        return None
    stop = limit
    for _ in range(_OCCURRENCES):
        start = text.rfind(trimmed, 0, stop)
        if start < 0:
            return None
        stop = start + len(trimmed)
        if fits(text, start, stop):
            first = start - wanted.index(trimmed)
            last = first + len(wanted)
            whole = first >= 0 and last <= limit and text.startswith(wanted, first)
            return range(first, last) if whole else range(start, stop)
        stop -= 1
    return None


def _anywhere(_text: str, _start: int, _stop: int) -> bool:
    return True


def _ends_stretch(text: str, _start: int, stop: int) -> bool:
    return _STRETCH_END.match(text, stop) is not None


def _stands_alone(text: str, start: int, stop: int) -> bool:
    return (start == 0 or _EDGE.match(text, start - 1) is not None) and (
        stop == len(text) or _EDGE.match(text, stop) is not None
    )


def _written(
    tokenizer: PlainTokenizer, ids: Sequence[int], text: str, place: range
) -> _Reply | None:
    """Return the tokens that lie whole in this place of the text, if any.

    The answer is the last part of what the model wrote. When it is not found there to the letter
    (a stop string cut its last token, or a user edited it), it is taken from its beginning, which
    is that of the reply or after a control token, as far as it agrees.
    """
    spoken = DecodedContext(_ControlsAsText(tokenizer), ids)
    answer = text[place.start : place.stop]
    start, same = spoken.text.rfind(answer), len(answer)
    if start < 0:
        start, same = _best_beginning(spoken, answer, tokenizer)
    first, last = spoken.tokens_until(start), spoken.tokens_before(start + same)
    if last <= first:
        return None
    shift = place.start - start
    return _Reply(spoken.end(first) + shift, spoken.end(last) + shift, spoken.ids[first:last])


def _best_beginning(
    spoken: DecodedContext, answer: str, tokenizer: PlainTokenizer
) -> tuple[int, int]:
    """Return where the answer seems to begin, and how far it agrees from there."""
    best = 0, 0
    for n in range(len(spoken.ids)):
        if n and not tokenizer.is_control(spoken.ids[n - 1]):
            continue
        start = spoken.end(n)
        start += len(spoken.text[start:]) - len(spoken.text[start:].lstrip())
        if (same := common_prefix(spoken.text[start:], answer)) > best[1]:
            best = start, same
    return best


class _ControlsAsText:
    """A tokenizer to which control tokens are text like all other, as they are in a message."""

    def __init__(self, tokenizer: PlainTokenizer) -> None:
        self.encode_plain = tokenizer.encode_plain
        self.token_bytes = tokenizer.token_bytes

    def is_control(self, _token_id: int) -> bool:
        return False
