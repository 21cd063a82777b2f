"""PromptPrice: what sending the prompt would cost, told while one writes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.chat.attachments import described, expand
from kvchat.chat.commands import GetPrice
from kvchat.chat.ledger import Price

if TYPE_CHECKING:
    from kvchat.chat.session import ChatSession
    from kvchat.chat.worker import Worker
    from kvchat.tui.main_screen import MainScreen
    from kvchat.tui.widgets.prompt import PromptArea


class PromptPrice:
    """Asks the worker for the price; while that is busy, tells what is known without it.

    Args:
        screen: whose prompt it is.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen
        self._asked: GetPrice | None = None

    def ask(self) -> None:
        """Bring the price of what stands in the prompt up to date."""
        worker, prompt = self.screen.app.worker, self.screen.prompt
        if self._asked is not None and worker is not None:
            worker.withdraw(self._asked)
            self._asked = None
        prompt.cost = ""
        if not prompt.message.strip():
            prompt.attached = ""
        elif worker is not None:
            ask: Any = partial(self._ask, worker, prompt)
            self.screen.run_worker(ask, exclusive=True, group="price")

    async def _ask(self, worker: Worker, prompt: PromptArea) -> None:
        """Read files and count tokens on another thread; the rest is the worker's to tell."""
        feed, typed = self.screen.feed, prompt.message
        message = await asyncio.to_thread(expand, typed, Path.cwd())
        if not self._is_wanted(prompt, typed):
            return
        prompt.attached = described(message.attachments)
        session = feed.session
        if session is not None and feed.writing:
            ids = await asyncio.to_thread(session.llm.tokenizer.encode_plain, message.text)
            if feed.writing and self._is_wanted(prompt, typed):
                prompt.cost = self._known(session, prompt, len(ids))
        elif session is not None:
            self._asked = GetPrice(message.text, conversation=self.screen.pane.conversation)
            worker.submit(self._asked)

    def _is_wanted(self, prompt: PromptArea, typed: str) -> bool:
        return self.screen.prompt is prompt and prompt.message == typed

    def _known(self, session: ChatSession, prompt: PromptArea, tokens: int) -> str:
        """What is known of the price while the worker is writing a reply."""
        cache, ms = self.screen.feed.cache, None
        # By then the reply will be in the cache, if it is written for this chat.
        if cache is not None and self.screen.feed.pane.prompt is prompt:
            ms = session.speed.estimate(tokens, cache.tokens)
        return " · ".join([f"{tokens:,} tokens", *_seconds(ms)])


def price_text(price: Price) -> str:
    """Return a price in a few quiet words."""
    parts = [f"{price.new:,} new tokens"]
    if price.reused:
        parts.append(f"{price.reused:,} reused")
    return " · ".join([*parts, *_seconds(price.ms)])


def _seconds(ms: float | None) -> list[str]:
    if ms is None:
        return []
    return [f"about {ms / 1e3:.1f} s" if ms >= 100 else "at once"]
