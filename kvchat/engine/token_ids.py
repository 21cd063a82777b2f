"""Sequences of token ids, without torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from kvchat.engine.errors import SettingError


def as_ids(ids: Iterable[Any]) -> list[int]:
    """Return ids from any sequence of whole numbers, such as a list, an array or a tensor (n,).

    Raises:
        SettingError: they are something else.
    """
    try:
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise SettingError("Token ids must be whole numbers; pass a list of them.") from error


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
