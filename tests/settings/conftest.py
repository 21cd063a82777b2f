"""Settings of nobody in particular."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a configuration file that is not there, in folders of its own."""
    for name in [name for name in os.environ if name.startswith("KVCHAT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "config.toml"
