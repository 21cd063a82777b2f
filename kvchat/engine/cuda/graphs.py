"""Captures a decode step as a CUDA graph.

Source: the section on CUDA graphs of torch's notes on CUDA semantics.
"""

from __future__ import annotations

from typing import Any

import torch

from kvchat.engine.static_step import Work

WARM_UPS = 2
"""Runs before a capture, in which libraries choose their kernels and load them."""


class GraphRecorder:
    """Captures work in the thread that calls it, and leaves other threads and streams alone.

    The graphs share the memory for what is computed on the way: only one of them runs at a time,
    and none needs anything of another. That memory goes with the last of them, so whoever drops
    all graphs takes a new recorder too.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # a handle, of a type that torch keeps to itself

    def __call__(self, work: Work) -> Work:
        """Capture `work`, which is run a few times for it; return what runs it again.

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # left also when a capture fails
            for _ in range(WARM_UPS):
                work()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        current.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay
