"""A persona into the configuration file."""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat.settings.document import toml
from kvchat.settings.file import Persona
from kvchat.settings.paths import config_file

LONGEST_NAME = 32
"""Characters of a persona's name."""


def save_persona(
    name: str,
    *,
    model: str | None = None,
    system: str | None = None,
    preset: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Persona:
    """Add a persona at the end of the configuration file; all else in it stays as it is.

    Raises:
        ValueError: the name cannot be used, or the file is not sound; with what to say.
        OSError: the file cannot be read or written. It is as it was then.
    """
    if not name or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(f"a persona's name has 1 to {LONGEST_NAME} printable characters")
    path = config_file()
    try:
        text = path.read_bytes().decode("utf-8-sig")
        known = tomllib.loads(text).get("personas", {})
    except FileNotFoundError:
        text, known = "", {}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not sound ({error}); correct it first") from error
    if name in known:
        raise ValueError(f"there is a persona '{name}' already; choose another name")
    values = {"model": model, "system": system, "preset": preset, **(sampling or {})}
    given = {key: value for key, value in values.items() if value not in (None, ())}
    lines = [f"[personas.{toml(name)}]", *(f"{key} = {toml(given[key])}" for key in given)]
    new = "\n".join([*([text.rstrip("\n"), ""] if text.strip() else []), *lines, ""])
    try:
        tomllib.loads(new)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} cannot take a section [personas.NAME]: {error}") from error
    _write(path, new)
    line = new.count("\n") - len(lines) + 1
    return Persona(
        name, f"{path}, line {line}", model, system or None, preset, dict(sampling or {})
    )


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: a full disk or a kill leaves the old one."""
    target = path.resolve()  # it may be a link into somebody's own collection
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        if target.exists():
            os.chmod(beside, target.stat().st_mode & 0o777)
        os.replace(beside, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
