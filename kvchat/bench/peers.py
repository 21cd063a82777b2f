"""kvchat beside other programs: same file, same threads, processes of their own, in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from kvchat.bench.process import run_module
from kvchat.bench.programs import Task
from kvchat.bench.result import Contestant
from kvchat.engine.errors import SettingError

PEERS = {"transformers": ("transformers",)}
"""Programs that can be compared, and the packages each needs."""

GGUF_NEEDS = {"transformers": ("accelerate", "gguf")}
"""What they need besides for a GGUF file."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One process."""

    ready_s: float
    prefill_ms: float
    decode_ms: float
    peak_memory_bytes: int | None


def check_installed(peers: Sequence[str], path: Path) -> None:
    """Raise SettingError for a peer that is unknown, or lacks a package for the model `path`."""
    for peer in peers:
        if peer not in PEERS:
            raise SettingError(f"cannot compare with {peer}; known are: {', '.join(PEERS)}")
        needs = (*PEERS[peer], *(GGUF_NEEDS.get(peer, ()) if path.suffix == ".gguf" else ()))
        missing = [package for package in needs if find_spec(package) is None]
        if missing:
            raise SettingError(
                f"comparing with {peer} needs more packages; run: "
                f"{sys.executable} -m pip install {' '.join(missing)}"
            )


def measure(task: Task) -> Measured:
    """Run a task in a fresh process.

    Raises:
        KvchatError: the process failed; with the last line that it wrote.
    """
    lines = run_module("kvchat.bench.programs", asdict(task), f"Measuring {task.program}")
    ready_s = next(seconds for seconds, line in lines if line == "ready\n")
    return Measured(ready_s, **json.loads(lines[-1][1]))


def compare(
    ours: Task, peers: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> list[Contestant]:
    """Measure kvchat as it is set, kvchat in plain bfloat16, and the peers, in turn.

    Every round starts a process of each, so a slow spell of the machine meets them all.
    """
    plain = replace(ours, load={**ours.load, "dtype": "bfloat16", "quant": "none"})
    entries = [
        ("kvchat", "as set", ours),
        ("kvchat", "bfloat16", plain),
        *((peer, "bfloat16", replace(plain, program=peer)) for peer in peers),
    ]
    measured: list[list[Measured]] = [[] for _ in entries]
    for nth in range(rounds):
        for (name, settings, task), runs in zip(entries, measured, strict=True):
            progress(f"{name}, {settings}: round {nth + 1} of {rounds}")
            runs.append(measure(task))
    return [
        Contestant(
            name=name,
            settings=settings,
            prefill_tps=len(task.prefill_ids) / median(run.prefill_ms for run in runs) * 1e3,
            decode_tps=1e3 / median(run.decode_ms for run in runs),
            ready_s=median(run.ready_s for run in runs),
            peak_memory_bytes=_largest([run.peak_memory_bytes for run in runs]),
        )
        for (name, settings, task), runs in zip(entries, measured, strict=True)
    ]


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)
