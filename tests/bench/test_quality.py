"""What the precision of the weights costs; the default model is held to the guard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvchat import cli
from kvchat.bench.plan import LoadSettings, QualityPlan
from kvchat.bench.quality import (
    VARIANTS,
    Loss,
    QualityResult,
    Variant,
    decoded,
    divergence,
    measure,
    text,
)
from kvchat.bench.quality_report import QualityReport
from kvchat.models.load import load

EXACT = Variant("float32", {"dtype": "float32", "quant": "none"})


def test_divergence_is_that_of_the_distributions() -> None:
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 1.0]])
    other = torch.tensor([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0]])
    kl, same = divergence(exact, other)
    p, q = exact[1].softmax(0), other[1].softmax(0)
    assert kl.tolist() == pytest.approx([0.0, (p * (p / q).log()).sum().item()], abs=1e-6)
    assert same.tolist() == [True, False]


def test_decode_steps_are_scored_as_a_prefill_is(folder: Path) -> None:
    llm = load(str(folder), device="cpu", dtype="float32", quant="none")
    ids = llm.tokenizer.encode_plain(text())[:40]
    sampler = llm.engine.sampler
    stepwise = torch.stack(list(decoded(llm.engine, ids)))
    assert torch.allclose(stepwise, llm.score(ids)[:-1], atol=1e-4)
    assert llm.engine.sampler is sampler


def test_the_same_weights_lose_nothing(folder: Path) -> None:
    settings = LoadSettings(model=str(folder), device="cpu")
    plan = QualityPlan(tokens=90, window=40)
    coarse = Variant("bfloat16", {"dtype": "bfloat16", "quant": "none"})
    found = measure(settings, plan, variants=[EXACT, coarse])
    assert found.tokens == 80
    exact, rounded = found.variants
    assert max(exact.prefill_kl, exact.decode_kl) < 1e-7
    assert (exact.weights, exact.goal) == ("float32", None)
    assert min(rounded.prefill_kl, rounded.decode_kl) > 1e-7
    assert (rounded.weights, rounded.goal) == ("bfloat16", 0.002)


def test_the_command_tells_every_variant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-m", str(folder), "--device", "cpu", "--ctx", "100", "--threads", "1"]
    assert cli.run(["bench", "--quality", "--quick", "--json", *flags]) == cli.DONE
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["name"] for each in said["variants"]] == [each.name for each in VARIANTS]
    assert said["tokens"] > 400


def test_the_command_refuses_what_has_no_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--quality", "--ui"]) == cli.BAD_USAGE
    assert "--quality has no meaning with --ui" in capsys.readouterr().err
    assert cli.run(["bench", "--quality", "--turns", "2", "--repeats", "3"]) == cli.BAD_USAGE
    assert "--turns has no meaning with --quality" in capsys.readouterr().err


def test_the_report_says_what_is_missed() -> None:
    kept = Loss("as set", "int4", 10**8, 0.001, 0.0015, 0.98, 0.97, 0.005)
    missed = replace(kept, name="rough", decode_kl=0.5)
    free = replace(missed, name="free", goal=None)
    found = QualityResult("some model", 1, 512, [kept, missed, free], QualityPlan())
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(QualityReport(found))
    words = [line.split() for line in capture.get().splitlines()[-3:]]
    assert words[0][-6:] == ["0.00100", "0.00150", "97.0%", "≤", "0.005", "reached"]
    assert words[1][-5:] == ["0.50000", "97.0%", "≤", "0.005", "missed"]
    assert words[2][-1] == "97.0%"


@pytest.fixture(scope="session")
def quality(default_model_path: Path) -> QualityResult:
    settings = LoadSettings(model=str(default_model_path), device="cpu")
    return measure(settings, QualityPlan(tokens=192, window=192))


@pytest.mark.real_model
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [each.name for each in VARIANTS])
def test_the_default_model_loses_little(quality: QualityResult, name: str) -> None:
    """In prefill and in decode steps alike; its file holds Q4_1 blocks and a Q8_0 head."""
    loss = next(each for each in quality.variants if each.name == name)
    assert loss.goal is not None
    assert loss.prefill_kl <= loss.goal
    assert loss.decode_kl <= loss.goal
