"""`kvchat bench`: how fast a model runs here, and what its cache is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.bench.plan import LoadSettings, Plan, UiPlan
from kvchat.cli.loading import make_available
from kvchat.cli.options import MODEL, takes_settings
from kvchat.cli.output import Output, status
from kvchat.engine.errors import SettingError
from kvchat.settings import Settings

if TYPE_CHECKING:
    from kvchat.bench.report import Report
    from kvchat.bench.result import BenchResult
    from kvchat.bench.resume import ResumeReport, ResumeResult
    from kvchat.bench.speculation import SpeculationReport, SpeculationResult
    from kvchat.bench.store import StoreResult
    from kvchat.bench.store_report import StoreReport
    from kvchat.bench.ui import UiResult
    from kvchat.bench.ui_report import UiReport


@takes_settings(MODEL)
def bench(  # noqa: PLR0917 (the command line passes them all by name)
    settings: Settings,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="PROGRAM", help="Run transformers beside; repeatable."),
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
    result: BenchResult | UiResult | SpeculationResult | StoreResult | ResumeResult
    report: Report | UiReport | SpeculationReport | StoreReport | ResumeReport
    try:
        if speculate:
            if ui or compare or turns is not None:
                raise SettingError("--ui, --compare and --turns have no meaning with --speculate")
            result, report = _speculation(load, quick, repeats)
        elif resume:
            if ui or compare or turns is not None:
                raise SettingError("--ui, --compare and --turns have no meaning with --resume")
            result, report = _resume(load, quick, repeats)
        elif ui:
            if compare or turns is not None:
                raise SettingError("--compare and --turns have no meaning with --ui")
            result, report = _screen(load, quick, given)
        elif store:
            if compare or turns is not None:
                raise SettingError("--compare and --turns have no meaning with --store")
            result, report = _store(load, quick, given)
        else:
            result, report = _chat(load, quick, given, compare or ())
    finally:
        status("")
    if as_json:
        output.write(result.to_json() + "\n")
    else:
        output.show(report)


def _chat(
    load: LoadSettings, quick: bool, given: dict[str, int], compare: Sequence[str]
) -> tuple[BenchResult, Report]:
    plan = replace(Plan.quick() if quick else Plan(), **given)
    from kvchat.bench.report import Report
    from kvchat.bench.run import run

    result = run(load, plan, compare=compare, progress=status)
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
