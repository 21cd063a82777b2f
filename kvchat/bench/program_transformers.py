"""Hugging Face transformers as one of the programs that are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvchat.bench.task import Task, Timing
from kvchat.engine.token_ids import common_prefix


class Transformers:
    """transformers with its default settings in bfloat16, on the same device as kvchat."""

    @staticmethod
    def imports() -> None:
        """Import torch and the classes of models."""
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache, logging

        from kvchat.models.load import pick_device

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        settings = task.settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.device = pick_device(settings.device)
        path = Path(settings.model)
        where = (
            {"pretrained_model_name_or_path": path}
            if path.is_dir()
            else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        )
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        self.model: Any = model.to(self.device).eval()  # type: ignore[arg-type]
        self.model.generation_config.eos_token_id = None
        self.sampling = task.sampling
        self.cache: Any = DynamicCache()
        self.held: list[int] = []
        """The ids in the cache."""

    def hold(self, ids: Sequence[int]) -> None:
        """Crop the cache, run the rest in one forward pass."""
        import torch

        reuse = self._crop(common_prefix(self.held, list(ids)))
        if rest := list(ids[reuse:]):
            with torch.inference_mode():
                self.model(
                    torch.tensor([rest], device=self.device),
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        self.held = list(ids)

    def reply(self, ids: Sequence[int], tokens: int) -> Timing:
        """`generate` on top of the cache, timed by a streamer."""
        import torch

        self._crop(min(common_prefix(self.held, list(ids)), len(ids) - 1))
        input_ids = torch.tensor([list(ids)], device=self.device)
        clock = _Clock()
        started = time.perf_counter()
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=self.cache,
            max_new_tokens=tokens,
            do_sample=True,
            streamer=clock,
            **self.sampling,
        )
        self.held = output[0].tolist()[: self.cache.get_seq_length()]
        drawn = clock.times[1:]  # the first call hands over the prompt
        return Timing((drawn[0] - started) * 1e3, [(b - a) * 1e3 for a, b in pairwise(drawn)])

    def _crop(self, n: int) -> int:
        from transformers import DynamicCache

        if n == 0:
            self.cache = DynamicCache()
        elif n < len(self.held):
            self.cache.crop(n - len(self.held))  # by how many: a length is not taken any more
        del self.held[n:]
        return n


class _Clock:
    """A streamer that only notes when it is called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
