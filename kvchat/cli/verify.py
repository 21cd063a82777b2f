"""`kvchat verify`: cached and uncached runs of the same chat, side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from kvchat.cli import FAILED
from kvchat.cli.interrupts import Interrupts
from kvchat.cli.loading import load_model, make_available
from kvchat.cli.options import MODEL, takes_settings
from kvchat.cli.output import Output, status
from kvchat.settings import Settings

_OWN = ("device", "dtype", "quant")
"""Flags that ask for the settings a chat would use, instead of float32."""


@takes_settings(MODEL)
def verify(
    settings: Settings,
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that answers with the cache equal those without it.

    Runs in float32, where any difference is a failure. With --device, --dtype or --quant it
    measures the settings a chat would use, and reports how far the two are apart.
    """
    output = Output()
    make_available(settings.model)
    if not any(_given(context, name) for name in _OWN):
        settings = replace(settings, dtype="float32", quant="none")
    with Interrupts() as interrupts:
        llm = load_model(settings, interrupts)
        from kvchat.bench import verify_report
        from kvchat.bench.verify import verify as run

        def progress(what: str) -> None:
            interrupts.check()
            status(what)

        try:
            found = run(llm, progress)
        finally:
            status("")
    if as_json:
        output.write(json.dumps(verify_report.as_data(found)) + "\n")
    else:
        output.show(verify_report.table(found))
    if found.failed:
        raise typer.Exit(FAILED)


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
