"""What a line typed into a plain chat means: a message, or a command that begins with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.chat.plain import PlainChat


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One command of the plain chat."""

    name: str
    arguments: str
    """How to write them, for the help."""
    help: str
    run: Callable[[PlainChat, str], None]
    """Gets what stands after the name, without the spaces around it."""


@dataclass(frozen=True, slots=True)
class Called:
    """A line that calls a command."""

    name: str
    argument: str


def read(line: str) -> Called | str:
    """Tell a call from a message; a message that begins with two slashes loses one."""
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    name, argument = first_word(line[1:])
    return Called(name, argument)


def first_word(text: str) -> tuple[str, str]:
    """Split off the first word; both parts without the white space around them."""
    parts = text.split(maxsplit=1)
    return (parts[0] if parts else "", parts[1].strip() if len(parts) > 1 else "")


def goes_on(line: str) -> bool:
    """Whether a line ends in a backslash that joins the next one; an escaped one does not."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def find(name: str, commands: Iterable[SlashCommand]) -> SlashCommand:
    """Return the command of that name.

    Raises:
        KvchatError: there is none; the text names the nearest.
    """
    by_name = {command.name: command for command in commands}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=1)
    hint = f"Did you mean /{near[0]}? " if near else ""
    raise KvchatError(
        f"There is no command /{name}. {hint}/help lists all; begin a message with // if it "
        "shall begin with a slash."
    )
