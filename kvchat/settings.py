"""Settings: defaults, the configuration file, the environment and flags, merged into one value.

Also where this platform keeps our files. A leaf: it imports nothing else of kvchat, and touches
the disk only when asked.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import platformdirs

Overflow = Literal["ask", "stop", "drop-oldest"]
"""What to do when a conversation no longer fits the context."""

ENV_PREFIX = "KVCHAT_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a user can set before a chat starts."""

    model: str = "smollm2"
    """A name from the catalogue, a file or folder, or a name from another store on this disk."""
    device: str = "auto"
    dtype: str = "auto"
    quant: str = "auto"
    ctx: int | None = None
    """Context length in tokens; None is what the model was made for."""
    threads: int | None = None
    """Compute threads; None measures which count is fastest."""
    theme: str | None = None
    """A theme's name; None is the application's own."""
    system: str | None = None
    """System prompt of new conversations."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Only the sampling parameters that were given, by their names in `SamplingParams`."""
    stash_mb: int = 512
    """Host memory for stashed cache suffixes, in MiB."""
    overflow: Overflow = "ask"
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the screen program by the id of what they do, such as `chat.stop = "ctrl+x"`."""

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None) -> tuple[Settings, list[str]]:
        """Merge defaults, the configuration file, `KVCHAT_*` variables and flags; the last wins.

        Flags are named like the settings and sampling parameters; None means not given. What
        cannot be used is left out and described: one text per problem, naming where and why.
        """
        problems: list[str] = []
        given: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for layer in (
            _from_file(problems, keys),
            _from_environment(problems),
            _from_flags(flags or {}),
        ):
            for where, name, value in layer:
                if reason := _refusal(name, value):
                    problems.append(f"{where}: {reason}")
                else:
                    given[name] = tuple(value) if name == "stop" else value
        sampling = {name: given.pop(name) for name in SAMPLING_RULES if name in given}
        return replace(cls(), **given, sampling=sampling, keys=keys), problems

    def load_arguments(self) -> dict[str, Any]:
        """Return how to load the model, as keyword arguments of `kvchat.load`."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "quant": self.quant,
            "ctx": self.ctx,
            "threads": self.threads,
            "stash_bytes": self.stash_mb * 2**20,
        }


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which values a setting takes."""

    kind: type
    low: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {
            str: "text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            tuple: "a list of texts",
        }[self.kind]
        return words if self.low is None else f"{words} from {self.low}"

    def refuses(self, value: object) -> str | None:
        """Say what is wrong with a value, or None."""
        accepted = {float: (int, float), tuple: (list, tuple)}.get(self.kind, self.kind)
        sound = (
            isinstance(value, accepted)
            and (self.kind is bool or not isinstance(value, bool))
            and (not self.choices or value in self.choices)
            and (self.low is None or (isinstance(value, int) and value >= self.low))
            and (self.kind is not str or value != "")
            and (not isinstance(value, list | tuple) or all(isinstance(v, str) for v in value))
        )
        return None if sound else f"must be {self.expected}, not {value!r}"

    def read(self, text: str) -> Any:
        """Turn an environment variable's text into a value; raises ValueError."""
        if self.kind is tuple:
            return (text,)
        if self.kind is bool:
            words = {"1": True, "true": True, "yes": True, "on": True}
            words |= {"0": False, "false": False, "no": False, "off": False}
            if text.lower() not in words:
                raise ValueError(text)
            return words[text.lower()]
        return self.kind(text)


SAMPLING_RULES: dict[str, _Rule] = {
    "temperature": _Rule(float),
    "top_k": _Rule(int),
    "top_p": _Rule(float),
    "min_p": _Rule(float),
    "repetition_penalty": _Rule(float),
    "presence_penalty": _Rule(float),
    "frequency_penalty": _Rule(float),
    "penalty_window": _Rule(int),
    "penalise_all": _Rule(bool),
    "temperature_last": _Rule(bool),
    "max_tokens": _Rule(int),
    "seed": _Rule(int),
    "stop": _Rule(tuple),
}
"""Kinds only: ranges are the engine's to check, when it builds its `SamplingParams`."""

_RULES: dict[str, _Rule] = {
    "model": _Rule(str),
    "device": _Rule(str),
    "dtype": _Rule(str, choices=("auto", "float32", "bfloat16", "float16")),
    "quant": _Rule(str, choices=("auto", "none", "int8", "int4")),
    "ctx": _Rule(int, low=1),
    "threads": _Rule(int, low=1),
    "theme": _Rule(str),
    "system": _Rule(str),
    "stash_mb": _Rule(int, low=0),
    "overflow": _Rule(str, choices=("ask", "stop", "drop-oldest")),
    **SAMPLING_RULES,
}

_Layer = Iterable[tuple[str, str, Any]]
"""Where a value was given, the setting's name, the value."""


def _refusal(name: str, value: object) -> str | None:
    if name in _RULES:
        reason = _RULES[name].refuses(value)
        return f"'{name}' {reason}" if reason else None
    near = difflib.get_close_matches(name, _RULES, n=1)
    return f"there is no setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")


def _from_flags(flags: Mapping[str, Any]) -> _Layer:
    for name, value in flags.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}", name, value


def _from_environment(problems: list[str]) -> _Layer:
    for name, rule in _RULES.items():
        variable = ENV_PREFIX + name.upper()
        text = os.environ.get(variable, "")
        if text:
            try:
                yield variable, name, rule.read(text)
            except ValueError:
                problems.append(f"{variable}: '{name}' must be {rule.expected}, not {text!r}")


def _from_file(problems: list[str], keys: dict[str, str]) -> _Layer:
    """Yield the file's settings; its [keys] go into `keys`, what is wrong into `problems`."""
    path = config_file()
    try:
        text = path.read_bytes().decode("utf-8-sig")
        table = tomllib.loads(text)
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
        return
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problems.append(f"{path}, line {line}: not UTF-8 text")
        return
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problems.append(f"{path}: not valid TOML: {error}")
        return
    for name, key in _key_table(table.pop("keys", {})):
        if isinstance(key, str) and key.strip():
            keys[name] = key
        else:
            where = f"{path}, line {_line_of(text, 'keys', name)}"
            problems.append(f"{where}: the key for '{name}' must be text such as \"ctrl+x\"")
    sampling = table.pop("sampling", {})
    if not isinstance(sampling, dict):
        problems.append(
            f"{path}, line {_line_of(text, '', 'sampling')}: write [sampling] as a section"
        )
        sampling = {}
    for section, values in (("", table), ("sampling", sampling)):
        for name, value in values.items():
            where = f"{path}, line {_line_of(text, section, name)}"
            belongs = (name in SAMPLING_RULES) == (section == "sampling")
            if name in _RULES and not belongs:
                home = "above any section" if section else "under [sampling]"
                problems.append(f"{where}: '{name}' belongs {home}")
            else:
                yield where, name, value


def _key_table(table: object, prefix: str = "") -> Iterable[tuple[str, object]]:
    """Flatten [keys]: TOML makes tables of names with a dot, such as chat.stop."""
    if not isinstance(table, dict):
        yield prefix.rstrip(".") or "keys", table
        return
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _key_table(value, f"{prefix}{name}.")
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


def _folder(variable: str, default: Path) -> Path:
    given = os.environ.get(ENV_PREFIX + variable)
    return Path(given).expanduser() if given else default


def config_dir() -> Path:
    """The folder of `config.toml` and the user's themes; `KVCHAT_CONFIG_DIR` moves it."""
    return _folder("CONFIG_DIR", platformdirs.user_config_path("kvchat", appauthor=False))


def config_file() -> Path:
    """The configuration file; it need not exist."""
    return config_dir() / "config.toml"


def data_dir() -> Path:
    """The folder of conversations and models; `KVCHAT_DATA_DIR` moves it."""
    return _folder("DATA_DIR", platformdirs.user_data_path("kvchat", appauthor=False))


def cache_dir() -> Path:
    """The folder of what can be made again; `KVCHAT_CACHE_DIR` moves it."""
    return _folder("CACHE_DIR", platformdirs.user_cache_path("kvchat", appauthor=False))


def models_dir() -> Path:
    """The folder models are fetched into."""
    return data_dir() / "models"


def log_file() -> Path:
    """The file diagnostics are written to."""
    return cache_dir() / "kvchat.log"
