"""Other programs beside ours: where they are found, what they are asked, how it is written."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console, Group
from synthetic import Shape, write

from kvchat.bench import peers, report
from kvchat.bench.beside import Beside
from kvchat.bench.plan import LoadSettings, Plan
from kvchat.bench.process import has_packages
from kvchat.bench.programs import PROGRAMS, perform
from kvchat.bench.result import BenchResult, Contestant
from kvchat.bench.run import run
from kvchat.bench.task import Task
from kvchat.engine.errors import KvchatError, SettingError

SAMPLING = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
}
SHAPE = Shape(
    n_layers=8, dim=64, n_heads=4, n_kv_heads=2, hidden_dim=256, vocab_size=512, max_seq_len=512
)


def task(model: Path, program: str = "kvchat", **given: object) -> Task:
    load = asdict(LoadSettings(model=str(model), device="cpu", threads=1))
    return Task(program=program, load=load, sampling=SAMPLING, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    write(path, SHAPE)
    return path


def test_unknown_and_missing_peers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, folder = Path("a.gguf"), Path("a")
    with pytest.raises(SettingError, match="cannot compare with abacus"):
        peers.interpreters(["abacus"], folder, None)
    abacus = peers.Peer(
        packages=("json",),
        gguf_packages=("no_such_package_at_all",),
        install="abacus",
        variants=(("as it is", {}),),
    )
    monkeypatch.setitem(peers.PEERS, "abacus", abacus)
    assert peers.interpreters(["abacus"], folder, None) == {"abacus": None}
    with pytest.raises(SettingError, match=r"pip install no_such_package_at_all.*--peer-python"):
        peers.interpreters(["abacus"], gguf, None)
    with pytest.raises(SettingError, match=r"pip install no_such_package_at_all$"):
        peers.interpreters(["abacus"], gguf, sys.executable)
    with pytest.raises(SettingError, match=r"reads GGUF files only; a is none"):
        peers.interpreters(["llama.cpp"], folder, None)


def test_another_interpreter_is_asked_for_its_packages(tmp_path: Path) -> None:
    assert has_packages(sys.executable, ["json", "torch"])
    assert not has_packages(sys.executable, ["json", "no_such_package_at_all"])
    with pytest.raises(SettingError, match="does not run as a Python interpreter"):
        has_packages(str(tmp_path / "python"), ["json"])


@pytest.mark.parametrize("python", [None, sys.executable])
def test_a_process_does_what_its_task_holds_and_no_more(folder: Path, python: str | None) -> None:
    asked = task(folder, decode_ids=[1, 2, 3], decode_tokens=4, turn_ids=[1, 2, 3, 4], turn_held=2)
    found = peers.measure(asked, python)
    assert found.decode_ms is not None
    assert found.turn_ttft_ms is not None
    assert found.prefill_ms is None
    assert found.long_decode_ms is None
    assert found.peak_memory_bytes >= found.reply_memory_bytes >= found.import_memory_bytes  # type: ignore[operator]


def test_a_failing_process_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(KvchatError, match=r"nothing\.gguf"):
        peers.measure(task(tmp_path / "nothing.gguf", decode_ids=[1]))


@pytest.mark.parametrize("program", ["kvchat", "transformers"])
def test_a_program_runs_only_what_it_does_not_hold(folder: Path, program: str) -> None:
    """The work is counted at the model itself: rows of every forward pass."""
    ids = list(range(1, 21))
    ours = PROGRAMS[program](task(folder, program, decode_ids=ids))
    rows = counted_rows(ours)
    ours.hold(ids[:15])
    ours.reply(ids, 1)
    assert rows == [15, 5]
    ours.hold(ids[:18])
    assert sum(rows) == 20
    assert len(ours.reply(ids, 3).token_ms) == 2
    assert rows == [15, 5, 2, 1, 1]
    ours.hold([])
    ours.reply(ids, 1)
    assert rows[5:] == [20]


def counted_rows(program: object) -> list[int]:
    """Note how many tokens each forward pass of a program gets from now on."""
    rows: list[int] = []

    def note(_: object, given: tuple[object, ...], named: dict[str, object]) -> None:
        input_ids = named["input_ids"] if "input_ids" in named else given[0]
        rows.append(input_ids.shape[1])  # type: ignore[attr-defined]

    model = program.model if hasattr(program, "model") else program.engine.model  # type: ignore[attr-defined]
    model.register_forward_pre_hook(note, with_kwargs=True)
    if hasattr(program, "engine"):
        from kvchat.engine.step import EagerStep

        program.engine.step = EagerStep(model)
    return rows


def test_llama_cpp_runs_only_what_it_does_not_hold(gguf_file: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    assert llama_cpp is not None
    ids = list(range(1, 21))
    peer = PROGRAMS["llama.cpp"](task(gguf_file, "llama.cpp", decode_ids=ids))
    llm = peer.llm  # type: ignore[attr-defined]
    peer.hold(ids[:15])
    assert llm.n_tokens == 15
    rows: list[int] = []
    evaluate = llm.eval
    llm.eval = lambda tokens: (rows.append(len(tokens)), evaluate(tokens))
    peer.reply(ids, 1)
    assert rows == [5]
    peer.hold(ids[:18])
    assert len(peer.reply(ids, 3).token_ms) == 2
    assert rows == [5, 2, 1, 1]


@pytest.mark.skipif(
    not os.environ.get("KVCHAT_PEER_PYTHON"), reason="needs an interpreter with llama-cpp-python"
)
def test_llama_cpp_is_measured_in_its_own_interpreter(gguf_file: Path) -> None:
    plan = Plan(
        repeats=1,
        prefill_tokens=40,
        decode_prompt=10,
        decode_tokens=6,
        long_contexts=(200,),
        turns=2,
        user_tokens=12,
        reply_tokens=9,
        branch_tokens=30,
        starts=1,
        rounds=1,
        light_repeats=1,
    )
    settings = LoadSettings(model=str(gguf_file), device="cpu", threads=1)
    python = os.environ["KVCHAT_PEER_PYTHON"]
    found = run(settings, plan, compare=["llama.cpp"], peer_python=python)
    assert found.notes == []
    assert [each.name for each in found.compared] == ["kvchat", "llama.cpp", "llama.cpp"]
    for each in found.compared:
        assert None not in asdict(each).values()
    assert "flash, batch" in found.compared[1].settings


def test_the_better_of_a_programs_choices_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {64: 30.0, 128: 20.0, 256: 25.0}
    asked: list[Task] = []

    def measured(task: Task, python: str | None = None) -> peers.Measured:
        asked.append(task)
        return peers.Measured(
            ready_s=1.0,
            prefill_ms=waits[task.options["n_ubatch"]],
            decode_ms=10.0,
            import_memory_bytes=None,
            peak_memory_bytes=None,
        )

    abacus = peers.Peer(
        packages=(),
        install="abacus",
        variants=(("fast", {"fast": True}), ("slow", {"fast": False})),
        choices=tuple((f"batch {size}", {"n_ubatch": size}) for size in waits),
    )
    monkeypatch.setattr(peers, "measure", measured)
    monkeypatch.setitem(peers.PEERS, "abacus", abacus)
    both = task(Path("a"), prefill_ids=[1] * 20, decode_ids=[1], turn_ids=[1, 2])
    ours = replace(both, options={"n_ubatch": 64})
    found = peers.compare(ours, both, {"abacus": None}, 2, lambda _: None)
    assert [each.settings for each in found] == [
        "as set",
        "fast, batch 128",
        "slow, batch 128",
    ]
    assert found[1].prefill_tps == 1000.0
    assert found[1].turn_ttft_ms is None
    trials, rounds = asked[:6], asked[6:]
    assert all(not trial.turn_ids and not trial.decode_ids for trial in trials)
    programs = [(each.program, each.options.get("fast")) for each in rounds]
    assert programs == [("kvchat", None), ("abacus", True), ("abacus", False)] * 2


def contestant(name: str, settings: str, tps: float, ttft: float, memory: int | None) -> Contestant:
    return Contestant(
        name=name,
        settings=settings,
        prefill_tps=10 * tps,
        decode_tps=tps,
        long_decode_tps=None,
        turn_ttft_ms=ttft,
        ready_s=1.0,
        reply_memory_bytes=memory,
        peak_memory_bytes=memory,
        import_memory_bytes=memory,
    )


def test_ratios_are_to_the_better_of_a_programs_settings(result: BenchResult) -> None:
    found = replace(
        result,
        compared=[
            contestant("kvchat", "as set", 120.0, 50.0, 2 * 10**9),
            contestant("other", "one way", 100.0, 80.0, 10**9),
            contestant("other", "another way", 80.0, 100.0, None),
        ],
    )
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(Group(*report.comparison(found)))
    lines = capture.get().splitlines()
    assert "cached" not in lines[1]  # nothing was measured with a long cache
    ratios = next(line for line in lines if "kvchat, as set / other" in line)
    assert re.findall(r"([\d.]+) ×", ratios) == ["1.20", "1.20", "0.62", "1.00", "2.00", "2.00"]


def llama_cpp(settings: str, **given: float) -> Contestant:
    return replace(contestant("llama.cpp", settings, 100.0, 80.0, 10**8), **given)  # type: ignore[arg-type]


def test_each_goal_is_held_against_the_better_setting_of_llama_cpp(result: BenchResult) -> None:
    ours = replace(
        contestant("kvchat", "as set", 125.0, 60.0, 3 * 10**8), import_memory_bytes=2 * 10**8
    )
    theirs = [
        llama_cpp("flash", long_decode_tps=30.0),
        llama_cpp("no flash", decode_tps=90.0, turn_ttft_ms=70.0),
    ]
    small = Beside(replace(result, weight_bytes=10**8, compared=[ours, *theirs]))
    assert small.decode == pytest.approx(1.25)
    assert small.long_decode is None
    assert small.prefill == pytest.approx(1.25)
    assert small.turn_ttft == pytest.approx(60 / 70)
    assert small.memory == pytest.approx(3 / (1.3 + 2))
    decode, *_ = small.goals
    assert not decode.reached(small.decode)
    large = Beside(replace(result, weight_bytes=4 * 10**8, compared=[ours, *theirs]))
    assert large.goals[0].reached(large.decode)
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(Group(*report.comparison(large.result)))
    said = capture.get()
    assert re.search(r"decode / llama.cpp's +1.25 × +goal ≥ 1.10 × +reached", said)
    assert re.search(r"prefill / llama.cpp's +1.25 × +goal ≥ 3.00 × +missed", said)


def test_goals_need_llama_cpp(result: BenchResult) -> None:
    assert Beside(result).decode is None


def test_a_task_tells_how_many_positions_it_takes(folder: Path) -> None:
    asked = task(folder, decode_ids=[1] * 10, decode_tokens=6, long_ids=[1] * 40)
    assert asked.room == 46


def test_perform_measures_in_this_process_too(folder: Path) -> None:
    ready: list[bool] = []
    figures = perform(
        task(folder, prefill_ids=[1, 2, 3], long_ids=[1] * 30, decode_tokens=3, repeats=2),
        lambda: ready.append(True),
    )
    assert ready == [True]
    assert set(figures) == {
        "import_memory_bytes",
        "prefill_ms",
        "long_decode_ms",
        "peak_memory_bytes",
    }
