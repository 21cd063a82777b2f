"""How fast this machine reads memory, and how much of that decoding makes use of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvchat.engine.engine import Engine

READ_BYTES = 512 * 2**20
"""Larger than any last-level cache this may run on."""

REPEATS = 5


def read_bandwidth(device: torch.device) -> float:
    """Return the best rate in GB/s (10⁹ bytes) of reading a large tensor, with torch's threads.

    Several reductions are tried, for no single one is limited by memory on every machine.
    """
    block = torch.ones(READ_BYTES // 4, device=device)
    reads: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.sum,
        torch.linalg.vector_norm,
        lambda x: torch.dot(x[: len(x) // 2], x[len(x) // 2 :]),
        lambda x: torch.mv(x.view(4096, -1), x[: len(x) // 4096]),
    )
    best = float("inf")
    for read in reads:
        for _ in range(REPEATS):
            started = time.perf_counter()
            read(block)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - started)
    return block.nbytes / best / 1e9


def bytes_read_per_token(engine: Engine, cached: float) -> float:
    """Bytes of memory that decoding one token must read, `cached` tokens being in the cache.

    An embedding that is not the output head as well gives one row only, which is left out.
    """
    model = engine.model
    head = {t.data_ptr() for t in model.head.buffers()}
    unread = sum(t.nbytes for t in model.embedding.buffers() if t.data_ptr() not in head)
    return engine.weight_bytes - unread + cached * engine.kv_bytes_per_token
