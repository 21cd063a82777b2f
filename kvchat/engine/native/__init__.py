"""Our own kernels for the CPU: built once on a machine, used only where they agree with torch.

They need a C++ compiler when they are built and nothing when they are used. Without them the
operators that come with torch do the same work, more slowly.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sqlite3
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("kernels.cpp")
FOLDER = "kernels"
"""Where in the cache folder the kernels are kept."""

LIBRARY = "kvchat_kernels"
CHECKED = "agrees"
"""A file beside the library: it was built completely, loaded, and agreed with torch."""


def is_loaded() -> bool:
    """Whether this process has the kernels."""
    return hasattr(torch.ops.kvchat, "linear")


def load(folder: Path) -> bool:
    """Load the kernels that are in `folder` for this machine; returns whether there are any."""
    if not is_in_place(folder):
        return False
    if is_loaded():
        return True
    place = home(folder)
    try:
        torch.ops.load_library(place / f"{LIBRARY}.so")
    except OSError:
        # The library is there and does not load: something of the system it needs has changed.
        shutil.rmtree(place, ignore_errors=True)
        return False
    return is_loaded()


def can_build() -> bool:
    """Whether this machine has a compiler, ninja, and what torch calls them with."""
    compiler = os.environ.get("CXX", "c++" if sys.platform != "win32" else "cl")
    found = shutil.which(compiler) is not None and ninja() is not None
    return found and find_spec("setuptools") is not None


def ninja() -> str | None:
    """The program ninja; one from a package lies beside our Python, which need not be in PATH."""
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


def is_in_place(folder: Path) -> bool:
    """Whether `folder` has kernels for this machine that agreed with torch."""
    return (home(folder) / CHECKED).exists()


def failure(folder: Path) -> str | None:
    """Why the last try to build for this machine failed; None if there was none since."""
    try:
        return _failure_file(home(folder)).read_text("utf-8", "replace").strip()
    except OSError:
        return None


def note_failure(place: Path, cause: str | None) -> None:
    """Remember, for `failure`, why kernels could not be built in `place`; None forgets it."""
    if cause is None:
        _failure_file(place).unlink(missing_ok=True)
    else:
        _failure_file(place).write_text(cause, "utf-8")


def _failure_file(place: Path) -> Path:
    return place.with_suffix(".failed")


class BusyError(Exception):
    """Another process builds in the same folder."""


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Be the only process that builds in `folder`, which must exist.

    Raises:
        BusyError: another one does.
    """
    # SQLite's lock is the same on every system, and goes with the process that held it.
    with closing(sqlite3.connect(folder / "lock", timeout=0)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise BusyError from error
        yield


def is_building(folder: Path) -> bool:
    """Whether a process builds in `folder` right now."""
    if not (folder / "lock").exists():
        return False
    try:
        with building(folder):
            return False
    except BusyError:
        return True


def home(folder: Path) -> Path:
    """Where in `folder` the kernels for this machine are, or would be.

    The name stands for what a library is good for: this source, this torch and this processor.
    """
    parts = [
        SOURCE.read_bytes(),
        torch.__version__.encode(),
        platform.platform().encode(),
        _processor().encode(),
    ]
    return folder / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Name the processor, with the instructions it knows where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
