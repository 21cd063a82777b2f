"""`kvchat ask` as a user runs it: another process, the default model, real pipes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real_model

COMMAND = (sys.executable, "-m", "kvchat", "ask")
EXACT = ("--temperature", "0", "--dtype", "float32", "--quant", "none")

posix = pytest.mark.skipif(sys.platform == "win32", reason="no such signals or devices there")


def hear_interrupts() -> None:
    """Undo what a shell does to jobs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(path: Path, *args: str, **pipes: Any) -> subprocess.Popen[bytes]:
    setup = {} if sys.platform == "win32" else {"preexec_fn": hear_interrupts}
    return subprocess.Popen(
        [*COMMAND, "-m", str(path), *args],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        | pipes
        | setup,
    )


def ask(path: Path, *args: str, piped: str | None = None) -> tuple[int, str, str]:
    stdin = subprocess.DEVNULL if piped is None else subprocess.PIPE
    process = start(path, *args, stdin=stdin)
    out, err = process.communicate(None if piped is None else piped.encode(), timeout=60)
    return process.returncode, out.decode(), err.decode()


def test_a_sensible_answer(default_model_path: Path) -> None:
    status, out, err = ask(default_model_path, "What is the capital of France?", *EXACT)
    assert (status, err) == (0, "")
    assert out == "The capital of France is Paris.\n"


def test_json_lines_tell_the_same_answer(default_model_path: Path) -> None:
    status, out, err = ask(
        default_model_path, "What is", "the capital of France?", *EXACT, "--json", "--stats"
    )
    prefill, *tokens, done = map(json.loads, out.splitlines())
    assert status == 0
    assert prefill["event"] == "prefill" and prefill["new"] == done["prompt_tokens"] > 20
    assert "".join(token["text"] for token in tokens) == "The capital of France is Paris."
    assert done["finish_reason"] == "stop"
    assert done["completion_tokens"] == len(tokens)
    assert err.count("\n") == 1 and "tok/s" in err


@pytest.mark.parametrize("cache", [(), ("--no-cache",)], ids=["cached", "naive"])
def test_the_typewriter_writes_on(default_model_path: Path, cache: tuple[str, ...]) -> None:
    limits = ("--raw", "--max-tokens", "12", *EXACT, *cache)
    status, out, err = ask(default_model_path, *limits, piped="Once upon a time\n")
    assert (status, err) == (0, "")
    assert out == "Once upon a time, the city of Nova Haven was ruled by a powerful sor\n"


def test_a_stop_string_ends_the_answer(default_model_path: Path) -> None:
    status, out, _ = ask(
        default_model_path, "What is the capital of France?", *EXACT, "--stop", "ance"
    )
    assert (status, out) == (0, "The capital of Fr\n")


def test_a_long_text_is_refused_with_its_size(default_model_path: Path) -> None:
    status, out, err = ask(default_model_path, "Sum it up:", piped="word " * 9000)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "8,192" in err and "9," in err


@posix
def test_a_reader_that_has_enough(default_model_path: Path) -> None:
    process = start(default_model_path, "Tell me a long story.", "--seed", "1")
    assert process.stdout is not None and process.stderr is not None
    assert len(os.read(process.stdout.fileno(), 10)) > 0
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@posix
@pytest.mark.parametrize("json_lines", [False, True])
def test_interrupted_while_it_answers(default_model_path: Path, json_lines: bool) -> None:
    args = ("--json",) if json_lines else ()
    process = start(default_model_path, "Tell me a long story.", "--seed", "1", *args)
    assert process.stdout is not None
    written = os.read(process.stdout.fileno(), 4000)
    while written.count(b'"token"' if json_lines else b" ") < 5:
        written += os.read(process.stdout.fileno(), 4000)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    if json_lines:
        assert json.loads((written + rest).splitlines()[-1])["finish_reason"] == "cancelled"


@posix
def test_interrupted_while_it_reads_the_prompt(default_model_path: Path) -> None:
    terminal, stderr = os.openpty()  # where progress is shown, so that we know when it reads
    process = start(default_model_path, "Sum it up: " + "word " * 7000, stderr=stderr)
    os.close(stderr)
    shown = b""
    while b"reading the prompt" not in shown:
        shown += os.read(terminal, 4000)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert (process.returncode, out) == (130, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk(default_model_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(default_model_path, "hi", "--max-tokens", "5", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count(b"\n") == 1 and b"standard output cannot be written" in err
