from __future__ import annotations

import pytest

from kvchat.models.languages import language_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("今天天气真好，我们一起去公园散步", "zh"),
        ("公園へ行きましょう", "ja"),
        ("안녕하세요", "ko"),
        ("Почему небо голубое?", "ru"),
        ("لماذا السماء زرقاء؟", "ar"),
        ("आसमान नीला क्यों है?", "hi"),
        ("Why is the sky blue?", None),
        ("Warum ist der Himmel blau?", None),
        ("What does 公园 mean in English, and how would you use it?", None),
        ("123 !? \N{GRINNING FACE}", None),
        ("", None),
    ],
)
def test_the_script_tells_the_language(text, code):
    assert language_of(text) == code
