"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Elsewhere every run tries new examples; a submission is judged by the same ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched the way the program fetches it."""
    from kvchat.models.locate import locate
    from kvchat.models.pull import pull

    found = locate("smollm2")
    return found if found is not None else pull("smollm2")
