"""A reply's numbers as compact bytes and back, bit for bit."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from kvchat.engine.types import Candidates

_WIDTH = 4
"""Bytes of an item of type code 'i' or 'f'."""


def pack(numbers: array[Any]) -> bytes:
    """Return an array's items as little-endian bytes."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def unpack(code: str, data: bytes) -> array[Any]:
    """Return the array that was packed.

    Raises:
        ValueError: the bytes are not whole items.
    """
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def pack_candidates(before: Sequence[Candidates], after: Sequence[Candidates]) -> bytes | None:
    """Return the candidates of some tokens as compressed bytes; None if none has any.

    Their counts, ids and log-probabilities, each sorted by the significance of its bytes: the
    higher ones are much alike, and the ids after the sampler mostly those before it.
    """
    counts, ids, logprobs = array("i"), array("i"), array("f")
    for candidates in (*before, *after):
        counts.append(len(candidates.ids))
        ids += candidates.ids
        logprobs += candidates.logprobs
    if not ids:
        return None
    columns = (pack(counts), pack(ids), pack(logprobs))
    planes = (column[i::_WIDTH] for column in columns for i in range(_WIDTH))
    return zlib.compress(b"".join(planes), 1)


def unpack_candidates(tokens: int, data: bytes | None) -> tuple[list[Candidates], list[Candidates]]:
    """Return the candidates of so many tokens, before and after the sampler.

    Raises:
        ValueError: the bytes are not what `pack_candidates` makes for so many tokens.
    """
    if data is None:
        return [none() for _ in range(tokens)], [none() for _ in range(tokens)]
    try:
        raw = zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    counts = unpack("i", _merged(raw[: 2 * tokens * _WIDTH]))
    rest = raw[2 * tokens * _WIDTH :]
    total = sum(counts)
    if len(counts) != 2 * tokens or min(counts) < 0 or len(rest) != 2 * total * _WIDTH:
        raise ValueError("candidates of another number of tokens")
    ids = unpack("i", _merged(rest[: total * _WIDTH]))
    logprobs = unpack("f", _merged(rest[total * _WIDTH :]))
    found, end = [], 0
    for count in counts:
        start, end = end, end + count
        found.append(Candidates(ids[start:end], logprobs[start:end]))
    return found[:tokens], found[tokens:]


def none() -> Candidates:
    """No candidates."""
    return Candidates(array("i"), array("f"))


def _merged(planes: bytes) -> bytes:
    merged, size = bytearray(len(planes)), len(planes) // _WIDTH
    for i in range(_WIDTH):
        merged[i::_WIDTH] = planes[i * size : (i + 1) * size]
    return bytes(merged)
