"""`kvchat config`, and personas as the commands see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvchat.cli.options import read_settings
from kvchat.engine.errors import SettingError
from kvchat.settings import config_file

Kvchat = Callable[..., Any]


def test_init_writes_a_file_once(kvchat: Kvchat) -> None:
    first = kvchat("config", "init")
    assert (first.status, first.out) == (0, f"{config_file()}\n")
    config_file().write_text("ctx = 5\n")
    second = kvchat("config", "init")
    assert second.status == 1 and "stays as it is" in second.err
    assert config_file().read_text() == "ctx = 5\n"
    assert kvchat("config", "path").out == first.out


def test_init_tells_why_it_cannot_write(kvchat: Kvchat, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("in the way")
    ran = kvchat("config", "init")
    assert ran.status == 1 and len(ran.err.splitlines()) == 1


def test_show_tells_where_each_value_comes_from(
    kvchat: Kvchat, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file().parent.mkdir()
    config_file().write_text(
        "\nthreads = 3\nsystem = '" + "long " * 30 + "'\n[keys]\nchat.stop = 'ctrl+x'\n"
        "[personas.coder]\npreset = 'precise'\n"
    )
    monkeypatch.setenv("KVCHAT_CTX", "77")
    ran = kvchat("config", "show", "--persona", "coder", "--seed", "7")
    assert (ran.status, ran.err) == (0, "")
    rows = {line.split()[0]: line for line in ran.out.splitlines()}
    expected = {
        "model": ('"smollm2"', "default"),
        "threads": ("3", f"{config_file()}, line 2"),
        "ctx": ("77", "KVCHAT_CTX"),
        "seed": ("7", "--seed"),
        "top_k": ("40", f"persona 'coder' ({config_file()}, line 6)"),
        "keys.chat.stop": ('"ctrl+x"', str(config_file())),
        "stop": ("none", "default"),
        "theme": ("kvchat's own", "default"),
    }
    for name, (value, where) in expected.items():
        assert rows[name].split(maxsplit=1)[1].startswith(f"{value}  ")
        assert rows[name].endswith(f"  {where}")
    assert "long lon…  " in rows["system"]
    data = json.loads(kvchat("config", "show", "--json").out)
    assert data["ctx"] == {"value": 77, "from": "KVCHAT_CTX"}
    assert data["top_k"] == {"value": None, "from": "default"}


def test_show_tells_what_is_unusable(kvchat: Kvchat) -> None:
    config_file().parent.mkdir()
    config_file().write_text("threads = 'many'\n")
    ran = kvchat("config", "show")
    assert ran.status == 0 and "line 1: 'threads' must be" in ran.err
    ran = kvchat("config", "show", "--persona", "nobody")
    assert (ran.status, ran.out) == (2, "") and "no persona 'nobody'" in ran.err


def test_values_out_of_range_are_told_with_where_they_stand(
    kvchat: Kvchat, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file().parent.mkdir()
    config_file().write_text(
        "[sampling]\ntop_p = 7\nmin_p = 0.5\ntemperature = nan\nstop = ['']\n"
        "[personas.a]\nsystem = 's'\ntop_k = -3\n"
    )
    monkeypatch.setenv("KVCHAT_SEED", "-1")
    ran = kvchat("config", "show", "--persona", "a")
    told = {line.removeprefix("kvchat: ") for line in ran.err.splitlines()}
    assert told == {
        f"{config_file()}, line 8: persona 'a': top_k must be a whole number from 0 to "
        "2,147,483,647, not -3",
        f"{config_file()}, line 2: top_p must be a number above 0 to 1, not 7",
        f"{config_file()}, line 4: temperature must be a number from 0 to 100, not nan",
        f"{config_file()}, line 5: stop must be a list of strings, none of them empty",
        "KVCHAT_SEED: seed must be a whole number from 0 to 9,223,372,036,854,775,807, not -1",
    }
    assert read_settings({"persona": "a"}).sampling == {"min_p": 0.5}
    for command in (("chat", "--plain"), ("ask", "hi")):
        ran = kvchat(*command, "--top-p", "7")
        assert (ran.status, ran.out) == (2, "")
        assert "--top-p: top_p must be a number above 0 to 1, not 7" in ran.err


def test_personas_take_presets_of_both_kinds(kvchat: Kvchat) -> None:
    config_file().parent.mkdir()
    config_file().write_text(
        "[personas.a]\npreset = 'mine'\ntop_k = 3\nsystem = 's'\n"
        "[personas.b]\npreset = 'creative'\n[personas.c]\npreset = 'absent'\n"
    )
    (config_file().parent / "presets.toml").write_text("[mine]\ntop_k = 9\nmin_p = 0.3\n")
    mine = read_settings({"persona": "a", "stop": []})
    assert (mine.system, dict(mine.sampling)) == ("s", {"top_k": 3, "min_p": 0.3})
    assert read_settings({"persona": "b"}).sampling["temperature"] == 1.1
    assert read_settings({"persona": "c"}).sampling == {}
    with pytest.raises(SettingError, match=r"no persona 'd' \(there are: a, b, c"):
        read_settings({"persona": "d"})
