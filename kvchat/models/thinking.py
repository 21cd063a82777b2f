"""Tells a reply's reasoning from its answer."""

from __future__ import annotations

from typing import NamedTuple


class ThinkingTags(NamedTuple):
    """What opens and what closes the reasoning in a reply."""

    open: str
    close: str


THINK = ThinkingTags("<think>", "</think>")
_KNOWN = (
    THINK,
    ThinkingTags("<seed:think>", "</seed:think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<|channel>thought", "<channel|>"),
)


def tags_in(source: str) -> ThinkingTags:
    """Return the tags a chat template's source mentions, `<think>` and `</think>` if none."""
    return next((tags for tags in _KNOWN if tags.close in source), THINK)


def split_thinking(
    text: str, *, opened: bool = False, tags: ThinkingTags = THINK
) -> tuple[str | None, str]:
    """Split a reply, finished or not, into its reasoning and its answer.

    Args:
        text: the reply as the model wrote it.
        opened: the prompt ended inside the reasoning, so the reply starts there.
        tags: what the model puts around its reasoning.

    Returns:
        The reasoning, None where the reply has none, and the answer, empty while the reasoning
        is not closed. The line breaks the tags bring along belong to neither.
    """
    start = text.lstrip()
    if start.startswith(tags.open):
        inner = start.removeprefix(tags.open)
    elif opened:
        inner = text
    else:
        return None, text
    thinking, _, answer = inner.partition(tags.close)
    return thinking.strip("\n"), answer.lstrip("\n")


class ThinkingSplitter:
    """Splits a reply that arrives in pieces, as `split_thinking` does the whole of it.

    What could be part of a tag, or of the line breaks around one, is held back until it is known.
    """

    def __init__(self, tags: ThinkingTags = THINK, *, opened: bool = False) -> None:
        self._tags = tags
        self._opened = opened
        self._held = ""
        self.thinking: bool | None = None
        """Whether the reply is in its reasoning; None before its first word."""
        self._begun = False  # whether anything of the current part has been let go

    def push(self, text: str) -> tuple[str, str]:
        """Take a piece in; return what is known to be reasoning, and to be answer."""
        if self.thinking is False and self._begun:
            return "", text
        self._held += text
        if self.thinking is None:
            self._begin()
        thinking = self._think() if self.thinking else ""
        return thinking, self._answer() if self.thinking is False else ""

    def flush(self) -> tuple[str, str]:
        """Return what is still held back, at the end of the reply."""
        held, self._held = self._held, ""
        if self.thinking or (self.thinking is None and self._opened):
            return held.rstrip("\n") if self._begun else held.strip("\n"), ""
        return "", held

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._tags.open):
            self._held = start.removeprefix(self._tags.open)
            self.thinking = True
        elif start and not self._tags.open.startswith(start):
            self.thinking = self._opened
            self._begun = not self._opened

    def _think(self) -> str:
        if not self._begun:
            self._held = self._held.lstrip("\n")
        inner, closed, rest = self._held.partition(self._tags.close)
        if closed:
            self._held, self.thinking, self._begun = rest, False, False
            return inner.rstrip("\n")
        keep = _end_that_may_be(self._held, self._tags.close)
        inner = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(inner) :]
        self._begun |= bool(inner)
        return inner

    def _answer(self) -> str:
        if not self._begun:
            self._held = self._held.lstrip("\n")
            self._begun = bool(self._held)
        answer, self._held = self._held, ""
        return answer


def _end_that_may_be(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` could begin `tag`."""
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
