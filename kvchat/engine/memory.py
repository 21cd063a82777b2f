"""What happens when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvchat.engine.errors import OutOfMemoryError


@contextmanager
def memory_is_enough() -> Iterator[None]:
    """Turn what an allocator raises when it is not into an error that says what to do.

    Raises:
        OutOfMemoryError: memory ran out inside.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if _is_about_memory(error):
            # The frames it passed through would hold on to their tensors.
            raise OutOfMemoryError(
                "There is not enough memory: close other programs, or choose a smaller model or "
                "a smaller --ctx."
            ) from error.with_traceback(None)
        raise


def _is_about_memory(error: Exception) -> bool:
    """Whether an allocator raised this; torch's for the CPU has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "CPUAllocator" in str(error)
