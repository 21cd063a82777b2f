"""A measurement in a fresh process, so that nothing before it takes part."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from tempfile import TemporaryFile
from typing import Any

from kvchat.engine.errors import KvchatError


def run_module(module: str, order: Any, what: str) -> list[tuple[float, str]]:
    """Run a module with JSON on its stdin.

    Args:
        module: what `python -m` takes.
        order: anything that JSON holds.
        what: names the measurement, should it fail.

    Returns:
        Every line it printed, with the seconds since its start.

    Raises:
        KvchatError: the process failed; with the last line that it wrote.
    """
    with TemporaryFile("w+") as stdin, TemporaryFile("w+", encoding="utf-8") as complaints:
        json.dump(order, stdin)
        stdin.seek(0)
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=complaints,
            encoding="utf-8",
        )
        try:
            assert process.stdout is not None
            lines = [(time.perf_counter() - started, line) for line in process.stdout]
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if status != 0 or not lines:
            complaints.seek(0)
            reason = (complaints.read().strip() or "it ended without a word").splitlines()[-1]
            raise KvchatError(f"{what} in a process of its own failed: {reason}")
    return lines
