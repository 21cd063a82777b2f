"""`kvchat bench --resume`: figures of the very thing they are said to be of."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvchat.bench.plan import LoadSettings
from kvchat.bench.resume import ResumeReport, ResumeResult, run
from kvchat.bench.resume_child import Errand, perform
from kvchat.engine.errors import SettingError


def settings(folder: Path) -> LoadSettings:
    return LoadSettings(model=str(folder), device="cpu", dtype="float32", quant="none")


def test_a_chat_is_written_and_opened_in_processes_of_their_own(folder: Path) -> None:
    steps: list[str] = []
    result = run(settings(folder), 1, tokens=300, progress=steps.append)
    assert result.tokens > 250
    assert result.snapshot_bytes > 0
    times = (result.save_ms, result.load_ms, result.resumed_ttft_ms, result.live_ttft_ms)
    assert min(*times, result.cold_ttft_ms) > 0
    assert len(steps) == 3
    told = json.loads(result.to_json())
    assert set(told) == set(ResumeResult.__dataclass_fields__)
    console = Console(width=100, record=True, file=StringIO())
    console.print(ResumeReport(result))
    assert "loading the snapshot" in console.export_text()


def test_the_first_turn_reuses_all_that_the_snapshot_has(folder: Path, tmp_path: Path) -> None:
    load = asdict(settings(folder))
    written = perform(Errand(load, str(tmp_path), "write", 300))
    opened = perform(Errand(load, str(tmp_path), "resume", 300))
    assert opened.loaded == opened.tokens == written.tokens


def test_nothing_to_repeat_is_refused(folder: Path) -> None:
    with pytest.raises(SettingError):
        run(settings(folder), 0)
