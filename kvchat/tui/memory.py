"""How much memory a model may take here."""

from __future__ import annotations

import os
import re
from pathlib import Path

RUN_FACTOR = 1.2
"""A running model takes its weights, and about a fifth more for cache and work space."""
RUN_BYTES = 400_000_000
"""What the program takes without any model."""


def available_memory() -> int | None:
    """Return the bytes that programs can still get; None where the system does not tell.

    Linux counts what it would give back (`MemAvailable` of /proc/meminfo); elsewhere it is all
    there is.
    """
    try:
        told = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        if told:
            return int(told[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def needed_memory(weight_bytes: int) -> int:
    """Estimate the bytes a model takes while it runs, from the size of its weights."""
    return int(weight_bytes * RUN_FACTOR) + RUN_BYTES
