"""Which language a text is in, as far as its script tells."""

from __future__ import annotations

import re

_SCRIPTS: tuple[tuple[str, str], ...] = (
    ("ja", r"[\u3040-\u30ff]"),  # kana; Japanese uses Chinese characters too, so it comes first
    ("ko", r"[\u1100-\u11ff\uac00-\ud7af]"),
    ("zh", r"[\u3400-\u9fff\U00020000-\U0002ffff]"),
    ("ru", r"[\u0400-\u04ff]"),
    ("ar", r"[\u0600-\u06ff]"),
    ("hi", r"[\u0900-\u097f]"),
    ("th", r"[\u0e00-\u0e7f]"),
    ("el", r"[\u0370-\u03ff]"),
    ("he", r"[\u0590-\u05ff]"),
)
"""ISO 639-1 codes, each with its script (Unicode blocks); the commonest language of a script."""

_LETTER = re.compile(r"[^\W\d_]")
_SAMPLE = 2_000
"""Characters that are looked at."""
_SHARE = 0.3
"""How much of a text has to be in a script: a quoted word does not make a language."""


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's language; None where its script does not tell."""
    text = text[:_SAMPLE]
    letters = len(_LETTER.findall(text))
    if not letters:
        return None
    for code, script in _SCRIPTS:
        if len(re.findall(script, text)) >= _SHARE * letters:
            return code
    return None
