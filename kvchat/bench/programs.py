"""`python -m kvchat.bench.programs`: one program, measured in a process of its own.

Reads a `Task` as JSON from stdin. Prints `ready` on a line when the model can answer, then its
measurements as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from kvchat.bench.plan import LoadSettings


@dataclass(frozen=True, slots=True)
class Task:
    """What one process shall do."""

    program: str
    load: dict[str, Any]
    """Fields of `LoadSettings`."""
    sampling: dict[str, Any]
    """Sampling settings that all programs know."""
    prefill_ids: list[int]
    decode_ids: list[int]
    decode_tokens: int
    repeats: int


class Program(Protocol):
    """Something that runs a language model."""

    def prefill_ms(self, ids: Sequence[int]) -> float:
        """Time from nothing to the logits that follow `ids`."""

    def decode_ms(self, ids: Sequence[int], tokens: int) -> list[float]:
        """Times between the tokens of a sampled reply of that many tokens."""


class Ours:
    """kvchat itself."""

    def __init__(self, load_settings: LoadSettings, sampling: dict[str, Any]) -> None:
        from kvchat.engine.types import SamplingParams
        from kvchat.models.load import load

        self.engine = load(load_settings.model, **load_settings.arguments()).engine
        self.params = SamplingParams(**sampling, seed=0)

    def prefill_ms(self, ids: Sequence[int]) -> float:
        """As a chat does it, the first draw included."""
        from kvchat.bench import speed

        return speed.prefill_ms(self.engine, ids, self.params)

    def decode_ms(self, ids: Sequence[int], tokens: int) -> list[float]:
        """As a chat does it."""
        from kvchat.bench import speed

        speed.forget(self.engine)
        return speed.reply(self.engine, ids, self.params, tokens=tokens).token_ms


class Transformers:
    """Hugging Face transformers with its default settings in bfloat16, on the same device."""

    def __init__(self, load_settings: LoadSettings, sampling: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        from kvchat.models.load import pick_device

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if load_settings.threads is not None:
            torch.set_num_threads(load_settings.threads)
        self.device = pick_device(load_settings.device)
        path = Path(load_settings.model)
        where = (
            {"pretrained_model_name_or_path": path}
            if path.is_dir()
            else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        )
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        self.model: Any = model.to(self.device).eval()  # type: ignore[arg-type]
        self.model.generation_config.eos_token_id = None
        self.sampling = sampling

    def prefill_ms(self, ids: Sequence[int]) -> float:
        """One forward pass that keeps the cache and computes the last logits only."""
        import torch

        input_ids = torch.tensor([list(ids)], device=self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self.model(input_ids, use_cache=True, logits_to_keep=1).logits
        logits[0, -1, 0].item()
        return (time.perf_counter() - started) * 1e3

    def decode_ms(self, ids: Sequence[int], tokens: int) -> list[float]:
        """`generate`, timed by a streamer."""
        import torch

        input_ids = torch.tensor([list(ids)], device=self.device)
        clock = _Clock()
        self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=tokens,
            do_sample=True,
            streamer=clock,
            **self.sampling,
        )
        drawn = clock.times[1:]  # the first call hands over the prompt
        return [(b - a) * 1e3 for a, b in pairwise(drawn)]


class _Clock:
    """A streamer that only notes when it is called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


PROGRAMS: dict[str, Callable[[LoadSettings, dict[str, Any]], Program]] = {
    "kvchat": Ours,
    "transformers": Transformers,
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
    """Load, say so, warm up, measure."""
    program = PROGRAMS[task.program](LoadSettings(**task.load), task.sampling)
    ready()
    program.decode_ms(task.decode_ids, 2)
    prefills = [program.prefill_ms(task.prefill_ids) for _ in range(task.repeats)]
    decodes = [program.decode_ms(task.decode_ids, task.decode_tokens) for _ in range(task.repeats)]
    return {
        "prefill_ms": median(prefills),
        "decode_ms": median(sum(each) / len(each) for each in decodes),
        "peak_memory_bytes": peak_memory(),
    }


def main() -> None:
    """Do the task that stands on stdin."""
    task = Task(**json.load(sys.stdin))
    figures = perform(task, lambda: print("ready", flush=True))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
