"""What the commands about chats have in common: the store, short ids, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.chat.plain_text import one_line
from kvchat.cli.output import Output, note

if TYPE_CHECKING:
    from kvchat.chat.store import Store

Id = Annotated[str, typer.Argument(metavar="ID", help="An id, or how it begins.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids, or how they begin.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

SHORT = 8
"""Characters of an id that are shown; more are needed only if two chats begin alike."""

_NUMBERS = ("Messages", "Size")


def open_store() -> Store:
    """Return the store; what it does by itself is told on stderr."""
    from kvchat.chat.store import Store

    return Store(tell=note)


def to_json(value: object) -> str:
    """Write a value as lines of JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=datetime.isoformat) + "\n"


def show_table(output: Output, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; what is in it is text and nothing else."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        justify = "right" if title in _NUMBERS else "left"
        table.add_column(title, justify=justify, no_wrap=title != "Title")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    output.show(table)
