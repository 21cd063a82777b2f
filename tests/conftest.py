"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched the way the program fetches it."""
    from kvchat.models.locate import locate
    from kvchat.models.pull import pull

    found = locate("smollm2")
    return found if found is not None else pull("smollm2")
