from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from tiny import tiny_model

from kvchat import cli
from kvchat.bench import goals, report, speed, texts, turns
from kvchat.bench.bandwidth import bytes_read_per_token
from kvchat.bench.plan import Plan
from kvchat.bench.result import BenchResult, percentile_95
from kvchat.engine.engine import Engine
from kvchat.engine.errors import SettingError
from kvchat.engine.linear import weight_bytes
from kvchat.engine.types import SamplingParams
from kvchat.models.load import LanguageModel, load

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0)

PROMISED = """
    model device dtype quant threads weight_bytes kv_bytes_per_token prefill_tps decode_tps
    decode_ms_p50 decode_ms_p95 ttft_ms_by_turn reused_by_turn new_by_turn
    naive_ttft_ms_by_turn bandwidth_gbps bandwidth_fraction
    bookkeeping_ms_at_200_turns send_to_first_event_ms
"""


@pytest.fixture
def llm(folder: Path) -> LanguageModel:
    return load(str(folder), device="cpu", dtype="float32", quant="none")


def played(llm: LanguageModel, n: int = 3) -> list[turns.Turn]:
    return list(turns.play(llm, GREEDY, turns=n, user_tokens=12, reply_tokens=9))


def test_prompts_have_the_wanted_length(llm: LanguageModel) -> None:
    assert len(texts.prompt(llm.tokenizer, 1000)) == 1000
    assert len(texts.prompt(llm.tokenizer, 7)) == 7
    first, second = (texts.message(llm.tokenizer, 40, nth) for nth in (0, 1))
    assert 40 <= len(llm.tokenizer.encode(first)) < 50
    assert first.split()[0] != second.split()[0]


def test_every_prompt_token_of_a_turn_is_either_reused_or_new(llm: LanguageModel) -> None:
    chat = played(llm)
    assert [turn.cost.reused + turn.cost.new for turn in chat] == [len(t.prompt) for t in chat]
    assert [len(turn.reply) for turn in chat] == [9, 9, 9]
    assert chat[0].cost.reused == 0
    for before, turn in pairwise(chat):
        assert turn.prompt[: len(before.prompt) + 9] == before.prompt + before.reply
        held = len(before.prompt) + len(before.reply) - 1 + before.idle_tokens
        assert turn.cost.reused == held


def test_replies_are_those_of_a_run_without_the_cache(llm: LanguageModel) -> None:
    chat = played(llm)
    for turn in chat:
        cold = Engine(llm.model)
        with speed.forced_length(cold, llm.tokenizer.control_ids):
            assert speed.reply(cold, turn.prompt, GREEDY, tokens=9).ids == turn.reply
    naive = list(turns.without_cache(llm, GREEDY, [turn.prompt for turn in chat]))
    assert [(each.reused, each.new) for each in naive] == [(0, len(t.prompt)) for t in chat]
    assert naive[0].ids == chat[0].reply[:1]


def test_the_chat_ends_when_the_context_is_full(folder: Path) -> None:
    small = load(str(folder), device="cpu", dtype="float32", quant="none", ctx=120)
    assert 0 < len(played(small, n=50)) < 50


def test_replies_have_the_asked_length(llm: LanguageModel) -> None:
    engine, ids = llm.engine, texts.prompt(llm.tokenizer, 10)
    free = speed.reply(engine, ids, GREEDY, tokens=5).ids
    engine.eog_ids = frozenset({free[1]})
    forced = speed.reply(engine, ids, GREEDY, tokens=5).ids
    assert len(forced) == 5
    assert free[1] not in forced
    sampler = engine.sampler
    with pytest.raises(ZeroDivisionError), speed.forced_length(engine, {free[0]}):
        assert free[0] not in speed.reply(engine, ids, GREEDY, tokens=5).ids
        raise ZeroDivisionError
    assert engine.sampler is sampler


def test_one_fewer_gap_than_tokens(llm: LanguageModel) -> None:
    timed = speed.reply(llm.engine, [1, 2, 3], GREEDY, tokens=6)
    assert len(timed.token_ms) == 5
    assert timed.decode_tps == pytest.approx(5e3 / sum(timed.token_ms))


def test_a_branch_comes_back_from_the_stash_if_it_fits() -> None:
    trunk, branch = list(range(20)), list(range(100, 160))
    roomy, tight = Engine(tiny_model()), Engine(tiny_model(), stash_budget=1000)
    assert speed.branch_switch(roomy, trunk, branch).switch_ms is not None
    assert list(roomy.ids) == trunk + branch
    assert speed.branch_switch(tight, trunk, branch).switch_ms is None


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_counts_as_read_only_where_it_is_the_head(tied: bool) -> None:
    engine = Engine(tiny_model(tied_embeddings=tied))
    embedding = weight_bytes(engine.model.embedding)
    weights = engine.weight_bytes - (0 if tied else embedding)
    cache = 10 * engine.kv_bytes_per_token
    assert bytes_read_per_token(engine, 10) == weights + cache


def test_percentile_interpolates() -> None:
    assert percentile_95(list(range(101))) == pytest.approx(95)
    assert percentile_95([1.0, 2.0]) == pytest.approx(1.95)
    assert percentile_95([3.0]) == 3.0


def test_a_plan_fits_itself_into_the_context() -> None:
    plan = Plan().fitted(600)
    assert plan.prefill_tokens + plan.decode_tokens <= 600
    assert plan.branch_tokens + plan.decode_prompt <= 600
    assert plan.long_contexts == ()
    assert Plan().fitted(6000).long_contexts == (4000,)
    assert Plan().fitted(8192) == Plan()
    with pytest.raises(SettingError, match="repeats must be at least 1"):
        Plan(repeats=0)


def test_the_json_has_every_promised_key_on_one_line(result: BenchResult) -> None:
    text = result.to_json()
    assert "\n" not in text
    said = json.loads(text)
    assert set(PROMISED.split()) <= said.keys()
    assert said["plan"]["repeats"] == 2
    by_turn = [key for key in said if key.endswith("_by_turn")]
    assert {len(said[key]) for key in by_turn} == {3}
    assert said["threads"] == 1
    assert said["notes"] == []


def test_figures_agree_with_each_other(result: BenchResult) -> None:
    read = result.bytes_per_token * result.decode_tps
    assert result.bandwidth_fraction == pytest.approx(read / (result.bandwidth_gbps * 1e9))
    assert result.decode_ms_p50 <= result.decode_ms_p95
    assert result.ready_s > 0
    assert result.weight_bytes > 0


def test_programs_are_measured_beside_each_other(result: BenchResult) -> None:
    names = [(each.name, each.settings) for each in result.compared]
    assert names == [
        ("kvchat", "as set"),
        ("kvchat", "bfloat16"),
        ("transformers", "bfloat16"),
    ]
    for each in result.compared:
        assert None not in asdict(each).values()


def shown(result: BenchResult, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(report.Report(result))
    return capture.get()


def test_the_report_shows_both_waits_of_every_turn(result: BenchResult) -> None:
    text = shown(result)
    for ms in (*result.ttft_ms_by_turn, *result.naive_ttft_ms_by_turn):
        assert report.milliseconds(ms) in text
    assert "kvchat, as set / transformers" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_report_puts_goals_beside_figures(result: BenchResult) -> None:
    lines = [line for line in shown(result).splitlines() if " goal " in line]
    measured = [goal.name for goal in goals.CHAT if getattr(result, goal.figure) is not None]
    measured += [goal.name for goal in goals.SAMPLER]
    assert [line.split("  ")[0] for line in lines] == measured
    assert "bookkeeping after 200 turns" in measured
    assert "turn 10" not in "".join(lines)
    long = replace(
        result, ttft_ms_by_turn=[2.0] * 9 + [3.0], naive_ttft_ms_by_turn=[3.0] * 9 + [60.0]
    )
    assert (long.ttft_growth, long.ttft_saving) == (1.5, 20.0)
    assert "20.0 ×  goal ≥ 15.0 ×   reached" in shown(long)


def test_bars_are_to_scale() -> None:
    assert report.bar(1.0) == "█" * report.BAR_WIDTH
    assert report.bar(0.5) == "█" * (report.BAR_WIDTH // 2)
    assert report.bar(0.5 + 1 / report.BAR_WIDTH / 2) == "█" * (report.BAR_WIDTH // 2) + "▌"
    assert report.bar(0.0) == "▏"
    assert report.bar(0.25, ascii_only=True) == "#" * (report.BAR_WIDTH // 4)
    assert report.bar(0.0, ascii_only=True) == "#"


@pytest.mark.parametrize(("ms", "text"), [(3.21, "3.2 ms"), (45.6, "46 ms"), (1234.0, "1.23 s")])
def test_times_are_written_in_a_fitting_unit(ms: float, text: str) -> None:
    assert report.milliseconds(ms) == text


def test_the_command_prints_one_json_object_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device", "cpu", "--ctx", "200", "--threads", "1", "--turns", "2", "--quick"]
    assert cli.run(["bench", "--json", "-m", str(folder), *flags]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["plan"]["turns"] == 2
    assert said["model"] == str(folder)


def test_the_command_refuses_a_plan_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--repeats", "0"]) == cli.BAD_USAGE
    assert "repeats must be at least 1" in capsys.readouterr().err
