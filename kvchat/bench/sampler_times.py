"""How long choosing a token takes, whatever the model."""

from __future__ import annotations

import time
from statistics import median

import torch

from kvchat.bench.result import SamplerTimes
from kvchat.engine.sampling import Sampler
from kvchat.engine.types import SamplingParams

CONTEXT = 256
"""Ids that the penalties look at."""

PEAKED, FLAT = 3.0, 0.05
"""Standard deviations of the logits: as a model's are, and all tokens about as probable."""


def measure(repeats: int = 25) -> SamplerTimes:
    """Draw from random logits of two common sizes of vocabulary."""
    top_k, flat = SamplingParams(), SamplingParams(top_k=0, top_p=0.95)
    assert top_k.top_k == 50
    return SamplerTimes(
        top_k_49152_ms=_draw_ms(49_152, PEAKED, top_k, repeats),
        top_k_151936_ms=_draw_ms(151_936, PEAKED, top_k, repeats),
        flat_49152_ms=_draw_ms(49_152, FLAT, flat, repeats),
        flat_151936_ms=_draw_ms(151_936, FLAT, flat, repeats),
    )


def _draw_ms(vocab_size: int, spread: float, params: SamplingParams, repeats: int) -> float:
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler()
    times = []
    for _ in range(1 + repeats):
        logits = torch.randn(vocab_size, generator=generator) * spread
        context = torch.randint(vocab_size, (CONTEXT,), generator=generator).tolist()
        started = time.perf_counter()
        sampler.sample(logits, context, params, generator)
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])
