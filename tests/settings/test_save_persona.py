"""Saving a persona into the configuration file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvchat.settings import Settings, config_file
from kvchat.settings.document import write_config_file
from kvchat.settings.personas import save_persona


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))


def test_a_persona_is_added_and_all_else_stays() -> None:
    write_config_file()
    before = config_file().read_text()
    made = save_persona(
        'a "b" 公园', model="m", system="Be\nbrief.", sampling={"temperature": 0.5, "stop": ("#",)}
    )
    assert config_file().read_text().startswith(before.rstrip())
    settings, problems = Settings.load()
    assert problems == []
    read = settings.personas[made.name]
    assert replace(read, where=made.where) == made
    lines = config_file().read_text().splitlines()
    assert lines[int(made.where.rpartition(" ")[2]) - 1].startswith("[personas.")


def test_a_first_persona_makes_the_file() -> None:
    save_persona("brief", system="Be brief.", sampling={"max_tokens": None})
    settings, problems = Settings.load({"persona": "brief"})
    assert (settings.system, problems) == ("Be brief.", [])


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("", "", "1 to 32"),
        ("", "x" * 33, "1 to 32"),
        ("", "a\nb", "1 to 32"),
        ("[personas.brief]\n", "brief", "already"),
        ("personas = {}\n", "brief", "cannot take a section"),
        ("[broken\n", "brief", "not sound"),
        ('x = "\xff', "brief", "not sound"),
    ],
)
def test_what_cannot_be_saved_leaves_the_file(text: str, name: str, reason: str) -> None:
    config_file().parent.mkdir(parents=True)
    config_file().write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=reason):
        save_persona(name, system="x")
    assert config_file().read_bytes() == text.encode("latin-1")
    assert [each.name for each in config_file().parent.iterdir()] == ["config.toml"]
