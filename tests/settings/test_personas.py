"""Personas, what is remembered, and the file that explains every key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvchat.engine.types import SamplingParams
from kvchat.settings import (
    RULES,
    SAMPLING_RULES,
    Given,
    Persona,
    Settings,
    gather,
    remember,
    remembered,
    state_file,
)
from kvchat.settings.document import document, write_config_file

PERSONAS = """
system = "from the file"
[sampling]
top_k = 1
[personas.coder]
system = "Code."
preset = "precise"
top_p = 0.5
stop = ["x"]
[personas."my own"]
model = "m"
"""


def presets(name: str) -> Mapping[str, Any]:
    if name != "precise":
        raise LookupError(f"there is no preset {name}")
    return {"top_p": 0.1, "temperature": 0.2}


def test_a_personas_values_stand_above_the_file_and_below_flags(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(PERSONAS)
    monkeypatch.setenv("KVCHAT_MODEL", "from-variable")
    monkeypatch.setenv("KVCHAT_TEMPERATURE", "0.9")
    loaded, problems = Settings.load({"persona": "coder", "seed": 3}, presets)
    assert problems == []
    assert (loaded.persona, loaded.system, loaded.model) == ("coder", "Code.", "from-variable")
    assert loaded.sampling == {
        "top_k": 1,
        "top_p": 0.5,
        "temperature": 0.2,
        "stop": ("x",),
        "seed": 3,
    }
    assert set(loaded.personas) == {"coder", "my own"}
    other, _ = Settings.load({"persona": "my own", "system": "flag"}, presets)
    assert (other.model, other.system, other.sampling["temperature"]) == ("m", "flag", 0.9)


def test_without_a_persona_none_of_its_values_hold(config: Path) -> None:
    config.write_text(PERSONAS)
    loaded, problems = Settings.load({}, presets)
    assert (loaded.persona, loaded.system, problems) == (None, "from the file", [])
    assert loaded.personas["my own"] == Persona("my own", f"{config}, line ?", model="m")
    assert loaded.personas["coder"].where == f"{config}, line 5"


@pytest.mark.parametrize("where", ["file", "KVCHAT_PERSONA", "--persona"])
def test_an_unknown_persona_is_told_where_it_was_chosen(
    config: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    config.write_text(("persona = 'nobody'" if where == "file" else "") + PERSONAS)
    if where == "KVCHAT_PERSONA":
        monkeypatch.setenv(where, "nobody")
    flags = {"persona": "nobody" if where == "--persona" else None}
    loaded, (problem,) = Settings.load(flags, presets)
    assert problem.startswith(f"{config}, line 1" if where == "file" else where)
    assert "no persona 'nobody' (there are: coder, my own)" in problem
    assert (loaded.persona, loaded.system) == (None, "from the file")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[personas.a]\ntop_k = 'x'", 2, "persona 'a': 'top_k' must be a whole number"),
        ("[personas.a]\n\ntheme = 'x'", 3, "persona 'a': there is no setting 'theme'"),
        ("[personas.a]\nsystem = 3", 2, "'system' must be text"),
        ("personas = 3", 1, "write [personas.NAME] as a section"),
        ("[personas]\na = 3", 2, "write [personas.a] as a section"),
    ],
)
def test_bad_personas_are_named(config: Path, text: str, line: int, said: str) -> None:
    config.write_text(text)
    loaded, (problem,) = Settings.load()
    assert problem.startswith(f"{config}, line {line}: ") and said in problem
    assert loaded == Settings(personas=loaded.personas)


def test_an_unknown_preset_is_told_and_the_rest_holds(config: Path) -> None:
    config.write_text("[personas.a]\npreset = 'x'\nsystem = 's'")
    loaded, (problem,) = Settings.load({"persona": "a"}, presets)
    assert problem == f"{config}, line 1: persona 'a': there is no preset x"
    assert loaded.system == "s"


def test_where_values_come_from(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("ctx = 5\nthreads = 2\n[personas.a]\nmodel = 'm'")
    monkeypatch.setenv("KVCHAT_THREADS", "3")
    remember(theme="dusk", threads=9, something="else")
    found, _, problems = gather({"persona": "a", "top_k": 7})
    assert problems == []
    assert found == {
        "theme": Given("dusk", str(state_file())),
        "ctx": Given(5, f"{config}, line 1"),
        "threads": Given(3, "KVCHAT_THREADS"),
        "model": Given("m", f"persona 'a' ({config}, line 3)"),
        "persona": Given("a", "--persona"),
        "top_k": Given(7, "--top-k"),
    }


def test_what_is_remembered_gives_way_to_everything(config: Path) -> None:
    assert remember(theme="dusk")
    assert Settings.load()[0].theme == "dusk"
    config.write_text("theme = 'paper'")
    assert Settings.load()[0].theme == "paper"


def test_remembering_adds_and_forgets(config: Path) -> None:
    assert remembered() == {}
    assert remember(theme="dusk", width=3)
    assert remember(width=None, more=[1])
    assert remembered() == {"theme": "dusk", "more": [1]}
    assert [path.name for path in state_file().parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"\xff", b'{"theme": 3}', b'{"theme": ""}', b"[" * 9999]
)
def test_damage_is_passed_over_and_mended(config: Path, damage: bytes) -> None:
    state_file().parent.mkdir()
    state_file().write_bytes(damage)
    assert Settings.load() == (Settings(), [])
    assert remember(theme="dusk")
    assert json.loads(state_file().read_text())["theme"] == "dusk"


def test_a_folder_in_its_place_is_no_failure(config: Path) -> None:
    state_file().mkdir(parents=True)
    assert not remember(theme="dusk")
    assert remembered() == {}
    assert [path.name for path in state_file().parent.iterdir()] == ["state.json"]


def test_the_written_file_changes_nothing(config: Path) -> None:
    write_config_file()
    assert Settings.load() == (Settings(), [])
    with pytest.raises(FileExistsError):
        write_config_file()


def test_every_key_is_explained_at_its_default(config: Path) -> None:
    uncommented = re.sub(r"(?m)^# (?=[a-z_.]+ = |\[)", "", document())
    table = tomllib.loads(uncommented)
    assert set(table) - {"sampling", "keys", "personas"} == set(RULES) - set(SAMPLING_RULES)
    assert set(table["sampling"]) == set(SAMPLING_RULES)
    config.write_text(uncommented)
    loaded, problems = Settings.load({}, presets)
    assert problems == []
    for name in ("model", "device", "dtype", "quant", "stash_mb", "overflow"):
        assert getattr(loaded, name) == getattr(Settings(), name)
    SamplingParams().updated(**loaded.sampling)
    assert loaded.personas["coder"].preset == "precise"
    assert max(map(len, document().splitlines())) <= 100
