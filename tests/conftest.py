"""Shared fixtures."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Elsewhere every run tries new examples; a submission is judged by the same ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder() -> Iterator[None]:
    """A cache folder of the tests' own: kernels that the user has built would change what runs.

    So would those that a chat builds in idle time.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCHAT_CACHE_DIR", folder)
        patch.setenv("KVCHAT_KERNELS", "use")
        patch.setattr("kvchat.chat.worker.Worker._build_kernels", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def as_many_threads_as_cores() -> Iterator[None]:
    """Nothing is measured and remembered in the user's own file; what is asked for is obeyed."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("OMP_NUM_THREADS"):
            patch.setenv("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        yield


@pytest.fixture(autouse=True)
def garbage_of_each_test_is_collected() -> Iterator[None]:
    """What a program keeps for as long as it runs ends here with the test."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched the way the program fetches it."""
    from kvchat.models.locate import locate
    from kvchat.models.pull import pull

    found = locate("smollm2")
    return found if found is not None else pull("smollm2")
