"""Kernels that are built by themselves: one process, remembered failures, nothing left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvchat.engine import native
from kvchat.engine.native import background
from kvchat.engine.native.build import build, cause

SAYS_ITS_VERSION = 'case "$1" in --version) exit 0;; esac'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    return folder


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler and a ninja that do what a test writes into them, in place of the real ones."""
    if sys.platform == "win32":
        pytest.skip("the stand-ins are shell scripts")
    place = tmp_path / "tools"
    place.mkdir()
    for name in ("c++", "ninja"):
        write_tool(place / name, "exit 0")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return place


def write_tool(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def wait_for(process: subprocess.Popen[bytes] | None) -> int:
    assert process is not None
    try:
        return process.wait(60)
    finally:
        assert process.stdin is not None
        process.stdin.close()


def test_a_failure_is_remembered_and_not_tried_again(folder: Path, tools: Path) -> None:
    write_tool(
        tools / "ninja", 'case "$1" in --version) exit 0;; esac\necho "x: error: no"\nexit 1'
    )
    assert wait_for(background.begin(folder)) == 1
    assert str(native.failure(folder)).endswith("x: error: no")
    assert background.begin(folder) is None
    assert not list(folder.glob(".building-*"))


def test_it_ends_with_the_program_that_began_it(folder: Path, tools: Path) -> None:
    write_tool(tools / "ninja", f"{SAYS_ITS_VERSION}\nexec sleep 300")
    process = background.begin(folder)
    assert process is not None and process.stdin is not None
    while not native.is_building(folder):
        assert process.poll() is None
        time.sleep(0.05)
    process.stdin.close()
    assert process.wait(30) != 0
    assert not native.is_building(folder)
    assert native.failure(folder) is None


def test_two_do_not_build_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat.engine.native.build.load", lambda *_, **__: pytest.fail("built"))
    with native.building(folder):
        assert native.is_building(folder)
        with pytest.raises(native.BusyError):
            build(native.home(folder))
    assert not native.is_building(folder)
    assert native.failure(folder) is None


def test_what_another_has_built_meanwhile_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvchat.engine.native.build.load", lambda *_, **__: pytest.fail("built"))
    native.home(folder).mkdir()
    (native.home(folder) / native.CHECKED).touch()
    build(native.home(folder))
    assert background.begin(folder) is None


def test_kernels_that_compute_something_else_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree() -> None:
        assert native.failure(folder) is not None  # what remains if the process ends here
        raise RuntimeError("the 4-bit product of 1 × 32 is off by 1.0e+00")

    monkeypatch.setattr("kvchat.engine.native.build.load", lambda *_, **__: None)
    monkeypatch.setattr("kvchat.engine.native.build.check", disagree)
    with pytest.raises(RuntimeError, match="off by"):
        build(native.home(folder))
    assert native.failure(folder) == "the 4-bit product of 1 × 32 is off by 1.0e+00"
    assert not native.is_in_place(folder)


def test_without_a_compiler_nothing_is_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert background.begin(folder) is None
    assert not list(folder.iterdir())


def test_ninja_is_found_beside_our_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tool(tmp_path / ("ninja.exe" if sys.platform == "win32" else "ninja"), "exit 0")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert native.ninja() is not None


def test_the_telling_line_of_a_compiler_is_found() -> None:
    tale = "Error building extension 'x'\nk.cpp:3: fatal error: omp.h: No such file\nninja: stopped"
    assert cause(RuntimeError(tale)) == "k.cpp:3: fatal error: omp.h: No such file"
    assert cause(RuntimeError("one\n\n two \n")) == "two"
    assert cause(RuntimeError("")) == "RuntimeError"
