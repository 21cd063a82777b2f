"""kvchat beside other programs: same file, same threads, processes of their own, in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from kvchat.bench.process import has_packages, run_module
from kvchat.bench.result import Contestant
from kvchat.bench.task import Task
from kvchat.engine.errors import SettingError

Options = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A program that kvchat can be compared with."""

    packages: tuple[str, ...]
    """What it needs to be imported from."""
    gguf_packages: tuple[str, ...] = ()
    """What it needs besides for a GGUF file."""
    install: str
    """What pip is told to install."""
    gguf_only: bool = False
    plain: bool = False
    """Whether it unpacks all weights to bfloat16, as kvchat does when told to."""
    variants: tuple[tuple[str, Options], ...]
    """Settings that are all measured: a name, and options."""
    choices: tuple[tuple[str, Options], ...] = (("", {}),)
    """Further settings, of which each variant takes those that prefill fastest."""


PEERS = {
    "transformers": Peer(
        packages=("transformers",),
        gguf_packages=("accelerate", "gguf"),
        install="transformers",
        plain=True,
        variants=(("bfloat16", {}),),
    ),
    "llama.cpp": Peer(
        packages=("llama_cpp",),
        install="llama-cpp-python",
        gguf_only=True,
        variants=(
            ("flash", {"flash_attn": True}),
            ("no flash", {"flash_attn": False}),
        ),
        choices=(
            ("batch 512/128", {"n_batch": 512, "n_ubatch": 128}),
            ("batch 512/512", {"n_batch": 512, "n_ubatch": 512}),
            ("batch 2048/2048", {"n_batch": 2048, "n_ubatch": 2048}),
        ),
    ),
}
"""Programs that can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process; None for what the task left out."""

    ready_s: float
    decode_ms: float | None = None
    prefill_ms: float | None = None
    turn_ttft_ms: float | None = None
    long_decode_ms: float | None = None
    import_memory_bytes: int | None
    reply_memory_bytes: int | None = None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One program with one set of settings."""

    name: str
    settings: str
    task: Task
    python: str | None = None
    """The interpreter it runs in, if not ours."""


def interpreters(names: Sequence[str], path: Path, python: str | None) -> dict[str, str | None]:
    """Find the interpreter of each peer: ours (None) where it has what is needed, else `python`.

    Raises:
        SettingError: a peer is unknown, cannot read the model at `path`, or lacks a package.
    """
    found: dict[str, str | None] = {}
    for name in names:
        if name not in PEERS:
            raise SettingError(f"cannot compare with {name}; known are: {', '.join(PEERS)}")
        peer, gguf = PEERS[name], path.suffix == ".gguf"
        if peer.gguf_only and not gguf:
            raise SettingError(f"{name} reads GGUF files only; {path.name} is none")
        needs = (*peer.packages, *(peer.gguf_packages if gguf else ()))
        missing = [package for package in needs if find_spec(package) is None]
        if not missing:
            found[name] = None
        elif python is not None and has_packages(python, needs):
            found[name] = python
        else:
            wanted = [peer.install if package in peer.packages else package for package in missing]
            raise SettingError(
                f"comparing with {name} needs more packages; run: {python or sys.executable} -m "
                f"pip install {' '.join(wanted)}"
                + ("" if python else ", or name an interpreter that has them with --peer-python")
            )
    return found


def measure(task: Task, python: str | None = None) -> Measured:
    """Run a task in a fresh process.

    Raises:
        KvchatError: the process failed; with the last line that it wrote.
    """
    lines = run_module(
        "kvchat.bench.programs", asdict(task), f"Measuring {task.program}", python=python
    )
    ready_s = next(seconds for seconds, line in lines if line == "ready\n")
    return Measured(ready_s=ready_s, **json.loads(lines[-1][1]))


def compare(
    ours: Task,
    theirs: Task,
    peers: Mapping[str, str | None],
    rounds: int,
    progress: Callable[[str], None],
) -> list[Contestant]:
    """Measure kvchat as it is set, kvchat in plain bfloat16 where a peer is so, and the peers.

    Every round starts a process of each, so a slow spell of the machine meets them all.

    Args:
        ours: what kvchat does.
        theirs: the same for the others, which hold less of a turn's prompt when it begins.
        peers: the interpreter of each, from `interpreters`.
        rounds: processes of each.
        progress: called with what is being measured now.
    """
    plain = {**ours.load, "dtype": "bfloat16", "quant": "none"}
    entries = [Entry("kvchat", "as set", ours)]
    if any(PEERS[name].plain for name in peers):
        entries.append(Entry("kvchat", "bfloat16", replace(ours, load=plain)))
    for name, python in peers.items():
        entries += _entries(name, python, replace(theirs, program=name), progress)
    measured: list[list[Measured]] = [[] for _ in entries]
    for nth in range(rounds):
        for entry, runs in zip(entries, measured, strict=True):
            progress(f"{entry.name}, {entry.settings}: round {nth + 1} of {rounds}")
            runs.append(measure(entry.task, entry.python))
    return [_contestant(*pair) for pair in zip(entries, measured, strict=True)]


def _entries(
    name: str, python: str | None, task: Task, progress: Callable[[str], None]
) -> list[Entry]:
    """All variants of a peer, each with whichever further options prefill fastest."""
    peer, entries = PEERS[name], []
    for settings, options in peer.variants:
        waits = []
        for choice, further in peer.choices if len(peer.choices) > 1 else ():
            progress(f"{name}, {settings}: trying {choice}")
            trial = Task(
                program=name,
                load=task.load,
                options={**options, **further},
                sampling=task.sampling,
                prefill_ids=task.prefill_ids,
                repeats=2,
            )
            waits.append(measure(trial, python).prefill_ms or 0.0)
        best, further = peer.choices[waits.index(min(waits))] if waits else peer.choices[0]
        label = ", ".join(filter(None, (settings, best)))
        entries.append(Entry(name, label, replace(task, options={**options, **further}), python))
    return entries


def _contestant(entry: Entry, runs: Sequence[Measured]) -> Contestant:
    task = entry.task

    def middle(figure: str) -> float | None:
        values = [getattr(run, figure) for run in runs]
        return None if None in values else median(values)

    def most(figure: str) -> int | None:
        return max((n for run in runs if (n := getattr(run, figure)) is not None), default=None)

    def rate(figure: str, tokens: int = 1) -> float | None:
        ms = middle(figure)
        return None if ms is None else tokens / ms * 1e3

    return Contestant(
        name=entry.name,
        settings=entry.settings,
        prefill_tps=rate("prefill_ms", len(task.prefill_ids)),
        decode_tps=rate("decode_ms"),
        long_decode_tps=rate("long_decode_ms"),
        turn_ttft_ms=middle("turn_ttft_ms"),
        ready_s=median(run.ready_s for run in runs),
        reply_memory_bytes=most("reply_memory_bytes"),
        peak_memory_bytes=most("peak_memory_bytes"),
        import_memory_bytes=most("import_memory_bytes"),
    )
