"""Costs are measured once and then remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_engine

from kvchat.models import known_costs
from kvchat.models.known_costs import pass_costs
from kvchat.settings import remember, remembered, state_file

MEASURED = {4: 1.40004, 8: 2.5, 16: 4.0}
KEPT = {4: 1.4, 8: 2.5, 16: 4.0}


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every measurement, in a data folder of its own."""
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path))
    made: list[Any] = []

    def measure(*what: Any) -> dict[int, float]:
        made.append(what)
        return MEASURED

    monkeypatch.setattr(known_costs, "measure_pass_costs", measure)
    return made


def test_they_are_measured_once_for_a_model_and_its_weights(measurements: list[Any]) -> None:
    remember(theme="paper")
    engine = tiny_engine()
    for _ in range(2):
        assert pass_costs(engine, Path("a.gguf"), "int4") == KEPT
    assert len(measurements) == 1
    assert pass_costs(engine, Path("a.gguf"), "float32") == KEPT
    assert pass_costs(engine, Path("b.gguf"), "int4") == KEPT
    assert len(measurements) == 3
    assert pass_costs(engine, Path("a.gguf"), "int4") == KEPT
    assert len(measurements) == 3
    assert remembered()["theme"] == "paper"


@pytest.mark.parametrize(
    "damage", ["3", "[]", '{"4": "much"}', '{"4": -1}', '{"four": 1}', '{"4": NaN}']
)
def test_damaged_ones_are_measured_again(measurements: list[Any], damage: str) -> None:
    engine = tiny_engine()
    pass_costs(engine, Path("a.gguf"), "int4")
    (key,) = remembered()["pass_costs"]
    quoted = key.replace("\\", "\\\\").replace('"', '\\"')
    state_file().write_text(f'{{"pass_costs": {{"{quoted}": {damage}}}}}')
    assert pass_costs(engine, Path("a.gguf"), "int4") == KEPT
    assert len(measurements) == 2
    state_file().write_text('{"pass_costs": 3}')
    assert pass_costs(engine, Path("a.gguf"), "int4") == KEPT
    assert len(measurements) == 3
