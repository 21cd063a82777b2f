"""`kvchat kernels` where nothing is built: what it says, and what it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvchat.cli import run
from kvchat.engine import native


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCHAT_CACHE_DIR", str(tmp_path))
    return tmp_path / native.FOLDER


def test_without_a_compiler_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run(["kernels"]) == 1
    assert "C++ compiler and ninja" in capsys.readouterr().err


def test_a_build_that_fails_is_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a long tale\nkernels.cpp: no such instruction\n")

    monkeypatch.setattr("kvchat.engine.native.can_build", lambda: True)
    monkeypatch.setattr("kvchat.engine.native.build.load", refuse)
    assert run(["kernels"]) == 1
    told = capsys.readouterr().err
    assert "could not be built here: kernels.cpp: no such instruction" in told
    assert "tale" not in told
    assert not list(cache.iterdir())


def test_clear_removes_them(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native.home(cache).mkdir(parents=True)
    assert run(["kernels", "--clear"]) == 0
    assert not cache.exists()
    assert "removed" in capsys.readouterr().out
