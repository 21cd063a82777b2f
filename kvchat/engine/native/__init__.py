"""Our own kernels for the CPU: built once on a machine, used only where they agree with torch.

They need a C++ compiler when they are built and nothing when they are used. Without them the
operators that come with torch do the same work, more slowly.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
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
    place = home(folder)
    if not (place / CHECKED).exists():
        return False
    if is_loaded():
        return True
    try:
        torch.ops.load_library(place / f"{LIBRARY}.so")
    except OSError:
        # The library is there and does not load: something of the system it needs has changed.
        shutil.rmtree(place, ignore_errors=True)
        return False
    return is_loaded()


def can_build() -> bool:
    """Whether this machine has what building takes: a compiler and ninja."""
    compiler = os.environ.get("CXX", "c++" if sys.platform != "win32" else "cl")
    return shutil.which(compiler) is not None and shutil.which("ninja") is not None


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
