"""Lone surrogates, which no UTF-8 text has and the `tokenizers` library refuses."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Return `text` with U+FFFD in the place of every surrogate.

    Nearly no text has one, and telling that is many times as quick as looking for them.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text
