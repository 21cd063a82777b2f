"""Settings: the order of layers, and what is said about what cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat import settings
from kvchat.cli.options import range_refusal
from kvchat.engine.types import SamplingParams
from kvchat.settings import RULES, SAMPLING_RULES, Settings
from kvchat.settings.document import toml

_NAMES = st.sampled_from([*RULES, "sampling", "personas", "keys", "colours", "a.b", ""])


def test_without_anything_the_defaults_hold(config: Path) -> None:
    assert Settings.load() == (Settings(), [])
    assert Settings().sampling == {}


def test_later_layers_win(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(
        'model = "from-file"\nctx = 1024\nthreads = 3\n[sampling]\ntop_k = 10\ntemperature = 1\n'
    )
    monkeypatch.setenv("KVCHAT_CTX", "2048")
    monkeypatch.setenv("KVCHAT_TOP_K", "20")
    monkeypatch.setenv("KVCHAT_THEME", "")
    loaded, problems = Settings.load({"top_k": 30, "threads": None, "stop": ["a", "b"]})
    assert problems == []
    assert (loaded.model, loaded.ctx, loaded.threads, loaded.theme) == ("from-file", 2048, 3, None)
    assert loaded.sampling == {"top_k": 30, "temperature": 1, "stop": ("a", "b")}
    SamplingParams().updated(**loaded.sampling)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("\nmodle = 'x'\n", 2, "did you mean 'model'"),
        ("threads = '4'\n", 1, "'threads' must be a whole number from 1, not '4'"),
        ("threads = true\n", 1, "'threads' must be a whole number"),
        ("ctx = 0\n", 1, "from 1, not 0"),
        ("model = ''\n", 1, "'model' must be text"),
        ("overflow = 'panic'\n", 1, "one of ask, stop, drop-oldest"),
        ("# a comment\ntop_k = 3\n", 2, "belongs under [sampling]"),
        ("[sampling]\n\nctx = 3\n", 3, "belongs above any section"),
        ("[sampling]\nstop = ['a', 3]\n", 2, "a list of texts"),
        ("[sampling]\ntemperature = 'hot'\n", 2, "must be a number, not 'hot'"),
        ("sampling.top_k = 1.5\n", 1, "whole number, not 1.5"),
        ("sampling = 3\n", 1, "write [sampling] as a section"),
        ("[colours]\nred = 1\n", 1, "there is no setting 'colours'"),
    ],
)
def test_bad_values_are_named_with_file_line_and_reason(
    config: Path, text: str, line: int, said: str
) -> None:
    config.write_text(text)
    loaded, problems = Settings.load()
    assert loaded == Settings()
    assert len(problems) == 1
    assert problems[0].startswith(f"{config}, line {line}: ")
    assert said in problems[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model = \n", "not valid TOML"),
        (b"model = 'a'\nmodel = 'b'\n", "not valid TOML"),
        (b"model = 'a'\ntheme = '\xff'\n", "line 2: not UTF-8"),
        (b"x = " + b"[" * 5000, "not valid TOML"),
        (b"ctx = " + b"1" * 5000, "not valid TOML"),
    ],
)
def test_a_broken_file_is_reported_and_ignored(config: Path, content: bytes, said: str) -> None:
    config.write_bytes(content)
    loaded, problems = Settings.load({"theme": "dark"})
    assert loaded == Settings(theme="dark")
    assert len(problems) == 1
    assert str(config) in problems[0] and said in problems[0]


def test_a_folder_in_place_of_the_file_is_reported(config: Path) -> None:
    config.mkdir()
    loaded, problems = Settings.load()
    assert loaded == Settings()
    assert "cannot be read" in problems[0]


def test_a_byte_order_mark_is_no_problem(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbfmodel = 'm'\n")
    assert Settings.load() == (Settings(model="m"), [])


def test_one_bad_value_spoils_no_other(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("threads = 2\nctx = 'big'\n")
    monkeypatch.setenv("KVCHAT_THREADS", "many")
    monkeypatch.setenv("KVCHAT_PENALISE_ALL", "yes")
    loaded, problems = Settings.load({"quant": "int5", "seed": 7, "sed": 8})
    assert loaded == Settings(threads=2, sampling={"penalise_all": True, "seed": 7})
    assert [problem.split(":")[0] for problem in problems] == [
        f"{config}, line 2",
        "KVCHAT_THREADS",
        "--quant",
        "--sed",
    ]


def test_sampling_settings_are_exactly_the_sampling_parameters() -> None:
    assert set(SAMPLING_RULES) == set(SamplingParams.names())


def test_paths_follow_the_environment_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "d"))
    monkeypatch.setenv("KVCHAT_CACHE_DIR", "~/somewhere")
    assert settings.models_dir() == tmp_path / "d" / "models"
    assert settings.cache_dir() == Path.home() / "somewhere"
    assert settings.log_file().parent == settings.cache_dir()
    assert not (tmp_path / "d").exists()
    monkeypatch.delenv("KVCHAT_DATA_DIR")
    assert settings.data_dir().name == "kvchat"


def test_settings_load_nothing_else_of_kvchat() -> None:
    script = (
        "import sys, kvchat.settings as s; s.Settings.load();"
        "print([m for m in sys.modules if m.startswith('kvchat.')"
        " and not m.startswith('kvchat.settings')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_home_that_does_not_exist_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAT_DATA_DIR", "~nobody-is-called-so/models")
    assert settings.data_dir() == Path("~nobody-is-called-so/models")


def test_no_system_prompt_can_be_asked_for(config: Path) -> None:
    config.write_text('system = "Be brief."\n')
    loaded, problems = Settings.load({"system": ""})
    assert (loaded.system, problems) == ("", [])
    assert "not empty" in Settings.load({"model": ""})[1][0]


_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    | st.datetimes()
    | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=5,
)


def written(value: object) -> str:
    """A value as TOML spells it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return toml(value)
        case list():
            return f"[{', '.join(map(written, value))}]"
        case dict():
            inner = ", ".join(f"{toml(k)} = {written(v)}" for k, v in value.items())
            return "{" + inner + "}"
        case float() | int():
            return str(value)
    return value.isoformat()


@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@given(table=st.dictionaries(_NAMES, _VALUES, max_size=3))
def test_whatever_is_in_the_file_is_used_or_told_about(config: Path, table: dict) -> None:
    lines = [f"{toml(name)} = {written(value)}" for name, value in table.items()]
    config.write_text("\n".join(lines), encoding="utf-8")
    loaded, problems = Settings.load({}, None, range_refusal)
    assert all(str(config) in problem for problem in problems)
    SamplingParams().updated(**loaded.sampling)
    for name, value in table.items():
        if name in RULES and name not in SAMPLING_RULES and name != "persona":
            told = any(f"'{name}'" in problem for problem in problems)
            assert told or getattr(loaded, name) == value
