"""Sampling parameters as text: what a user types for one, and how one is shown."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvchat.engine.errors import SettingError
from kvchat.engine.types import LIMITS, SamplingParams

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "penalty_window": 0,
    "penalise_all": False,
    "temperature_last": False,
    "max_tokens": None,
    "seed": None,
    "stop": (),
}
"""The value of each parameter that leaves the model's own distribution as it is."""

_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_ESCAPES = {"\\n": "\n", "\\t": "\t"}


def updated(
    params: SamplingParams, name: str, text: str, defaults: SamplingParams
) -> SamplingParams:
    """Return a copy with one parameter as the user wrote it.

    Args:
        params: to start from.
        name: of the parameter, with underscores or hyphens.
        text: a value, `off` for the neutral one or `default`. Several stop strings are written as
            a JSON list; in a plain one a backslash and an n make a line break.
        defaults: where `default` comes from.

    Raises:
        SettingError: no such parameter, or not a value of its.
    """
    name = name.replace("-", "_").lower()
    if name not in NEUTRAL:
        near = difflib.get_close_matches(name, NEUTRAL, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NEUTRAL)}"
        raise SettingError(f"There is no sampling parameter {name}; {hint}")
    match text.lower():
        case "off":
            value = NEUTRAL[name]
        case "default":
            value = getattr(defaults, name)
        case _:
            value = _read(name, text)
    return replace(params, **{name: value})


def lines(params: SamplingParams) -> Iterator[str]:
    """Describe all parameters, one a line."""
    width = max(map(len, NEUTRAL))
    for name in NEUTRAL:
        yield f"{name:<{width}}  {shown(getattr(params, name))}"


def shown(value: Any) -> str:
    """Return a value as `updated` would read it."""
    if value is None or value is False or value == ():
        return "off"
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(name: str, text: str) -> Any:
    if name == "stop":
        return _stop_strings(text)
    try:
        if name not in LIMITS:
            return _WORDS[text.lower()]
        return int(text) if LIMITS[name].whole else float(text)
    except (KeyError, ValueError):
        kind = "on or off" if name not in LIMITS else "a number"
        kind = "a whole number" if name in LIMITS and LIMITS[name].whole else kind
        raise SettingError(f"{name} takes {kind}, `off` or `default`, not {text!r}") from None


def _stop_strings(text: str) -> tuple[str, ...]:
    if text.startswith(("[", '"')):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        given = [value] if isinstance(value, str) else value
        if isinstance(given, list) and all(isinstance(each, str) for each in given):
            return tuple(given)
    for written, meant in _ESCAPES.items():
        text = text.replace(written, meant)
    return (text,)
