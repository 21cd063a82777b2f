"""`config.toml`: what it sets, on which line, and what in it cannot be used."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvchat.settings.paths import config_file
from kvchat.settings.rules import PERSONA_RULES, RULES, SAMPLING_RULES, RangeCheck, refusal


@dataclass(frozen=True, slots=True)
class Persona:
    """A manner of answering, under a name."""

    name: str
    where: str
    """The file and line it stands at."""
    model: str | None = None
    system: str | None = None
    preset: str | None = None
    """Name of a sampling preset, which holds below `sampling`."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters by their names in `SamplingParams`."""


@dataclass(slots=True)
class ConfigFile:
    """What a configuration file says."""

    values: list[tuple[str, str, Any]] = field(default_factory=list)
    """Where a value stands, the setting's name, the value; not yet checked."""
    keys: dict[str, str] = field(default_factory=dict)
    personas: dict[str, Persona] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One text each, naming where and why."""


def read_config(in_range: RangeCheck | None = None) -> ConfigFile:
    """Read the configuration file; one that is not there says nothing.

    Args:
        in_range: checks the sampling parameters of personas.
    """
    path = config_file()
    config = ConfigFile()
    try:
        text = path.read_bytes().decode("utf-8-sig")
        table = tomllib.loads(text)
    except FileNotFoundError:
        return config
    except OSError as error:
        config.problems.append(f"{path}: cannot be read ({error.strerror})")
        return config
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        config.problems.append(f"{path}, line {line}: not UTF-8 text")
        return config
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        config.problems.append(f"{path}: not valid TOML: {error}")
        return config
    _Reading(path, text, config, in_range).take(table)
    return config


@dataclass(frozen=True, slots=True)
class _Reading:
    path: Path
    text: str
    config: ConfigFile
    in_range: RangeCheck | None

    def take(self, table: dict[str, Any]) -> None:
        self._take_keys(table.pop("keys", {}))
        for name, persona in self._sections("personas", table.pop("personas", {})):
            self._take_persona(name, persona)
        sections = self._sections("", {"sampling": table.pop("sampling", {})})
        sampling = dict(sections).get("sampling", {})
        for section, values in (("", table), ("sampling", sampling)):
            for name, value in values.items():
                where = self._where(section, name)
                if name in RULES and (name in SAMPLING_RULES) != (section == "sampling"):
                    home = "above any section" if section else "under [sampling]"
                    self._problem(where, f"'{name}' belongs {home}")
                else:
                    self.config.values.append((where, name, value))

    def _take_keys(self, table: object) -> None:
        for name, key in _flattened(table):
            if isinstance(key, str) and key.strip():
                self.config.keys[name] = key
            else:
                reason = f"the key for '{name}' must be text such as \"ctrl+x\""
                self._problem(self._where("keys", name), reason)

    def _take_persona(self, name: str, table: dict[str, Any]) -> None:
        section = f"personas.{name}"
        sound: dict[str, Any] = {}
        for key, value in table.items():
            if reason := refusal(key, value, PERSONA_RULES, self.in_range):
                self._problem(self._where(section, key), f"persona '{name}': {reason}")
            else:
                sound[key] = tuple(value) if key == "stop" else value
        sampling = {key: sound.pop(key) for key in SAMPLING_RULES if key in sound}
        where = self._where("", section)
        self.config.personas[name] = Persona(name, where, sampling=sampling, **sound)

    def _sections(self, parent: str, table: object) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(table, dict):
            self._problem(self._where("", parent), f"write [{parent}.NAME] as a section")
            return
        for name, section in table.items():
            full = f"{parent}.{name}".lstrip(".")
            if isinstance(section, dict):
                yield name, section
            else:
                self._problem(self._where(parent, name), f"write [{full}] as a section")

    def _problem(self, where: str, reason: str) -> None:
        self.config.problems.append(f"{where}: {reason}")

    def _where(self, section: str, name: str) -> str:
        return f"{self.path}, line {_line_of(self.text, section, name)}"


def _flattened(table: object, prefix: str = "") -> Iterable[tuple[str, object]]:
    """Flatten [keys]: TOML makes tables of names with a dot, such as chat.stop."""
    if not isinstance(table, dict):
        yield prefix.rstrip(".") or "keys", table
        return
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _line_of(text: str, section: str, name: str) -> str:
    """Find the line that sets a key, or '?': the TOML reader does not say where a value stood."""
    key = re.escape(name)
    if section:
        dotted = re.compile(rf"\s*{re.escape(section)}\b.*\b{key}\b.*=")
    else:
        dotted = re.compile(rf"\s*\[+\s*[\"']?{key}\b")
    plain = re.compile(rf"\s*[\"']?{key}[\"']?\s*[=.]")
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*[\"']?([^\]\"']+?)[\"']?\s*\]", line):
            here = header[1]
        if dotted.match(line) or (here == section and plain.match(line)):
            return str(number)
    return "?"
