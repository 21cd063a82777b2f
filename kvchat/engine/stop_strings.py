"""Stop strings in a reply that arrives token by token."""

from __future__ import annotations

from kvchat.engine.types import TokenGenerated


class StopStrings:
    """Holds token events back while the end of the text could still become a stop string.

    An event that was let go is never taken back. Tokens that complete no character carry no text
    yet: they stay with the token that does.
    """

    def __init__(self) -> None:
        self._held: list[TokenGenerated] = []
        self._text = ""  # the text of the held events

    def push(self, event: TokenGenerated, stop: tuple[str, ...]) -> list[TokenGenerated]:
        """Take an event in; return those that no stop string can reach any more."""
        self._held.append(event)
        self._text += event.text
        if not stop:
            return self.release()
        at = self.match(stop)
        return self._release_until(at if at is not None else self._safe_end(stop))

    def match(self, stop: tuple[str, ...]) -> int | None:
        """Return where in the held text the earliest complete stop string begins."""
        starts = [at for text in stop if (at := self._text.find(text)) >= 0]
        return min(starts) if starts else None

    def cut(self, at: int) -> tuple[list[TokenGenerated], str]:
        """Return the held events that end at or before `at`, and the text between them and it."""
        kept = self._release_until(at)
        return kept, self._text[: at - sum(len(event.text) for event in kept)]

    def release(self) -> list[TokenGenerated]:
        """Let all held events go."""
        held, self._held, self._text = self._held, [], ""
        return held

    def _safe_end(self, stop: tuple[str, ...]) -> int:
        """Return where the longest end of the text that begins a stop string starts."""
        longest = max(len(text) for text in stop)
        for start in range(max(0, len(self._text) - longest + 1), len(self._text)):
            if any(text.startswith(self._text[start:]) for text in stop):
                return start
        return len(self._text)

    def _release_until(self, end: int) -> list[TokenGenerated]:
        count = passed = released = 0
        for i, event in enumerate(self._held, start=1):
            passed += len(event.text)
            if passed > end:
                break
            if event.text:
                count, released = i, passed
        out, self._held = self._held[:count], self._held[count:]
        self._text = self._text[released:]
        return out
