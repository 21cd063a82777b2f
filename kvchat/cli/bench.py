"""`kvchat bench`: how fast a model runs here, and what its cache is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvchat.bench.plan import LoadSettings, Plan
from kvchat.cli.loading import make_available
from kvchat.cli.options import MODEL, takes_settings
from kvchat.cli.output import Output, status
from kvchat.settings import Settings


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Measure prefill, decode and the wait for the first token, with the cache and without it."""
    given = {name: n for name, n in (("turns", turns), ("repeats", repeats)) if n is not None}
    plan = replace(Plan.quick() if quick else Plan(), **given)
    output = Output()
    make_available(settings.model)

    from kvchat.bench.report import Report
    from kvchat.bench.run import run

    load = LoadSettings(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        quant=settings.quant,  # type: ignore[arg-type]
        ctx=settings.ctx,
        threads=settings.threads,
    )
    try:
        result = run(load, plan, compare=compare or (), progress=status)
    finally:
        status("")
    if as_json:
        output.write(result.to_json() + "\n")
    else:
        output.show(Report(result))
