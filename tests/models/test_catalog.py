"""The catalogue's data and look-ups."""

from __future__ import annotations

import re

from kvchat.models import catalog
from kvchat.models.catalog import CATALOG
from kvchat.settings import Settings


def test_entries_are_complete_and_distinct() -> None:
    assert len({entry.alias for entry in CATALOG}) == len(CATALOG)
    assert len({entry.file for entry in CATALOG}) == len(CATALOG)
    for entry in CATALOG:
        assert re.fullmatch(r"[a-z0-9.-]+", entry.alias)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo)
        assert entry.file.endswith(".gguf")
        assert entry.about and "\n" not in entry.about
        # From two bits to a little over a byte for each parameter.
        assert 0.25 < entry.size / entry.parameters < 1.2
        assert entry.languages and all(re.fullmatch(r"[a-z]{2}", c) for c in entry.languages)


def test_the_default_model_can_be_had_without_the_hub() -> None:
    entry = catalog.find(Settings().model)
    assert entry is not None and entry.wheel is not None and entry.sha256 is not None
    assert entry.wheel.member.endswith(entry.file)


def test_a_model_is_found_by_its_names() -> None:
    entry = catalog.find("qwen3-0.6b")
    assert entry is not None
    for name in ("Qwen3:0.6B", " qwen3-0.6b ", entry.file.upper(), f"{entry.repo}/{entry.file}"):
        assert catalog.find(name) is entry
    assert catalog.find("qwen3") is None
    assert catalog.find("") is None


def test_chinese_models_come_smallest_first() -> None:
    found = catalog.for_language("zh")
    assert {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"} <= {entry.alias for entry in found}
    assert "smollm2" not in {entry.alias for entry in found}
    assert [entry.size for entry in found] == sorted(entry.size for entry in found)


def test_near_names() -> None:
    assert catalog.near("smolm2")[0] == "smollm2"
    assert catalog.near("MyModle", ("MyModel",))[0] == "MyModel"
    assert catalog.near("zzzzzz") == []
