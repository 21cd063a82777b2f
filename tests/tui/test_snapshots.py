"""What the screen looks like: the whole app over a real worker and a tiny model, drawn as SVG.

`pytest tests/tui/test_snapshots.py --snapshot-update` accepts a new look; look at it first.
Only the clock is not real: it goes on by one tick whenever it is read.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from running_chat import Chat, dictate
from textual import constants
from textual.widgets import TextArea, Tree
from tiny_chat import tiny_llm

from kvchat.chat import session as session_module
from kvchat.chat.events import WorkerEvent
from kvchat.engine import generate as generate_module
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import PrefillProgress
from kvchat.models import load as load_module
from kvchat.models.load import LanguageModel
from kvchat.models.locate import LocalModel
from kvchat.settings import Settings
from kvchat.tui import event_feed as event_feed_module
from kvchat.tui.app import KvchatApp
from kvchat.tui.bridge import EventBridge
from kvchat.tui.modals.branch_tree import BranchTree
from kvchat.tui.modals.help import HelpScreen
from kvchat.tui.modals.model_picker import ModelPicker

TICK_SECONDS = 1 / 16
"""A power of two: sums of it are exact, whenever they begin."""

Scene = Callable[[Chat], Awaitable[None]]
"""What the user does before the picture is taken."""

QUESTION = "What does a KV cache do?"
ANSWER = """\
It keeps what attention has **already computed**, so that the next turn reads only *new* text.

```python
def attend(query, keys, values):
    weights = softmax(query @ keys.T)
    return weights @ values  # no past token is run again
```

1. Prefill runs the prompt once.
2. Decode adds one token at a time.
"""
WIDE = """\
你好！这是一个很小的模型。こんにちは、世界。안녕하세요, 세계!

Emoji 🙂👩🏽‍🚀🇨🇭, combining é ñ ก็, right to left: שלום עולם.

| 词 | meaning |
|---|---|
| 缓存 | cache |
| 注意力 | attention |
"""
THOUGHT = "<think>\nTwo and two. That is the same as twice two.\nSo it is four.\n</think>\n\nFour."


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"KVCHAT_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setattr(constants, "COLOR_SYSTEM", "truecolor")
    monkeypatch.setattr(TextArea, "cursor_blink", False)
    for module in (session_module, generate_module, event_feed_module):
        ticks = count()

        def read(ticks: count[int] = ticks) -> float:
            return next(ticks) * TICK_SECONDS

        clock = SimpleNamespace(perf_counter=read, monotonic=read)
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> LanguageModel:
    template = getattr(request, "param", "chatml")
    llm = replace(tiny_llm(template, ctx=1024), name="tiny")
    monkeypatch.setattr(load_module, "load", lambda *_, **__: llm)
    return llm


@pytest.fixture
def shows(snap_compare: Callable[..., bool]) -> Callable[..., bool]:
    """Tells whether the screen after a scene looks as it did when it was last accepted."""

    def shows(
        scene: Scene, size: tuple[int, int] = (120, 36), theme: str = "dusk", **flags: object
    ) -> bool:
        settings, problems = Settings.load({"theme": theme, "max_tokens": 500, **flags})
        assert not problems
        app = KvchatApp(settings)

        async def act(pilot: object) -> None:
            chat = Chat(app, pilot)
            await chat.until(lambda: app.worker is not None)
            await settled(chat)
            await scene(chat)

        return snap_compare(app, terminal_size=size, run_before=act)

    return shows


def told(c: Chat) -> bool:
    """Whether all that the worker said is on the screen."""
    return not c.app.bridge._outstanding and c.screen.feed._figures_due is None


async def settled(c: Chat) -> None:
    """Wait until the worker has nothing left to do, and all it told is on the screen."""
    await c.idle()
    await c.until(lambda: not c.app.worker._unsettled and told(c))


async def say(c: Chat, text: str) -> None:
    await c.say(text)
    await settled(c)


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 20)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("theme", ["dusk", "paper"])
def test_a_chat(model, shows, size, theme):
    dictate(model, "Hello! Ask me about the cache.", ANSWER)

    async def scene(c: Chat) -> None:
        await say(c, "Hi")
        await say(c, QUESTION)

    assert shows(scene, size, theme)


def test_a_chat_without_unicode(monkeypatch, model, shows):
    monkeypatch.setenv("LC_ALL", "C")
    dictate(model, ANSWER)

    async def scene(c: Chat) -> None:
        await say(c, QUESTION)

    assert shows(scene, (120, 36))


@pytest.mark.parametrize("size", [(120, 36), (60, 20)], ids="{0[0]}x{0[1]}".format)
def test_before_the_first_message(model, shows, size):
    assert shows(settled, size)


def test_wide_characters(model, shows):
    dictate(model, WIDE)

    async def scene(c: Chat) -> None:
        await say(c, "你好，世界")
        c.screen.prompt.message = "再见👋"
        await c.until(lambda: c.screen.prompt.cost)
        await settled(c)

    assert shows(scene, (80, 24), max_tokens=800)


@pytest.mark.parametrize("theme", ["dusk", "paper"])
def test_an_error(monkeypatch, shows, theme):
    def fail(*_: object, **__: object) -> None:
        raise KvchatError("tiny.gguf ends in the middle of a tensor; fetch it again.")

    monkeypatch.setattr(load_module, "load", fail)

    async def scene(c: Chat) -> None:
        await c.until(lambda: c.app.screen.query("Toast"))

    assert shows(scene, (80, 24), theme)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)], ids="{0[0]}x{0[1]}".format)
def test_reading_a_long_message(monkeypatch, model, shows, size):
    put = EventBridge.put

    def put_and_hold(bridge: EventBridge, event: WorkerEvent) -> None:
        put(bridge, event)
        if isinstance(event, PrefillProgress) and event.done >= 256:
            while not bridge._app.worker._stopping:
                time.sleep(0.01)

    monkeypatch.setattr(EventBridge, "put", put_and_hold)

    async def scene(c: Chat) -> None:
        await c.type("Please sum this up. " + "The quick brown fox jumps over the lazy dog. " * 15)
        await c.until(lambda: c.screen.speed._phase.startswith("reading 256 "))

    assert shows(scene, size)


def test_a_slider_moved_while_it_writes(model, shows):
    dictate(model, "abcdefgh" * 8)

    async def scene(c: Chat) -> None:
        c.app.worker.pause()
        await c.type("Say the alphabet.")
        await c.until(lambda: c.screen.speed._phase == "paused")
        c.screen.paused = True
        c.screen._first_slider.focus()
        await c.pilot.press("shift+right")
        await c.until(lambda: c.app.worker.params.temperature > 0)
        for written in range(2, 12):
            await c.pilot.press("f8")
            await c.until(lambda written=written: len(c.said[-1][1]) == written)
        await c.until(lambda: told(c))

    assert shows(scene, (120, 36))


def test_messages_that_wait(model, shows):
    dictate(model, "abcdefgh" * 8)

    async def scene(c: Chat) -> None:
        c.app.worker.pause()
        await c.type("one")
        await c.until(lambda: c.screen.speed._phase == "paused")
        c.screen.paused = True
        await c.type("two")
        await c.type("three\nand a half")
        await c.until(lambda: len(c.screen.queue.query("QueuedMessage")) == 2)

    assert shows(scene, (80, 24))


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "unfolded"])
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_thinking(model, shows, folded):
    dictate(model, THOUGHT)

    async def scene(c: Chat) -> None:
        await say(c, "2+2?")
        c.screen.transcript.focus()
        if not folded:
            await c.pilot.press("t")

    assert shows(scene, (80, 24))


@pytest.mark.parametrize("size", [(80, 24), (60, 20)], ids="{0[0]}x{0[1]}".format)
def test_the_sliders_of_a_narrow_terminal(model, shows, size):
    async def scene(c: Chat) -> None:
        await c.pilot.press("f2")

    assert shows(scene, size)


def test_help(model, shows):
    async def scene(c: Chat) -> None:
        await c.pilot.press("f1")
        await c.until(lambda: isinstance(c.app.screen, HelpScreen))

    assert shows(scene, (80, 24))


def test_the_model_picker(model, shows):
    here = [
        LocalModel(
            "smollm2", Path("SmolLM2-135M-Instruct.Q4_1.gguf"), "gguf", 98_362_432, "kvchat"
        ),
        LocalModel("story-teller", Path("story-teller.gguf"), "gguf", 9_100_000_000, "Ollama"),
    ]

    async def scene(c: Chat) -> None:
        picker = ModelPicker("smollm2", find_local=lambda: here, memory=lambda: 8 * 10**9)
        c.app.push_screen(picker)
        await c.until(lambda: picker._choices)

    assert shows(scene, (120, 36))


def test_branches(model, shows):
    dictate(model, "One.", "Two.", "Three.", "Four.")

    async def scene(c: Chat) -> None:
        await say(c, "Count.")
        await say(c, "Go on.")
        await c.pilot.press("ctrl+r")
        await c.until(lambda: c.said[-1][1] == "Three.")
        await settled(c)
        await c.pilot.press("f6")
        await c.until(lambda: isinstance(c.app.screen, BranchTree))
        await c.until(lambda: c.app.screen.query_one(Tree).cursor_line >= 0)

    assert shows(scene, (80, 24))


def test_a_terminal_that_is_too_small(model, shows):
    assert shows(settled, (50, 15))
