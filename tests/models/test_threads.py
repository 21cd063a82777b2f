"""The thread count: what is tried, what is chosen, and that it is chosen once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from kvchat import cli
from kvchat.engine.step import EagerStep
from kvchat.models import threads
from kvchat.settings.memory import state_file


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_counts_that_are_tried_leave_a_core_for_the_screen_where_there_are_three() -> None:
    tried = {cores: threads.candidates(cores) for cores in (1, 2, 3, 4, 6, 10, 64)}
    assert tried == {
        1: [1],
        2: [1, 2],
        3: [1, 2],
        4: [1, 2, 3],
        6: [1, 2, 3, 4, 5],
        10: [1, 2, 3, 4, 6, 8, 9],
        64: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63],
    }


def test_the_smallest_count_that_is_about_as_fast_is_chosen() -> None:
    assert threads.choose({1: 10.0, 2: 6.0, 4: 5.0, 6: 4.9, 8: 6.0}) == 4
    assert threads.choose({1: 7.0, 2: 28.0}) == 1


def test_a_container_may_have_fewer_cores_than_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    said = {"": 8, "max 100000": 8, "250000 100000": 2, "50000 100000": 1, "9900000 100000": 8}
    for limit, cores in said.items():
        monkeypatch.setattr(Path, "read_text", lambda *_, limit=limit: limit)
        assert threads.usable_cores() == cores


def test_times_are_measured_and_the_count_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    model = tiny_model()
    before = torch.get_num_threads()
    times = threads.token_times(model, EagerStep(model))
    assert set(times) <= {1, 2}
    assert 1 in times
    assert min(times.values()) > 0
    assert torch.get_num_threads() == before


def test_no_more_counts_are_tried_once_they_slow_it_down(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {1: 4.0, 2: 3.0, 3: 3.1, 4: 9.0, 6: 1.0}
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(threads, "_window_ms", lambda *_: slow[torch.get_num_threads()])
    before = torch.get_num_threads()
    model = tiny_model()
    assert threads.token_times(model, EagerStep(model)) == {1: 4.0, 2: 3.0, 3: 3.1, 4: 9.0}
    assert torch.get_num_threads() == before


def test_a_choice_holds_for_one_model_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{1: 2.0, 2: 1.0}, {1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}])
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "token_times", lambda *_: next(found))
    model = tiny_model()
    step = EagerStep(model)

    def chosen(path: str, weights: str = "int4") -> int:
        return threads.best_threads(model, step, Path(path), weights)

    assert [chosen("a"), chosen("b"), chosen("a"), chosen("b")] == [2, 1, 2, 1]
    assert threads.tune(model, step, Path("a"), "int4")[0] == 1
    assert chosen("a") == 1
    assert next(found, None) is None


def test_only_the_latest_choices_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "token_times", lambda *_: {1: 1.0, 2: 2.0})
    monkeypatch.setattr(threads, "KEPT", 3)
    model = tiny_model()
    for name in ("a", "b", "c", "a", "d"):
        threads.tune(model, EagerStep(model), Path(name), "int4")
    kept = json.loads(state_file().read_text())["threads"]
    assert [key.partition(",")[0] for key in kept] == ["c", "a", "d"]


@pytest.mark.parametrize("stored", ["3", '"two"', "[]", '{"threads": 5}', '{"threads": {"x": 0}}'])
def test_damaged_memory_is_measured_again(monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "token_times", lambda *_: {1: 2.0, 2: 1.0})
    state_file().write_text(stored)
    model = tiny_model()
    assert threads.best_threads(model, EagerStep(model), Path("a"), "int4") == 2
    assert list(json.loads(state_file().read_text())["threads"].values())[-1] == 2


def test_a_count_from_outside_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "token_times", lambda *_: pytest.fail("measured"))
    model = tiny_model()
    count = threads.best_threads(model, EagerStep(model), Path("a"), "int4")
    assert count == torch.get_num_threads()


def test_the_command_measures_anew_and_keeps_the_choice(
    monkeypatch: pytest.MonkeyPatch,
    default_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(threads, "token_times", lambda *_: {1: 5.0, 2: 4.0})
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    flags = ["-m", str(default_model_path), "--device", "cpu"]
    assert cli.run(["bench", "--tune-threads", *flags]) == cli.DONE
    assert "2 of 2 cores" in capsys.readouterr().out
    monkeypatch.setattr(threads, "token_times", lambda *_: pytest.fail("measured"))
    from kvchat.models.load import load

    before = torch.get_num_threads()
    try:
        load(default_model_path, device="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
