"""n-gram speculation, also called prompt lookup: guess the next ids from what was written before.

Where the last few ids have occurred earlier in the context, the ids that followed them there are a
draft of what comes next. One forward pass over the drawn id and the draft costs less than a pass
for each, and gives the logits after every one of them. The sampler then draws from those logits as
always: a draft that guessed right only spared a pass, and one that guessed wrong is forgotten. So
every token has exactly the distribution, and takes exactly the random number, that it would have
had without a draft.

Whether a draft is run is decided by counting, never by a stopwatch, so that a seed gives the same
reply again. Guesses are compared with what is drawn whether or not they are run: where they turn
out wrong, drafting stops by itself, and finding out that it pays again costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import takewhile

SIZES = {16: 0.8, 8: 0.8, 4: 0.5, 2: 0.5}
"""Lengths of the n-grams that are looked up, longest first, and the share of right guesses that is
taken for granted before any was seen: the longer, the surer."""

WIDTHS = (4, 8, 16)
"""Tokens in one pass with a draft: the drawn id and up to 3, 7 or 15 guesses.

Few and fixed, as each has its own cost; quantised kernels take rows by fours."""

PassCosts = Mapping[int, float]
"""What a forward pass over so many tokens costs, in decode steps of one token."""

_WEIGHT = 1 / 8
"""Of the newest guess in the running share."""
_GAIN = 1.1
"""Drafts have to promise so much more than a token a step: sampling costs the same either way."""


class NgramIndex:
    """Where each n-gram of a growing list of ids was followed by something, and last so."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._after: dict[int, int] = {}
        """By the hash of an n-gram, which takes less memory; a collision is but a wrong guess."""
        for size in SIZES:
            grams = zip(*(self.ids[offset:] for offset in range(size)), strict=False)
            self._after.update(zip(map(hash, grams), range(size, len(self.ids)), strict=False))

    def append(self, token_id: int) -> None:
        """Add the id that follows."""
        end = len(self.ids)
        for size in SIZES:
            if size <= end:
                self._after[hash(tuple(self.ids[end - size :]))] = end
        self.ids.append(token_id)

    def find(self) -> tuple[int, int] | None:
        """Look for the last ids earlier on.

        Returns the position after their last other occurrence, and how many they are: as many of
        `SIZES` as there are. None if there is none.
        """
        for size in SIZES:
            position = self._after.get(hash(tuple(self.ids[-size:])))
            if position is not None:
                return position, size
        return None

    def continuation(self, position: int, n: int) -> list[int]:
        """Return the `n` ids from `position` on; past the end, what is returned goes on itself."""
        found = self.ids[position : position + n]
        while len(found) < n:
            found += found[: n - len(found)]
        return found


class Speculation:
    """Drafts for one reply; they depend on its ids and on fixed costs alone.

    Args:
        ids: the prompt.
        pass_costs: by the tokens of a pass, of which there are some of `WIDTHS`.
        eog_ids: ids that end a reply; none is ever drafted, as nothing is run after it.
    """

    def __init__(
        self, ids: Sequence[int], pass_costs: PassCosts, eog_ids: Collection[int] = ()
    ) -> None:
        self._prompt = ids
        self._found: tuple[int, int] | None = None
        self._pass_costs = pass_costs
        self._eog_ids = eog_ids
        self._right = dict(SIZES)
        """Running share of guesses that were drawn, by the size of what they were found by."""
        self.proposed = 0
        """Drafted ids that were run."""
        self.accepted = 0
        """Drafted ids that were drawn, each of which spared a decode step."""

    @cached_property
    def _index(self) -> NgramIndex:
        """Built at the first append: the first token of a reply does not wait for it."""
        return NgramIndex(self._prompt)

    def append(self, token_id: int) -> None:
        """Learn the id that was drawn, drafted or not."""
        if self._found is not None:
            position, size = self._found
            right = self._index.ids[position] == token_id
            self._right[size] += _WEIGHT * (right - self._right[size])
        self._index.append(token_id)
        self._found = self._index.find()

    def draft(self, room: int) -> list[int]:
        """Return up to `room` ids to run after the last one; none where that does not pay."""
        if self._found is None or room < 1:
            return []
        position, size = self._found
        guesses = self._index.continuation(position, min(room, max(self._pass_costs) - 1))
        usable = list(takewhile(lambda guess: guess not in self._eog_ids, guesses))
        best, gain = 0, _GAIN
        for width, cost in self._pass_costs.items():
            n = min(width - 1, len(usable))
            if expected_tokens(self._right[size], n) / cost > gain:
                best, gain = n, expected_tokens(self._right[size], n) / cost
        self.proposed += best
        return usable[:best]


def expected_tokens(right: float, n: int) -> float:
    """Return the mean number of tokens that a pass with `n` guesses yields.

    One is drawn in any case; each guess counts only if all before it were right.
    """
    return sum(right**i for i in range(n + 1))
