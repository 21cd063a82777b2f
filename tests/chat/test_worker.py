"""The one engine thread: order, stopping at any moment, and going on after anything."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tiny_chat import GREEDY, DictatedSampler
from tiny_checkpoints import reference, save_folder

from kvchat.chat.commands import (
    Command,
    Continue,
    Edit,
    Fork,
    GetPrice,
    Load,
    Open,
    Regenerate,
    Restore,
    Send,
    SetSystem,
    SetThinking,
    Switch,
    Truncate,
)
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import (
    BranchDeleted,
    CacheStatus,
    CommandFailed,
    CommandFinished,
    CommandStarted,
    ModelLoaded,
    Paused,
    Priced,
    ReplyStarted,
    TextAdded,
    TurnFinished,
    WorkerEvent,
)
from kvchat.chat.session import ChatSession
from kvchat.chat.worker import Worker
from kvchat.engine.errors import ContextOverflowError, KvchatError, OutOfMemoryError
from kvchat.engine.types import (
    GenerationFinished,
    LoadProgress,
    PrefillFinished,
    PrefillProgress,
    TokenGenerated,
)

BUILD_KERNELS = Worker._build_kernels
"""As it is; for the other tests it does nothing."""

SECONDS = 20
"""Longest wait for something that is certain to happen."""

CONTEXT = 4096
E = TypeVar("E")


class Heard:
    """All events of a worker, in order; can hold the worker at one of them."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.on: Callable[[WorkerEvent], None] = lambda _: None
        self._changed = threading.Condition()

    def __call__(self, event: WorkerEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        self.on(event)

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def until(self, predicate: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, SECONDS), self.events[-5:]

    def hold_at(self, wanted: Callable[[WorkerEvent], bool]) -> Hold:
        """Hold the worker in its callback at the first such event."""
        hold = Hold()

        def on(event: WorkerEvent) -> None:
            if wanted(event):
                self.on = lambda _: None
                hold.here()

        self.on = on
        return hold


class Hold:
    """Keeps one thread waiting at a place until another has done something."""

    def __init__(self) -> None:
        self._reached, self._released = threading.Event(), threading.Event()

    def here(self) -> None:
        self._reached.set()
        assert self._released.wait(SECONDS)

    def reached(self) -> None:
        assert self._reached.wait(SECONDS)

    def release(self) -> None:
        self._released.set()

    def release_soon(self) -> None:
        threading.Timer(0.05, self.release).start()


class Rig:
    """A worker, what it tells, and a model to load."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.heard = Heard()
        self.worker = Worker(self.heard, **settings)

    @property
    def session(self) -> ChatSession:
        return self.heard.all(ModelLoaded)[-1].session

    @property
    def said(self) -> list[str]:
        return [node.content for node in self.session.conversation.active_path()]

    def do(self, *commands: Command) -> WorkerEvent:
        """Submit commands and return how the last one ended."""
        for command in commands:
            self.worker.submit(command)
        return self.end_of(commands[-1])

    def end_of(self, command: Command) -> WorkerEvent:
        def ended() -> list[WorkerEvent]:
            kinds = CommandFinished | CommandFailed
            return [e for e in self.heard.events if isinstance(e, kinds) and e.command == command]

        self.heard.until(ended)
        return ended()[0]

    def load(self, **options: Any) -> None:
        options = {"device": "cpu", "dtype": "float32", "quant": "none"} | options
        end = self.do(Load(str(self.folder), options))
        assert isinstance(end, CommandFinished), end.error
        engine = self.session.llm.engine
        engine.chunk_size = 16
        engine.sampler = DictatedSampler(self.session.llm.tokenizer.exempt_ids)
        self.worker.params = GREEDY

    def say(self, text: str, reply: str = "Fine.") -> None:
        self.dictate(reply)
        end = self.do(Send(text))
        assert isinstance(end, CommandFinished), end.error

    def dictate(self, reply: str) -> None:
        tokenizer = self.session.llm.tokenizer
        sampler = self.session.llm.engine.sampler
        assert isinstance(sampler, DictatedSampler)
        sampler.dictated = [*tokenizer.encode(reply), tokenizer.eos_token_id]

    def settled(self) -> None:
        """Wait until the worker has nothing to do."""
        self.heard.until(
            lambda: not self.worker.busy and isinstance(self.heard.events[-1], CacheStatus)
        )

    def hold_engine(self, monkeypatch: pytest.MonkeyPatch, at: int = 3) -> Hold:
        """Hold the worker inside the model, where it checks whether it shall stop."""
        engine, hold, calls = self.session.llm.engine, Hold(), iter(range(at))
        check = engine._check_cancelled

        def checked() -> None:
            if next(calls, None) is None:
                hold.here()
            check()

        monkeypatch.setattr(engine, "_check_cancelled", checked)
        return hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference("smollm2", max_position_embeddings=CONTEXT)
    return save_folder(model, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def empty(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    yield rig
    assert rig.worker.shutdown(SECONDS)


@pytest.fixture
def rig(folder: Path) -> Iterator[Rig]:
    rig = Rig(folder)
    rig.load()
    yield rig
    assert rig.worker.shutdown(SECONDS)


def is_token(index: int) -> Callable[[WorkerEvent], bool]:
    return lambda event: isinstance(event, TokenGenerated) and event.index == index


# Order


def test_events_of_loading_and_of_a_turn_come_in_order(empty: Rig) -> None:
    empty.load()
    kinds = [type(event) for event in empty.heard.events]
    assert kinds[:2] == [CommandStarted, LoadProgress]
    end = kinds.index(CommandFinished)
    assert kinds[end - 2 : end + 1] == [ModelLoaded, CacheStatus, CommandFinished]
    assert set(kinds[1 : end - 2]) == {LoadProgress}
    empty.settled()
    before = len(empty.heard.events)
    empty.dictate("Hi")
    send = Send("hello")
    empty.do(send)
    kinds = [type(event) for event in empty.heard.events[before:]]
    end = kinds.index(CommandFinished)
    assert kinds[:3] == [CommandStarted, ReplyStarted, PrefillProgress]
    assert kinds[kinds.index(PrefillFinished) : end + 1] == [
        PrefillFinished,
        CacheStatus,
        *[TextAdded, TokenGenerated] * 2,
        GenerationFinished,
        TurnFinished,
        CacheStatus,
        CommandFinished,
    ]
    assert empty.heard.events[before + end] == CommandFinished(send)
    empty.settled()
    assert set(kinds[end + 1 :]) <= {CacheStatus}


def test_without_a_model_commands_fail_and_say_so(empty: Rig) -> None:
    end = empty.do(Send("hello"))
    assert isinstance(end, CommandFailed)
    assert "choose one" in str(end.error)
    assert isinstance(empty.do(Load("no/such/model")), CommandFailed)
    assert isinstance(empty.do(Send("hello")), CommandFailed)
    empty.load()
    empty.say("hello")
    assert empty.said == ["hello", "Fine."]


def test_every_command_does_what_it_says(rig: Rig) -> None:
    rig.say("hello", "One.")
    rig.say("more", "Two.")
    user, first, _, second = rig.session.conversation.active_path()
    rig.dictate("Three.")
    rig.do(Regenerate(second.id))
    assert rig.said == ["hello", "One.", "more", "Three."]
    rig.do(Switch(second.id))
    assert rig.said[-1] == "Two."
    rig.dictate("Four.")
    rig.do(Edit(user.id, "hi"))
    assert rig.said == ["hi", "Four."]
    rig.do(Edit(rig.session.last_reply().id, "Fou"))
    rig.dictate("nd.")
    rig.do(Continue())
    assert rig.said == ["hi", "Found."]
    rig.dictate("x.")
    rig.do(Fork(rig.session.last_reply().id, 2, ord("i") - 33))
    assert rig.said == ["hi", "Foix."]
    rig.do(SetSystem("Be brief."))
    assert rig.session.conversation.system == "Be brief."
    rig.do(SetThinking(False))
    assert rig.session.prompts.thinking is False
    rig.do(GetPrice("and?"))
    assert rig.heard.all(Priced)[-1].price.new > len("Be brief.")
    rig.do(Truncate(first.id))
    rig.do(Switch(user.id))
    assert rig.said == ["hello"]
    rig.do(Restore(rig.heard.all(BranchDeleted)[-1].deleted))
    assert rig.said == ["hello", "One.", "more", "Two."]
    other = Conversation()
    rig.do(Open(other))
    assert rig.session.conversation is other
    rig.say("hello", "New.")
    assert [node.content for node in other.active_path()] == ["hello", "New."]
    assert rig.heard.all(CommandFailed) == []


def test_a_command_says_which_conversation_it_is_about(rig: Rig) -> None:
    rig.say("hello", "One.")
    first = rig.session.conversation
    rig.settled()
    held = list(rig.session.llm.engine.ids)
    second = Conversation("Be brief.")
    rig.do(GetPrice("hello", conversation=second))
    assert rig.heard.all(Priced)[-1].price.new > 0
    assert rig.session.conversation is first
    assert list(rig.session.llm.engine.ids) == held
    rig.dictate("Two.")
    rig.do(Send("hi", conversation=second))
    assert [node.content for node in second.active_path()] == ["hi", "Two."]
    assert [node.content for node in first.active_path()] == ["hello", "One."]
    rig.settled()
    rig.dictate("Three.")
    rig.do(Send("back", conversation=first))
    assert [node.content for node in first.active_path()][2:] == ["back", "Three."]
    turn = rig.heard.all(TurnFinished)[-1].turn
    assert turn.reused >= len(held)
    assert turn.restored  # what the second chat cut off came back without a prefill


# The queue


def test_messages_queue_up_and_can_be_changed_and_withdrawn(rig: Rig) -> None:
    hold = rig.heard.hold_at(is_token(0))
    first = rig.worker.submit(Send("one"))
    hold.reached()
    assert rig.worker.busy
    second, third = rig.worker.submit(Send("two")), rig.worker.submit(Send("three"))
    assert rig.worker.queued == (second, third)
    assert not rig.worker.withdraw(first)
    assert not rig.worker.replace(first, replace(first, text="never"))
    assert rig.worker.withdraw(second)
    assert not rig.worker.withdraw(second)
    changed = replace(third, text="drei")
    assert rig.worker.replace(third, changed)
    assert rig.worker.queued == (changed,)
    hold.release()
    rig.end_of(changed)
    assert rig.said[::2] == ["one", "drei"]
    started = [event.command for event in rig.heard.all(CommandStarted)]
    assert started[-2:] == [first, changed]


# Settings, pausing


def test_new_settings_act_on_the_very_next_token(rig: Rig) -> None:
    def swap(event: WorkerEvent) -> None:
        if is_token(3)(event):
            rig.worker.params = GREEDY.updated(top_k=7)

    rig.heard.on = swap
    rig.do(Send("hello"))
    assert [event.params.top_k for event in rig.heard.all(TokenGenerated)][:6] == [
        *[GREEDY.top_k] * 4,
        7,
        7,
    ]
    assert rig.worker.params == GREEDY.updated(top_k=7)


def test_another_model_brings_its_own_settings(folder: Path) -> None:
    rig = Rig(folder, sampling={"top_p": 0.5})
    rig.load()
    assert rig.worker.params == GREEDY
    rig.do(Load(str(folder)))
    assert rig.worker.params == rig.session.llm.defaults.updated(top_p=0.5)
    assert rig.session.params == rig.worker.params
    assert rig.worker.shutdown(SECONDS)


def test_a_reply_is_paused_stepped_and_resumed(rig: Rig) -> None:
    rig.worker.step()  # nothing is paused yet, so this is not saved up
    rig.worker.pause()
    rig.dictate("abcdefgh")
    command = rig.worker.submit(Send("hello"))
    for tokens in (1, 2, 3):
        rig.heard.until(lambda n=tokens: len(rig.heard.all(Paused)) == n)
        assert len(rig.heard.all(TokenGenerated)) == tokens
        rig.worker.step()
    rig.heard.until(lambda: len(rig.heard.all(Paused)) == 4)
    rig.worker.resume()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert rig.said == ["hello", "abcdefgh"]
    assert len(rig.heard.all(Paused)) == 4


def test_a_paused_reply_can_be_cancelled(rig: Rig) -> None:
    rig.worker.pause()
    command = rig.worker.submit(Send("hello"))
    rig.heard.until(lambda: rig.heard.all(Paused))
    rig.worker.cancel()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert rig.heard.all(GenerationFinished)[-1].reason == "cancelled"
    assert len(rig.heard.all(TokenGenerated)) == 1


# Cancelling


def test_a_cancel_ends_a_load_and_the_chat_survives(rig: Rig) -> None:
    rig.say("hello")
    hold = rig.heard.hold_at(lambda event: isinstance(event, LoadProgress))
    command = rig.worker.submit(Load(str(rig.folder)))
    hold.reached()
    rig.worker.cancel()
    hold.release()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert len(rig.heard.all(ModelLoaded)) == 1
    assert isinstance(rig.do(Send("more")), CommandFailed)
    rig.load()
    assert rig.said == ["hello", "Fine."]


@pytest.mark.parametrize(
    "moment",
    [CommandStarted, ReplyStarted, PrefillProgress],
    ids=lambda kind: kind.__name__,
)
def test_a_cancel_before_the_first_token(rig: Rig, moment: type[WorkerEvent]) -> None:
    hold = rig.heard.hold_at(lambda event: isinstance(event, moment))
    command = rig.worker.submit(Send("x" * 500))
    hold.reached()
    rig.worker.cancel()
    hold.release()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert rig.heard.all(GenerationFinished)[-1].reason == "cancelled"
    assert rig.heard.all(PrefillProgress)[-1].done == 0
    assert rig.heard.all(TokenGenerated) == []
    rig.do(Continue())
    assert rig.heard.all(GenerationFinished)[-1].stats.completion_tokens > 0


def test_a_cancel_inside_a_prefill_chunk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = rig.hold_engine(monkeypatch, at=8)
    command = rig.worker.submit(Send("x" * 500))
    hold.reached()
    rig.worker.cancel()
    hold.release()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert rig.heard.all(GenerationFinished)[-1].reason == "cancelled"
    assert 0 < rig.heard.all(PrefillProgress)[-1].done < 500


def test_a_cancel_keeps_what_was_written_and_the_queue_goes_on(rig: Rig) -> None:
    hold = rig.heard.hold_at(is_token(2))
    rig.worker.params = GREEDY.updated(max_tokens=50)
    rig.dictate("abcdefgh")
    first = rig.worker.submit(Send("one"))
    hold.reached()
    second = rig.worker.submit(Send("two"))
    rig.worker.cancel()
    hold.release()
    assert isinstance(rig.end_of(first), CommandFinished)
    rig.end_of(second)
    assert rig.said[:3] == ["one", "abc", "two"]
    assert rig.heard.all(GenerationFinished)[-1].reason != "cancelled"


def test_a_cancel_with_nothing_to_do_does_nothing(rig: Rig) -> None:
    rig.settled()
    rig.worker.cancel()
    rig.say("hello")
    assert rig.said == ["hello", "Fine."]


# Failures


def test_an_error_gives_the_command_back_and_the_chat_goes_on(rig: Rig) -> None:
    rig.say("hello")
    end = rig.do(Send("x" * CONTEXT))
    assert isinstance(end, CommandFailed)
    assert isinstance(end.error, ContextOverflowError)
    assert isinstance(end.command, Send)
    assert end.command.text == "x" * CONTEXT
    assert rig.said == ["hello", "Fine."]
    assert isinstance(rig.do(Switch("nowhere")), CommandFailed)
    rig.say("more")
    assert rig.said == ["hello", "Fine.", "more", "Fine."]


def memory_gone(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def broken(*_: object) -> None:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [(memory_gone, OutOfMemoryError, "smaller --ctx"), (broken, KvchatError, "a fault of ours")],
)
@pytest.mark.parametrize("part", ["sampler", "step", "block", "head"])
def test_any_fault_becomes_an_event(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    fault: Callable[..., None],
    kind: type[KvchatError],
    told: str,
) -> None:
    rig.say("hello")
    rig.settled()
    engine = rig.session.llm.engine
    parts: dict[str, tuple[object, str]] = {
        "sampler": (engine.sampler, "sample"),
        "step": (engine, "step"),
        "block": (engine.model.blocks[1], "forward"),
        "head": (engine.model.head, "forward"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*parts[part], fault)
        end = rig.do(Send("more"))
    assert isinstance(end, CommandFailed)
    assert isinstance(end.error, kind)
    assert told in str(end.error)
    assert rig.said[:2] == ["hello", "Fine."]
    if part != "step":  # which fails after the first token: that stays
        assert len(rig.said) == 2
    rig.say("again")
    assert rig.said[-2:] == ["again", "Fine."]
    assert len(engine.ids) == engine._context.cache.length


def test_a_model_that_cannot_be_found_leaves_the_one_there_is(rig: Rig) -> None:
    rig.say("hello")
    assert isinstance(rig.do(Load("no/such/model")), CommandFailed)
    assert isinstance(rig.do(Load(str(rig.folder), {"ctx": 10**9})), CommandFailed)
    rig.say("more")
    assert rig.said == ["hello", "Fine.", "more", "Fine."]


def test_a_model_that_breaks_while_it_is_read_leaves_the_chat(
    rig: Rig, tmp_path: Path, folder: Path
) -> None:
    rig.say("hello")
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert isinstance(rig.do(Load(str(tmp_path))), CommandFailed)
    assert isinstance(rig.do(Send("more")), CommandFailed)
    rig.load()
    assert rig.said == ["hello", "Fine."]
    rig.say("more")


def test_a_model_too_large_for_memory_is_told_with_a_remedy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.say("hello")
    with monkeypatch.context() as patched:
        patched.setattr("kvchat.models.load.build_transformer", memory_gone)
        end = rig.do(Load(str(rig.folder)))
    assert isinstance(end, CommandFailed)
    assert isinstance(end.error, OutOfMemoryError)
    rig.load()
    assert rig.said == ["hello", "Fine."]


# Idle time


def test_settling_happens_by_itself_and_makes_the_next_turn_short(rig: Rig) -> None:
    rig.say("hello")
    rig.settled()
    rig.say("more")
    assert rig.heard.all(TurnFinished)[-1].turn.new == len("user\nmore!\n!assistant\n")


class Builder:
    """In place of the process that builds kernels."""

    def __init__(self) -> None:
        self.stdin = io.BytesIO()


def test_idle_time_builds_kernels_once_and_not_after_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Builder] = []

    def begin(_: Path) -> Builder:
        begun.append(Builder())
        return begun[-1]

    monkeypatch.setattr("kvchat.engine.native.background.begin", begin)
    monkeypatch.setattr(Worker, "_build_kernels", BUILD_KERNELS)
    for kernels, times in ((False, 0), (True, 1)):
        rig = Rig(folder, kernels=kernels)
        rig.load()
        rig.settled()
        rig.say("hello")
        rig.settled()
        assert rig.worker.shutdown(SECONDS)
        assert len(begun) == times
    assert begun[0].stdin.closed


def test_a_fault_in_idle_time_does_not_end_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def fails() -> None:
        failed.append(1)
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(rig.session, "settle", fails)
    rig.say("hello")
    rig.settled()
    assert failed
    rig.say("more")
    assert rig.said == ["hello", "Fine.", "more", "Fine."]


def test_settling_gives_way_to_a_command(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.say("x" * 500)
    rig.settled()
    hold = rig.hold_engine(monkeypatch, at=8)
    rig.do(SetSystem("All of it has to be read anew."))
    hold.reached()
    rig.dictate("Fine.")
    command = rig.worker.submit(Send("more"))
    hold.release()
    assert isinstance(rig.end_of(command), CommandFinished)
    turn = rig.heard.all(TurnFinished)[-1].turn
    assert turn.new > 450
    assert 0 < turn.reused < 50


def test_settling_gives_way_before_it_has_begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.say("x" * 500)
    rig.settled()
    hold, certain = Hold(), rig.session.prompts.certain

    def held(node_id: str) -> list[int]:
        hold.here()
        return certain(node_id)

    monkeypatch.setattr(rig.session.prompts, "certain", held)
    rig.do(SetSystem("All of it has to be read anew."))
    hold.reached()
    monkeypatch.undo()
    rig.dictate("Fine.")
    command = rig.worker.submit(Send("more"))
    hold.release()
    assert isinstance(rig.end_of(command), CommandFinished)
    assert rig.heard.all(TurnFinished)[-1].turn.new > 500


# Shutdown


def shut_down_at(rig: Rig, hold: Hold) -> None:
    """Shut down while the worker is held; it must end in time and say nothing afterwards."""
    hold.reached()
    hold.release_soon()
    assert rig.worker.shutdown() is True
    told = len(rig.heard.events)
    assert not rig.worker._thread.is_alive()
    rig.worker.submit(Send("never"))
    assert rig.worker.shutdown() is True
    assert len(rig.heard.events) == told


def test_shutdown_while_idle(rig: Rig) -> None:
    rig.settled()
    assert rig.worker.shutdown() is True


def test_shutdown_in_the_middle_of_a_reply(rig: Rig) -> None:
    rig.worker.params = GREEDY.updated(max_tokens=3000)
    rig.dictate("x" * 3000)
    hold = rig.heard.hold_at(is_token(5))
    rig.worker.submit(Send("hello"))
    rig.worker.submit(Send("more"))
    shut_down_at(rig, hold)
    assert rig.said == ["hello", "xxxxxx"]
    assert rig.session.last_reply().reply.finish_reason == "cancelled"


def test_shutdown_in_the_middle_of_a_prefill(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = rig.hold_engine(monkeypatch, at=20)
    rig.worker.submit(Send("x" * 4000))
    shut_down_at(rig, hold)
    assert 0 < rig.heard.all(PrefillProgress)[-1].done < 4000


def test_shutdown_in_the_middle_of_a_load(empty: Rig) -> None:
    hold = empty.heard.hold_at(lambda event: isinstance(event, LoadProgress))
    empty.worker.submit(Load(str(empty.folder)))
    shut_down_at(empty, hold)
    assert len(empty.heard.all(LoadProgress)) == 1
    assert empty.heard.all(ModelLoaded) == []


def test_shutdown_in_a_pause(rig: Rig) -> None:
    rig.worker.pause()
    rig.worker.submit(Send("hello"))
    rig.heard.until(lambda: rig.heard.all(Paused))
    assert rig.worker.shutdown() is True
    assert len(rig.heard.all(TokenGenerated)) == 1


def test_shutdown_in_the_middle_of_settling(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.say("x" * 3000)
    rig.settled()
    hold = rig.hold_engine(monkeypatch, at=8)
    rig.do(SetSystem("All of it has to be read anew."))
    shut_down_at(rig, hold)
    assert len(rig.session.llm.engine.ids) < 3000


def test_shutdown_that_takes_too_long_is_told_and_nothing_is_heard_of_it(rig: Rig) -> None:
    hold = rig.heard.hold_at(is_token(1))
    rig.worker.submit(Send("hello"))
    hold.reached()
    assert rig.worker.shutdown(timeout=0.01) is False
    told = len(rig.heard.events)
    hold.release()
    rig.worker._thread.join(SECONDS)
    assert len(rig.heard.events) == told
