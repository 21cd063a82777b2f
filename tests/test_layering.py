"""Who may import whom, read from the sources; and what an import really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "kvchat"
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = ("engine", "models", "chat", "tui", "bench", "cli")
"""From the bottom up: each may import those before it."""

HOMES = {
    "torch": {"engine", "models", "bench"},
    "typer": {"cli"},
    "textual": {"tui"},
    "rich": {"tui", "bench", "cli"},
    "platformdirs": {"settings"},
    "transformers": {"bench"},
}
"""Packages that belong to some layers only."""

BANNED = {"gguf", "pickle", "click", "requests"}
"""An oracle of the tests, what would run strangers' code, and what is not a dependency."""

TORCH_FREE = {"engine/types.py", "engine/errors.py", "engine/config.py", "engine/__init__.py"}


def layer_of(path: Path) -> str:
    """The first name below kvchat: a layer, `settings`, or nothing for the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first.startswith("__") else first


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    layer = layer_of(path)
    for name in imported(path):
        package, *rest = name.split(".")
        assert package not in BANNED, name
        if package in HOMES:
            assert layer in HOMES[package], f"{name} has no place in {layer or 'the package'}"
        if package == "torch":
            assert path.relative_to(ROOT).as_posix() not in TORCH_FREE
        if package == "kvchat" and layer in LAYERS and rest and rest[0] in LAYERS:
            assert LAYERS.index(rest[0]) <= LAYERS.index(layer), f"{layer} imports {name}"


def test_settings_are_a_leaf() -> None:
    names = {name for path in (ROOT / "settings").glob("*.py") for name in imported(path)}
    others = {name for name in names if not f"{name}.".startswith("kvchat.settings.")}
    assert {name.split(".")[0] for name in others} - sys.stdlib_module_names == {"platformdirs"}


def test_every_file_is_in_a_layer() -> None:
    assert {layer_of(path) for path in FILES} <= {"", "settings", *LAYERS}


def chat_modules() -> list[str]:
    return [f"kvchat.chat.{path.stem}" for path in sorted((ROOT / "chat").glob("[!_]*.py"))]


@pytest.mark.parametrize(
    "code",
    [
        "import kvchat, kvchat.engine, kvchat.engine.types, kvchat.engine.config, kvchat.settings",
        f"import kvchat.chat, {', '.join(chat_modules())}",
        "import kvchat.cli, kvchat.cli.app",
        "from kvchat.cli import run; assert run(['--help']) == 0",
        "from kvchat.cli import run; assert run(['ask', '--no-such-flag']) == 2",
        "from kvchat.cli import run; assert run(['ask', 'hi', '--temperature', '-1']) == 2",
        "from kvchat.cli import run; assert run(['ask', 'hi', '-m', 'no-such-model']) == 1",
    ],
)
def test_does_not_load_torch_or_textual(code: str) -> None:
    heavy = {"torch", "textual", "transformers", "huggingface_hub"}
    code += f"\nimport sys\nassert not (found := {heavy} & sys.modules.keys()), found"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_loading_code_stays_clear_of_the_compiler() -> None:
    code = "import sys, kvchat.models.load; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
