"""The measured costs of passes over several tokens."""

from __future__ import annotations

from itertools import pairwise

from tiny import tiny_engine, tiny_model

from kvchat.engine.pass_costs import measure_pass_costs
from kvchat.engine.speculation import WIDTHS
from kvchat.engine.step import EagerStep


def test_every_width_has_a_cost_and_a_wider_one_is_no_cheaper(monkeypatch):
    monkeypatch.setattr("kvchat.engine.pass_costs.SECONDS", 0.05)
    engine = tiny_engine()
    list(engine.prefill([1, 2, 3]))
    costs = measure_pass_costs(engine.model, engine.step)
    assert tuple(costs) == WIDTHS
    assert all(1 <= a <= b for a, b in pairwise(costs.values()))
    assert list(engine.ids) == [1, 2, 3]
    assert engine._context.cache.length == 3


def test_a_context_too_small_for_a_draft_has_no_costs():
    model = tiny_model(max_seq_len=16)
    assert measure_pass_costs(model, EagerStep(model)) == {}
