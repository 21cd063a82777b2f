from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_checkpoints import reference, save_folder

from kvchat.bench import verify_report
from kvchat.bench.verify import Verification, verify
from kvchat.bench.verify_scripts import scripts, thoughtful
from kvchat.cli import run
from kvchat.engine.engine import Engine
from kvchat.models.load import load


@pytest.fixture(scope="session")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference("smollm2", max_position_embeddings=1024)
    return save_folder(model, tmp_path_factory.mktemp("models") / "verified")


@pytest.fixture(scope="module")
def sound(babbler: Path) -> Verification:
    return verify(load(str(babbler), device="cpu", dtype="float32", quant="none"))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is damaged whenever its end is cut off."""
    truncate = Engine.truncate

    @torch.inference_mode()
    def damaging(engine: Engine, n: int) -> None:
        cut = n < len(engine.ids)
        truncate(engine, n)
        if cut:
            for keys in engine._context.cache.keys:
                keys.mul_(-1.0)

    monkeypatch.setattr(Engine, "truncate", damaging)


def shown(found: Verification) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(verify_report.table(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_sound_cache_gives_the_same_answers(sound: Verification) -> None:
    assert sound.exact and not sound.different and not sound.failed
    assert 0.0 < sound.logit_gap < 1e-4


def test_the_script_does_what_cuts_a_cache(sound: Verification) -> None:
    reasons = {turn.finish_reason for turn in sound.turns}
    assert reasons == {"stop", "length", "cancelled"}
    fresh = [turn.name for turn in sound.turns if not turn.reused]
    assert fresh == ["first message", "small context"]
    names = [turn.name for turn in sound.turns]
    assert len(set(names)) == len(names)
    stopped = next(turn for turn in sound.turns if "at its beginning" in turn.name)
    assert stopped.decoded == 0 and stopped.logit_gap is None
    continued = [turn for turn in sound.turns if turn.name.endswith(", continued")]
    assert len(continued) == 4 and all(turn.new < turn.reused for turn in continued)


def test_turns_are_dropped_and_seen_again(sound: Verification) -> None:
    assert sum(turn.dropped_turns for turn in sound.turns) > 0
    after, back = sound.turns[-2:]
    assert (after.name, back.name) == ("after turns were dropped", "back before they were")
    assert back.dropped_turns == 0


def test_thinking_is_forgotten(babbler: Path) -> None:
    llm = load(str(babbler), device="cpu", dtype="float32", quant="none")
    chats = [chat for chat, script in scripts(llm) if script is thoughtful]
    for step in thoughtful(chats[0]):
        list(step.events)
    thought, *_, last = [node for node in chats[0].conversation if node.reply]
    assert thought.reply.thinking and last.parent
    prompt = chats[0].conversation.context_ids(last.id)
    text = llm.tokenizer.decode(prompt)
    assert text.count("<think>") == 1  # that of the reply that is being written


@pytest.mark.usefixtures("forgetful")
def test_a_damaged_cache_is_found(babbler: Path) -> None:
    found = verify(load(str(babbler), device="cpu", dtype="float32", quant="none"))
    assert found.failed
    assert any("with the cache" in (turn.difference or "") for turn in found.different)
    assert "Different:" in shown(found)


def test_verifying_twice_finds_the_same(babbler: Path) -> None:
    llm = load(str(babbler), device="cpu", dtype="float32", quant="none")
    first, second = verify(llm), verify(llm)
    assert [(t.reused, t.new, t.decoded) for t in first.turns] == [
        (t.reused, t.new, t.decoded) for t in second.turns
    ]


@pytest.mark.usefixtures("forgetful")  # whether sound runs differ hangs on the processor
def test_other_dtypes_are_measured_not_judged(babbler: Path) -> None:
    found = verify(load(str(babbler), device="cpu", dtype="bfloat16", quant="none"))
    assert not found.exact and not found.failed
    assert found.logit_gap > 1e-3 and found.kl > 0.0
    assert "mean KL" in shown(found)


def test_the_table_has_a_line_for_every_reply(sound: Verification) -> None:
    text = shown(sound)
    assert all(turn.name in text for turn in sound.turns)
    assert "Equal with the cache and without it: " in text


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"KVCHAT_{kind}_DIR", str(tmp_path / kind))


@pytest.mark.usefixtures("own_home")
def test_the_command_prints_json(babbler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "-m", str(babbler), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["equal"] and data["exact"] and data["dtype"] == "float32"
    assert len(data["turns"]) > 12 and data["turns"][1]["reused"] > 0
    assert run(["verify", "-m", str(babbler), "--json", "--dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"


@pytest.mark.usefixtures("own_home", "forgetful")
def test_the_command_fails_on_a_difference(
    babbler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "-m", str(babbler)]) == 1
    assert "Different" in capsys.readouterr().out
    assert run(["verify", "-m", str(babbler), "--dtype", "bfloat16"]) == 0


@pytest.mark.usefixtures("own_home")
def test_own_settings_are_those_of_a_chat(
    babbler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "-m", str(babbler), "--json", "--device", "cpu"]) == 0
    expected = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    assert json.loads(capsys.readouterr().out)["dtype"] == expected
