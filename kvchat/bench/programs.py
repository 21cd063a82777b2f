"""`python -m kvchat.bench.programs`: one program, measured in a process of its own.

Reads a `Task` as JSON from stdin. Prints `ready` on a line when the model can answer, then its
measurements as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kvchat.bench.program_kvchat import Kvchat
from kvchat.bench.program_llama_cpp import LlamaCpp
from kvchat.bench.program_transformers import Transformers
from kvchat.bench.task import Program, Task

PROGRAMS: dict[str, type[Program]] = {
    "kvchat": Kvchat,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def peak_memory() -> int | None:
    """Return the most memory this process ever had resident, in bytes, where the system tells."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux that starts from what the parent had when it made this process.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def perform(task: Task, ready: Callable[[], None]) -> dict[str, Any]:
    """Load, say so, warm up, measure; returns the fields of `kvchat.bench.peers.Measured`."""
    kind = PROGRAMS[task.program]
    kind.imports()
    figures: dict[str, Any] = {"import_memory_bytes": peak_memory()}
    program = kind(task)
    ready()
    if task.decode_ids:
        figures["decode_ms"] = _decode_ms(program, task, task.decode_ids)
        figures["reply_memory_bytes"] = peak_memory()
    if task.prefill_ids:
        figures["prefill_ms"] = _ttft_ms(program, task, task.prefill_ids, held=0)
    if task.turn_ids:
        figures["turn_ttft_ms"] = _ttft_ms(program, task, task.turn_ids, held=task.turn_held)
    if task.long_ids:
        figures["long_decode_ms"] = _decode_ms(program, task, task.long_ids)
    return {**figures, "peak_memory_bytes": peak_memory()}


def _ttft_ms(program: Program, task: Task, ids: list[int], *, held: int) -> float:
    waits = []
    for _ in range(task.repeats):
        program.hold(ids[:held])
        waits.append(program.reply(ids, 1).ttft_ms)
    return median(waits)


def _decode_ms(program: Program, task: Task, ids: list[int]) -> float:
    """Mean time of a token, the median of all repeats; the first tokens warm up."""
    program.hold(ids[:-1])
    program.reply(ids, 2)
    means = []
    for _ in range(task.repeats):
        program.hold(ids[:-1])
        times = program.reply(ids, task.decode_tokens).token_ms
        means.append(sum(times) / len(times))
    return median(means)


def main() -> None:
    """Do the task that stands on stdin."""
    task = Task(**json.load(sys.stdin))
    figures = perform(task, lambda: print("ready", flush=True))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
