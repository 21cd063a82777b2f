from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvchat import cli
from kvchat.bench import goals
from kvchat.bench.plan import LoadSettings
from kvchat.bench.store import QUERIES, RARE, StorePlan, StoreResult, _batches, _chats, run
from kvchat.bench.store_report import StoreReport
from kvchat.chat.store import Store

SMALL = StorePlan(chats=40, branches=3, message_tokens=4, reply_tokens=12, repeats=2)


@pytest.fixture(scope="module")
def result(folder: Path) -> StoreResult:
    return run(LoadSettings(model=str(folder), device="cpu", ctx=200, threads=1), SMALL)


def test_what_is_measured_and_kept(result: StoreResult) -> None:
    assert (result.chats, result.messages) == (40, 400)
    assert set(result.search_ms) == set(QUERIES)
    assert result.hand_over_ms_p99 > 0
    assert result.hand_over_ms_max > 0
    assert 0 < result.saving_cpu_share < 1
    assert result.search_ms_max == max(result.search_ms.values())


def test_the_json_has_every_figure(result: StoreResult) -> None:
    data = json.loads(result.to_json())
    assert set(data) == set(StoreResult.__dataclass_fields__)
    assert data["plan"]["chats"] == 40


def test_the_report_shows_every_goal(result: StoreResult) -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(StoreReport(result))
    shown = captured.get()
    assert "40 chats with 400 messages" in shown
    assert all(goal.name in shown for goal in goals.STORE)
    assert all(f"search for {query}" in shown for query in QUERIES)


def test_each_query_but_the_last_finds_something(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.db")
    for batch in _batches(_chats(SMALL)):
        store.save_all(batch)
    found = {query: len(store.search(query)) for query in QUERIES}
    assert [query for query, hits in found.items() if not hits] == ["→", "absent"]
    assert found[RARE] < found["harbour"]


def test_what_does_not_go_together_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "-m", str(folder), "--store", "--turns", "3"]) == 2
    assert "--store" in capsys.readouterr().err
