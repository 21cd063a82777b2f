"""Sequences of token ids, compared without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many leading items two sequences of one type (lists, strings, …) share.

    Slices are compared, growing while they agree and halving around the first difference, so
    the work is done in C: 100,000 ids take well under a millisecond.
    """
    low, limit, step = 0, min(len(a), len(b)), 1024
    while low < limit:
        high = min(low + step, limit)
        if a[low:high] == b[low:high]:
            low, step = high, step * 2
        elif high - low == 1:
            break
        else:
            limit, step = high, (high - low) // 2
    return low
