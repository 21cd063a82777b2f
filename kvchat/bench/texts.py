"""Texts of a wanted length in tokens."""

from __future__ import annotations

from itertools import cycle, islice

from kvchat.models.tokenizer import Tokenizer

PASSAGE = (
    "the harbour was quiet that morning and nobody on the long pier could say why the old ferry "
    "had left without its bell so the children drew maps of every island they knew while their "
    "teacher counted boats and asked how far a lantern can be seen over calm water at night"
)
WORDS = tuple(PASSAGE.split())


def words_from(nth: int) -> str:
    """Return the whole passage, begun at its nth word."""
    return " ".join(islice(cycle(WORDS), nth, nth + len(WORDS)))


def message(tokenizer: Tokenizer, n: int, nth: int) -> str:
    """Return a text of `n` tokens, or of the few more that its last word takes.

    Texts of different `nth` begin with different words.
    """
    text = ""
    for word in islice(cycle(WORDS), nth, None):
        if len(tokenizer.encode_plain(text)) >= n:
            break
        text = f"{text} {word}".lstrip()
    return text


def prompt(tokenizer: Tokenizer, n: int, nth: int = 0) -> list[int]:
    """Return exactly `n` ids of text, begun as the model wants it."""
    bos = [tokenizer.bos_id] if tokenizer.add_bos_default and tokenizer.bos_id is not None else []
    return [*bos, *tokens(tokenizer, n - len(bos), nth)]


def tokens(tokenizer: Tokenizer, n: int, nth: int = 0) -> list[int]:
    """Return exactly `n` ids of text, begun in the middle of something."""
    return [*islice(cycle(tokenizer.encode_plain(words_from(nth) + " ")), n)]
