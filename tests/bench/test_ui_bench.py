from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from kvchat import cli
from kvchat.bench import goals, long_chat, ui, worker_child
from kvchat.bench.plan import LoadSettings, UiPlan
from kvchat.bench.ui import Stream, UiResult
from kvchat.bench.ui_child import Noted, Painter
from kvchat.bench.ui_report import UiReport
from kvchat.bench.worker_child import WARM_UP, Errand, tokens_per_second
from kvchat.chat.events import TextAdded
from kvchat.chat.prompt import PromptBuilder
from kvchat.engine.errors import KvchatError, SettingError
from kvchat.models.load import LanguageModel, load

if os.name == "nt":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

from kvchat.bench.terminal import Terminal

SMALL = UiPlan(repeats=1, reply_tokens=40, keys=2, idle_s=1.0, messages=6)


@pytest.fixture
def llm(folder: Path) -> LanguageModel:
    return load(str(folder), device="cpu", dtype="float32", quant="none")


# Chats that nobody wrote


def test_a_written_chat_goes_on_where_it_ended(llm: LanguageModel) -> None:
    chat = long_chat.chat_of(llm.tokenizer, 6)
    assert [node.role for node in chat.active_path()] == ["user", "assistant"] * 3
    prompts = PromptBuilder(chat, llm.tokenizer, llm.template)
    held: list[int] = []
    for nth in range(3):
        user = chat.add_user(f"question {nth}")
        ids = prompts.for_reply(user.id)
        assert ids[: len(held)] == held
        reply = long_chat.write_reply(chat, llm.tokenizer, user, nth, before=ids)
        held = chat.context_ids(reply.id)
        assert held[: len(ids)] == ids
        assert llm.tokenizer.decode(held[len(ids) : -1]) == reply.content


# A worker without a screen


def test_a_worker_is_measured_in_a_process_of_its_own(folder: Path) -> None:
    load_settings = asdict(LoadSettings(model=str(folder), device="cpu", ctx=200, threads=1))
    found = worker_child.measure(Errand(load_settings, reply_tokens=40, sends=4))
    assert found.decode_tps is not None
    assert found.decode_tps > 0
    assert 0 < found.send_to_first_event_ms < found.send_to_reply_started_ms
    assert worker_child.measure(Errand(load_settings)).decode_tps is None


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    errand = Errand(asdict(LoadSettings(model=str(tmp_path / "nothing.gguf"))))
    with pytest.raises(KvchatError, match=r"Measuring the worker .*nothing\.gguf"):
        worker_child.measure(errand)


def test_the_first_tokens_of_a_reply_do_not_count() -> None:
    slow = [float(n) for n in range(WARM_UP)]
    assert tokens_per_second([*slow, 100.0, 100.5, 101.0]) == 2.0


# From the bridge to the terminal


@pytest.fixture
def painted() -> list[tuple[list[Noted], float]]:
    return []


def test_an_event_is_painted_by_the_first_write_after_it_was_handled(
    painted: list[tuple[list[Noted], float]],
) -> None:
    painter = Painter(lambda events, at: painted.append((events, at)))
    first, second = (1.0, TextAdded("a", False)), (2.0, TextAdded("b", False))
    painter.write_queued()  # on its way already when the event is handled
    painter.handled([first])
    painter.write_done()
    painter.flushed()
    assert painted == []
    painter.write_queued()
    painter.handled([second])
    painter.write_queued()
    painter.write_done()
    assert painted == []
    painter.flushed()
    painter.write_done()
    painter.flushed()
    assert [events for events, _ in painted] == [[first], [second]]
    assert painted[0][1] <= painted[1][1]


# A program on a pseudo-terminal

PROGRAM = """
import os, sys, tty
tty.setraw(0)
pipe = os.fdopen(int(sys.argv[1]), "w")
size = os.get_terminal_size(0)
print(f"\\x1b[1mhel\\x1b[0m\\x1b]0;title\\x07lo {size.columns} x {size.lines}", flush=True)
while (key := os.read(0, 1)) != b"q":
    os.write(1, b"\\x1b[3;4H<" + key + b">")
    pipe.write('{"key": "%s"}\\n' % key.decode())
    pipe.flush()
"""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal([sys.executable, "-c", PROGRAM], {}, pipe=True) as terminal:
        yield terminal


def test_a_terminal_shows_types_reports_and_ends(terminal: Terminal) -> None:
    assert terminal.shown("hello 120 x 36", 20) > terminal.started
    pressed = terminal.write("a")
    assert terminal.shown("<a>", 20) > pressed
    terminal.write("b")
    assert terminal.shown("<b>", 20) > pressed
    assert [terminal.report(20), terminal.report(20)] == [{"key": "a"}, {"key": "b"}]
    asked = terminal.write("q")
    assert terminal.ended(20) > asked
    with pytest.raises(KvchatError, match="did not report"):
        terminal.report(20)


def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    with (
        Terminal([sys.executable, "-c", "raise SystemExit('no such luck')"], {}) as terminal,
        pytest.raises(KvchatError, match=r"did not show 'ready'.*no such luck"),
    ):
        terminal.shown("ready", 20)


# The whole


@pytest.fixture(scope="module")
def result(folder: Path) -> UiResult:
    settings = LoadSettings(model=str(folder), device="cpu", ctx=400, threads=1)
    return ui.measure(settings, SMALL)


def test_the_screen_is_measured(result: UiResult) -> None:
    text = result.to_json()
    assert "\n" not in text
    said = json.loads(text)["ui"]
    assert 0 < said["first_paint_s"] < said["ready_s"]
    assert said["open_ms"] > 0
    assert said["exit_s"] > 0
    assert said["idle_cpu"] >= 0
    (stream,) = said["streams"]
    assert stream["threads"] == 1
    assert stream["token_ms_p50"] <= stream["token_ms_p95"]
    assert stream["refreshes_per_s"] > 0
    kept = result.ui.streams[0].decode_tps / result.ui.streams[0].headless_decode_tps
    assert result.ui.streams[0].speed_kept == pytest.approx(kept)


def test_the_report_has_every_goal(result: UiResult) -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(UiReport(result))
    text = capture.get()
    for goal in goals.SCREEN:
        assert goal.name in text
    assert "decode with the screen / without" in text
    assert "without a screen" in text


@pytest.mark.parametrize(
    ("threads", "cores", "limit"), [(1, 2, 0.92), (2, 2, 0.8), (2, 4, 0.95), (1, 1, 0.8)]
)
def test_the_goal_for_the_speed_depends_on_the_cores(
    threads: int, cores: int, limit: float
) -> None:
    assert goals.speed_kept(threads, cores).limit == limit


def test_goals_compare_the_right_way() -> None:
    at_most, at_least = goals.SCREEN[0], goals.speed_kept(1, 2)
    assert at_most.reached(at_most.limit)
    assert not at_most.reached(at_most.limit * 1.01)
    assert at_least.reached(at_least.limit)
    assert not at_least.reached(at_least.limit * 0.99)


def test_figures_that_are_missing_are_left_out() -> None:
    stream = Stream(
        threads=1,
        decode_tps=1.0,
        headless_decode_tps=1.0,
        speed_kept=1.0,
        refreshes_per_s=1.0,
        token_ms_p50=1.0,
        token_ms_p95=1.0,
        key_ms_p50=None,
        key_ms_p95=None,
    )
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(*goals.table(goals.STREAM, stream))
    assert "key to screen" not in capture.get()
    assert "missed" in capture.get()


def test_bad_plans_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="reply_tokens must be at least 32"):
        UiPlan(reply_tokens=31)
    assert cli.run(["bench", "--ui", "--turns", "3"]) == cli.BAD_USAGE
    assert "no meaning with --ui" in capsys.readouterr().err
