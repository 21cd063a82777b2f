from __future__ import annotations

import pytest

from kvchat.chat import sampling_text
from kvchat.engine.errors import SettingError
from kvchat.engine.types import SamplingParams

DEFAULTS = SamplingParams(temperature=0.6, top_k=7, stop=("x",))


def set_to(name: str, text: str) -> object:
    params = sampling_text.updated(SamplingParams(seed=5), name, text, DEFAULTS)
    return getattr(params, name.replace("-", "_"))


def test_every_parameter_can_be_set() -> None:
    assert tuple(sampling_text.NEUTRAL) == SamplingParams.names()


@pytest.mark.parametrize("name", SamplingParams.names())
def test_what_is_shown_can_be_typed(name: str) -> None:
    for params in (SamplingParams(), DEFAULTS, SamplingParams(max_tokens=9, penalise_all=True)):
        value = getattr(params, name)
        assert set_to(name, sampling_text.shown(value)) == value


@pytest.mark.parametrize("name", SamplingParams.names())
def test_off_is_neutral_and_default_is_the_models_own(name: str) -> None:
    assert set_to(name, "off") == sampling_text.NEUTRAL[name]
    assert set_to(name, "Default") == getattr(DEFAULTS, name)


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("User:", ("User:",)),
        ("\\n\\n", ("\n\n",)),
        ('"  a\\tb "', ("  a\tb ",)),
        ('["a", "b c"]', ("a", "b c")),
        ("[broken", ("[broken",)),
        ("[1, 2]", ("[1, 2]",)),
    ],
)
def test_stop_strings(text: str, strings: tuple[str, ...]) -> None:
    assert set_to("stop", text) == strings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("top-k", "1.5"),
        ("top_p", "2"),
        ("seed", "-1"),
        ("penalise_all", "perhaps"),
        ("stop", '[""]'),
    ],
)
def test_bad_values_are_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=name.replace("-", "_") if name != "stop" else "stop"):
        set_to(name, text)


def test_a_misspelled_name_is_answered_with_the_near_one() -> None:
    with pytest.raises(SettingError, match="temperature"):
        sampling_text.updated(SamplingParams(), "temprature", "1", DEFAULTS)
