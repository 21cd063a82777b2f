"""What a forward pass over a few tokens costs beside a decode step, by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from kvchat.engine.model import Transformer
from kvchat.engine.speculation import WIDTHS, PassCosts
from kvchat.engine.step import DecodeStep

CACHED = 64
"""Tokens cached while measuring."""
SECONDS = 1.0
"""For so long rounds are begun: the fastest of many runs is the least disturbed one."""


def measure_pass_costs(model: Transformer, step: DecodeStep) -> PassCosts:
    """Time a decode step and passes over each of `WIDTHS` tokens, in turn, in a cache of their own.

    Returns the costs of the widths, in steps; none if the context does not hold that many tokens.
    A wider pass never counts as cheaper than a narrower one, nor any as cheaper than a step.
    """
    cache = model.new_cache()
    cached = min(CACHED, cache.max_seq_len - max(WIDTHS))
    if cached < 1:
        return {}
    vocabulary = model.config.vocab_size
    ids = torch.arange(cached + max(WIDTHS), device=model.device)[None] * 7919 % vocabulary
    model(ids[:, :cached], cache, 0)

    def pass_over(width: int) -> Callable[[], Tensor]:
        following = ids[:, cached : cached + width]
        return lambda: model(following, cache, cached, all_logits=True)[0]

    runs = {width: pass_over(width) for width in WIDTHS}
    runs[1] = lambda: step(7919 % vocabulary, cache)
    fastest = dict.fromkeys(runs, float("inf"))
    for run in runs.values():  # to warm up
        cache.truncate(cached)
        run()
    started = time.perf_counter()
    while True:
        for width, run in runs.items():
            cache.truncate(cached)
            begun = time.perf_counter()
            run().flatten()[-1].item()  # a figure in hand: a device may still be computing
            fastest[width] = min(fastest[width], time.perf_counter() - begun)
        if time.perf_counter() - started > SECONDS:
            break
    costs = (max(fastest[width] / fastest[1], 1.0) for width in WIDTHS)
    return dict(zip(WIDTHS, accumulate(costs, max), strict=True))
