"""What a process that measures one program is asked, and what a program must be able to do.

Imports nothing that another program's interpreter may lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvchat.bench.plan import LoadSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process shall do; what is empty is left out."""

    program: str
    load: dict[str, Any]
    """Fields of `LoadSettings`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that only this program has."""
    sampling: dict[str, Any]
    """Sampling settings that all programs know."""
    decode_ids: list[int] = field(default_factory=list)
    decode_tokens: int = 2
    prefill_ids: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    """The whole prompt of a late turn of a chat."""
    turn_held: int = 0
    """How many of them are cached when the turn begins."""
    long_ids: list[int] = field(default_factory=list)
    """What is cached when decoding is measured once more."""
    repeats: int = 1

    @property
    def settings(self) -> LoadSettings:
        """The model, and how to load it."""
        return LoadSettings(**self.load)

    @property
    def room(self) -> int:
        """Positions that the longest of all this takes."""
        longest = max(map(len, (self.decode_ids, self.prefill_ids, self.turn_ids, self.long_ids)))
        return longest + self.decode_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """One reply."""

    ttft_ms: float
    """From the call to the first token, drawn."""
    token_ms: list[float]
    """Time between two tokens; one fewer than there are tokens."""


class Program(Protocol):
    """Something that runs a language model and keeps its cache."""

    def __init__(self, task: Task) -> None:
        """Load the model."""

    @staticmethod
    def imports() -> None:
        """Import what runs the model, and nothing else."""

    def hold(self, ids: Sequence[int]) -> None:
        """Make the cache hold exactly `ids`."""

    def reply(self, ids: Sequence[int], tokens: int) -> Timing:
        """Draw `tokens` tokens after `ids`; what is cached of these is not run again."""
