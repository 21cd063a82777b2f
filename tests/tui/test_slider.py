"""The slider under every key and every movement of the mouse."""

from __future__ import annotations

import pytest
from helpers import wait_until
from textual import events
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.widgets import Static

from kvchat.engine.types import Limit
from kvchat.tui.glyphs import ASCII, UNICODE, Glyphs
from kvchat.tui.scale import Scale, Value
from kvchat.tui.widgets.slider import ParamSlider

TEMPERATURE = Scale(low=0.0, high=2.0, step=0.05, limit=Limit(0, 100), words={0.0: "greedy"})
SEED = Scale(
    low=0, high=9999, step=1, limit=Limit(0, 2**63 - 1, whole=True),
    words={None: "random"}, beside=(None, "low"),
)  # fmt: skip

WIDTH = 30
TRACK = 28
"""The track below the label takes all columns but two."""


class Host(App[None]):
    """A slider, what it posted, and something else that can have the focus."""

    ESCAPE_TO_MINIMIZE = False

    def __init__(self, *, one_line: bool = False, glyphs: Glyphs = UNICODE) -> None:
        super().__init__()
        self.posted: list[Value] = []
        self.slider = ParamSlider(
            "temperature", TEMPERATURE, 0.8, default=0.6, short="temp", about="how freely.",
            glyphs=glyphs,
        )  # fmt: skip
        self.slider.one_line = one_line
        self.slider.styles.width = WIDTH
        self.seed = ParamSlider("seed", SEED, None, default=None)

    def compose(self) -> ComposeResult:
        yield self.slider
        yield self.seed

    def on_mount(self) -> None:
        self.slider.focus()

    def on_param_slider_changed(self, event: ParamSlider.Changed) -> None:
        assert event.control is event.slider and event.value == event.slider.value
        self.posted.append(event.value)


def rows(slider: ParamSlider) -> list[str]:
    return [
        "".join(segment.text for segment in slider.render_line(y)).rstrip()
        for y in range(slider.size.height)
    ]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ("right", 0.85),
        ("left", 0.75),
        ("shift+right", 1.3),
        ("shift+left", 0.3),
        ("home", 0.0),
        ("end", 2.0),
        ("end right", 2.0),
        ("r", 0.6),
        ("backspace", 0.6),
        ("delete", 0.6),
        ("1 . 2 enter", 1.2),
        (". 5 enter", 0.5),
        ("1 0 enter", 10.0),
        ("enter 0 , 7 enter", 0.7),
        ("enter g r e e d y enter", 0.0),
        ("1 . 2 escape", 0.8),
        ("1 backspace 2 enter", 2.0),
        ("9 9 9 enter escape", 0.8),
        ("9 9 9 enter backspace enter", 99.0),
        ("5 left home r enter backspace backspace enter", 0.8),
        ("1 . 5 tab", 1.5),
        ("1 . x tab", 0.8),
    ],
)
async def test_keys(keys: str, value: float) -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press(*keys.split())
        await wait_until(pilot, lambda: app.slider.value == value)
        await wait_until(pilot, lambda: app.posted == ([] if value == 0.8 else [value]))


async def test_keys_belong_to_the_text_while_a_value_is_typed() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("1", "r", "left", "home")
        assert app.slider.entry == "1r"
        await pilot.press("enter")
        assert app.slider.error == "not a number"
        assert rows(app.slider) == [f"▸ temperature{'1r▏':>17}", "  ! not a number"]
        await pilot.press("backspace")
        assert app.slider.error == ""
        await pilot.press("escape")
        assert app.slider.entry is None and app.slider.value == 0.8 and app.posted == []


async def test_typing_shows_what_may_be_typed() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("enter")
        assert rows(app.slider)[1] == "  0 to 100"
        await pilot.press("4", "2")
        assert rows(app.slider)[0].endswith("42▏")


async def test_a_number_is_pasted() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.post_message(events.Paste(" 1.25\x1b[31m\n" + "9" * 1_000_000))
        await wait_until(pilot, lambda: app.slider.entry)
        assert app.slider.entry is not None and len(app.slider.entry) <= 24
        assert "\x1b" not in app.slider.entry
        await pilot.press("escape", "enter")
        app.post_message(events.Paste(" 1.25 "))
        await wait_until(pilot, lambda: app.slider.entry)
        await pilot.press("enter")
        assert app.slider.value == 1.25


async def test_no_value_is_a_value_where_the_scale_has_a_word_for_it() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.seed.focus()
        await pilot.press("right", "right")
        assert app.seed.value == 1
        await pilot.press("home")
        assert app.seed.value is None and rows(app.seed)[0].endswith(" random")
        await pilot.press(*"9223372036854775807", "enter")
        assert app.seed.value == 2**63 - 1
        await pilot.press("r")
        assert app.seed.value is None


def column(value: float) -> int:
    return 2 + round(TEMPERATURE.position(value) * (TRACK - 1))


async def press_at(pilot: Pilot[None], slider: ParamSlider, x: int, y: int = 1) -> None:
    await pilot.mouse_down(slider, offset=(x, y))


async def test_a_click_on_the_track_goes_there_and_takes_the_focus() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.seed.focus()
        await pilot.click(app.slider, offset=(2, 1))
        assert app.slider.value == 0.0 and app.slider.has_focus
        await pilot.click(app.slider, offset=(WIDTH - 1, 1))
        assert app.slider.value == 2.0
        await pilot.click(app.slider, offset=(column(0.6), 1))
        assert app.slider.value == 0.6, "the default's tick is the default"
        assert app.posted == [0.0, 2.0, 0.6]


async def test_a_drag_follows_the_mouse_also_outside_and_ends_with_it() -> None:
    app = Host()
    async with app.run_test(size=(60, 10)) as pilot:
        await press_at(pilot, app.slider, column(1.0))
        await pilot.hover(app.slider, offset=(column(1.5), 1))
        assert app.slider.value == 1.5
        await pilot.hover(None, offset=(55, 8))
        assert app.slider.value == 2.0
        await pilot.mouse_up(None, offset=(55, 8))
        assert app.mouse_captured is None
        await pilot.hover(app.slider, offset=(column(0.5), 1))
        assert app.slider.value == 2.0


async def test_a_press_on_the_label_changes_nothing_and_on_the_value_begins_to_type() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.click(app.slider, offset=(4, 0))
        assert app.slider.value == 0.8 and app.slider.entry is None
        await pilot.click(app.slider, offset=(WIDTH - 2, 0))
        assert app.slider.entry == ""
        await pilot.press("1", "enter")
        assert app.slider.value == 1.0


async def test_the_mouse_works_on_one_line_too() -> None:
    app = Host(one_line=True)
    async with app.run_test() as pilot:
        line = rows(app.slider)[0]
        track = [x for x, sign in enumerate(line) if sign in "━─●○┼"]
        await pilot.click(app.slider, offset=(track[-1], 0))
        assert app.slider.value == 2.0
        await pilot.click(app.slider, offset=(track[0], 0))
        assert app.slider.value == 0.0
        await pilot.click(app.slider, offset=(track[-1] + 1, 0))
        assert app.slider.value == 0.0


def wheel(kind: type[events.MouseEvent], slider: ParamSlider, shift: bool = False) -> None:
    region = slider.region
    slider.app.post_message(
        kind(slider, region.x, region.y, 0, 0, 0, shift, False, False, region.x, region.y)
    )


async def test_the_wheel() -> None:
    app = Host()
    async with app.run_test() as pilot:
        for kind, shift, value in (
            (events.MouseScrollUp, False, 0.85),
            (events.MouseScrollDown, False, 0.8),
            (events.MouseScrollUp, True, 1.3),
        ):
            wheel(kind, app.slider, shift)
            await wait_until(pilot, lambda value=value: app.slider.value == value)


async def test_the_wheel_scrolls_past_a_slider_without_the_focus() -> None:
    class Tall(App[None]):
        def compose(self) -> ComposeResult:
            with VerticalScroll():
                yield ParamSlider("temperature", TEMPERATURE, 0.8, default=0.6)
                yield Static("\n" * 100)

    app = Tall()
    async with app.run_test() as pilot:
        slider, scroll = app.query_one(ParamSlider), app.query_one(VerticalScroll)
        scroll.focus()
        wheel(events.MouseScrollDown, slider)
        await wait_until(pilot, lambda: scroll.scroll_y > 0)
        assert slider.value == 0.8
        scroll.scroll_home(animate=False)
        slider.focus()
        await wait_until(pilot, lambda: scroll.scroll_y == 0 and slider.has_focus)
        wheel(events.MouseScrollDown, slider)
        await wait_until(pilot, lambda: slider.value == 0.75)
        assert scroll.scroll_y == 0


async def test_how_it_looks() -> None:
    app = Host()
    async with app.run_test() as pilot:
        head, track = rows(app.slider)
        assert head == f"▸ temperature{'0.80':>17}"
        assert track == f"  {'━' * 8}┼{'━' * 2}●{'─' * 16}"
        await pilot.press("r")
        assert rows(app.slider)[1] == f"  {'━' * 8}○{'─' * 19}"
        app.slider.one_line = True
        app.seed.focus()
        await wait_until(pilot, lambda: rows(app.slider) == [f"  temp ━━━━○{'─' * 11}   0.60"])


async def test_no_sign_outside_ascii_where_the_terminal_has_none() -> None:
    app = Host(glyphs=ASCII)
    async with app.run_test() as pilot:
        assert "".join(rows(app.slider)).isascii()
        await pilot.press("7")
        assert "".join(rows(app.slider)).isascii()


@pytest.mark.parametrize("width", [0, 1, 3, 8, 12, 18, 200])
@pytest.mark.parametrize("one_line", [False, True])
async def test_it_survives_every_width(width: int, one_line: bool) -> None:
    app = Host(one_line=one_line)
    async with app.run_test(size=(210, 10)) as pilot:
        app.slider.styles.width = width
        await pilot.pause()
        await pilot.press("right", "1", "x", "enter", "escape")
        assert app.slider.value == 0.85
        assert all(len(row) <= width for row in rows(app.slider))


async def test_the_value_may_be_set_and_is_clamped_and_told() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.slider.value = 1e9
        assert app.slider.value == 100.0
        await wait_until(pilot, lambda: app.posted == [100.0])
        with app.slider.prevent(ParamSlider.Changed):
            app.slider.value = 0.5
        await pilot.pause()
        assert app.posted == [100.0]


def test_it_explains_itself() -> None:
    slider = Host().slider
    assert slider.tooltip == "temperature: how freely."
    assert "how freely." in slider.HELP
