from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvchat import cli
from kvchat.bench.speculation import SCENARIOS, SpeculationReport, measure
from kvchat.models.load import load

FREE = {4: 0.1, 8: 0.2, 16: 0.4}


@pytest.fixture(autouse=True)
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs at which every draft is run, remembered in a folder of their own."""
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("kvchat.models.known_costs.measure_pass_costs", lambda *_: FREE)


def test_both_ways_write_the_same_and_drafts_are_counted(folder: Path) -> None:
    llm = load(str(folder), device="cpu", dtype="float32", quant="none", speculate=True)
    told: list[str] = []
    result = measure(llm, 1, told.append)
    assert [gain.name for gain in result.gains] == [each.name for each in SCENARIOS]
    for gain in result.gains:
        assert gain.same_text
        assert 0 <= gain.accepted <= gain.proposed
        assert gain.ratio == pytest.approx(gain.speculating_tps / gain.plain_tps)
    assert sum(gain.proposed for gain in result.gains) > 0
    assert llm.engine.pass_costs == result.pass_costs == FREE
    assert len(told) == 4 * len(SCENARIOS)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(SpeculationReport(result))
    shown = captured.get()
    assert all(each.name in shown for each in SCENARIOS)
    assert "16 tokens 0.40" in shown
    assert "Texts differ" not in shown


def test_a_context_too_small_for_drafts_is_told(folder: Path) -> None:
    llm = load(str(folder), device="cpu", dtype="float32", quant="none", ctx=40, speculate=True)
    llm.engine.pass_costs = {}
    result = measure(llm, 1)
    assert all(gain.proposed == 0 and gain.tokens <= 20 for gain in result.gains)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(SpeculationReport(result))
    assert "too small for drafts" in captured.get()


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "-m", str(folder), "--dtype", "float32", "--speculate", "--quick"]
    assert cli.run([*asked, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pass_costs"] == {str(width): cost for width, cost in FREE.items()}
    assert result["repeats"] == 1
    assert cli.run([*asked, "--turns", "3"]) == 2
    assert "no meaning with --speculate" in capsys.readouterr().err
    assert cli.run([*asked, "--repeats", "0"]) == 2
