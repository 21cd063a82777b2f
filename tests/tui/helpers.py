"""What the tests of the screen share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from textual.pilot import Pilot

PATIENCE_SECONDS = 60
"""A busy machine takes its time; only what will never come takes as long as this."""


async def wait_until(pilot: Pilot[object], predicate: Callable[[], object]) -> None:
    """Let the app work until `predicate` holds; fail if it does not in time."""
    deadline = monotonic() + PATIENCE_SECONDS
    while True:
        await pilot.pause()
        if predicate():
            return
        assert monotonic() < deadline, "what was waited for did not happen"
        await asyncio.sleep(0.01)
