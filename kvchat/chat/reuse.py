"""Why a prompt could not keep all that was in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvchat.chat.nodes import Node
from kvchat.chat.prompt import PromptBuilder
from kvchat.engine.token_ids import common_prefix

_TEMPLATE = "the template changed an earlier turn"


@dataclass(frozen=True, slots=True)
class Source:
    """What a prompt was rendered from."""

    system: str
    thinking: bool | None
    unseen: int
    """How many of the first messages were left out of it."""
    path: tuple[str, ...]
    """The messages, by id, those left out among them."""

    @classmethod
    def of(cls, prompts: PromptBuilder, path: Sequence[Node]) -> Self:
        """Return what the prompt of this path is rendered from."""
        chat = prompts.conversation
        ids = tuple(node.id for node in path)
        return cls(chat.system, prompts.thinking, len(chat.unseen(path)), ids)


class ReuseWatch:
    """Finds where the reuse of the cache ended, prefill by prefill, until a turn tells it."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._ended = ""

    def note(
        self,
        source: Source,
        cached: Sequence[int],
        ids: Sequence[int],
        reused: int,
        *,
        idle: bool = False,
    ) -> None:
        """Take notice of a prefill.

        Args:
            source: what `ids` were rendered from.
            cached: the ids that were in the cache before.
            ids: the prompt.
            reused: how many of these were not run.
            idle: the prefill was done while nobody waited for it.
        """
        before, self._source = self._source, source
        same = common_prefix(cached, ids)
        # A prompt that ends inside of what is cached, or came back from the stash, loses nothing.
        if reused > same or same >= min(len(cached), len(ids) - 1):
            return
        why = _why(before, source)
        # What a template drops of a reply is read again after every turn, which costs nobody time.
        if why and not self._ended and not (idle and why == _TEMPLATE):
            read = "; read anew while idle" if idle else ""
            self._ended = f"at token {same:,} ({why}{read})"

    def take(self) -> str:
        """Return where and why reuse ended since this was asked last; "" if it did not."""
        ended, self._ended = self._ended, ""
        return ended


def _why(before: Source | None, now: Source) -> str:
    if before is None:
        # A chat that begins has nothing in the cache to lose.
        return "the cache held something else" if len(now.path) > 1 else ""
    if before.system != now.system:
        return "system prompt changed"
    if before.thinking != now.thinking:
        return "thinking switched"
    if before.unseen != now.unseen:
        return "oldest turns left out" if now.unseen else "left-out turns are back"
    for old, new in zip(before.path, now.path, strict=False):
        if old != new:
            return "message replaced" if new == now.path[-1] else "another branch"
    return _TEMPLATE
