"""Sampling presets: those that come with the program, and the user's in `presets.toml`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvchat.engine.errors import SettingError
from kvchat.engine.types import SamplingParams
from kvchat.settings import SAMPLING_RULES, config_dir

SHAPE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""What every preset sets; a reply's length, seed and the rest only where it names them."""

MODELS_OWN = "model's own"
_LONGEST_NAME = 32
_LARGEST_FILE = 1 << 20
_HEADING = "# Sampling presets, written by kvchat. Comments are not kept.\n"


@dataclass(frozen=True, slots=True)
class Preset:
    """Some sampling parameters under a name."""

    name: str
    values: Mapping[str, Any]
    """By their names in `SamplingParams`; what is not named stays as it is."""

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with this preset's values."""
        return replace(params, **self.values)

    def matches(self, params: SamplingParams) -> bool:
        """Whether the parameters have all of this preset's values."""
        return all(getattr(params, name) == value for name, value in self.values.items())


def _shape(
    temperature: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> dict[str, float]:
    return dict(zip(SHAPE, (temperature, top_k, top_p, min_p, repetition, 0.0, 0.0), strict=True))


BUILT_IN = (
    Preset("precise", _shape(0.2, 40, 0.9, 0.0, 1.05)),
    Preset("balanced", _shape(0.7, 50, 0.95, 0.02, 1.1)),
    Preset("creative", _shape(1.1, 0, 1.0, 0.05, 1.1)),
)


def models_own(defaults: SamplingParams) -> Preset:
    """Return the preset that goes back to what a model comes with."""
    return Preset(MODELS_OWN, {name: getattr(defaults, name) for name in SHAPE})


def presets_file() -> Path:
    """The file of the user's presets; it need not exist."""
    return config_dir() / "presets.toml"


def load_presets() -> tuple[list[Preset], list[str]]:
    """Read the user's presets.

    Returns:
        Those that can be used, and one text per problem, naming where and why.

    Raises:
        SettingError: The file cannot be read or is not TOML.
    """
    presets, problems = [], []
    for name, values in _read_tables().items():
        try:
            presets.append(_checked(name, values))
        except SettingError as problem:
            problems.append(f"{presets_file()}: preset '{name[:_LONGEST_NAME]}': {problem}")
    return presets, problems


def save_preset(name: str, params: SamplingParams) -> Preset:
    """Keep the parameters under a name, in place of an earlier preset of that name.

    Raises:
        SettingError: The name cannot be used, or the file cannot be read or written; it is as
            it was then.
    """
    names = (*SHAPE, "max_tokens", "seed")
    values = {key: getattr(params, key) for key in names if getattr(params, key) is not None}
    preset = _checked(name.strip(), values)
    kept = _kept()
    _write([*(each for each in kept if each.name != preset.name), preset])
    return preset


def forget_preset(name: str) -> None:
    """Delete one of the user's presets.

    Raises:
        SettingError: The file cannot be read or written.
    """
    _write([preset for preset in _kept() if preset.name != name])


def _kept() -> list[Preset]:
    """Read what a new file must hold; refuses to lose what it does not understand."""
    presets, problems = load_presets()
    if problems:
        raise SettingError(f"{problems[0]}. Correct or delete it first; nothing was changed.")
    return presets


def _checked(name: str, values: object) -> Preset:
    if not name or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise SettingError(f"a preset's name has 1 to {_LONGEST_NAME} printable characters")
    if name in {MODELS_OWN, *(preset.name for preset in BUILT_IN)}:
        raise SettingError(f"'{name}' is the name of a preset of kvchat; choose another")
    if not isinstance(values, dict) or not values:
        raise SettingError("write a section of sampling parameters")
    for key, value in values.items():
        if key not in SAMPLING_RULES:
            raise SettingError(f"there is no sampling parameter '{key}'")
        if reason := SAMPLING_RULES[key].refuses(value):
            raise SettingError(f"'{key}' {reason}")
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    preset = Preset(name, values)
    preset.applied(SamplingParams())
    return preset


def _read_tables() -> dict[str, Any]:
    path = presets_file()
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}).") from error
    if len(data) > _LARGEST_FILE:
        raise SettingError(f"{path} is too large to be a file of presets; move it away.")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SettingError(f"{path}, line {line}: not UTF-8 text; correct or move it.") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingError(f"{path}: not valid TOML: {error}; correct or move it.") from error


def _write(presets: list[Preset]) -> None:
    lines = [_HEADING]
    for preset in presets:
        lines.append(f"[{_toml(preset.name)}]")
        lines += [f"{key} = {_toml(value)}" for key, value in preset.values.items()]
        lines.append("")
    path = presets_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved into place: a full disk or a kill leaves the old file.
        handle, beside = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write("\n".join(lines))
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error.strerror}).") from error


def _toml(value: object) -> str:
    """Write a value as TOML, which agrees with JSON on numbers, texts and lists of texts."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
