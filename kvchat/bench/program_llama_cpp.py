"""llama.cpp, through llama-cpp-python, as one of the programs that are compared.

It may run in an interpreter of its own, which need not have torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

from kvchat.bench.task import Task, Timing
from kvchat.engine.token_ids import common_prefix

NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Sampling settings, as kvchat calls them and as llama-cpp-python does."""

PAD = 256
"""llama.cpp makes its cache a multiple of this long."""


class LlamaCpp:
    """llama.cpp on the CPU; the options of a task are passed to its constructor.

    Its cache is as long as the task needs and no longer: it is allocated whole, so a longer one
    would cost memory and time that no figure is about.
    """

    @staticmethod
    def imports() -> None:
        """Import the library."""
        import llama_cpp  # noqa: F401

    def __init__(self, task: Task) -> None:
        from llama_cpp import Llama

        self.llm: Any = Llama(
            task.settings.model,
            n_ctx=-(-task.room // PAD) * PAD,
            n_threads=task.settings.threads,
            n_threads_batch=task.settings.threads,
            verbose=False,
            **task.options,
        )
        self.sampling = {NAMES[name]: value for name, value in task.sampling.items()}

    def hold(self, ids: Sequence[int]) -> None:
        """Keep the common prefix, as `generate` does too, and evaluate the rest."""
        keep = common_prefix(self.llm.input_ids[: self.llm.n_tokens].tolist(), list(ids))
        # The positions beyond are removed by the next evaluation.
        self.llm.n_tokens = keep
        if keep < len(ids):
            self.llm.eval(list(ids[keep:]))

    def reply(self, ids: Sequence[int], tokens: int) -> Timing:
        """`generate`, which keeps the cached prefix by itself."""
        started = time.perf_counter()
        drawn = islice(self.llm.generate(list(ids), **self.sampling), tokens)
        times = [time.perf_counter() for _ in drawn]
        return Timing((times[0] - started) * 1e3, [(b - a) * 1e3 for a, b in pairwise(times)])
