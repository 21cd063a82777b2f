"""Colour themes: TOML files become Textual themes, checked so that none can break the screen.

A theme file sets colours by name; only `primary` is required:

    name = "paper"              # letters, digits and dashes; the file's name if left out
    about = "ink on paper"      # one line for the list
    dark = false
    primary = "#8c2f25"
    [variables]                 # any of Textual's theme variables
    border = "#8c2f25 50%"
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from textual.app import App
from textual.color import Color, ColorParseError
from textual.design import ColorSystem
from textual.theme import BUILTIN_THEMES, Theme

from kvchat.settings import config_dir

Source = Literal["kvchat", "yours", "Textual"]

DEFAULT_THEME = "dusk"
TERMINAL_THEME = "terminal"
"""Uses nothing but the terminal's own sixteen colours."""

READABLE = 4.5
"""Least contrast of text with what is behind it (WCAG 2.2, 1.4.3)."""

_COLOURS = (
    "primary",
    "secondary",
    "accent",
    "success",
    "warning",
    "error",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
)
_KINDS: dict[str, type] = {"name": str, "about": str, "dark": bool, "ansi": bool, "variables": dict}
_KINDS |= dict.fromkeys(_COLOURS, str)
_WORDS = {str: "text", bool: "true or false", dict: "a section"}
_TEXT_STYLES = frozenset(("none", "not", "bold", "italic", "underline", "reverse", "dim", "strike"))
_ANSI_VARIABLES = {"ansi-background": "ansi_default", "ansi-foreground": "ansi_default"}
"""Textual's widgets name these, and its colour system leaves them out."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_SIZE_LIMIT = 1 << 16
"""Bytes; a theme is a few hundred."""


@dataclass(frozen=True, slots=True)
class ThemeEntry:
    """A theme, with what a list says about it."""

    theme: Theme
    about: str
    source: Source


class Choice(NamedTuple):
    """The theme to begin with, and what there is to tell about it."""

    name: str
    problem: str | None = None
    """What the user can put right."""
    note: str | None = None
    """What is as it is: to be told once, not at every start."""


@dataclass(slots=True)
class Themes:
    """All themes there are."""

    entries: dict[str, ThemeEntry] = field(default_factory=dict)
    """By name: ours, the user's, then Textual's."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the user's files: file, key and reason, one text each."""

    def register(self, app: App[Any]) -> None:
        """Make all themes known to an app."""
        for entry in self.entries.values():
            app.register_theme(entry.theme)

    def choose(self, wanted: str | None, *, color_system: str | None, no_color: bool) -> Choice:
        """Return the theme to begin with.

        Args:
            wanted: a theme's name; None is no preference.
            color_system: of rich's console: "truecolor", "256", "standard", "windows", or None.
            no_color: the user wants no colours at all.
        """
        problem = None
        if wanted is not None and wanted not in self.entries:
            near = difflib.get_close_matches(wanted, self.entries, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            problem, wanted = f"There is no theme '{wanted}'.{hint}", None
        few_colours = no_color or color_system not in ("truecolor", "256")
        if few_colours and not (wanted and self.entries[wanted].theme.ansi):
            note = None
            if wanted is not None and not no_color:
                said = f"'{TERMINAL_THEME}' is shown in place of '{wanted}'."
                note = f"This terminal has 16 colours at most: {said}"
            return Choice(TERMINAL_THEME, problem, note)
        return Choice(wanted or DEFAULT_THEME, problem)


def load_themes() -> Themes:
    """Read our themes, the user's and Textual's. Never raises: see `Themes.problems`."""
    themes = Themes()
    sources: tuple[tuple[Source, Path], ...] = (
        ("kvchat", _own_folder()),
        ("yours", config_dir() / "themes"),
    )
    for source, folder in sources:
        for path in _theme_files(folder):
            theme, about, problems = read_theme(path)
            themes.problems.extend(f"{path}: {problem}" for problem in problems)
            if theme is None:
                continue
            same = themes.entries.get(theme.name)
            if same is not None and same.source == source:
                themes.problems.append(f"{path}: 'name' is {theme.name!r}, as another file's")
            else:
                themes.entries[theme.name] = ThemeEntry(theme, about, source)
    for name, theme in BUILTIN_THEMES.items():
        themes.entries.setdefault(name, ThemeEntry(theme, "", "Textual"))
    return themes


def read_theme(path: Path) -> tuple[Theme | None, str, list[str]]:
    """Read one theme file.

    Returns:
        The theme, what it says about itself, and the problems found. A wrong or unknown key is
        left out and the rest used; without a primary colour there is no theme.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            return None, "", ["too long to be a theme"]
        table = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        return None, "", [f"cannot be read ({error.strerror})"]
    except UnicodeDecodeError:
        return None, "", ["not UTF-8 text"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return None, "", [f"not valid TOML: {error}"]
    problems: list[str] = []
    values = _sound(table, problems)
    variables = _sound_variables(values.pop("variables", {}), problems)
    about = values.pop("about", "")
    values.setdefault("name", path.stem)
    if not _NAME.fullmatch(values["name"]):
        problems.append("'name' may have letters, digits and dashes, and begins with a letter")
    elif "primary" in values:
        theme = Theme(**values, variables=variables)
        derived = _ANSI_VARIABLES if theme.ansi else _readable_variables(theme)
        theme.variables = {**derived, **variables}
        return theme, about, problems
    elif "primary" not in table:
        problems.append("'primary' is needed: the main colour, such as \"#8fb8de\"")
    return None, about, problems


def _own_folder() -> Path:
    """Where our themes are: inside the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    packaged = package / "_themes"
    return packaged if packaged.is_dir() else package.parent / "themes"


def _theme_files(folder: Path) -> list[Path]:
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".toml"]
    except OSError:
        return []
    return sorted(paths, key=lambda path: (path.stem != DEFAULT_THEME, path.name))


def _sound(table: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the keys that can be used."""
    values = {}
    for key, value in table.items():
        kind = _KINDS.get(key)
        if kind is None:
            problems.append(_unknown(key, _KINDS))
        elif not isinstance(value, kind):
            problems.append(f"'{key}' must be {_WORDS[kind]}, not {value!r}")
        elif isinstance(value, str) and key in _COLOURS and not _is_colour(value):
            problems.append(f"'{key}' is not a colour: {value!r}")
        else:
            values[key] = value
    return values


def _sound_variables(table: Mapping[str, Any], problems: list[str]) -> dict[str, str]:
    values = {}
    for key, value in table.items():
        if key not in _variable_names():
            problems.append("[variables] " + _unknown(key, _variable_names()))
        elif not isinstance(value, str):
            problems.append(f"[variables] '{key}' must be text, not {value!r}")
        elif key.endswith("-style") or "-style-" in key:
            if not value.split() or not _TEXT_STYLES.issuperset(value.split()):
                problems.append(f"[variables] '{key}' is not a text style: {value!r}")
            else:
                values[key] = value
        elif not _is_colour(value, variable=True):
            problems.append(f"[variables] '{key}' is not a colour: {value!r}")
        else:
            values[key] = value
    return values


@cache
def _variable_names() -> frozenset[str]:
    return frozenset(
        name for ansi in (False, True) for name in ColorSystem("#000000", ansi=ansi).generate()
    )


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"there is no key '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")


def _is_colour(text: str, *, variable: bool = False) -> bool:
    """Whether Textual takes this for a colour; a variable's may be `auto` or have a percentage."""
    if variable:
        text = re.sub(r" +\d{1,3}%$", "", text)
        if text in ("auto", "initial", "transparent"):
            return True
    try:
        Color.parse(text)
    except ColorParseError:
        return False
    return True


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two opaque colours, from 1 to 21 (WCAG 2.2)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Color) -> float:
    """Relative luminance as WCAG 2.2 defines it, from 0 to 1."""
    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in colour.normalized
    )
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _readable_variables(theme: Theme) -> dict[str, str]:
    """Derive text colours that belong to the theme, where Textual would take black or white."""
    generated = {
        name: Color.parse(value)
        for name, value in theme.to_color_system().generate().items()
        if name in _COLOURS
    }
    if any(colour.ansi is not None for colour in generated.values()):
        return {}
    ink, background, surface, primary = (
        generated[name] for name in ("foreground", "background", "surface", "primary")
    )
    cursor = surface.blend(primary, 0.14, alpha=1)
    grounds = [background, surface, generated["panel"], cursor]

    def readable(colour: Color, towards: Color, steps: int = 20) -> str:
        """The first mix of two colours, from one to the other, that can be read anywhere."""
        mixes = (colour.blend(towards, step / steps, alpha=1) for step in range(steps + 1))
        good = (mix for mix in mixes if min(contrast(mix, at) for at in grounds) >= READABLE)
        return next(good, towards).hex

    on_primary = max((background, ink), key=lambda colour: contrast(colour, primary)).hex
    named = ("primary", "secondary", "accent", "success", "warning", "error")
    return {
        "text": ink.hex,
        "text-muted": readable(ink.blend(background, 0.45, alpha=1), ink),
        "text-disabled": ink.blend(background, 0.6, alpha=1).hex,
        **{f"text-{name}": readable(generated[name], ink) for name in named},
        "block-cursor-foreground": on_primary,
        "button-color-foreground": on_primary,
        "block-cursor-blurred-foreground": ink.hex,
        "block-cursor-blurred-background": cursor.hex,
        "block-hover-background": surface.blend(ink, 0.07, alpha=1).hex,
        "scrollbar": background.blend(ink, 0.2, alpha=1).hex,
        "scrollbar-hover": background.blend(ink, 0.3, alpha=1).hex,
        "scrollbar-background": background.hex,
        "border-blurred": surface.blend(ink, 0.22, alpha=1).hex,
    }
