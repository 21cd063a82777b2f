"""What the program remembers by itself from one start to the next, such as the theme last chosen.

It is one small JSON file. Losing it costs nothing but a choice made once more, so whatever is wrong
with it is passed over.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat.settings.paths import data_dir

_LARGEST = 2**20


def state_file() -> Path:
    """The file of what is remembered; it need not exist."""
    return data_dir() / "state.json"


def remembered() -> dict[str, Any]:
    """Return what is remembered; nothing if the file is damaged."""
    try:
        with state_file().open("rb") as file:
            values = json.loads(file.read(_LARGEST + 1))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def remember(**values: Any) -> bool:
    """Remember values that JSON can hold, beside those there are; None forgets one.

    Returns:
        Whether they could be kept; the file is whole in any case.
    """
    kept = {key: value for key, value in (remembered() | values).items() if value is not None}
    path = state_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved into place: a full disk or a kill leaves the old file.
        handle, beside = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file, indent=2)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    except OSError:
        return False
    return True
