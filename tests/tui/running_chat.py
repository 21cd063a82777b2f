"""A whole screen over a real worker and a tiny model whose words are dictated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from helpers import wait_until
from textual.pilot import Pilot
from tiny_chat import DictatedSampler

from kvchat.models.load import LanguageModel
from kvchat.settings import Settings
from kvchat.tui.app import KvchatApp
from kvchat.tui.main_screen import MainScreen


def dictate(llm: LanguageModel, *replies: str) -> None:
    sampler = llm.engine.sampler
    assert isinstance(sampler, DictatedSampler)
    for reply in replies:
        sampler.dictated += [*llm.tokenizer.encode(reply), llm.tokenizer.eos_token_id or 0]


class Chat:
    """A running app, and what a user sees and does."""

    def __init__(self, app: KvchatApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def screen(self) -> MainScreen:
        return self.app._main_screen

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(n.role, n.content) for n in self.screen.pane.conversation.active_path()]

    async def until(self, predicate: Any) -> None:
        await wait_until(self.pilot, predicate)

    async def idle(self) -> None:
        worker = self.app.worker
        assert worker is not None
        await self.until(lambda: not worker.busy and self.screen.feed.running is None)

    async def say(self, text: str) -> None:
        count = len(self.said)
        await self.type(text)
        await self.until(lambda: len(self.said) == count + 2)
        await self.idle()

    async def type(self, text: str) -> None:
        self.screen.prompt.focus()
        self.screen.prompt.message = text
        await self.pilot.press("enter")


@asynccontextmanager
async def chat(
    size: tuple[int, int] = (120, 36), resume: str | None = None, **flags: Any
) -> AsyncIterator[Chat]:
    settings, problems = Settings.load({"max_tokens": 60, **flags})
    app = KvchatApp(settings, problems, resume=resume)
    async with app.run_test(size=size) as pilot:
        running = Chat(app, pilot)
        await running.until(lambda: running.screen.feed.session is not None)
        await running.idle()
        yield running
