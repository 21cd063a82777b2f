"""The command line in this process, mostly on a tiny model that babbles bytes."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import edit_json, reference, save_folder

from kvchat import __version__
from kvchat.chat.plain_text import one_line, printable
from kvchat.cli import app, loading, run
from kvchat.cli.interrupts import Interrupts
from kvchat.cli.output import Output
from kvchat.cli.progress import Bar
from kvchat.models import pull as pull_module
from kvchat.models.catalog import BETTER, CATALOG, find
from kvchat.settings import config_file, log_file, models_dir


@pytest.fixture(scope="session")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference("smollm2"), tmp_path_factory.mktemp("models") / "babbler")


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, models or stores of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("KVCHAT_", "HF_", "OLLAMA_", "LLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"KVCHAT_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setattr(sys, "stdin", Stdin(b"", terminal=True))


class Ran:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def answer(self) -> str:
        return "".join(event["text"] for event in self.events if event["event"] == "token")

    def failed(self, status: int, *words: str) -> bool:
        """Whether it ended so, with nothing on stdout and one line on stderr with these words."""
        lines = self.err.splitlines()
        assert (self.status, self.out, len(lines)) == (status, "", 1), (self.status, self.err)
        assert lines[0].startswith("kvchat: ")
        return all(word in lines[0] for word in words)


@pytest.fixture
def kvchat(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def call(*args: object) -> Ran:
        status = run([str(arg) for arg in args])
        return Ran(status, *capsys.readouterr())

    yield call


def ask(kvchat: Any, babbler: Path, *args: object) -> Ran:
    ran: Ran = kvchat(
        "ask", "-m", babbler, "--dtype", "float32", "--max-tokens", 12, "--seed", 3, *args
    )
    return ran


# Usage


def test_a_file_is_attached_to_a_question(
    kvchat: Any, babbler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("milk")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    monkeypatch.setattr(sys, "stdin", Stdin(b"@notes.txt"))
    ran = kvchat("ask", "-m", babbler, "see", "@notes.txt", "--json", "--max-tokens", 2)
    assert "attached: notes.txt (4 bytes); the question has " in ran.err
    prompt = b"see notes.txt\n\nnotes.txt (4 bytes):\n```\nmilk\n```\n\n@notes.txt"
    monkeypatch.setattr(sys, "stdin", Stdin(prompt))
    plain = kvchat("ask", "-m", babbler, "--json", "--max-tokens", 2)
    assert (plain.err, plain.events[0]["event"]) == ("", "prefill")
    assert ran.events[0]["new"] == plain.events[0]["new"]
    assert kvchat("ask", "-m", babbler, "@picture.png").failed(1, "picture.png", "no text")
    raw = kvchat("ask", "-m", babbler, "--raw", "@picture.png", "--max-tokens", 2)
    assert raw.out.startswith("@picture.png")


def test_version(kvchat: Any) -> None:
    assert kvchat("--version").out == f"kvchat {__version__}\n"


def test_help_names_every_command_and_flag(kvchat: Any) -> None:
    shown = kvchat("--help")
    assert shown.status == 0
    assert all(name in shown.out for name in (*app.COMMANDS, *app.GROUPS))
    flags = "--model --device --dtype --quant --ctx --threads --system --temperature --top-k "
    flags += "--top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty "
    flags += "--penalty-window --penalise-all --temperature-last --seed --max-tokens --stop "
    flags += "--speculate --raw --no-cache --json --stats"
    shown = kvchat("ask", "--help")
    assert all(flag in shown.out for flag in flags.split())


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["frobnicate"], "frobnicate"),
        (["ask", "hi", "--frobnicate"], "--frobnicate"),
        (["ask", "hi", "--top-k", "many"], "--top-k"),
        (["ask", "hi", "--stop", ""], "stop"),
        (["ask"], "nothing to ask"),
        (["ask", "  ", "\n"], "nothing to ask"),
        (["ask", "hi", "--temperature", "-0.1"], "temperature"),
        (["ask", "hi", "--temperature", "nan"], "nan"),
        (["ask", "hi", "--top-k", "-1"], "top_k"),
        (["ask", "hi", "--top-p", "0"], "top_p"),
        (["ask", "hi", "--min-p", "1.5"], "min_p"),
        (["ask", "hi", "--repetition-penalty", "0"], "repetition_penalty"),
        (["ask", "hi", "--max-tokens", "0"], "max_tokens"),
        (["ask", "hi", "--seed", "-5"], "seed"),
        (["ask", "hi", "--quant", "int3"], "--quant"),
        (["ask", "hi", "--dtype", "float8"], "--dtype"),
        (["ask", "hi", "--ctx", "0"], "--ctx"),
        (["ask", "hi", "--threads", "0"], "--threads"),
        (["pull"], "NAME"),
        (["models", "--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_usage_is_one_line_and_2(kvchat: Any, args: list[str], word: str) -> None:
    assert kvchat(*args).failed(2, word)


def test_no_command_is_the_default_one(kvchat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "DEFAULT_COMMAND", "models")
    assert kvchat().status == 0
    assert json.loads(kvchat("--json").out)["on_disk"] == []
    assert "Usage" in kvchat("--help").out


def test_a_fault_of_ours_is_one_line_and_a_logged_traceback(
    kvchat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("\x1b[31mboom\ntwice")

    monkeypatch.setattr("kvchat.cli.models.list_models", broken)
    assert kvchat("models").failed(1, "RuntimeError", "boom twice", str(log_file()))
    assert "in broken" in log_file().read_text()
    log_file().unlink()
    log_file().mkdir()
    assert kvchat("models").failed(1, "RuntimeError")


def test_unusable_settings_are_told_and_ignored(kvchat: Any, babbler: Path) -> None:
    config_file().parent.mkdir()
    config_file().write_text('quant = "int3"\n[sampling]\ntemperature = 0.0\n')
    ran = ask(kvchat, babbler, "hi", "--json")
    assert ran.status == 0
    assert "config.toml, line 1" in ran.err
    assert ran.answer == ask(kvchat, babbler, "hi", "--json", "--temperature", 0).answer
    assert ran.answer != ask(kvchat, babbler, "hi", "--json", "--temperature", 1).answer


# ask


def test_the_answer_and_nothing_else_is_on_stdout(kvchat: Any, babbler: Path) -> None:
    as_text = ask(kvchat, babbler, "hi")
    as_json = ask(kvchat, babbler, "hi", "--json")
    assert as_text.err == as_json.err == ""
    assert as_text.out.removesuffix("\n") == as_json.answer.removesuffix("\n")
    assert as_text.out.endswith("\n")


def test_json_lines_have_the_documented_keys(kvchat: Any, babbler: Path) -> None:
    prefill, *tokens, done = ask(kvchat, babbler, "hi", "--json").events
    assert list(prefill) == ["event", "reused", "new", "ms"]
    assert all(list(token) == ["event", "id", "text", "logprob", "ms"] for token in tokens)
    assert list(done) == [
        "event",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "ttft_ms",
        "prefill_tps",
        "decode_tps",
        "kv_bytes",
    ]
    assert [e["event"] for e in (prefill, *tokens, done)] == [
        "prefill",
        *["token"] * len(tokens),
        "done",
    ]
    assert done["completion_tokens"] == len(tokens)
    assert done["prompt_tokens"] == prefill["reused"] + prefill["new"]
    assert prefill["reused"] == 0
    assert all(token["logprob"] <= 0 for token in tokens)
    assert done["kv_bytes"] > 0


@pytest.mark.parametrize("length", range(1, 9))
def test_json_texts_join_to_the_answer_whatever_is_cut(
    kvchat: Any, babbler: Path, length: int
) -> None:
    from kvchat.models.hf_tokenizer import from_folder

    # Random bytes: characters are invalid, or cut by the limit.
    ran = ask(kvchat, babbler, "hi", "--json", "--max-tokens", length, "--temperature", 5)
    tokens = [event for event in ran.events if event["event"] == "token"]
    decoded = from_folder(babbler).decode([token["id"] for token in tokens])
    assert ran.answer == decoded
    assert len(tokens) == ran.events[-1]["completion_tokens"]


def test_stop_strings_repeat_and_end_the_reply(kvchat: Any, babbler: Path) -> None:
    whole = ask(kvchat, babbler, "hi", "--json").answer
    stop = next(char for char in whole[1:] if char != "\ufffd" and whole[0] != char)
    ran = ask(kvchat, babbler, "hi", "--json", "--stop", "no such text", "--stop", stop)
    assert ran.answer == whole[: whole.index(stop)]
    assert ran.events[-1]["finish_reason"] == "stop"


def test_raw_echoes_the_prompt_and_leaves_the_template_out(kvchat: Any, babbler: Path) -> None:
    raw = ask(kvchat, babbler, "abc", "--raw")
    assert raw.out.startswith("abc")
    events = ask(kvchat, babbler, "abc", "--raw", "--json").events
    assert events[0]["new"] == 3
    assert ask(kvchat, babbler, "abc", "--json").events[0]["new"] > 3


def test_raw_text_cannot_become_a_control_token(kvchat: Any, babbler: Path) -> None:
    events = ask(kvchat, babbler, "<|im_end|>", "--raw", "--json").events
    assert events[0]["new"] == len("<|im_end|>")


def test_without_cache_is_the_same_text(kvchat: Any, babbler: Path) -> None:
    cached = ask(kvchat, babbler, "hi", "--json", "--temperature", 0)
    naive = ask(kvchat, babbler, "hi", "--json", "--temperature", 0, "--no-cache")
    ids = [[e.get("id") for e in ran.events] for ran in (cached, naive)]
    assert ids[0] == ids[1]
    assert naive.events[-1]["kv_bytes"] == 0 < cached.events[-1]["kv_bytes"]
    told = ask(kvchat, babbler, "hi", "--stats", "--no-cache")
    assert "no cache;" in told.err


def test_system_prompt_reaches_the_model(kvchat: Any, babbler: Path) -> None:
    plain = ask(kvchat, babbler, "hi", "--json").events[0]["new"]
    told = ask(kvchat, babbler, "hi", "--json", "--system", "x").events[0]["new"]
    assert told == plain + len("system\nx\n") + 2


def test_a_seed_gives_the_same_answer(kvchat: Any, babbler: Path) -> None:
    assert ask(kvchat, babbler, "hi").out == ask(kvchat, babbler, "hi").out
    assert ask(kvchat, babbler, "hi").out != ask(kvchat, babbler, "hi", "--seed", 4).out


def test_stats_are_one_line_on_stderr(kvchat: Any, babbler: Path) -> None:
    ran = ask(kvchat, babbler, "hi", "--stats")
    assert len(ran.err.splitlines()) == 1
    assert "tok/s" in ran.err
    assert "tok/s" not in ran.out


@pytest.mark.parametrize("chosen", ["flag", "variable", "file"])
def test_speculation_tells_what_it_spared_and_changes_no_answer(
    kvchat: Any, babbler: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    costs = {4: 0.1, 8: 0.2, 16: 0.4}
    monkeypatch.setattr("kvchat.models.known_costs.measure_pass_costs", lambda *_: costs)
    asked = ("ab ab", "--raw", "--json", "--stats", "--temperature", 0)
    asked += ("--repetition-penalty", 1, "--max-tokens", 120)
    plain = ask(kvchat, babbler, *asked)
    if chosen == "variable":
        monkeypatch.setenv("KVCHAT_SPECULATE", "yes")
    elif chosen == "file":
        config_file().parent.mkdir(parents=True)
        config_file().write_text("speculate = true\n")
    ran = ask(kvchat, babbler, *asked, *(["--speculate"] if chosen == "flag" else []))
    assert ran.answer == plain.answer
    done = ran.events[-1]
    assert 0 < done["accepted"] <= done["proposed"]
    assert f"{done['accepted']} of {done['proposed']} drafted" in ran.err
    for without in (["--no-speculate"], ["--speculate", "--no-cache"]):
        ran = ask(kvchat, babbler, *asked, *without)
        assert "proposed" not in ran.events[-1] and "drafted" not in ran.err


def new_tokens(kvchat: Any, babbler: Path, *args: str) -> int:
    count: int = ask(kvchat, babbler, "--raw", "--json", *args).events[0]["new"]
    return count


def test_piped_text_is_put_after_the_question(
    kvchat: Any, babbler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("\ufeffpiped é\n".encode()))
    assert ask(kvchat, babbler, "ask", "this", "--raw").out.startswith("ask this\n\npiped é")
    monkeypatch.setattr(sys, "stdin", Stdin(b"only this\r\n"))
    assert ask(kvchat, babbler, "--raw").out.startswith("only this")
    monkeypatch.setattr(sys, "stdin", Stdin(b"\n"))
    assert new_tokens(kvchat, babbler, "abc") == 3
    monkeypatch.setattr(sys, "stdin", None)
    assert new_tokens(kvchat, babbler, "abc") == 3


def test_bad_stdin(kvchat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"caf\xe9"))
    assert kvchat("ask", "hi").failed(1, "UTF-8", "byte 3", "0xe9")
    monkeypatch.setattr("kvchat.cli.ask.STDIN_LIMIT", 10)
    monkeypatch.setattr(sys, "stdin", Stdin(b"x" * 11))
    assert kvchat("ask").failed(1, "stdin has more than")


def test_arguments_are_utf_8_whatever_the_locale_says(kvchat: Any, babbler: Path) -> None:
    undecoded = "你好".encode().decode("ascii", "surrogateescape")
    ran = ask(kvchat, babbler, "--raw", "--max-tokens", 1, undecoded)
    assert ran.out.startswith("你好")
    assert ask(kvchat, babbler, "a\udcff").failed(2, "UTF-8")


def test_a_prompt_longer_than_the_context_says_by_how_much(kvchat: Any, babbler: Path) -> None:
    for flag in ("--raw", "--json", "--no-cache"):
        ran = ask(kvchat, babbler, "x" * 100, "--ctx", 50, flag, "--system", "s")
        assert ran.failed(1, "1", "50")
    assert ask(kvchat, babbler, "x" * 50, "--raw", "--ctx", 50).failed(1, "50 tokens", "holds 50")
    assert ask(kvchat, babbler, "hi", "--ctx", 10**6).failed(2, "--ctx")


def test_nan_is_told(kvchat: Any, babbler: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in babbler.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert ask(kvchat, broken, "hi").failed(1, "not a number")


def test_models_that_are_not_there(kvchat: Any, tmp_path: Path) -> None:
    assert kvchat("ask", "hi", "-m", "qwen3-0.6b").failed(1, "kvchat pull qwen3-0.6b")
    assert kvchat("ask", "hi", "-m", "qwen3-0.6").failed(1, "qwen3-0.6b")
    assert kvchat("ask", "hi", "-m", tmp_path / "no.gguf").failed(1, "no.gguf")
    (tmp_path / "empty.gguf").touch()
    assert kvchat("ask", "hi", "-m", tmp_path / "empty.gguf").failed(1, "empty")
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    assert kvchat("ask", "hi", "-m", tmp_path / "model.bin").failed(1, "pickled")
    assert kvchat("pull", "no-such-model").failed(1, "no-such-model")


def test_a_model_without_a_template_is_pointed_out(
    kvchat: Any, babbler: Path, tmp_path: Path
) -> None:
    for file in babbler.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "tokenizer_config.json", remove=("chat_template",))
    assert "--raw" in ask(kvchat, tmp_path, "hi").err
    assert ask(kvchat, tmp_path, "hi", "--raw").err == ""


# What the terminal gets


def test_control_codes_are_made_visible() -> None:
    hostile = "a\x1b[31m\x1b]0;title\x07b\r\nc\x9b2J\x00\x7f\td\u202ee"
    shown = printable(hostile)
    assert shown == "a␛[31m␛]0;title␇b\nc�2J␀␡\td�e"
    assert "".join(map(printable, hostile)) == shown
    text = "你好 é مرحبا 👩‍👩‍👧 \n"
    assert printable(text) == text
    assert one_line("a\n\x1b b") == "a ␛ b"


class Stdout(io.TextIOWrapper):
    def __init__(self, encoding: str, terminal: bool, error: OSError | None = None) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal, self.error = terminal, error

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        if self.error:
            raise self.error
        super().flush()


def written(monkeypatch: pytest.MonkeyPatch, text: str, encoding: str, terminal: bool) -> bytes:
    stream = Stdout(encoding, terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    Output().write(text)
    data: bytes = stream.buffer.getvalue()  # type: ignore[attr-defined]
    return data


def test_stderr_that_fails_changes_nothing(
    kvchat: Any, babbler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Stdout("utf-8", False, OSError(errno.ENOSPC, "full")))
    ran = ask(kvchat, babbler, "hi", "--stats", "--max-tokens", 2)
    assert (ran.status, bool(ran.out)) == (0, True)


@pytest.mark.parametrize("args", [["--help"], ["ask", "--help"], ["models"], ["--version"]])
def test_a_closed_pipe_is_no_failure(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "kvchat", *args], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_only_terminals_are_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, "\x1b[1m\r", "utf-8", terminal=False) == b"\x1b[1m\r"
    assert written(monkeypatch, "\x1b[1m\r", "utf-8", terminal=True) == "␛[1m".encode()
    assert written(monkeypatch, "é你\ud800", "ascii", terminal=True) == b"???"
    assert written(monkeypatch, "é\ud800", "utf-8", terminal=False) == "é?".encode()


def test_stdout_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Stdout("utf-8", False, BrokenPipeError()))
    assert run(["models"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdout", Stdout("utf-8", False, OSError(28, "No space left")))
    assert run(["models"]) == 1
    assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["models"]) == 1
    assert "closed" in capsys.readouterr().err


def test_bar_is_for_terminals_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Stdout("utf-8", terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Bar("bytes", delay=60) as bar:
        bar.update("reading", 1, 2)
    assert screen.buffer.getvalue() == b""  # type: ignore[attr-defined]
    with Bar("bytes", delay=0) as bar:
        bar.update("[red]reading", 1_000_000, None)
    shown = screen.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"[red]reading" in shown
    assert shown.rstrip().endswith(b"\x1b[2K")


def test_without_a_terminal_each_phase_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bar("bytes", delay=0, announce=True) as bar:
        for done in range(3):
            bar.update("downloading x", done, 3)
        bar.update("checking x", 3, 3)
    with Bar("bytes", delay=0) as bar:
        bar.update("loading x", 1, 3)
    assert capsys.readouterr().err == "kvchat: downloading x\nkvchat: checking x\n"


# Ctrl+C


def test_the_first_interrupt_asks_and_the_second_stops() -> None:
    asked = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        interrupts.on_ask = lambda: asked.append(1)
        signal.raise_signal(signal.SIGINT)
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_interrupts_on_the_way_out_are_not_heard() -> None:
    script = (
        "import atexit, os, signal, sys\n"
        "from kvchat import cli\n"
        "def strike(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "def run(_): strike(); strike()\n"
        "cli.run = run\n"
        "atexit.register(strike)\n"
        "cli.main([])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_while_loading_ends_with_130(
    kvchat: Any, babbler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(self: Bar, what: str, done: int, total: int | None) -> None:
        if "loading" in what:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Bar, "update", strike)
    ran = ask(kvchat, babbler, "hi")
    assert (ran.status, ran.out, ran.err) == (130, "", "")


# models, doctor, the first start


def test_models_lists_this_disk_and_the_rest_of_the_catalogue(kvchat: Any) -> None:
    assert "No model is on this disk yet" in kvchat("models").out
    models_dir().mkdir(parents=True)
    (models_dir() / "Mine[red].gguf").write_bytes(b"GGUF" + bytes(100))
    ours = find("qwen3-0.6b")
    assert ours is not None
    (models_dir() / ours.file).write_bytes(b"GGUF" + bytes(200))
    data = json.loads(kvchat("models", "--json").out)
    assert {m["name"]: m["bytes"] for m in data["on_disk"]} == {
        "Mine[red]": 104,
        "qwen3-0.6b": 204,
    }
    assert {m["name"] for m in data["catalogue"]} == {e.alias for e in CATALOG} - {"qwen3-0.6b"}
    assert all(m["languages"] for m in data["catalogue"])
    shown = kvchat("models").out
    here, _, absent = shown.partition("kvchat pull NAME")
    assert "Mine[red]" in here and "qwen3-0.6b" in here
    assert "smollm2" in absent and "qwen3-0.6b" not in absent
    assert str(models_dir()) not in shown


def test_doctor_is_content_with_a_fresh_machine(kvchat: Any) -> None:
    ran = kvchat("doctor")
    assert ran.status == 0, ran.out
    assert "FAIL" not in ran.out
    assert "kvchat pull smollm2" in ran.out
    places = (str(models_dir()), str(log_file()))
    for word in (__version__, "torch", "CPU", "GPU", *places, "encoding", "TERM="):
        assert word in ran.out


def test_doctor_finds_what_is_broken(
    kvchat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = find("smollm2")
    assert default is not None
    models_dir().mkdir(parents=True)
    (models_dir() / default.file).write_bytes(b"GGUF" + bytes(200))
    ran = kvchat("doctor")
    assert ran.status == 1
    assert "smollm2 is damaged" in ran.out
    config_file().parent.mkdir()
    config_file().write_text("colour = 3\n")
    assert "there is no setting 'colour'" in kvchat("doctor").out
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "file" / "data"))
    ran = kvchat("doctor")
    assert ran.status == 1
    assert "KVCHAT_DATA_DIR" in ran.out


def test_the_first_start_fetches_the_default_model_and_names_better_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    monkeypatch.setattr(pull_module, "pull", lambda name, progress: fetched.append(name))
    loading.make_available("smollm2")
    assert fetched == ["smollm2"]
    [line] = capsys.readouterr().err.splitlines()
    assert "English only" in line
    recommended = [find(alias) for alias in BETTER]
    assert all(entry and entry.alias in line for entry in recommended)
    assert any(entry and "zh" in entry.languages for entry in recommended)
