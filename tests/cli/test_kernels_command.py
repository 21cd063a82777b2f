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
    assert "no such instruction" in str(native.failure(cache))
    assert {path.suffix for path in cache.iterdir()} == {".failed", ""}  # and the lock


def test_doctor_says_how_things_stand(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        run(["doctor"])
        return next(line for line in capsys.readouterr().out.splitlines() if "kernels" in line)

    monkeypatch.setattr("kvchat.engine.native.can_build", lambda: False)
    assert "torch's operators do the work" in told()
    monkeypatch.setattr("kvchat.engine.native.can_build", lambda: True)
    assert "`kvchat kernels` builds them" in told()
    monkeypatch.setenv("KVCHAT_KERNELS", "auto")
    assert "a chat builds them while it is idle" in told()
    place = native.home(cache)
    place.parent.mkdir()
    with native.building(cache):
        assert "being built right now" in told()
    native.note_failure(place, "k.cpp:3: error: no")
    assert "could not be built: k.cpp:3: error: no" in told()
    place.mkdir()
    (place / native.CHECKED).touch()
    assert "in place" in told()
    monkeypatch.setenv("KVCHAT_KERNELS", "off")
    assert "left aside" in told()


def test_two_builds_are_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvchat.engine.native.can_build", lambda: True)
    cache.mkdir()
    with native.building(cache):
        assert run(["kernels"]) == 1
    assert "another kvchat is building" in capsys.readouterr().err


def test_clear_removes_them(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native.home(cache).mkdir(parents=True)
    assert run(["kernels", "--clear"]) == 0
    assert not cache.exists()
    assert "removed" in capsys.readouterr().out
