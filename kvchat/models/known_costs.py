"""Costs of forward passes, measured once for a model on this machine and then remembered.

They decide which drafts are run, and so which kernels compute a reply: were they measured at every
start, a seed would not give the same reply again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import kvchat
from kvchat.engine.engine import Engine
from kvchat.engine.pass_costs import measure_pass_costs
from kvchat.engine.speculation import WIDTHS, PassCosts
from kvchat.settings import remember, remembered

_NAME = "pass_costs"


def pass_costs(engine: Engine, path: Path, weights: str) -> PassCosts:
    """Return the costs for an engine whose model is loaded from `path` with such weights."""
    device, threads = engine.model.device, torch.get_num_threads()
    executor = type(engine.step).__name__
    versions = f"kvchat {kvchat.__version__}, torch {torch.__version__}"
    key = f"{path}, {weights}, {device}, {threads} threads, {executor}, {versions}"
    known = remembered().get(_NAME)
    known = known if isinstance(known, dict) else {}
    costs = _sound(known.get(key))
    if costs is None:
        costs = {
            width: round(cost, 3)
            for width, cost in measure_pass_costs(engine.model, engine.step).items()
        }
        stored = {str(width): cost for width, cost in costs.items()}
        remember(**{_NAME: {**known, key: stored}})
    return costs


def _sound(stored: Any) -> PassCosts | None:
    """Return what was remembered as costs, or None if it is none."""
    if not isinstance(stored, dict) or not set(stored) <= set(map(str, WIDTHS)):
        return None
    if not all(isinstance(c, int | float) and c > 0 and math.isfinite(c) for c in stored.values()):
        return None
    return {int(width): float(cost) for width, cost in stored.items()}
