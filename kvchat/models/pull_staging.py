"""What every download shares: a locked workplace, watched child processes, and the last step.

Downloads run in child processes, so that an interrupt ends them at once, and write below
`.partial` in the models folder, so that the finished file moves into place in one step.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvchat.engine.errors import DownloadError
from kvchat.settings import models_dir

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
_CHUNK = 1 << 20
_UNWRITTEN_LOCK_SECONDS = 10.0
_held: set[Path] = set()


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A download has brought `done` of `total` bytes, or a check has read them."""

    done: int
    total: int | None
    """None while the size is unknown."""
    what: str
    """What is going on, as a few words."""


Report = Callable[[PullProgress], None]


class SourceError(DownloadError):
    """One source cannot deliver; another may. Its text is a clause, to be put into a sentence."""


@contextmanager
def explaining_disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a `DownloadError` that names the models folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise DownloadError(_disk_sentence(error.errno, error.strerror, folder)) from error


def _disk_sentence(code: int | None, reason: str | None, folder: Path) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk of {folder} is full. Free some space, then pull again."
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"There is no permission to write to {folder}. Change its permissions, or set "
            "KVCHAT_DATA_DIR to a folder of yours."
        )
    why = reason or "unknown reason"
    return f"Writing to {folder} failed: {why}. Set KVCHAT_DATA_DIR to another folder."


def check_space(needed: int) -> None:
    """Raise `DownloadError` when the models folder's disk has fewer than `needed` bytes free."""
    folder = models_dir()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{needed / 1e6:,.0f} MB are needed in {folder}, but its disk has {free / 1e6:,.0f} MB "
            "free. Free some space, or set KVCHAT_DATA_DIR to a folder on a larger disk."
        )


@contextmanager
def locked(key: str) -> Iterator[Path]:
    """Hold the workplace of one model, so that two programs never fetch it into one place.

    Yields the folder to download into. What a killed download left there is still there.
    Raises `DownloadError` when another running program holds it.
    """
    partial = models_dir() / ".partial"
    partial.mkdir(parents=True, exist_ok=True)
    lock = partial / f"{key}.lock"
    _acquire(lock, key)
    _held.add(lock)
    try:
        yield partial / key
    finally:
        _held.discard(lock)
        lock.unlink(missing_ok=True)
        below = [Path(place) for place, _, _ in os.walk(partial / key, topdown=False)]
        for folder in (*below, partial):
            with suppress(OSError):
                folder.rmdir()  # refuses when something is in it


def _acquire(lock: Path, key: str) -> None:
    for _ in range(2):
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            holder = _holder(lock)
            if holder is not None:
                raise DownloadError(
                    f"{holder} is already fetching {key}. Wait until it is done, or delete {lock} "
                    "if that is not so."
                ) from None
            lock.unlink(missing_ok=True)
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(str(os.getpid()))
            return
    raise DownloadError(f"Another program has just begun to fetch {key}. Wait until it is done.")


def _holder(lock: Path) -> str | None:
    """Who holds a lock, in words; None when its owner is gone."""
    try:
        text, made = lock.read_text(), lock.stat().st_mtime
    except FileNotFoundError:
        return None
    if not text.isdecimal():
        fresh = time.time() - made < _UNWRITTEN_LOCK_SECONDS
        return "Another program" if fresh else None
    pid = int(text)
    if pid == os.getpid():
        return "This program" if lock in _held else None
    return f"Process {pid}" if _runs(pid) else None


def _runs(pid: int) -> bool:
    if sys.platform == "win32":
        import ctypes

        kernel = ctypes.windll.kernel32
        synchronize, timed_out = 0x0010_0000, 0x102
        handle = kernel.OpenProcess(synchronize, False, pid)
        running = bool(handle) and kernel.WaitForSingleObject(handle, 0) == timed_out
        kernel.CloseHandle(handle)
        return running
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def run_watched(
    command: Sequence[str],
    *,
    measure: Callable[[], int],
    total: int | None,
    what: str,
    report: Report,
    output: Path,
    environment: Mapping[str, str],
) -> int:
    """Run a command, reporting what `measure` counts in bytes, and return its exit status.

    What it prints goes to the file `output`; `environment` is set on top of ours. Whatever ends
    the wait early, an interrupt or an exception out of `report`, first ends the command and its
    children.
    """
    with output.open("wb") as printed:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            done = -1
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(_POLL_SECONDS)
                grown = measure() if total is None else min(measure(), total)
                if grown != done:
                    done = grown
                    report(PullProgress(done, total, what))
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        child.stdin.close()
    if child.poll() is not None:
        return
    for strong in (False, True):
        if sys.platform == "win32":
            child.kill()
        else:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL if strong else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
            return


def files_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every file below `folder` with its size; files that vanish meanwhile are left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with suppress(OSError):
                yield path, path.stat().st_size


def copy_hashed(
    source: IO[bytes], target: IO[bytes] | None, size: int, report: Report, what: str
) -> str:
    """Read `source`, write it to `target` if there is one, and return its SHA-256 in hex.

    Stops after `size + 1` bytes, so that a stream that lies about its length cannot fill a disk.
    """
    digest = hashlib.sha256()
    done, reported = 0, -math.inf
    while done <= size:
        chunk = source.read(min(_CHUNK, size + 1 - done))
        if not chunk:
            break
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        if time.monotonic() - reported > _POLL_SECONDS:
            reported = time.monotonic()
            report(PullProgress(min(done, size), size, what))
    report(PullProgress(min(done, size), size, what))
    return digest.hexdigest()


def is_exactly(path: Path, size: int, sha256: str, report: Report) -> bool:
    """Whether a file has this size and this SHA-256."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return copy_hashed(file, None, size, report, "checking") == sha256


def move_into_place(finished: Path, target: Path) -> None:
    """Make a finished file appear as `target` in one step, safe against power loss."""
    with finished.open("rb+") as file:
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(finished, target)
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
