"""Copying to the clipboard of the terminal's own machine, also over SSH and inside tmux.

OSC 52 is the terminal's way (xterm's control sequences, "Manipulate Selection Data"). tmux passes
it on only when it is wrapped; terminals that do not know it ignore it, so the platform's own
program is asked as well where there is one.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Mapping

_PROGRAMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("TMUX", ("tmux", "load-buffer", "-w", "-")),
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--clipboard", "--input")),
    ("", ("pbcopy",)),
    ("", ("clip.exe",)),
)
"""The variable that must be set for a program to make sense, and the program."""

_TIMEOUT = 2.0


def osc52(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the sequence that asks the terminal to put `text` on its clipboard."""
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    sequence = f"\x1b]52;c;{encoded}\x07"
    if environment.get("TMUX"):
        return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return sequence


def clipboard_program(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Return the command that fills the clipboard from its input, if this machine has one."""
    for variable, command in _PROGRAMS:
        if (not variable or environment.get(variable)) and shutil.which(command[0]):
            return command
    return None


def fill_clipboard(text: str) -> bool:
    """Hand `text` to the platform's clipboard program; False where that is not possible."""
    command = clipboard_program()
    if command is None:
        return False
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
