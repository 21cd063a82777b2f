"""The log: what a fault leaves behind for whoever looks into it."""

from __future__ import annotations

import logging

from kvchat.settings import log_file


def log_to_file() -> None:
    """Send what the program logs to its log file, and nothing of it to the terminal."""
    logger = logging.getLogger("kvchat")
    if logger.handlers:
        return
    path = log_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
