"""Values out of records that strangers wrote."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvchat.chat.transfer.records import RecordError

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {dict: "an object", list: "a list", str: "text", int: "a whole number", bool: "a boolean"}
_MILLISECONDS, _NANOSECONDS = 1e11, 1e17
"""From here on, a time since 1970 cannot be meant in seconds or milliseconds."""


def expect(value: object, kind: type[T], what: str) -> T:
    """Return the value if it is of the kind.

    Raises:
        RecordError: it is not.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecordError(f"{what} must be {_KINDS[kind]}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RecordError(f"{what} is too large a number")
    return value


def get(record: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return a member that must be there; raises RecordError."""
    if name not in record:
        raise RecordError(f"there is no '{name}'")
    return expect(record[name], kind, f"'{name}'")


def text_of(value: object) -> str:
    """Return a text without halves of surrogate pairs, which JSON can spell; "" for no text."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else ""


def object_of(value: object) -> dict[str, Any]:
    """Return an object, or an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    """Return a list, or an empty one."""
    return value if isinstance(value, list) else []


def time_of(*values: object) -> datetime | None:
    """Return the first that is a moment: seconds, ms or ns since 1970, or ISO 8601."""
    for value in values:
        try:
            if isinstance(value, str):
                return datetime.fromisoformat(value).astimezone()
            if isinstance(value, int | float) and value > 0:
                per_second = 1e9 if value > _NANOSECONDS else 1e3 if value > _MILLISECONDS else 1
                return datetime.fromtimestamp(value / per_second, UTC).astimezone()
        except (ValueError, OverflowError, OSError):
            pass
    return None
