"""Settings: what a user can set before a chat starts, merged into one value from where it was set.

The later of these win: defaults, what the program remembers, the configuration file, `KVCHAT_*`
variables, the persona, flags. A leaf: it imports nothing else of kvchat, and touches the disk only
when asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvchat.settings.file import ConfigFile, Persona, read_config
from kvchat.settings.memory import remember, remembered, state_file
from kvchat.settings.paths import (
    ENV_PREFIX,
    cache_dir,
    config_dir,
    config_file,
    data_dir,
    log_file,
    models_dir,
)
from kvchat.settings.rules import RULES, SAMPLING_RULES, RangeCheck, refusal

__all__ = [
    "RULES",
    "SAMPLING_RULES",
    "Given",
    "Kernels",
    "Overflow",
    "Persona",
    "Settings",
    "cache_dir",
    "config_dir",
    "config_file",
    "data_dir",
    "gather",
    "log_file",
    "models_dir",
    "remember",
    "remembered",
    "state_file",
]

Overflow = Literal["ask", "stop", "drop-oldest"]
"""What to do when a conversation no longer fits the context."""

Kernels = Literal["auto", "use", "off"]
"""`auto` uses the kernels for the CPU and lets chats build them in idle time, `use` builds none by
itself, `off` leaves them aside."""

_REMEMBERED = ("theme",)
"""Settings that the program remembers by itself."""

Presets = Callable[[str], Mapping[str, Any]]
"""Returns the sampling parameters of a preset; raises LookupError with what to say if there is
none of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a user can set before a chat starts."""

    model: str = "smollm2"
    """A name from the catalogue, a file or folder, or a name from another store on this disk."""
    model_is_asked: bool = False
    """Whether a flag, or the persona of this start, names the model."""
    device: str = "auto"
    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    ctx: int | None = None
    """Context length in tokens; None is what the model was made for."""
    threads: int | None = None
    """Compute threads; None measures which count is fastest."""
    kernels: Kernels = "auto"
    """Our own kernels for the CPU."""
    speculate: bool = False
    """Run guesses of the next tokens along, where that pays."""
    theme: str | None = None
    """A theme's name; None is the application's own."""
    system: str | None = None
    """System prompt of new conversations."""
    persona: str | None = None
    """The persona whose values are in the others."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Only the sampling parameters that were given, by their names in `SamplingParams`."""
    stash_mb: int = 512
    """Host memory for stashed cache suffixes, in MiB."""
    packed_mb: int = 4096
    """Disk space for packed weights of all models, in MiB."""
    overflow: Overflow = "ask"
    save_candidates: bool = True
    """Whether saved chats have the candidates of each token."""
    snapshots: bool = False
    """Whether the KV caches of chats are kept on the disk, where a chat says nothing about it."""
    snapshots_mb: int = 2048
    """Disk space for them all, in MiB."""
    titles: bool = False
    """Whether the model gives chats titles in idle time."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the screen program by the id of what they do, such as `chat.stop = "ctrl+x"`."""
    personas: Mapping[str, Persona] = field(default_factory=dict)
    """Those of the configuration file, by name."""

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        presets: Presets | None = None,
        in_range: RangeCheck | None = None,
    ) -> tuple[Settings, list[str]]:
        """Merge what was set.

        Args:
            flags: named like the settings and sampling parameters; None means not given.
            presets: gives the values of a persona's preset; without it presets say nothing.
            in_range: checks sampling parameters further than their kinds.

        Returns:
            The settings, and one text per thing that cannot be used and is left out, naming where
            it stands and why.
        """
        found, config, problems = gather(flags, presets, in_range)
        given = {name: each.value for name, each in found.items()}
        sampling = {name: given.pop(name) for name in SAMPLING_RULES if name in given}
        flags = flags or {}
        persona = config.personas.get(flags.get("persona") or "")
        settings = replace(
            cls(),
            **given,
            model_is_asked=bool(flags.get("model") or (persona and persona.model)),
            sampling=sampling,
            keys=config.keys,
            personas=config.personas,
        )
        return settings, problems

    def load_arguments(self) -> dict[str, Any]:
        """Return how to load the model, as keyword arguments of `kvchat.load`."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "quant": self.quant,
            "ctx": self.ctx,
            "threads": self.threads,
            "kernels": self.kernels != "off",
            "kv": self.kv,
            "speculate": self.speculate,
            "stash_bytes": self.stash_mb * 2**20,
            "packed_bytes": self.packed_mb * 2**20,
        }

    def keeping_arguments(self) -> dict[str, Any]:
        """Return how chats are kept, as keyword arguments of `kvchat.chat.keeper.Keeper`."""
        return {
            "candidates": self.save_candidates,
            "snapshots": self.snapshots,
            "snapshots_mb": self.snapshots_mb,
        }


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was set."""

    value: Any
    where: str
    """A file and line, a variable, a flag, or a persona."""


_Layer = Iterable[tuple[str, str, Any]]
"""Where a value was given, the setting's name, the value."""


def gather(
    flags: Mapping[str, Any] | None = None,
    presets: Presets | None = None,
    in_range: RangeCheck | None = None,
) -> tuple[dict[str, Given], ConfigFile, list[str]]:
    """Find what was set and where; see `Settings.load`."""
    config = read_config(in_range)
    problems = list(config.problems)
    in_file, variables, given = (
        _checked(layer, problems, in_range)
        for layer in (config.values, _from_environment(problems), _from_flags(flags or {}))
    )
    chosen = (in_file | variables | given).get("persona")
    persona = _from_persona(chosen, config, presets, problems) if chosen else {}
    found = _from_memory() | in_file | variables | persona | given
    if not persona:
        found.pop("persona", None)
    return found, config, problems


def _checked(
    layer: _Layer, problems: list[str], in_range: RangeCheck | None = None
) -> dict[str, Given]:
    sound = {}
    for where, name, value in layer:
        if reason := refusal(name, value, RULES, in_range):
            problems.append(f"{where}: {reason}")
        else:
            sound[name] = Given(tuple(value) if name == "stop" else value, where)
    return sound


def _from_flags(flags: Mapping[str, Any]) -> _Layer:
    for name, value in flags.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}", name, value


def _from_environment(problems: list[str]) -> _Layer:
    for name, rule in RULES.items():
        variable = ENV_PREFIX + name.upper()
        text = os.environ.get(variable, "")
        if text:
            try:
                yield variable, name, rule.read(text)
            except ValueError:
                problems.append(f"{variable}: '{name}' must be {rule.expected}, not {text!r}")


def _from_persona(
    chosen: Given, config: ConfigFile, presets: Presets | None, problems: list[str]
) -> dict[str, Given]:
    persona = config.personas.get(chosen.value)
    if persona is None:
        known = ", ".join(config.personas) or f"none; {config_file()} may have [personas.NAME]"
        problems.append(
            f"{chosen.where}: there is no persona '{chosen.value}' (there are: {known})"
        )
        return {}
    values = {"model": persona.model, "system": persona.system}
    if persona.preset and presets:
        try:
            values |= presets(persona.preset)
        except LookupError as error:
            problems.append(f"{persona.where}: persona '{persona.name}': {error.args[0]}")
    values |= persona.sampling
    where = f"persona '{persona.name}' ({persona.where})"
    set_by_it = {name: Given(value, where) for name, value in values.items() if value is not None}
    return {"persona": chosen, **set_by_it}


def _from_memory() -> dict[str, Given]:
    """Return the settings among what is remembered; a damaged one says nothing."""
    values = remembered()
    found = ((str(state_file()), name, values[name]) for name in _REMEMBERED if name in values)
    return _checked(found, [])
