"""The sampling panel: its sliders, its presets, and what it tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import wait_until
from textual.app import App, ComposeResult
from textual.widgets import Input, Select

from kvchat.engine.types import LIMITS, SamplingParams
from kvchat.tui.presets import BUILT_IN, Preset, load_presets, presets_file, save_preset
from kvchat.tui.widgets.cache_panel import CachePanel
from kvchat.tui.widgets.sampling import CONTROLS, SamplingPanel
from kvchat.tui.widgets.sidebar import Sidebar
from kvchat.tui.widgets.slider import ParamSlider


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path))


class Host(App[None]):
    def __init__(self, params: SamplingParams | None = None) -> None:
        super().__init__()
        self.sidebar = Sidebar(params)
        self.told: list[SamplingParams] = []

    def compose(self) -> ComposeResult:
        yield self.sidebar

    @property
    def panel(self) -> SamplingPanel:
        return self.sidebar.sampling

    def slider(self, name: str) -> ParamSlider:
        return self.query_one(f"#{name}", ParamSlider)

    @property
    def menu(self) -> Select[object]:
        return self.panel.query_one(Select)

    def on_sampling_panel_params_changed(self, event: SamplingPanel.ParamsChanged) -> None:
        self.told.append(event.params)

    async def choose(self, pilot, name: str) -> None:
        """Open the menu and pick the entry that begins so, by keyboard."""
        self.menu.focus()
        await pilot.press("enter", *name, "enter")


def test_there_is_a_slider_for_every_number_but_the_window() -> None:
    assert {control.name for control in CONTROLS} == set(LIMITS) - {"penalty_window"}
    assert all(control.about.endswith(".") for control in CONTROLS)


def test_neutral_values_are_written_as_words() -> None:
    neutral = SamplingParams(
        top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_tokens=None, seed=None
    )
    words = {c.name: c.scale.format(getattr(neutral, c.name)) for c in CONTROLS}
    del words["temperature"]
    assert words.pop("max_tokens") == "no limit"
    assert words.pop("seed") == "random"
    assert set(words.values()) == {"off"}


async def test_a_moved_slider_tells_all_parameters_at_once() -> None:
    app = Host(SamplingParams(stop=("END",), penalty_window=7))
    async with app.run_test() as pilot:
        app.slider("top_k").focus()
        await pilot.press("right", "right")
        expected = SamplingParams(stop=("END",), penalty_window=7, top_k=70)
        await wait_until(pilot, lambda: len(app.told) == 2)
        assert app.told[-1] == app.panel.params == expected


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
async def test_every_slider_keeps_to_what_sampling_accepts(control) -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.slider(control.name).focus()
        for key in ("home", "end", "shift+left", "left", "right"):
            await pilot.press(key)
        await wait_until(pilot, lambda: len(app.told) >= 3)
        for value in (1e300, -1e300):
            app.slider(control.name).value = value
            await wait_until(
                pilot,
                lambda: getattr(app.panel.params, control.name) == app.slider(control.name).value,
            )


async def test_setting_the_parameters_moves_the_sliders_and_tells_nobody() -> None:
    app = Host()
    async with app.run_test() as pilot:
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=9)
        app.panel.params = params
        await pilot.pause()
        assert {c.name: app.slider(c.name).value for c in CONTROLS} == {
            c.name: getattr(params, c.name) for c in CONTROLS
        }
        assert app.told == [] and app.panel.params == params


async def test_parameters_given_before_the_panel_is_mounted_are_shown() -> None:
    app = Host()
    app.panel.params = SamplingParams(temperature=1.5)
    app.panel.set_defaults(SamplingParams(temperature=0.3))
    async with app.run_test() as pilot:
        assert app.slider("temperature").value == 1.5
        app.slider("temperature").focus()
        await pilot.press("r")
        assert app.slider("temperature").value == 0.3


async def test_a_reset_goes_to_the_loaded_models_defaults() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.panel.set_defaults(SamplingParams(temperature=0.6, max_tokens=None))
        assert app.panel.params.temperature == 0.8 and app.told == []
        app.slider("temperature").focus()
        await pilot.press("r")
        await wait_until(pilot, lambda: app.panel.params.temperature == 0.6)


async def test_up_and_down_go_from_slider_to_slider() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.slider("temperature").focus()
        await pilot.press("down", "down")
        assert app.focused is app.slider("top_p")
        await pilot.press(*["down"] * 20)
        assert app.focused is app.slider("seed")
        await pilot.press(*["up"] * 8)
        assert app.focused is app.slider("temperature")
        await pilot.press("up")
        assert app.focused is app.menu
        assert app.told == []


async def test_a_typed_value_counts_when_one_moves_on() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.slider("temperature").focus()
        await pilot.press("1", ".", "3", "down")
        await wait_until(pilot, lambda: app.panel.params.temperature == 1.3)


@pytest.mark.parametrize("preset", BUILT_IN, ids=lambda preset: preset.name)
async def test_a_preset_is_chosen_by_keyboard(preset: Preset) -> None:
    app = Host(SamplingParams(max_tokens=55))
    async with app.run_test() as pilot:
        await app.choose(pilot, preset.name)
        await wait_until(pilot, lambda: app.told)
        assert app.told == [preset.applied(SamplingParams(max_tokens=55))]
        assert app.menu.value == preset.name


async def test_the_menu_names_the_preset_the_sliders_stand_at() -> None:
    app = Host()
    async with app.run_test() as pilot:
        assert app.menu.value == "model's own"
        app.slider("temperature").focus()
        await pilot.press("right")
        await wait_until(pilot, lambda: not isinstance(app.menu.value, str))
        await pilot.press("left")
        await wait_until(pilot, lambda: app.menu.value == "model's own")
        app.panel.params = BUILT_IN[0].applied(app.panel.params)
        assert app.menu.value == "precise"
        await app.choose(pilot, "model")
        await wait_until(pilot, lambda: app.told and app.told[-1] == SamplingParams())


async def test_a_preset_is_saved_chosen_and_forgotten() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.slider("temperature").focus()
        await pilot.press("right")
        await app.choose(pilot, "save")
        await wait_until(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press(*"[b]hot", "enter")
        await wait_until(pilot, lambda: app.menu.value == "[b]hot")
        assert not app.panel.query_one(Input).display and app.focused is app.menu
        (saved,), _ = load_presets()
        assert saved.name == "[b]hot" and saved.values["temperature"] == 0.85
        await app.choose(pilot, "precise")
        await app.choose(pilot, "[b]")
        await wait_until(pilot, lambda: app.panel.params.temperature == 0.85)
        await app.choose(pilot, "forget")
        await wait_until(pilot, lambda: load_presets()[0] == [])
        await wait_until(pilot, lambda: not isinstance(app.menu.value, str))
        assert app.panel.params.temperature == 0.85


@pytest.mark.parametrize("last", ["escape", "enter"])
async def test_naming_a_preset_can_be_dropped(last: str) -> None:
    app = Host()
    async with app.run_test() as pilot:
        await app.choose(pilot, "save")
        await wait_until(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press(last)
        await wait_until(pilot, lambda: app.focused is app.menu)
        assert app.menu.value == "model's own" and not presets_file().exists()


async def test_a_name_that_cannot_be_used_is_said_and_may_be_corrected() -> None:
    app = Host()
    async with app.run_test(notifications=True) as pilot:
        await app.choose(pilot, "save")
        await wait_until(pilot, lambda: isinstance(app.focused, Input))
        await pilot.press(*"precise", "enter")
        await wait_until(pilot, lambda: [n.severity for n in app._notifications] == ["error"])
        assert isinstance(app.focused, Input) and not presets_file().exists()


async def test_the_users_presets_are_offered_and_a_broken_file_is_named() -> None:
    save_preset("mine", SamplingParams(temperature=1.7))
    app = Host()
    async with app.run_test() as pilot:
        await app.choose(pilot, "mine")
        await wait_until(pilot, lambda: app.panel.params.temperature == 1.7)
    presets_file().write_text("[mine\n")
    app = Host()
    async with app.run_test(notifications=True) as pilot:
        await wait_until(pilot, lambda: len(app._notifications) == 1)
        assert str(presets_file()) in next(iter(app._notifications)).message
        await app.choose(pilot, "precise")
        await wait_until(pilot, lambda: app.panel.params.temperature == 0.2)


async def test_the_mouse_opens_the_menu_and_picks() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app.menu.region.width)
        await pilot.click("SelectCurrent")
        await wait_until(pilot, lambda: app.menu.expanded)
        await pilot.click("SelectOverlay", offset=(3, 1))
        await wait_until(pilot, lambda: app.menu.value == "precise")


@pytest.mark.parametrize(
    ("height", "one_line", "compact"),
    [
        (18, True, True),
        (20, True, True),
        (21, True, True),
        (30, True, True),
        (31, True, False),
        (39, True, False),
        (40, False, False),
    ],
)
async def test_the_sidebar_is_as_roomy_as_its_height_allows(
    height: int, one_line: bool, compact: bool
) -> None:
    app = Host()
    async with app.run_test(size=(40, height)) as pilot:
        await wait_until(pilot, lambda: app.slider("seed").one_line is one_line)
        assert app.query_one(CachePanel).compact is app.sidebar.speed.compact is compact
        await wait_until(pilot, lambda: app.sidebar.max_scroll_y == 0)


async def test_a_short_sidebar_scrolls_by_keyboard_and_shows_the_focused_slider() -> None:
    app = Host()
    async with app.run_test(size=(40, 8)) as pilot:
        app.slider("temperature").focus()
        await pilot.press(*["down"] * 8)
        await wait_until(pilot, lambda: app.slider("seed").region.bottom <= 8)
        await pilot.press("pagedown", "pagedown")
        await wait_until(pilot, lambda: app.sidebar.scroll_y == app.sidebar.max_scroll_y > 0)
