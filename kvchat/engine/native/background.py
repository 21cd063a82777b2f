"""Build the kernels in a process that keeps out of everybody's way.

It has the lowest priority there is, works on one core, and ends with the program that began it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from kvchat.engine import native


def begin(folder: Path) -> subprocess.Popen[bytes] | None:
    """Build into `folder` if that is possible and was not tried before.

    Returns:
        The process, which ends when its stdin is closed; None where there is nothing to do.
    """
    if native.is_in_place(folder) or native.failure(folder) or not native.can_build():
        return None
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MAX_JOBS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # no key of the terminal reaches it, and it ends as one group
            creationflags=getattr(subprocess, "IDLE_PRIORITY_CLASS", 0),
        )
    except OSError:
        return None


def main() -> None:
    """Build, as the process that `begin` starts; its exit status says nothing that is read."""
    _step_back()
    threading.Thread(target=_end_with_the_program, daemon=True).start()
    from kvchat.engine.native.build import build

    folder = Path(sys.argv[1])
    try:
        build(native.home(folder))
    except (RuntimeError, OSError, native.BusyError):
        sys.exit(1)


def _step_back() -> None:
    with suppress(OSError):  # only Linux has it: where memory gets short, this goes before the chat
        Path("/proc/self/oom_score_adj").write_text("1000")
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif hasattr(os, "nice"):
        os.nice(19)


def _end_with_the_program() -> None:
    os.read(0, 1)  # returns at the end; unbuffered, as Python does not end with a buffer in use
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # the compiler too
    os._exit(1)


if __name__ == "__main__":
    main()
