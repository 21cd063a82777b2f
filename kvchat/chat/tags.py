"""Tags of a chat: words that the user sorts chats by."""

from __future__ import annotations

from collections.abc import Iterable

from kvchat.chat.plain_text import one_line

LONGEST = 32
"""Characters of a tag."""


def tags_in(text: str) -> list[str]:
    """Return the tags that a user has written, with "#" or without, each once."""
    words = (word.strip("#")[:LONGEST] for word in one_line(text).replace(",", " ").split())
    return list(dict.fromkeys(word for word in words if word))


def split_search(text: str) -> tuple[str, list[str]]:
    """Return the words of a search without its `#tag` words, and these."""
    words = text.split()
    tags = [word.lstrip("#") for word in words if word.startswith("#")]
    return " ".join(word for word in words if not word.startswith("#")), [t for t in tags if t]


def has_tags(tags: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether each wanted tag is the beginning of one that is there."""
    there = [tag.casefold() for tag in tags]
    return all(any(tag.startswith(each.casefold()) for tag in there) for each in wanted)
