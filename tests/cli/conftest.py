"""The command line in this process, in folders of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvchat.cli import run


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Kvchat = Callable[..., Ran]


@pytest.fixture
def kvchat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Kvchat:
    for name in [name for name in os.environ if name.startswith("KVCHAT_")]:
        monkeypatch.delenv(name)
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"KVCHAT_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: object) -> Ran:
        status = run([str(arg) for arg in args])
        return Ran(status, *capsys.readouterr())

    return call
