"""A chat that keeps its cache is closed and gone on with: the default model, a real terminal."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from safetensors import safe_open
from test_screen import CTRL_Q, ENTER, Terminal

pytestmark = pytest.mark.real_model

QUESTION = "List three facts about the sea, each in one short sentence."
LEDGER = r"reused ([\d,]+) · new (\d+) · [\d.]+ s to first token"


@pytest.fixture
def start(tmp_path: Path, default_model_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts the program over one data folder, once the one before has ended."""
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    (models / default_model_path.name).symlink_to(default_model_path)
    folders = {
        f"KVCHAT_{name.upper()}_DIR": str(tmp_path / name) for name in ("data", "config", "cache")
    }
    terminals: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        terminals.append(Terminal(*arguments, KVCHAT_SNAPSHOTS="true", **folders))
        terminals[-1].wait_for("Write a message")
        return terminals[-1]

    yield begin
    for terminal in terminals:
        terminal.close()


def end(terminal: Terminal) -> None:
    terminal.wait_until(lambda: re.search(r"SPEED +idle", terminal.shown))
    terminal.press(CTRL_Q)
    assert terminal.wait_for_end() == 0


def snapshot_in(tmp_path: Path) -> Path:
    [snapshot] = (tmp_path / "data" / "snapshots").iterdir()
    assert snapshot.suffix == ".safetensors"
    return snapshot


def test_a_resumed_chat_reads_only_the_new_message(
    start: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = start()
    terminal.press(QUESTION, ENTER)
    terminal.wait_for(LEDGER)
    end(terminal)
    snapshot = snapshot_in(tmp_path)
    with safe_open(str(snapshot), framework="np") as file:
        held = len(json.loads(file.metadata()["ids"]))
    with closing(sqlite3.connect(tmp_path / "data" / "chats.db")) as db:
        [(chat_id,)] = db.execute("SELECT id FROM chats")

    terminal = start("--resume", chat_id[:8])
    terminal.wait_for("three facts")
    terminal.press("Thanks.", ENTER)
    terminal.wait_for(r"from[\s▏]+the[\s▏]+snapshot")
    reused, new = re.findall(LEDGER, terminal.chat)[-1]
    assert (int(reused), int(new) < 20) == (held, True), terminal.shown
    end(terminal)

    damaged = bytearray(snapshot.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    snapshot.write_bytes(damaged)
    terminal = start("--continue")
    terminal.press("Thanks again.", ENTER)
    terminal.wait_for(r"snapshot[\s▏]+not[\s▏]+used:[\s▏]+it[\s▏]+is[\s▏]+damaged")
    end(terminal)
    assert "Traceback" not in (tmp_path / "cache" / "kvchat.log").read_text("utf-8")
