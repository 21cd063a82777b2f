"""`kvchat doctor`: is everything in place, and if not, what to do."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer

from kvchat import __version__
from kvchat.chat.plain_text import one_line
from kvchat.cli.interrupts import Interrupts
from kvchat.cli.options import preset_values, range_refusal
from kvchat.cli.output import Output, is_terminal
from kvchat.models import catalog
from kvchat.models.locate import locate
from kvchat.settings import (
    Settings,
    cache_dir,
    config_dir,
    config_file,
    data_dir,
    log_file,
    models_dir,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    remedy: str = ""
    """What to do about it; empty when it is fine."""
    needed: bool = False
    """Whether nothing works until that is done."""

    @property
    def mark(self) -> str:
        """How it is shown: fine, worth knowing, broken."""
        if not self.remedy:
            return "ok"
        return "FAIL" if self.needed else "note"


def doctor() -> None:
    """Look at this machine, its folders and the terminal, and say what needs mending."""
    output = Output()
    broken = False
    with Interrupts() as interrupts:
        for look in (_program, _compute, _kernels, _folders, _settings, _model, _terminal):
            for finding in look():
                interrupts.check()
                broken |= finding.mark == "FAIL"
                output.write(f"{finding.mark:<5}{finding.what:<13}{one_line(finding.found)}\n")
                if finding.remedy:
                    output.write(f"{'':<18}{one_line(finding.remedy)}\n")
    if broken:
        raise typer.Exit(1)


def _program() -> Iterator[Finding]:
    yield Finding("kvchat", __version__)
    yield Finding("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    tools = [tool for tool in ("uv", "pipx") if shutil.which(tool)]
    pips = ["pip"] if find_spec("pip") else tools
    remedy = "" if pips else "Install pip, uv or pipx; without one, models come from the Hub alone."
    yield Finding("pip", ", ".join(pips) or "none", remedy)


def _compute() -> Iterator[Finding]:
    try:
        from kvchat.bench.machine import machine

        here = machine()
    except Exception as error:  # a broken installation may fail in any way
        remedy = "Install it anew: pip install --force-reinstall torch"
        yield Finding("torch", f"{type(error).__name__}: {error}", remedy, needed=True)
        return
    yield Finding("torch", here.torch_version)
    bfloat16 = "with" if here.bfloat16 else "without"
    yield Finding(
        "CPU",
        f"{here.cpu}, {bfloat16} bfloat16, {here.cores} cores, {here.threads} threads",
    )
    yield Finding("GPU", ", ".join(here.accelerators) or "none; models run on the CPU")


def _kernels() -> Iterator[Finding]:
    try:
        from kvchat.engine import native
    except Exception:
        return  # there is no torch, which was told
    folder, remedy = cache_dir() / native.FOLDER, ""
    setting = Settings.load()[0].kernels
    if native.is_in_place(folder):
        found = "in place"
    elif native.is_building(folder):
        found = "being built right now; they are used from the next start on"
    elif cause := native.failure(folder):
        found = f"could not be built: {cause}"
        remedy = "`kvchat kernels` tries again; until then torch's operators do the work."
    elif not native.can_build():
        found = "none; torch's operators do the work"
        remedy = "With a C++ compiler and `pip install 'kvchat[kernels]'` replies are quicker."
    else:
        found = "none yet; a chat builds them while it is idle"
        if setting != "auto":
            found = "none; `kvchat kernels` builds them"
    if setting == "off":
        found += "; left aside, as kernels is set to off"
    yield Finding("kernels", found, remedy)


def _folders() -> Iterator[Finding]:
    places = {
        "models": models_dir(),
        "data": data_dir(),
        "config": config_dir(),
        "cache": cache_dir(),
    }
    for what, folder in places.items():
        problem = _unwritable(folder)
        variable = {"config": "CONFIG", "cache": "CACHE"}.get(what, "DATA")
        remedy = f"Change its permissions, or set KVCHAT_{variable}_DIR to a folder of yours."
        found = f"{folder} ({problem})" if problem else str(folder)
        # Without a folder for models and chats nothing lasts; the others can be done without.
        yield Finding(what, found, remedy if problem else "", needed=variable == "DATA")
    yield Finding("log", str(log_file()))
    space = _existing(models_dir())
    yield Finding("free space", f"{catalog.size_text(shutil.disk_usage(space).free)} for models")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _unwritable(folder: Path) -> str:
    """Say why nothing can be written to a folder, or below the nearest one that exists."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written: {error.strerror}"


def _settings() -> Iterator[Finding]:
    path = config_file()
    yield Finding(
        "settings", str(path) if path.exists() else f"{path} (none yet, and none is needed)"
    )
    for problem in Settings.load({}, preset_values, range_refusal)[1]:
        yield Finding("settings", problem, "Correct it; until then it is ignored.")


def _model() -> Iterator[Finding]:
    from kvchat.models.pull_staging import is_exactly

    name = Settings().model
    entry = catalog.find(name)
    path = locate(name)
    assert entry is not None and entry.sha256 is not None
    if path is None:
        size = catalog.size_text(entry.size)
        remedy = f"The first question fetches it ({size}), or `kvchat pull {name}`."
        yield Finding("model", f"{name} is not here yet", remedy)
    elif is_exactly(path, entry.size, entry.sha256, lambda _: None):
        yield Finding("model", f"{name} is whole")
    else:
        remedy = f"Delete {path}, then `kvchat pull {name}`."
        yield Finding("model", f"{name} is damaged", remedy, needed=True)


def _terminal() -> Iterator[Finding]:
    encoding = getattr(sys.stdout, "encoding", None) or "unknown"
    legible = encoding.lower().replace("-", "") == "utf8"
    remedy = "" if legible else "Set PYTHONUTF8=1, or a UTF-8 locale, to see all characters."
    yield Finding("encoding", encoding, remedy)
    term, color = (os.environ.get(name, "") for name in ("TERM", "COLORTERM"))
    size = shutil.get_terminal_size()
    inside = "inside tmux" if os.environ.get("TMUX") else "not in tmux"
    shown = "a terminal" if is_terminal(sys.stdout) else "not a terminal"
    yield Finding(
        "terminal",
        f"{shown}, {size.columns}×{size.lines}, TERM={term or 'unset'}, "
        f"COLORTERM={color or 'unset'}, {inside}",
    )
