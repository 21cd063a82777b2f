"""Sequences of token ids, compared without torch."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading ids two sequences of the same type share.

    Compares slices, which runs in C, and halves the range of disagreement: a hundred thousand
    ids take well under a millisecond.
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
