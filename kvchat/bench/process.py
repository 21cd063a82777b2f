"""A measurement in a fresh process, so that nothing before it takes part."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import kvchat
from kvchat.engine.errors import KvchatError, SettingError

AS_GUEST = (
    "import runpy, sys; root, module = sys.argv[1:]; del sys.path[0]; sys.path.append(root); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
"""Runs a module of ours in another interpreter; whatever that one has itself comes first."""


def run_module(
    module: str, order: Any, what: str, *, python: str | None = None
) -> list[tuple[float, str]]:
    """Run a module with JSON on its stdin.

    Args:
        module: what `python -m` takes.
        order: anything that JSON holds.
        what: names the measurement, should it fail.
        python: another interpreter to run it in; the module must be content with its packages.

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
            _command(module, python),
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


def has_packages(python: str, packages: Sequence[str]) -> bool:
    """Whether another interpreter has all these packages.

    Raises:
        SettingError: it is no interpreter.
    """
    found = " and ".join(f"find_spec({package!r})" for package in packages)
    program = f"from importlib.util import find_spec; print(bool({found}))"
    try:
        said = subprocess.run(
            [python, "-c", program], capture_output=True, encoding="utf-8", timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingError(f"{python} does not run as a Python interpreter: {error}") from error
    return said.strip() == "True"


def _command(module: str, python: str | None) -> list[str]:
    if python is None:
        return [sys.executable, "-m", module]
    root = Path(kvchat.__file__).parent.parent
    return [python, "-c", AS_GUEST, str(root), module]
