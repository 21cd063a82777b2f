"""kvchat as one of the programs that are compared."""

from __future__ import annotations

from collections.abc import Sequence

from kvchat.bench.task import Task, Timing


class Kvchat:
    """kvchat's engine, as a chat uses it."""

    @staticmethod
    def imports() -> None:
        """Import torch."""
        import torch  # noqa: F401

    def __init__(self, task: Task) -> None:
        from kvchat.engine.types import SamplingParams
        from kvchat.models.load import load

        settings = task.settings
        self.engine = load(settings.model, **settings.arguments()).engine
        self.params = SamplingParams(**task.sampling, seed=0)

    def hold(self, ids: Sequence[int]) -> None:
        """Truncate to what is held of them, prefill the rest; leave nothing in the stash."""
        for _ in self.engine.prefill(ids):
            pass
        self.engine.stash.clear()

    def reply(self, ids: Sequence[int], tokens: int) -> Timing:
        """Generate, the first draw included in the TTFT."""
        from kvchat.bench import speed

        timed = speed.reply(self.engine, ids, self.params, tokens=tokens)
        return Timing(timed.ttft_ms, timed.token_ms)
