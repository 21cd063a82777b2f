"""Stash: what was cut off the cache, kept in host memory so that coming back costs a copy.

Entries are found by content: the ids that led up to a suffix are its address, so a branch, an
edit or a regenerate needs no bookkeeping of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.engine.kv_cache import CacheSuffix
from kvchat.engine.token_ids import common_prefix

MIN_TOKENS = 8
"""Shorter suffixes are quicker to run again than to look after."""


@dataclass(frozen=True, slots=True, eq=False)
class Stashed:
    """A suffix and the ids of the whole sequence it ends."""

    ids: list[int]
    suffix: CacheSuffix


class Stash:
    """Suffixes under a memory budget in bytes; the least recently used one goes first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: list[Stashed] = []  # least recently used first

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(entry.suffix.nbytes for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def accepts(self, tokens: int, nbytes: int) -> bool:
        """Whether a suffix of that size is worth cutting out and small enough to keep."""
        return tokens >= MIN_TOKENS and nbytes <= self.budget

    def covering(self, ids: Sequence[int], start: int) -> Stashed | None:
        """Return the entry that already holds positions from `start` to the end of `ids`."""
        whole = list(ids)
        for entry in self._entries:
            if entry.suffix.start <= start and entry.ids[: len(whole)] == whole:
                return entry
        return None

    def put(self, ids: Sequence[int], suffix: CacheSuffix) -> None:
        """Keep a suffix that ends the sequence `ids`; entries it covers are dropped."""
        whole = list(ids)
        self._entries = [
            entry
            for entry in self._entries
            if entry.suffix.start < suffix.start or whole[: len(entry.ids)] != entry.ids
        ]
        self._entries.append(Stashed(whole, suffix))
        while self.nbytes > self.budget:
            self._entries.pop(0)

    def best(self, ids: Sequence[int], held: int) -> tuple[Stashed, int] | None:
        """Find the entry that extends `held` known ids of `ids` furthest, and how far it does.

        It can be put back when the positions before it are among the `held` ones.
        """
        wanted = list(ids)
        found, reach = None, held
        for entry in self._entries:
            if entry.suffix.start <= held:
                n = common_prefix(entry.ids, wanted)
                if n > reach:
                    found, reach = entry, n
        return None if found is None else (found, reach)

    def touch(self, entry: Stashed) -> None:
        """Mark an entry as the most recently used."""
        self._entries.remove(entry)
        self._entries.append(entry)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
