"""`kvchat chat` in scripts: lines in, replies out, an exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import reference, save_folder

from kvchat.chat.store import Store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference("smollm2"), tmp_path_factory.mktemp("models") / "scripted")


def chat(
    model: Path, tmp_path: Path, lines: bytes, *flags: str
) -> subprocess.CompletedProcess[bytes]:
    folders = {f"KVCHAT_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "CACHE")}
    return subprocess.run(
        [sys.executable, "-m", "kvchat", "chat", "--plain", "-m", str(model), *flags],
        input=lines,
        capture_output=True,
        env={**os.environ, **folders},
        check=False,
    )


def test_lines_in_replies_out(model: Path, tmp_path: Path) -> None:
    lines = b"Hi\n/set stop ~\nYou\n/history\n"
    done = chat(model, tmp_path, lines, "--max-tokens", "4", "--seed", "1", "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode("utf-8")
    assert "1  you: Hi\n" in out and "3  you: You\n" in out
    assert "> " not in out and "ready" not in out and "\x1b" not in out
    assert done.stderr == b""


def test_an_error_is_told_and_the_rest_goes_on(model: Path, tmp_path: Path) -> None:
    done = chat(model, tmp_path, b"/nope\nHi\n\xff\n/history 1\n", "--max-tokens", "4")
    assert done.returncode == 1
    assert done.stdout.endswith(b"\nHi\n")
    assert [line.split(b":")[0] for line in done.stderr.splitlines()] == [b"kvchat", b"kvchat"]


def test_nothing_in_nothing_out(model: Path, tmp_path: Path) -> None:
    done = chat(model, tmp_path, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("flags", "status"), [(("-m", "no-such"), 1), (("--top-p", "3"), 2)])
def test_what_cannot_start_is_told_in_one_line(
    model: Path, tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    done = chat(model, tmp_path, b"Hi\n", *flags)
    assert done.returncode == status
    assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr


def test_a_chat_is_saved_and_goes_on(model: Path, tmp_path: Path) -> None:
    flags = ("--max-tokens", "4", "--seed", "1")
    assert chat(model, tmp_path, b"first\n", *flags).returncode == 0
    done = chat(model, tmp_path, b"second\n/history 1\n", *flags, "--continue")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"first\n")
    store = Store(tmp_path / "DATA" / "chats.db")
    (saved,) = store.chats()
    assert (saved.title, saved.messages) == ("first", 4)
    again = chat(model, tmp_path, b"third\n", *flags, "--resume", saved.id[:6])
    assert again.returncode == 0
    assert [n.content for n in store.load(saved.id).active_path()][::2] == [
        "first",
        "second",
        "third",
    ]


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("--continue",), 1, b"no chat yet"),
        (("--resume", "x"), 1, b"There is no chat 'x'"),
        (("--resume", "x", "--continue"), 2, b"two chats"),
    ],
)
def test_a_chat_that_is_not_there_is_told(
    model: Path, tmp_path: Path, flags: tuple[str, ...], status: int, said: bytes
) -> None:
    done = chat(model, tmp_path, b"Hi\n", *flags)
    assert (done.returncode, done.stdout) == (status, b"")
    assert done.stderr.count(b"\n") == 1 and said in done.stderr


def test_a_chat_goes_on_in_memory_where_nothing_can_be_saved(model: Path, tmp_path: Path) -> None:
    (tmp_path / "DATA").write_text("in the way")
    done = chat(model, tmp_path, b"Hi\n/history 1\n", "--max-tokens", "4")
    assert done.returncode == 0
    assert done.stdout.endswith(b"Hi\n")
    told = done.stderr.decode().splitlines()
    assert "goes on in memory" in told[0] and "KVCHAT_DATA_DIR" in told[0]
    assert "could not be written" in told[-1] and len(told) == 2
