"""A tiny model in the place of a real one, and folders of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_chat import tiny_llm

from kvchat.models import load as load_module
from kvchat.models.load import LanguageModel


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"KVCHAT_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture
def llm(own_folders: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    model = tiny_llm(ctx=400)
    monkeypatch.setattr(load_module, "load", lambda *_, **__: model)
    yield model
