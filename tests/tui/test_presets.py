"""Presets: the program's own, and the user's file with all that can be wrong with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvchat.engine.errors import SettingError
from kvchat.engine.types import SamplingParams
from kvchat.tui.presets import (
    BUILT_IN,
    MODELS_OWN,
    SHAPE,
    forget_preset,
    load_presets,
    models_own,
    presets_file,
    save_preset,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder that does not exist yet."""
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def write(text: str | bytes) -> None:
    presets_file().parent.mkdir(exist_ok=True)
    presets_file().write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("preset", BUILT_IN)
def test_a_built_in_preset_sets_the_shape_and_nothing_else(preset) -> None:
    before = SamplingParams(max_tokens=77, seed=5, stop=("END",), penalty_window=-1)
    after = preset.applied(before)
    assert preset.matches(after) and not preset.matches(SamplingParams(temperature=0.123))
    assert set(preset.values) == set(SHAPE)
    assert (after.max_tokens, after.seed, after.stop, after.penalty_window) == (77, 5, ("END",), -1)


def test_the_built_in_presets_go_from_careful_to_free() -> None:
    assert [preset.name for preset in BUILT_IN] == ["precise", "balanced", "creative"]
    temperatures = [preset.values["temperature"] for preset in BUILT_IN]
    assert temperatures == sorted(temperatures)


def test_the_models_own_goes_back_to_its_defaults() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
    own = models_own(defaults).applied(SamplingParams(temperature=1.9, max_tokens=50))
    assert (own.temperature, own.top_k, own.max_tokens) == (0.6, 20, 50)


def test_without_a_file_there_are_none() -> None:
    assert load_presets() == ([], [])


@pytest.mark.parametrize("name", ["mine", "[b]x[/b]", 'a "b" \\ c', "诗人 🪶", "a.b", "#"])
def test_what_is_saved_is_loaded(name: str) -> None:
    params = SamplingParams(temperature=0.85, top_k=0, min_p=1e-5, seed=2**63 - 1, max_tokens=300)
    saved = save_preset(f"  {name} ", params)
    presets, problems = load_presets()
    assert presets == [saved] and problems == [] and saved.name == name
    assert saved.applied(SamplingParams()) == params


def test_what_has_no_value_is_not_written() -> None:
    assert not {"seed", "max_tokens"} & set(save_preset("mine", SamplingParams()).values)


def test_a_name_is_kept_once_and_others_stay() -> None:
    save_preset("one", SamplingParams(temperature=0.1))
    save_preset("two", SamplingParams(temperature=0.2))
    save_preset("one", SamplingParams(temperature=0.3))
    assert [(p.name, p.values["temperature"]) for p in load_presets()[0]] == [
        ("two", 0.2),
        ("one", 0.3),
    ]
    forget_preset("two")
    forget_preset("never there")
    assert [p.name for p in load_presets()[0]] == ["one"]
    assert list(presets_file().parent.iterdir()) == [presets_file()]


def test_all_parameters_may_be_written_by_hand() -> None:
    write('[mine]\nstop = ["END", "\\u007f"]\ntemperature_last = true\npenalty_window = -1\n')
    (mine,), problems = load_presets()
    params = mine.applied(SamplingParams())
    assert problems == []
    assert (params.stop, params.temperature_last, params.penalty_window) == (
        ("END", "\x7f"),
        True,
        -1,
    )
    save_preset("other", SamplingParams())
    assert load_presets()[0][0] == mine
    tomllib.loads(presets_file().read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", ["", "  ", "x" * 33, "a\nb", "\x1b[31m", "\ud800", "precise", MODELS_OWN]
)
def test_a_name_that_cannot_be_used(name: str) -> None:
    with pytest.raises(SettingError, match="name"):
        save_preset(name, SamplingParams())
    assert not presets_file().exists()


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("[bad]\ntemperature = 'hot'\n", "'temperature' must be a number, not 'hot'"),
        ("[bad]\ntemperature = 101\n", "temperature must be a number from 0 to 100"),
        ("[bad]\ntop_k = 1.5\n", "'top_k' must be a whole number"),
        ("[bad]\ntop_k = true\n", "'top_k' must be a whole number"),
        ("[bad]\nmin_p = nan\n", "min_p must be"),
        ("[bad]\nheat = 1\n", "no sampling parameter 'heat'"),
        ("[bad]\nstop = ['']\n", "list of strings"),
        ("[bad]\n", "section of sampling parameters"),
        ("bad = 3\n", "section of sampling parameters"),
        ("[precise]\ntop_k = 3\n", "name of a preset of kvchat"),
        ("[bad]\n[bad.temperature]\nx = 1\n", "'temperature' must be a number"),
    ],
)
def test_a_bad_preset_is_named_and_the_good_ones_load(section: str, reason: str) -> None:
    write(f"{section}[good]\ntop_k = 3\n")
    presets, problems = load_presets()
    assert [preset.name for preset in presets] == ["good"]
    assert len(problems) == 1 and reason in problems[0] and str(presets_file()) in problems[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[mine\n", "not valid TOML.*line 1"),
        (b"\n\n\xff\xfe", "line 3: not UTF-8"),
        (b"x = " + b"[" * 100_000, "not valid TOML"),
        (b"#" * (1 << 20) + b"\n", "too large"),
    ],
)
def test_a_broken_file_is_named_and_kept(data: bytes, reason: str) -> None:
    write(data)
    for use in (
        load_presets,
        lambda: save_preset("m", SamplingParams()),
        lambda: forget_preset("m"),
    ):
        with pytest.raises(SettingError, match=reason):
            use()
    assert presets_file().read_bytes() == data


def test_a_preset_that_is_not_understood_is_not_lost() -> None:
    write("[bad]\nheat = 1\n")
    with pytest.raises(SettingError, match=r"heat.*nothing was changed"):
        save_preset("mine", SamplingParams())
    assert presets_file().read_text() == "[bad]\nheat = 1\n"


def test_a_file_that_cannot_be_read_or_written(folder: Path) -> None:
    folder.write_text("a file where a folder should be")
    with pytest.raises(SettingError, match="cannot be"):
        save_preset("mine", SamplingParams())
    folder.unlink()
    presets_file().mkdir(parents=True)
    with pytest.raises(SettingError, match="cannot be read"):
        load_presets()


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    save_preset("old", SamplingParams())
    before = presets_file().read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SettingError, match="No space left"):
        save_preset("new", SamplingParams())
    assert presets_file().read_bytes() == before
    assert list(presets_file().parent.iterdir()) == [presets_file()]
