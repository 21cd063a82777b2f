"""The command line, seen from outside: arguments in, exit status out.

0 is done, 1 failed, 2 bad usage, 130 interrupted; a failure is told in one line on stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from kvchat import __version__
from kvchat.engine.errors import KvchatError, SettingError

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        status = run(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:  # one more, while the first was dealt with
        status = INTERRUPTED
    # From here on there is nothing to interrupt but the interpreter's own last words.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def run(args: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    # Read by OpenMP when torch is loaded. Its threads spin for milliseconds between two operations,
    # which costs most of the speed beside any other program; not to spin at all costs two fifths of
    # it on an idle machine. About a tenth of a millisecond covers the gaps within a token.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        # Imported here, so that an early Ctrl+C finds someone to catch it.
        from kvchat.cli.app import invoke
        from kvchat.cli.output import note, settle_stdout
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        status = invoke(list(args))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the latter is rich's way to say the same
        status = DONE  # whoever read our output has all they wanted
    except SettingError as error:
        status = BAD_USAGE
        note(str(error))
    except KvchatError as error:
        status = FAILED
        note(str(error))
    except MemoryError:
        status = FAILED
        note("there is not enough memory; try a smaller model or a smaller --ctx")
    except Exception as error:
        status = FAILED
        note(_unexpected(error))
    settle_stdout()
    return status


def _unexpected(error: Exception) -> str:
    """Put the traceback of a fault of ours into the log; return what to tell the user."""
    from kvchat.settings import log_file

    told = f"this should not have happened: {type(error).__name__}: {error}"
    path = log_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} kvchat {__version__}\n")
            log.writelines(traceback.format_exception(error))
    except OSError:
        return told
    return f"{told} (details in {path})"
