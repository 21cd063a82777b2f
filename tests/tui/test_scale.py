"""Scales of sliders: positions, steps, and what people type."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.engine.types import Limit
from kvchat.tui.scale import Scale
from kvchat.tui.widgets.sampling import CONTROLS

LINEAR = Scale(low=0.0, high=2.0, step=0.05, limit=Limit(0, 100), words={0.0: "greedy"})
TOP_K = Scale(
    low=1, high=200, step=1, limit=Limit(0, 2**31 - 1, whole=True), log=True,
    words={0.0: "off"}, beside=(0, "low"),
)  # fmt: skip
LENGTH = Scale(
    low=16, high=8192, step=1, limit=Limit(1, 2**31 - 1, whole=True), log=True,
    words={None: "no limit"}, beside=(None, "high"),
)  # fmt: skip
SEED = Scale(
    low=0, high=9999, step=1, limit=Limit(0, 2**63 - 1, whole=True),
    words={None: "random"}, beside=(None, "low"),
)  # fmt: skip
TOP_P = Scale(low=0.01, high=1.0, step=0.01, limit=Limit(0, 1, low_excluded=True))
EVERY = [control.scale for control in CONTROLS]


def walk(scale: Scale, up: bool) -> list[float | None]:
    """All values that steps lead to, from one end to the other."""
    value = scale.first if up else scale.last
    values = [value]
    while (following := scale.stepped(value, 1 if up else -1)) != value:
        values.append(following)
        value = following
        assert len(values) < 20_000
    return values


@pytest.mark.parametrize("scale", EVERY)
def test_steps_reach_both_ends_and_retrace_themselves(scale: Scale) -> None:
    up = walk(scale, up=True)
    assert up[0] == scale.first and up[-1] == scale.last
    assert up == walk(scale, up=False)[::-1]
    positions = [scale.position(value) for value in up]
    assert positions == sorted(positions) and positions[0] == 0.0 and positions[-1] == 1.0


@pytest.mark.parametrize("scale", EVERY)
def test_every_step_is_found_again_at_its_position(scale: Scale) -> None:
    for value in walk(scale, up=True):
        assert scale.value_at(scale.position(value)) == value


@pytest.mark.parametrize("scale", EVERY)
def test_what_is_written_is_read_back(scale: Scale) -> None:
    for value in walk(scale, up=True)[::7]:
        assert scale.parse(scale.format(value)) == value


@given(st.integers(1, 8192))
def test_a_logarithmic_round_trip_stays_within_one_step(value: int) -> None:
    seen = LENGTH.value_at(LENGTH.position(value))
    shown = max(value, 16)
    lower, upper = LENGTH.stepped(shown, -1), LENGTH.stepped(shown, 1)
    assert lower is not None and seen is not None
    assert lower <= seen <= (upper or 8192)


@given(st.floats(0, 1), st.sampled_from(EVERY), st.floats(0, 0.5))
def test_every_position_has_an_allowed_value(position: float, scale: Scale, cell: float) -> None:
    value = scale.value_at(position, resolution=cell)
    assert scale.clamp(value) == value
    assert value is None or not scale.limit.whole or isinstance(value, int)


@given(st.floats(allow_nan=False), st.sampled_from(EVERY))
def test_clamped_values_are_inside_the_limits(value: float, scale: Scale) -> None:
    if math.isinf(value) and scale.limit.whole:
        value = math.copysign(1e300, value)
    clamped = scale.clamp(value)
    assert clamped is not None and scale.limit.low <= clamped <= scale.limit.high
    assert not (scale.limit.low_excluded and clamped == scale.limit.low)
    assert 0.0 <= scale.position(clamped) <= 1.0


@given(st.text(max_size=12), st.sampled_from(EVERY))
def test_any_text_is_a_value_or_a_reason(text: str, scale: Scale) -> None:
    try:
        value = scale.parse(text)
    except ValueError as reason:
        assert str(reason) in {"not a number", "not a whole number", scale.range_text}
    else:
        assert scale.clamp(value) == value


@pytest.mark.parametrize(
    ("scale", "text", "value"),
    [
        (LINEAR, "0.83", 0.83),
        (LINEAR, " 0,8 ", 0.8),
        (LINEAR, ".5", 0.5),
        (LINEAR, "greedy", 0.0),
        (LINEAR, "７", 7.0),
        (TOP_K, "OFF", 0),
        (TOP_K, "5000", 5000),
        (LENGTH, "1,024", 1024),
        (LENGTH, "2e3", 2000),
        (LENGTH, "no limit", None),
        (SEED, "9223372036854775807", 2**63 - 1),
        (SEED, "random", None),
    ],
)
def test_numbers_as_people_type_them(scale: Scale, text: str, value: float | None) -> None:
    assert scale.parse(text) == value


@pytest.mark.parametrize(
    ("scale", "text", "reason"),
    [
        (LINEAR, "100.1", "0 to 100"),
        (LINEAR, "-1", "0 to 100"),
        (LINEAR, "nan", "not a number"),
        (LINEAR, "inf", "not a number"),
        (LINEAR, "1.2.3", "not a number"),
        (LINEAR, "random", "not a number"),
        (TOP_K, "2.5", "not a whole number"),
        (SEED, "9223372036854775808", "0 or more"),
        (TOP_P, "0", ">0 to 1"),
    ],
)
def test_what_is_no_value_is_refused_with_the_reason(
    scale: Scale, text: str, reason: str
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=f"^{reason}$"):
        scale.parse(text)


def test_steps_are_exact_and_start_from_typed_values() -> None:
    assert LINEAR.stepped(0.3, 1) == 0.35
    assert LINEAR.stepped(0.83, 1) == 0.85
    assert LINEAR.stepped(0.83, -1) == 0.8
    assert LINEAR.stepped(0.8, 10) == 1.3
    assert SEED.stepped(2**63 - 1, -1) == 2**63 - 2


def test_logarithmic_steps_are_round_and_reach_the_value_beside() -> None:
    assert [TOP_K.stepped(10, n) for n in (1, 2, 3)] == [12, 14, 16]
    assert TOP_K.stepped(50, 10) == 200
    assert TOP_K.stepped(1, -1) == 0
    assert TOP_K.stepped(0, 1) == 1
    assert LENGTH.stepped(8192, 1) is None
    assert LENGTH.stepped(None, -1) == 8192


def test_a_value_out_of_sight_stands_at_the_end_and_steps_back() -> None:
    assert TOP_K.position(5000) == 1.0
    assert TOP_K.stepped(5000, 1) == 5000
    assert TOP_K.stepped(5000, -1) == 4500


def test_wide_cells_give_round_values() -> None:
    assert LINEAR.value_at(0.41, resolution=0.09) == 0.8
    assert TOP_P.value_at(0.5, resolution=0.11) == 0.5


def test_a_magnet_takes_half_a_cell_on_both_sides() -> None:
    signed = Scale(low=-2.0, high=2.0, step=0.05, limit=Limit(-100, 100))
    cell = 1 / 11
    for position in (5 / 11, 6 / 11):
        assert signed.value_at(position, resolution=cell, magnets=[0.0]) == 0.0
    assert signed.value_at(7 / 11, resolution=cell, magnets=[0.0]) > 0


def test_values_are_written_with_the_decimals_they_need() -> None:
    assert LINEAR.format(0.8) == "0.80"
    assert LINEAR.format(0.8125) == "0.8125"
    assert TOP_K.format(0) == "off"
    assert TOP_K.format(40) == "40"
    assert SEED.format(None) == "random"


@pytest.mark.parametrize("wrong", [float("nan"), None])
def test_no_value_is_not_clamped_to_one(wrong: float | None) -> None:
    with pytest.raises(ValueError):
        LINEAR.clamp(wrong)
