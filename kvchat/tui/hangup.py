"""Whether the terminal is still there."""

from __future__ import annotations

import select


def has_hung_up(terminal: int) -> bool:
    """Tell whether the other end of a terminal's descriptor is gone.

    A program outside the terminal's session gets no signal then: reading finds nothing, for ever.
    """
    if not hasattr(select, "poll"):  # Windows ends programs whose console is closed
        return False
    poll = select.poll()
    poll.register(terminal, 0)  # a hang-up is told in any case
    return any(told & (select.POLLHUP | select.POLLERR) for _, told in poll.poll(0))
