"""`kvchat config`: the configuration file, and what holds in the end."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvchat.chat.plain_text import one_line
from kvchat.cli.options import (
    CHAT,
    MODEL,
    SAMPLING,
    SAVING,
    SCREEN,
    preset_values,
    range_refusal,
    takes_flags,
    tell,
)
from kvchat.cli.output import Output, note
from kvchat.engine.errors import KvchatError
from kvchat.settings import RULES, Given, Settings, config_file, gather
from kvchat.settings.document import toml, write_config_file

_WIDEST = 40
"""Characters shown of a value."""

config = typer.Typer(help="The configuration file, and what holds in the end.")


@config.command()
def init() -> None:
    """Write a configuration file in which every key is explained and commented out."""
    path = config_file()
    try:
        write_config_file()
    except FileExistsError:
        raise KvchatError(
            f"{path} is there already and stays as it is; move it away to write a new one."
        ) from None
    except OSError as error:
        raise KvchatError(f"{path} cannot be written: {error.strerror}") from error
    Output().write(f"{path}\n")
    note("written; everything in it is commented out, so nothing has changed yet")


@config.command()
def path() -> None:
    """Print where the configuration file is, or would be."""
    Output().write(f"{config_file()}\n")


@config.command()
@takes_flags(MODEL, CHAT, SCREEN, SAVING, SAMPLING)
def show(
    flags: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every setting's value and where it comes from; flags are taken into account."""
    output = Output()
    found, in_file, problems = gather(flags, preset_values, range_refusal)
    tell(problems)
    rows = [_row(name, found.get(name)) for name in RULES]
    rows += [
        (f"keys.{name}", key, toml(key), str(config_file())) for name, key in in_file.keys.items()
    ]
    if as_json:
        data = {name: {"value": value, "from": where} for name, value, _, where in rows}
        output.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        return
    cells = [(name, _shortened(shown), one_line(where)) for name, _, shown, where in rows]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    for name, shown, where in cells:
        output.write(f"{name:<{widths[0]}}  {shown:<{widths[1]}}  {where}\n")


def _row(name: str, given: Given | None) -> tuple[str, Any, str, str]:
    """Return a setting's name, its value, how to show that, and where it comes from."""
    if given is not None:
        return name, given.value, toml(given.value), given.where
    value = getattr(Settings(), name, None)
    return name, value, RULES[name].unset if value is None else toml(value), "default"


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
