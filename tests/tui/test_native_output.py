from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import os, sys
from pathlib import Path
from kvchat.tui.native_output import native_output_to

with native_output_to(Path(sys.argv[1])):
    os.write(1, b"native one\\n")
    os.write(2, b"native two\\n")
    print("drawn", file=sys.__stderr__, flush=True)
    print(os.get_terminal_size(sys.__stdout__.fileno()).columns, file=sys.__stderr__, flush=True)
print("after")
"""


def test_libraries_write_to_the_log_and_the_screen_keeps_the_terminal(tmp_path):
    log = tmp_path / "log"
    parent, child = pty.openpty()
    subprocess.run(["stty", "cols", "77"], stdin=child, check=True)
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], stdout=child, stderr=child, check=True
    )
    os.close(child)
    shown = os.read(parent, 10_000).decode().split()
    assert shown == ["drawn", "77", "after"]
    assert log.read_text().split("\n") == ["native one", "native two", ""]


def test_a_log_that_cannot_be_written_is_no_obstacle():
    program = PROGRAM.replace("os.get_terminal_size(sys.__stdout__.fileno()).columns", "0")
    done = subprocess.run(
        [sys.executable, "-c", program, "/"], capture_output=True, check=True, text=True
    )
    assert done.stderr.split() == ["drawn", "0"]
    assert done.stdout.split() == ["after"]


def test_a_terminal_that_has_gone_is_no_fault():
    program = """
import os, pty, sys
from pathlib import Path
from kvchat.tui.native_output import native_output_to

parent, child = pty.openpty()
kept = os.dup(1)
os.dup2(child, 1), os.dup2(child, 2), os.close(child)
with native_output_to(Path("/dev/null")):
    os.close(parent)
    sys.__stderr__.write("nobody sees this")
os.write(kept, b"through")
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stdout == b"through"
