"""A reply as it arrives, written to where text goes in one direction only."""

from __future__ import annotations

from typing import Protocol

from kvchat.chat.events import TextAdded


class Output(Protocol):
    """Where replies and answers to commands go."""

    is_terminal: bool

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write text that may come from anywhere."""


class ReplyWriter:
    """Writes one reply after another; reasoning and answer stand under headings of their own.

    Args:
        output: gets the text.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._thinking = False
        self._line_is_open = False

    def add(self, added: TextAdded) -> None:
        """Write what was added to the reply."""
        if added.thinking != self._thinking:
            self._end_line()
            self._output.write("[thinking]\n" if added.thinking else "[answer]\n", dim=True)
        self._thinking = added.thinking
        self._output.write(added.text, dim=added.thinking)
        self._line_is_open = not added.text.endswith("\n")

    def finish(self) -> None:
        """End the reply, and its last line."""
        self._end_line()
        self._thinking = False

    def _end_line(self) -> None:
        if self._line_is_open:
            self._output.write("\n")
        self._line_is_open = False
