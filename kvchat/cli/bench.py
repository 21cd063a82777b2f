"""`kvchat bench`: how fast a model runs here, and what its cache is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.bench.plan import LoadSettings, Plan, QualityPlan, UiPlan
from kvchat.cli.loading import make_available
from kvchat.cli.options import MODEL, takes_settings
from kvchat.cli.output import Output, status
from kvchat.engine.errors import SettingError
from kvchat.settings import Settings

if TYPE_CHECKING:
    from kvchat.bench.quality import QualityResult
    from kvchat.bench.quality_report import QualityReport
    from kvchat.bench.report import Report
    from kvchat.bench.result import BenchResult
    from kvchat.bench.resume import ResumeReport, ResumeResult
    from kvchat.bench.speculation import SpeculationReport, SpeculationResult
    from kvchat.bench.store import StoreResult
    from kvchat.bench.store_report import StoreReport
    from kvchat.bench.thread_counts import ThreadsReport, ThreadsResult
    from kvchat.bench.ui import UiResult
    from kvchat.bench.ui_report import UiReport

    Result = (
        BenchResult
        | UiResult
        | SpeculationResult
        | StoreResult
        | ResumeResult
        | QualityResult
        | ThreadsResult
    )
    Shown = (
        Report
        | UiReport
        | SpeculationReport
        | StoreReport
        | ResumeReport
        | QualityReport
        | ThreadsReport
    )


@takes_settings(MODEL)
def bench(  # noqa: PLR0917 (the command line passes them all by name)
    settings: Settings,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="PROGRAM",
            help="Run llama.cpp or transformers beside; repeatable.",
        ),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(
            "--peer-python",
            metavar="PATH",
            envvar="KVCHAT_PEER_PYTHON",
            help="A Python interpreter that has the programs to compare with.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, for a first look.")] = False,
    turns: Annotated[
        int | None, typer.Option("--turns", help="Length of the scripted chat.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Measurements behind each median.")
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Measure the screen program instead.")] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Measure how chats are kept and found instead.")
    ] = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Measure what n-gram speculation brings instead.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure how a long chat is opened again instead.")
    ] = False,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Measure what the precision of the weights costs instead."),
    ] = False,
    tune_threads: Annotated[
        bool, typer.Option("--tune-threads", help="Measure thread counts anew; keep the best one.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Measure prefill, decode and the wait for the first token, with the cache and without it."""
    output = Output()
    make_available(settings.model)
    load = LoadSettings(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        quant=settings.quant,  # type: ignore[arg-type]
        ctx=settings.ctx,
        threads=settings.threads,
    )
    given = {name: n for name, n in (("turns", turns), ("repeats", repeats)) if n is not None}
    modes = {
        "--ui": ui,
        "--store": store,
        "--speculate": speculate,
        "--resume": resume,
        "--quality": quality,
        "--tune-threads": tune_threads,
    }
    mode = next((flag for flag, given_flag in modes.items() if given_flag), None)
    _check_alone(mode, {**modes, "--compare": compare, "--turns": turns})
    result: Result
    report: Shown
    try:
        match mode:
            case "--ui":
                result, report = _screen(load, quick, given)
            case "--store":
                result, report = _store(load, quick, given)
            case "--speculate":
                result, report = _speculation(load, quick, repeats)
            case "--resume":
                result, report = _resume(load, quick, repeats)
            case "--quality":
                _check_alone(mode, {"--repeats": repeats})
                result, report = _quality(load, quick)
            case "--tune-threads":
                _check_alone(mode, {"--repeats": repeats, "--threads": settings.threads})
                result, report = _threads(load)
            case _:
                result, report = _chat(load, quick, given, compare or (), peer_python)
    finally:
        status("")
    if as_json:
        output.write(result.to_json() + "\n")
    else:
        output.show(report)


def _check_alone(mode: str | None, others: Mapping[str, object]) -> None:
    """Refuse flags that have no meaning with a mode.

    Raises:
        SettingError: there are some.
    """
    meaningless = [flag for flag, value in others.items() if value and flag != mode]
    if mode is not None and meaningless:
        plural = len(meaningless) > 1
        raise SettingError(
            f"{' and '.join(meaningless)} {'have' if plural else 'has'} no meaning with {mode}"
        )


def _chat(
    load: LoadSettings,
    quick: bool,
    given: dict[str, int],
    compare: Sequence[str],
    peer_python: str | None,
) -> tuple[BenchResult, Report]:
    plan = replace(Plan.quick() if quick else Plan(), **given)  # type: ignore[arg-type]
    from kvchat.bench.report import Report
    from kvchat.bench.run import run

    result = run(load, plan, compare=compare, peer_python=peer_python, progress=status)
    return result, Report(result)


def _speculation(
    load: LoadSettings, quick: bool, repeats: int | None
) -> tuple[SpeculationResult, SpeculationReport]:
    if repeats is not None and repeats < 1:
        raise SettingError("repeats must be at least 1")
    from kvchat.bench.speculation import SpeculationReport, run

    result = run(load, repeats or (1 if quick else 3), progress=status)
    return result, SpeculationReport(result)


def _resume(
    load: LoadSettings, quick: bool, repeats: int | None
) -> tuple[ResumeResult, ResumeReport]:
    from kvchat.bench.resume import TOKENS, ResumeReport, run

    tokens = TOKENS // 4 if quick else TOKENS
    result = run(load, repeats or (1 if quick else 3), tokens=tokens, progress=status)
    return result, ResumeReport(result)


def _store(
    load: LoadSettings, quick: bool, given: dict[str, int]
) -> tuple[StoreResult, StoreReport]:
    from kvchat.bench.store import StorePlan, run
    from kvchat.bench.store_report import StoreReport

    plan = replace(StorePlan.quick() if quick else StorePlan(), **given)
    result = run(load, plan, progress=status)
    return result, StoreReport(result)


def _screen(load: LoadSettings, quick: bool, given: dict[str, int]) -> tuple[UiResult, UiReport]:
    plan = replace(UiPlan.quick() if quick else UiPlan(), **given)
    from kvchat.bench.ui import measure
    from kvchat.bench.ui_report import UiReport

    result = measure(load, plan, progress=status)
    return result, UiReport(result)


def _quality(load: LoadSettings, quick: bool) -> tuple[QualityResult, QualityReport]:
    plan = QualityPlan.quick() if quick else QualityPlan()
    from kvchat.bench.quality import measure
    from kvchat.bench.quality_report import QualityReport

    result = measure(load, plan, progress=status)
    return result, QualityReport(result)


def _threads(load: LoadSettings) -> tuple[ThreadsResult, ThreadsReport]:
    from kvchat.bench.thread_counts import ThreadsReport, measure

    result = measure(load, progress=status)
    return result, ThreadsReport(result)
