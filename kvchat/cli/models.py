"""`kvchat models`: what is on this disk, and what could be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvchat.cli.output import Output
from kvchat.models.catalog import CATALOG, CatalogEntry, languages_text, size_text
from kvchat.models.locate import LocalModel, list_models, locate


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models on this disk, and the recommended ones that are not."""
    output = Output()
    here = list_models()
    absent = [entry for entry in CATALOG if locate(entry.alias) is None]
    if as_json:
        data = {
            "on_disk": [_local_data(model) for model in here],
            "catalogue": [_catalogue_data(entry) for entry in absent],
        }
        output.write(json.dumps(data, indent=2) + "\n")
        return
    if here:
        titles = ("Name", "Size", "Format", "Where")
        found = [(m.name, size_text(m.bytes), m.kind, m.source) for m in here]
        _show(output, "On this disk", titles, found)
    else:
        output.write("No model is on this disk yet.\n")
    if absent:
        titles = ("Name", "Size", "Languages", "About")
        offered = [(e.alias, size_text(e.size), languages_text(e), e.about) for e in absent]
        output.write("\n")
        _show(output, "To fetch with `kvchat pull NAME`", titles, offered)


def _show(
    output: Output, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvchat.chat.plain_text import one_line

    output.show(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column == "Size"
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    output.show(table)


def _local_data(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "bytes": model.bytes,
        "format": model.kind,
        "source": model.source,
        "path": str(model.path),
    }


def _catalogue_data(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.alias,
        "bytes": entry.size,
        "parameters": entry.parameters,
        "context": entry.context,
        "languages": list(entry.languages),
        "licence": entry.licence,
        "about": entry.about,
    }
