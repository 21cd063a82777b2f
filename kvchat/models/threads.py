"""How many compute threads: measured once for a model on a machine, and then remembered.

The number decides which kernels compute a reply, so a measurement at every start would mean that
a seed does not give the same reply again. More threads are not always better: one that has to
share its core, with the screen or with another program, holds up all the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvchat.engine import native
from kvchat.engine.kv_cache import KVCache
from kvchat.engine.model import Transformer
from kvchat.engine.step import DecodeStep
from kvchat.settings import remember, remembered

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Counts that are tried, as far as there are cores for them."""

CACHED = 32
"""Tokens cached while measuring."""

REFRESH_S, PAINT_S = 1 / 15, 0.015
"""A busy screen refreshes so often, and computes for so long each time."""

ROUNDS = 3
"""Windows of one refresh for each count; the best counts, being the least disturbed one."""

WORSE, AS_GOOD = 1.10, 1.03
"""A count that is so much slower than the best ends the search; of those that are no slower than
this, the smallest is taken."""

KEPT = 64
"""Choices that are remembered, the latest ones."""

_NAME = "threads"


def best_threads(model: Transformer, step: DecodeStep, path: Path, weights: str) -> int:
    """Return the count for a model loaded from `path`: remembered, or else measured.

    `OMP_NUM_THREADS` is obeyed, and nothing is measured on a device that is no CPU.
    """
    if model.device.type != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    if usable_cores() == 1:
        return 1
    known = _known().get(_key(step, path, weights))
    if isinstance(known, int) and 1 <= known <= usable_cores():
        return known
    return tune(model, step, path, weights)[0]


def tune(
    model: Transformer, step: DecodeStep, path: Path, weights: str
) -> tuple[int, dict[int, float]]:
    """Measure, and remember the best count; returns it, and the times from `token_times`."""
    times = token_times(model, step)
    best = choose(times)
    known, key = _known(), _key(step, path, weights)
    known.pop(key, None)
    remember(**{_NAME: {**dict([*known.items()][1 - KEPT :]), key: best}})
    return best, times


def choose(times: Mapping[int, float]) -> int:
    """Return the smallest count that is about as fast as the fastest."""
    return min(count for count, ms in times.items() if ms <= AS_GOOD * min(times.values()))


def token_times(model: Transformer, step: DecodeStep) -> dict[int, float]:
    """Return milliseconds of a decode step by thread count, beside a thread as busy as a screen.

    Takes a fraction of a second, or three windows of three steps of each where these are slower.
    """
    counts = candidates(usable_cores())
    cache = model.new_cache()
    before = torch.get_num_threads()
    held = min(CACHED, max(1, cache.max_seq_len // 2))
    ids = torch.arange(held, device=model.device)[None] * 7919 % model.config.vocab_size
    times: dict[int, float] = {}
    try:
        model(ids, cache, 0)
        with _busy_screen():
            for count in counts:
                torch.set_num_threads(count)
                step(0, cache)  # starts the threads
                times[count] = min(_window_ms(step, cache, held) for _ in range(ROUNDS))
                if times[count] > WORSE * min(times.values()):
                    break
    finally:
        torch.set_num_threads(before)
    return times


def candidates(cores: int) -> list[int]:
    """Return the counts to try on so many cores: one is left for the screen if there are three.

    With two, the screen takes little of the second one and the model gains much by it.
    """
    limit = cores if cores <= 2 else cores - 1
    return sorted({count for count in LADDER if count < limit} | {limit})


def usable_cores() -> int:
    """Return how many cores this process may keep busy; a container may have less than all."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such limit: the quota is then the word max
        return cores


def _window_ms(step: DecodeStep, cache: KVCache, held: int) -> float:
    """Mean time of the steps that end within one refresh, three of them at least."""
    started, steps = time.perf_counter(), 0
    while steps < 3 or time.perf_counter() - started < REFRESH_S:
        cache.truncate(held)
        step(0, cache)
        steps += 1
    return (time.perf_counter() - started) / steps * 1e3


@contextmanager
def _busy_screen() -> Iterator[None]:
    done = threading.Event()

    def paint() -> None:
        while not done.wait(REFRESH_S - PAINT_S):
            until = time.perf_counter() + PAINT_S
            while time.perf_counter() < until:
                pass

    thread = threading.Thread(target=paint, name="busy-screen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _known() -> dict[str, Any]:
    known = remembered().get(_NAME)
    return known if isinstance(known, dict) else {}


def _key(step: DecodeStep, path: Path, weights: str) -> str:
    """Name what the count holds for: the model, how it is run, and the machine with its torch."""
    machine = native.home(Path()).name
    return f"{path}, {weights}, {type(step).__name__}, {usable_cores()} cores, {machine}"
