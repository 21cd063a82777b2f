"""`kvchat bench --ui`: the screen program as a user has it, on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import kvchat
from kvchat.bench import worker_child
from kvchat.bench.plan import LoadSettings, UiPlan
from kvchat.bench.result import percentile_95, rounded
from kvchat.bench.ui_child import Script
from kvchat.bench.worker_child import STORY, Errand
from kvchat.engine.errors import KvchatError
from kvchat.models.locate import require

if TYPE_CHECKING:
    from kvchat.bench.terminal import Terminal

PROMPT_TEXT = "Write a message"
"""The prompt's placeholder: once it is there, one can type."""
HEADER_TEXT = r"context \d"
"""The header's words once a model is loaded."""
PATIENCE_S = 300
"""Longer than a large model takes to load, or a slow one to reply."""
QUIT = "\x11"
ENTER = "\r"

KEYS = [chr(n) for n in (*range(0x430, 0x450), *range(0x3B1, 0x3CA))]
"""What is typed: each once, and none that a reply in English holds."""
PAUSES_S = (0.11, 0.17, 0.13, 0.19)
"""Between key presses; in step with nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A reply on the screen, with so many compute threads."""

    threads: int
    decode_tps: float
    """With the screen on."""
    headless_decode_tps: float
    """The same reply from the same worker without a screen."""
    speed_kept: float
    """Their ratio."""
    refreshes_per_s: float
    """That brought new tokens to the terminal."""
    token_ms_p50: float
    """From the token being drawn to its bytes being at the terminal."""
    token_ms_p95: float
    key_ms_p50: float | None
    """From the key to its echo, while a reply is written; None if none fitted in."""
    key_ms_p95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UiFigures:
    """All figures of the screen."""

    first_paint_s: float
    """From the start of the process to the prompt being on the terminal."""
    ready_s: float
    """From the start of the process to the header naming the model."""
    idle_cpu: float
    """Share of one core while nothing happens."""
    open_ms: float
    """From asking for a chat of `plan.messages` messages to its being on the terminal."""
    exit_s: float
    """From Ctrl+Q in the middle of a reply to the end of the process."""
    streams: list[Stream]


@dataclass(frozen=True, slots=True, kw_only=True)
class UiResult:
    """One run; the fields are the keys of the JSON."""

    model: str
    ui: UiFigures
    plan: UiPlan
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    kvchat: str = kvchat.__version__
    textual: str = field(default_factory=lambda: version("textual"))

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


def measure(
    settings: LoadSettings,
    plan: UiPlan,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> UiResult:
    """Measure the program with 1 and 2 compute threads, or with those of the settings.

    Args:
        settings: the model, and how to load it.
        plan: lengths and repeats.
        progress: called with what is being measured now.

    Raises:
        KvchatError: there are no pseudo-terminals here, or the program fails.
    """
    if os.name == "nt":
        raise KvchatError("--ui needs a pseudo-terminal, which Windows has none of; use WSL")
    here = replace(settings, model=str(require(settings.model)))
    with TemporaryDirectory() as folder:
        # The user's settings, themes and chats stay out of it. Their cache does not: the kernels
        # are in it, and the same reply without a screen is written with them.
        names = ("CONFIG", "DATA")
        user: dict[str, str | None] = {
            f"KVCHAT_{name}_DIR": str(Path(folder, name.lower())) for name in names
        }
        # A user's start is not the first of all, so it finds the modules compiled.
        user["PYTHONDONTWRITEBYTECODE"] = None
        counts = [settings.threads] if settings.threads else [1, 2]
        bench = _Bench(here, plan, user, progress)
        starts = bench.starts(counts[0])
        opens = bench.opens(counts[0])
        streams, idles = [], []
        for threads in counts:
            stream, idle = bench.stream(threads)
            streams.append(stream)
            idles += idle
    return UiResult(
        model=settings.model,
        plan=plan,
        ui=UiFigures(
            first_paint_s=median(start.first_paint_s for start in starts),
            ready_s=median(start.ready_s for start in starts),
            exit_s=median(start.exit_s for start in starts),
            idle_cpu=median(idles),
            open_ms=median(opens),
            streams=streams,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    first_paint_s: float
    ready_s: float
    exit_s: float


@dataclass(frozen=True, slots=True)
class _Bench:
    settings: LoadSettings
    plan: UiPlan
    environment: dict[str, str | None]
    progress: Callable[[str], None]

    def starts(self, threads: int) -> list[_Start]:
        """Start the program, say something, and quit while it replies."""
        options = {**asdict(self.settings), "threads": threads}
        flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
        starts = []
        for nth in range(self.plan.repeats):
            self.progress(f"start {nth + 1} of {self.plan.repeats}")
            with self._terminal(["-m", "kvchat", "chat", *flags]) as terminal:
                painted = terminal.shown(PROMPT_TEXT, PATIENCE_S)
                ready = terminal.shown(HEADER_TEXT, PATIENCE_S)
                terminal.write(STORY + ENTER)
                terminal.read_for(0.7)
                asked = terminal.write(QUIT)
                exit_s = terminal.ended(PATIENCE_S) - asked
                starts.append(_Start(painted - terminal.started, ready - terminal.started, exit_s))
        return starts

    def opens(self, threads: int) -> list[float]:
        """Open long chats; return the milliseconds each took."""
        self.progress(f"opening a chat of {self.plan.messages:,} messages")
        script = self._script(threads, open_messages=self.plan.messages, opens=self.plan.repeats)
        with self._child(script) as terminal:
            opened: list[float] = _until(terminal, "open_ms")["open_ms"]
        return opened

    def stream(self, threads: int) -> tuple[Stream, list[float]]:
        """Write replies with the screen and without it; also return the idle CPU shares."""
        seen: list[dict[str, Any]] = []
        headless: list[float] = []
        keys: list[float] = []
        idles: list[float] = []
        for nth in range(self.plan.repeats):
            what = f"{threads} threads, round {nth + 1} of {self.plan.repeats}"
            self.progress(f"a reply on the screen: {what}")
            script = self._script(
                threads, reply_tokens=self.plan.reply_tokens, idle_s=self.plan.idle_s
            )
            with self._child(script) as terminal:
                idles.append(_until(terminal, "idle_cpu")["idle_cpu"])
                _until(terminal, "ready")
                terminal.write(STORY + ENTER)
                seen.append(_until(terminal, "decode_tps"))
                self.progress(f"typing meanwhile: {what}")
                terminal.write(STORY + ENTER)
                terminal.read_for(1)
                keys += self._type(terminal)
            self.progress(f"the same without a screen: {what}")
            load = asdict(replace(self.settings, threads=threads))
            found = worker_child.measure(Errand(load, self.plan.reply_tokens))
            assert found.decode_tps is not None
            headless.append(found.decode_tps)
        token_ms = [ms for each in seen for ms in each["token_ms"]]
        decode_tps = median(each["decode_tps"] for each in seen)
        stream = Stream(
            threads=threads,
            decode_tps=decode_tps,
            headless_decode_tps=median(headless),
            speed_kept=decode_tps / median(headless),
            refreshes_per_s=median(each["refreshes_per_s"] for each in seen),
            token_ms_p50=median(token_ms),
            token_ms_p95=percentile_95(token_ms),
            key_ms_p50=median(keys) if keys else None,
            key_ms_p95=percentile_95(keys) if len(keys) > 1 else None,
        )
        return stream, idles

    def _type(self, terminal: Terminal) -> list[float]:
        """Press keys while the reply is written; return the milliseconds to each echo."""
        took = []
        for nth, key in enumerate(KEYS[: self.plan.keys]):
            if terminal.reports:
                break  # the reply has ended
            pressed = terminal.write(key)
            took.append((terminal.shown(key, 30) - pressed) * 1e3)
            terminal.read_for(PAUSES_S[nth % len(PAUSES_S)])
        return took

    def _script(self, threads: int, **what: Any) -> Script:
        return Script(load=asdict(replace(self.settings, threads=threads)), **what)

    def _child(self, script: Script) -> Terminal:
        arguments = ["-m", "kvchat.bench.ui_child", json.dumps(asdict(script))]
        return self._terminal(arguments, pipe=True)

    def _terminal(self, arguments: Sequence[str], *, pipe: bool = False) -> Terminal:
        from kvchat.bench.terminal import Terminal

        return Terminal([sys.executable, *arguments], self.environment, pipe=pipe)


def _until(terminal: Terminal, key: str) -> dict[str, Any]:
    """Wait for the report that has this key."""
    while key not in (report := terminal.report(PATIENCE_S)):
        if "error" in report:
            raise KvchatError(f"The screen program failed: {report['error']}")
    return report
