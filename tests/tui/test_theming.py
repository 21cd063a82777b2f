"""Themes: ours are readable, broken ones are named, poor terminals get what they can show."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from textual.color import Color
from textual.filter import NoColor
from textual.theme import BUILTIN_THEMES
from textual.widgets import Button, Input, OptionList, TextArea, Tree

from kvchat.tui.theming import (
    DEFAULT_THEME,
    READABLE,
    TERMINAL_THEME,
    Themes,
    contrast,
    load_themes,
    read_theme,
)

GROUNDS = ("background", "surface", "panel", "block-cursor-blurred-background")
NAMED = ("primary", "secondary", "accent", "success", "warning", "error")
INKS = ("foreground", "text", "text-muted", *(f"text-{name}" for name in NAMED))
OURS = sorted(path.stem for path in (Path(__file__).parents[2] / "themes").glob("*.toml"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path))
    (tmp_path / "themes").mkdir()
    return tmp_path / "themes"


def write(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def colours(themes: Themes, name: str) -> dict[str, str]:
    theme = themes.entries[name].theme
    return {**theme.to_color_system().generate(), **theme.variables}


def test_ours_and_all_of_textuals_are_there(config: Path):
    themes = load_themes()
    assert themes.problems == []
    assert len(OURS) >= 8
    assert set(OURS) | set(BUILTIN_THEMES) == set(themes.entries)
    assert next(iter(themes.entries)) == DEFAULT_THEME
    assert {themes.entries[name].theme.dark for name in OURS} == {True, False}
    assert all(themes.entries[name].about for name in OURS)


@pytest.mark.parametrize("name", [name for name in OURS if name != TERMINAL_THEME])
def test_every_text_of_ours_can_be_read(config: Path, name: str):
    found = colours(load_themes(), name)
    poor = {
        (ink, ground): round(ratio, 2)
        for ink in INKS
        for ground in GROUNDS
        if (ratio := contrast(Color.parse(found[ink]), Color.parse(found[ground]))) < READABLE
    }
    assert poor == {}
    cursor = (found["block-cursor-foreground"], found["block-cursor-background"])
    assert contrast(*map(Color.parse, cursor)) >= READABLE


def test_the_high_contrast_theme_has_seven_to_one(config: Path):
    found = colours(load_themes(), "contrast")
    for ink in INKS:
        assert contrast(Color.parse(found[ink]), Color.parse(found["background"])) >= 7


def test_contrast_is_that_of_the_guidelines():
    white, black, grey = map(Color.parse, ("#ffffff", "#000000", "#767676"))
    assert contrast(white, black) == pytest.approx(21)
    assert contrast(grey, white) == contrast(white, grey) == pytest.approx(4.54, abs=0.01)


def test_a_users_theme_may_say_little(config: Path):
    write(config, 'primary = "#ff8800"', "lamp")
    themes = load_themes()
    assert themes.problems == []
    entry = themes.entries["lamp"]
    assert (entry.source, entry.theme.primary) == ("yours", "#ff8800")


def test_a_users_theme_may_replace_one_of_ours(config: Path):
    write(config, 'name = "paper"\nprimary = "#123456"', "other")
    assert load_themes().entries["paper"].source == "yours"


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ('primary = "bluish"', "primary", "not a colour: 'bluish'"),
        ("primary = 3", "primary", "must be text, not 3"),
        ('primary = "#123"\naccnt = "#123"', "accnt", "did you mean 'accent'?"),
        ('primary = "#123"\ndark = "yes"', "dark", "must be true or false"),
        ('primary = "#123"\nvariables = 1', "variables", "must be a section"),
        ('primary = "#123"\n[variables]\ntext-mutd = "red"', "text-mutd", "'text-muted'?"),
        ('primary = "#123"\n[variables]\nborder = "red; x: y"', "border", "not a colour"),
        ('primary = "#123"\n[variables]\nlink-style = "wavy"', "link-style", "not a text style"),
        ('primary = "#123"\n[variables]\nborder = 7', "border", "must be text, not 7"),
        ('name = "a b"\nprimary = "#123"', "name", "letters, digits and dashes"),
        ("dark = true", "primary", "is needed"),
    ],
)
def test_a_wrong_key_is_named_with_its_file_and_the_reason(config, text, key, reason):
    path = write(config, text)
    (problem,) = load_themes().problems
    assert problem.startswith(f"{path}: ")
    assert f"'{key}'" in problem
    assert reason in problem


def test_the_rest_of_a_theme_with_a_wrong_key_is_used(config: Path):
    write(config, 'primary = "#123456"\naccent = "nope"\nerror = "#ff0000"')
    theme = load_themes().entries["mine"].theme
    assert (theme.primary, theme.accent, theme.error) == ("#123456", None, "#ff0000")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"primary = ", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (1 << 17), "too long"),
        (b"x = " + b"[" * 10_000, "not valid TOML"),
    ],
    ids=["cut", "binary", "huge", "deep"],
)
def test_a_file_that_is_no_theme_is_reported(config: Path, data: bytes, reason: str):
    path = config / "bad.toml"
    path.write_bytes(data)
    themes = load_themes()
    assert len(themes.problems) == 1
    assert str(path) in themes.problems[0]
    assert reason in themes.problems[0]
    assert "bad" not in themes.entries


def test_a_folder_in_place_of_a_theme_is_reported(config: Path):
    (config / "bad.toml").mkdir()
    assert "cannot be read" in load_themes().problems[0]


def test_two_files_with_one_name_are_reported(config: Path):
    write(config, 'name = "same"\nprimary = "#111111"', "a")
    write(config, 'name = "same"\nprimary = "#222222"', "b")
    themes = load_themes()
    assert "'same'" in themes.problems[0]
    assert themes.entries["same"].theme.primary == "#111111"


@pytest.mark.parametrize(
    ("wanted", "color_system", "no_color", "chosen", "said"),
    [
        (None, "truecolor", False, DEFAULT_THEME, None),
        (None, "standard", False, TERMINAL_THEME, None),
        ("paper", "truecolor", False, "paper", None),
        ("paper", "256", False, "paper", None),
        ("paper", "standard", False, TERMINAL_THEME, "This terminal has 16 colours"),
        ("paper", None, False, TERMINAL_THEME, "This terminal has 16 colours"),
        ("paper", "truecolor", True, TERMINAL_THEME, None),
        ("ansi-light", "standard", False, "ansi-light", None),
    ],
)
def test_a_terminal_gets_a_theme_it_can_show(config, wanted, color_system, no_color, chosen, said):
    name, problem, note = load_themes().choose(wanted, color_system=color_system, no_color=no_color)
    assert (name, problem) == (chosen, None)
    if said is None:
        assert note is None
    else:
        assert note is not None
        assert note.startswith(said)
        assert "'paper'" in note


def test_an_unknown_theme_is_said_and_the_default_taken(config: Path):
    name, problem, note = load_themes().choose("papper", color_system="truecolor", no_color=False)
    assert (name, note) == (DEFAULT_THEME, None)
    assert problem is not None
    assert "'papper'" in problem
    assert "'paper'" in problem


class Gallery(App[None]):
    def compose(self) -> ComposeResult:
        yield TextArea("text")
        yield Input()
        yield OptionList("one", "two")
        yield Tree("tree")
        yield Button("button")


async def test_every_theme_can_be_worn(config: Path):
    write(config, 'primary = "ansi_blue"\nansi = true', "mine-ansi")
    write(config, 'primary = "ansi_blue"', "mixed")
    write(config, 'primary = "#8888"\nbackground = "transparent"', "glass")
    themes = load_themes()
    assert themes.problems == []
    app = Gallery()
    themes.register(app)
    async with app.run_test() as pilot:
        for name in themes.entries:
            app.theme = name
            await pilot.pause()
            assert app.theme_variables["primary"]


async def test_without_colours_there_are_none(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = Gallery(ansi_color=True)
    load_themes().register(app)
    app.theme = TERMINAL_THEME
    async with app.run_test() as pilot:
        await pilot.pause()
        assert any(isinstance(each, NoColor) for each in app._filters)
        strips = app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips for segment in strip if segment.style]
        assert {str(style.color.name) for style in styles if style.color} <= {"default"}
        assert {str(style.bgcolor.name) for style in styles if style.bgcolor} <= {"default"}


def test_a_theme_file_is_read_as_written(tmp_path: Path):
    path = write(
        tmp_path,
        'name = "n"\nabout = "words"\ndark = false\nprimary = "#010203"\n'
        '[variables]\ntext-muted = "#040506 50%"\nlink-style = "bold underline"',
    )
    theme, about, problems = read_theme(path)
    assert problems == []
    assert theme is not None
    assert (theme.name, about, theme.dark) == ("n", "words", False)
    assert theme.variables["text-muted"] == "#040506 50%"
    assert theme.variables["link-style"] == "bold underline"
