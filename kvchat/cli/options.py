"""Flags that several commands share: every setting is a flag of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from kvchat.cli.output import note
from kvchat.engine.errors import SettingError
from kvchat.engine.types import SamplingParams
from kvchat.settings import Settings

Flags = dict[str, Any]
"""The annotation of each flag, by the name of its setting."""


def _flag(kind: Any, panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    option = typer.Option(
        *names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False
    )
    return Annotated[kind | None, option]


MODEL: Flags = {
    "model": _flag(
        str, "Model", "Name, file or folder of the model.", "--model", "-m", metavar="NAME|PATH"
    ),
    "device": _flag(str, "Model", "Where to compute.", metavar="auto|cpu|cuda|mps"),
    "dtype": _flag(
        str,
        "Model",
        "Type of weights that are not quantised.",
        metavar="auto|float32|bfloat16|float16",
    ),
    "quant": _flag(
        str, "Model", "How to hold the weights in memory.", metavar="auto|none|int8|int4"
    ),
    "kv": _flag(
        str,
        "Model",
        "Type of the cached keys and values.",
        metavar="auto|float32|bfloat16|float16",
    ),
    "ctx": _flag(int, "Model", "Context length in tokens.", metavar="N"),
    "threads": _flag(int, "Model", "Compute threads.", metavar="N"),
}

CHAT: Flags = {
    "kernels": _flag(str, "Model", "kvchat's own kernels for the CPU.", metavar="auto|use|off"),
    "speculate": _flag(
        bool,
        "Model",
        "Guess repeated text and check several tokens in one step, where that pays.",
        "--speculate/--no-speculate",
    ),
    "system": _flag(str, "Model", "System prompt.", metavar="TEXT"),
    "persona": _flag(str, "Model", "A persona of the configuration file.", metavar="NAME"),
}

SCREEN: Flags = {
    "theme": _flag(str, "Screen", "Colour theme.", metavar="NAME"),
}

SAVING: Flags = {
    "snapshots": _flag(
        bool,
        "Saving",
        "Keep the KV caches of chats on the disk.",
        "--snapshots/--no-snapshots",
    ),
}

SAMPLING: Flags = {
    "temperature": _flag(
        float, "Sampling", "Lower is more predictable; 0 takes the most probable token."
    ),
    "top_k": _flag(int, "Sampling", "Choose among the k most probable tokens; 0 is off."),
    "top_p": _flag(
        float, "Sampling", "Choose among the fewest tokens that together reach p; 1 is off."
    ),
    "min_p": _flag(
        float, "Sampling", "Drop tokens less probable than this share of the best; 0 is off."
    ),
    "repetition_penalty": _flag(
        float, "Sampling", "Weaken tokens that were used already; 1 is off."
    ),
    "presence_penalty": _flag(float, "Sampling", "Subtract from tokens that were used already."),
    "frequency_penalty": _flag(float, "Sampling", "Subtract for each time a token was used."),
    "penalty_window": _flag(
        int, "Sampling", "How many last tokens the penalties look at; -1 is all."
    ),
    "penalise_all": _flag(
        bool, "Sampling", "Penalise punctuation and control tokens too.", "--penalise-all"
    ),
    "temperature_last": _flag(
        bool, "Sampling", "Apply the temperature after the truncations.", "--temperature-last"
    ),
    "seed": _flag(int, "Sampling", "The same seed gives the same reply."),
    "max_tokens": _flag(int, "Sampling", "Longest reply in tokens."),
    "stop": _flag(list[str], "Sampling", "End the reply before this text; repeatable."),
}


def takes_settings(*groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of some groups; it receives them merged as `settings`.

    The command's own parameters keep their place before the flags.
    """
    return _takes("settings", read_settings, groups)


def takes_flags(*groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of some groups; it receives those that were given as `flags`."""
    return _takes("flags", _given, groups)


def _takes(
    receives: str, read: Callable[[dict[str, Any]], Any], groups: tuple[Flags, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flags = {name: annotation for group in groups for name, annotation in group.items()}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            values = {name: given.pop(name) for name in flags}
            function(**{receives: read(values)}, **given)

        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != receives]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            *(p.replace(kind=keyword) for p in own),
            *(
                inspect.Parameter(name, keyword, default=None, annotation=annotation)
                for name, annotation in flags.items()
            ),
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def read_settings(flags: dict[str, Any]) -> Settings:
    """Merge flags with the configuration and the environment; say what of these is unusable.

    Raises:
        SettingError: a flag has an unusable value.
    """
    settings, problems = Settings.load(_given(flags), preset_values, range_refusal)
    tell(problems)
    return settings


def tell(problems: Iterable[str]) -> None:
    """Note what is unusable.

    Raises:
        SettingError: it is a flag.
    """
    for problem in problems:
        if problem.startswith("--"):
            raise SettingError(problem)
        note(problem)


def range_refusal(name: str, value: Any) -> str | None:
    """Say why the engine does not take a value of a sampling parameter, or None."""
    try:
        SamplingParams().updated(**{name: value})
    except SettingError as error:
        return str(error)
    return None


def preset_values(name: str) -> Mapping[str, Any]:
    """Return the sampling parameters of a preset.

    Raises:
        LookupError: there is none of that name, or the file of presets cannot be read.
    """
    from kvchat.tui.presets import BUILT_IN, load_presets

    try:
        presets = {preset.name: preset for preset in (*load_presets()[0], *BUILT_IN)}
    except SettingError as error:
        raise LookupError(str(error)) from error
    if name not in presets:
        raise LookupError(f"there is no preset '{name}' (there are: {', '.join(presets)})")
    return presets[name].values


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Leave out flags that were not given; a repeatable one is empty then."""
    return {name: value for name, value in flags.items() if value not in (None, [])}
