"""KV snapshots of chats: when they are written and used, which go, and what cannot harm them."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_worker import CONTEXT, SECONDS, Rig
from tiny_chat import GREEDY, cold_reply
from tiny_checkpoints import reference, save_folder

from kvchat.chat.commands import KeepCache, Open, Send, Switch
from kvchat.chat.conversation import Conversation
from kvchat.chat.events import CommandFailed, CommandFinished, ReplyStarted, TurnFinished
from kvchat.chat.ledger import Turn
from kvchat.chat.provenance import Provenance, fingerprint
from kvchat.chat.session import ChatSession
from kvchat.chat.snapshot_folder import SnapshotFolder
from kvchat.chat.snapshots import Snapshots, made_with, snapshot_text
from kvchat.engine.engine import Engine
from kvchat.engine.errors import Cancelled, SnapshotError
from kvchat.engine.token_ids import common_prefix

BUDGET = 2**30
FIELDS = ("model", "template", "device", "dtype", "quantisation", "version")
LONG = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference("smollm2", max_position_embeddings=CONTEXT)
    return save_folder(model, tmp_path_factory.mktemp("models") / "tiny")


class Desk(Rig):
    """A worker that keeps caches in a folder."""

    def __init__(
        self,
        model: Path,
        place: Path,
        chat: Conversation | None = None,
        *,
        budget: int = BUDGET,
        always: bool = True,
        quiet: float = 0.05,
    ) -> None:
        self.told: list[str] = []
        self.kept = Snapshots(SnapshotFolder(place, budget), always=always, tell=self.told.append)
        super().__init__(model, snapshots=self.kept, quiet=quiet)
        self.first = chat

    def open(self, chat: Conversation | None = None) -> Desk:
        self.load()
        if chat is not None:
            assert isinstance(self.do(Open(chat)), CommandFinished)
        return self

    @property
    def chat(self) -> Conversation:
        return self.session.conversation

    @property
    def turns(self) -> list[Turn]:
        return [event.turn for event in self.heard.all(TurnFinished)]

    @property
    def file(self) -> Path:
        return self.kept.folder.file(self.chat.id)

    def written(self) -> bytes:
        """Wait until a snapshot is there that holds all that is certain of the next turn."""
        certain = ChatSession(self.session.llm, conversation=self.chat).certain()
        wait_until(lambda: self.kept._ids.get(self.chat.id) == certain)
        self.settled()
        return self.file.read_bytes()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def sit(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Begins programs one after another over one folder of snapshots."""
    desks: list[Desk] = []

    def begin(chat: Conversation | None = None, model: Path = folder, **settings: Any) -> Desk:
        if desks:
            assert desks[-1].worker.shutdown(SECONDS)
        desks.append(Desk(model, tmp_path / "snapshots", **settings))
        return desks[-1].open(chat)

    yield begin
    assert desks[-1].worker.shutdown(SECONDS)


def test_a_chat_goes_on_as_if_it_had_never_been_closed(sit: Callable[..., Desk]) -> None:
    first = sit()
    first.say(LONG)
    first.say("And then?", "Then it slept.")
    first.written()
    held = list(first.session.engine.ids)
    chat = first.chat
    second = sit(chat)
    assert list(second.session.engine.ids) == held
    node = None
    assert isinstance(second.do(Send("Why?")), CommandFinished)
    node = second.session.last_reply()
    turn = second.turns[0]
    assert turn.loaded == turn.reused >= common_prefix(held, chat.context_ids(node.id))
    assert turn.reused == len(held)
    assert "from the snapshot" in turn.line()
    prompt = chat.context_ids(node.id)[: turn.reused + turn.new]
    assert list(node.reply.token_ids) == cold_reply(second.session.llm, prompt, GREEDY)
    second.do(Send("Why again?"))
    assert second.turns[1].loaded == 0


def test_the_second_turn_says_nothing_of_the_snapshot(sit: Callable[..., Desk]) -> None:
    desk = sit()
    desk.say(LONG)
    assert [turn.loaded for turn in desk.turns] == [0]
    assert "snapshot" not in desk.turns[0].line()


def test_it_is_kept_only_if_somebody_wants_it(sit: Callable[..., Desk]) -> None:
    desk = sit(always=False)
    desk.say(LONG)
    chat = desk.chat
    status = settled_status(desk)
    assert (status.keeps_cache, status.snapshot_bytes) == (False, 0)
    assert status.would_take > 0
    assert "not kept" in snapshot_text(status)
    assert isinstance(desk.do(KeepCache(True)), CommandFinished)
    status = settled_status(desk)
    size = len(desk.written())
    assert chat.keep_cache is True
    assert abs(size - status.would_take) < 2048
    assert settled_status(desk).snapshot_bytes == size
    assert isinstance(desk.do(KeepCache(False)), CommandFinished)
    assert chat.keep_cache is False
    assert not desk.file.exists()
    desk.say("More.")
    assert desk.worker.shutdown(SECONDS)
    assert not desk.file.exists()


def settled_status(desk: Desk) -> Any:
    desk.settled()
    return desk.heard.events[-1]


def test_a_chat_s_own_word_wins_over_the_setting(sit: Callable[..., Desk]) -> None:
    desk = sit(Conversation(keep_cache=False))
    desk.say(LONG)
    assert desk.worker.shutdown(SECONDS)
    assert not desk.file.exists()


def test_without_a_place_for_them_it_cannot_be_switched_on(folder: Path) -> None:
    rig = Rig(folder)
    rig.load()
    end = rig.do(KeepCache(True))
    assert isinstance(end, CommandFailed)
    assert "not saved" in str(end.error)
    assert rig.worker.shutdown(SECONDS)


def test_it_is_written_when_the_program_ends_right_after_a_reply(
    sit: Callable[..., Desk],
) -> None:
    first = sit(quiet=SECONDS)
    first.say(LONG)
    chat = first.chat
    second = sit(chat)
    assert len(second.session.engine.ids) > 300
    second.do(Send("Why?"))
    assert second.turns[0].loaded > 300


def test_leaving_a_chat_for_another_writes_it(sit: Callable[..., Desk]) -> None:
    desk = sit(quiet=SECONDS)
    desk.say(LONG)
    desk.settled()
    file = desk.file
    desk.do(Open(Conversation()))
    assert file.exists()
    assert [each.path for each in desk.kept.folder.all()] == [file]


def test_nothing_is_written_twice(sit: Callable[..., Desk]) -> None:
    first = sit()
    first.say(LONG)
    first.written()
    inode = first.file.stat().st_ino
    chat = first.chat
    second = sit(chat)
    second.settled()
    assert second.worker.shutdown(SECONDS)
    assert second.file.stat().st_ino == inode


def test_coming_back_to_a_chat_that_the_stash_has_reads_no_file(
    sit: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = sit()
    desk.say(LONG)
    desk.written()
    chat = desk.chat
    desk.do(Open(Conversation()))
    desk.say("Something else.")
    desk.settled()
    monkeypatch.setattr(Engine, "load", None)
    assert isinstance(desk.do(Open(chat)), CommandFinished)
    desk.settled()
    assert len(desk.session.engine.ids) > 300


def test_a_snapshot_of_another_branch_is_used_as_far_as_it_goes(sit: Callable[..., Desk]) -> None:
    first = sit()
    first.say(LONG)
    kept = first.session.last_reply()
    first.say("One way.")
    first.written()
    chat = first.chat
    first.settled()
    chat.branch(kept.id)
    second = sit(chat)
    second.do(Send("Another way."))
    assert second.turns[0].loaded > 300
    assert second.turns[0].new < 100


# What is wrong with a file


def spoiled(sit: Callable[..., Desk], spoil: Callable[[Path], object], **settings: Any) -> Desk:
    """A chat whose snapshot something has happened to, opened again and answered."""
    first = sit()
    first.say(LONG)
    first.written()
    assert first.worker.shutdown(SECONDS)
    spoil(first.file)
    chat, held = first.chat, list(first.session.engine.ids)
    second = sit(chat, quiet=SECONDS, **settings)
    assert isinstance(second.do(Send("Why?")), CommandFinished)
    reply = second.session.last_reply()
    turn = second.turns[0]
    assert turn.loaded == 0
    assert len(chat.context_ids(reply.id)) > len(held)
    prompt = chat.context_ids(reply.id)[: turn.reused + turn.new]
    assert list(reply.reply.token_ids) == cold_reply(second.session.llm, prompt, GREEDY)
    assert not second.told and second.heard.all(CommandFailed) == []
    return second


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "something else": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_removed_and_the_ledger_says_so(
    sit: Callable[..., Desk], damage: str
) -> None:
    desk = spoiled(sit, DAMAGES[damage])
    assert desk.turns[0].snapshot_problem == "it is damaged"
    assert "snapshot not used: it is damaged" in desk.turns[0].line()
    assert not desk.file.exists()


@pytest.mark.parametrize("field", FIELDS)
def test_one_that_was_made_with_something_else_is_not_used(
    sit: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    def other(_: Path) -> None:
        monkeypatch.setattr(
            "kvchat.chat.snapshots.made_with", lambda found: {**made_with(found), field: "other"}
        )

    desk = spoiled(sit, other)
    assert desk.turns[0].snapshot_problem == f"it was made with another {field}"
    assert desk.file.exists()


def test_one_of_another_model_is_not_used(
    sit: Callable[..., Desk], tmp_path: Path, folder: Path
) -> None:
    other = tmp_path / "other" / "tiny"
    other.parent.mkdir()
    shutil.copytree(folder, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    desk = spoiled(sit, lambda _: None, model=other)
    assert desk.turns[0].snapshot_problem == "it was made with another model"


def test_a_model_whose_files_are_gone_has_none(
    sit: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Path) -> None:
        real = Provenance.of
        monkeypatch.setattr(Provenance, "of", lambda llm: replace(real(llm), fingerprint=None))

    desk = spoiled(sit, gone)
    assert desk.turns[0].snapshot_problem == "the model's files cannot be read"
    assert desk.file.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_one_that_may_not_be_read_is_passed_over(sit: Callable[..., Desk]) -> None:
    desk = spoiled(sit, lambda path: path.chmod(0))
    assert "cannot be read" in desk.turns[0].snapshot_problem


def test_a_model_is_told_from_one_that_differs_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(9 << 20)
    middle = slice(4 << 20, (4 << 20) + (40 << 10))  # as large as a small matrix
    found = set()
    for nth, place in enumerate((slice(0), slice(1), middle, slice(len(data) - 1, None))):
        data[place] = bytes(byte ^ 1 for byte in data[place])
        path.write_bytes(data)
        os.utime(path, (nth, nth))
        found.add(fingerprint(path))
    assert len(found) == 4


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF" * 10)
    before = fingerprint(parts[0])
    parts[1].write_bytes(b"GGML" * 10)
    assert fingerprint(parts[0]) != before


# Being interrupted


def test_a_message_goes_before_writing(
    sit: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = sit()
    real, reached = Engine.save, []

    def save(engine: Engine, path: str, about: Any, check: Callable[[], None]) -> None:
        if not reached:
            reached.append(path)
            command = desk.worker.submit(Send("At once."))
            with pytest.raises(Cancelled):
                real(engine, path, about, check)
            assert desk.heard.all(ReplyStarted)[-1:] == desk.heard.all(ReplyStarted)[:1]
            reached.append(command)
            raise Cancelled
        real(engine, path, about, check)

    monkeypatch.setattr(Engine, "save", save)
    desk.say(LONG)
    wait_until(lambda: len(reached) == 2)
    assert isinstance(desk.end_of(reached[1]), CommandFinished)
    desk.written()
    assert [path.suffix for path in desk.file.parent.iterdir()] == [".safetensors"]


def test_the_end_of_the_program_waits_for_no_slow_disk(
    sit: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = sit(quiet=SECONDS)
    desk.say(LONG)
    desk.settled()
    desk.worker._deadline = -1.0
    monkeypatch.setattr("kvchat.chat.worker.CLOSING", -1.0)
    assert desk.worker.shutdown(SECONDS)
    assert list(desk.file.parent.iterdir()) == []


def test_a_kill_in_the_middle_of_writing_leaves_nothing_that_is_used(
    tmp_path: Path, folder: Path
) -> None:
    """The old snapshot stays; what is unfinished is not taken for one, and goes some time."""
    place = SnapshotFolder(tmp_path / "snapshots", BUDGET)
    place.put("c0", lambda path: Path(path).write_bytes(b"old") and None)
    program = (
        "import sys, time; from pathlib import Path\n"
        "from kvchat.chat.snapshot_folder import SnapshotFolder\n"
        "def write(path):\n"
        "    with open(path, 'wb') as file:\n"
        "        file.write(b'half'); file.flush()\n"
        "        print('now', flush=True); time.sleep(60)\n"
        f"SnapshotFolder(Path({str(place.path)!r}), {BUDGET}).put('c0', write)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"now\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert place.file("c0").read_bytes() == b"old"
    assert [each.path for each in place.all()] == [place.file("c0")]
    (unfinished,) = (path for path in place.path.iterdir() if path != place.file("c0"))
    place.prune(["c0"])
    assert unfinished.exists()  # somebody may be writing it
    os.utime(unfinished, (1, 1))
    place.prune(["c0"])
    assert list(place.path.iterdir()) == [place.file("c0")]


# Room


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit the size of files, which is how a full disk looks from here."""
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, was[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)


def test_a_full_disk_is_told_once_and_nothing_is_lost(sit: Callable[..., Desk]) -> None:
    desk = sit()
    desk.say(LONG)
    before = desk.written()
    with full_disk():
        desk.say(LONG)
        wait_until(lambda: bool(desk.told))
        desk.say("More.")
        desk.settled()
        assert desk.file.read_bytes() == before
        assert list(desk.file.parent.iterdir()) == [desk.file]
    desk.say("There is room again.")
    assert desk.written() != before
    assert len(desk.told) == 1
    assert "could not be kept" in desk.told[0]
    assert [turn.decoded > 0 for turn in desk.turns] == [True] * 4


def test_one_that_is_too_large_is_not_written_and_told_with_its_size(
    sit: Callable[..., Desk],
) -> None:
    desk = sit(budget=1000)
    desk.say(LONG)
    wait_until(lambda: bool(desk.told))
    assert "snapshots_mb" in desk.told[0] and "MiB" in desk.told[0]
    assert not desk.file.exists()


def content(size: int) -> Callable[[str], None]:
    def write(path: str) -> None:
        Path(path).write_bytes(b"x" * size)

    return write


def used(place: SnapshotFolder, **times: float) -> None:
    for chat_id, when in times.items():
        os.utime(place.file(chat_id), (when, when))


def test_the_least_recently_used_go_when_room_is_needed(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    for chat_id in ("a", "b", "c"):
        place.put(chat_id, content(30))
    used(place, a=1, b=2, c=3)
    place.touch("a")
    place.put("d", content(30))
    assert {each.path for each in place.all()} == {place.file(each) for each in "acd"}
    place.put("d", content(40))  # in its own place
    assert sum(each.nbytes for each in place.all()) == 100
    place.put("e", content(100))
    assert [each.path for each in place.all()] == [place.file("e")]
    with pytest.raises(SnapshotError):
        place.put("f", content(101))
    assert [each.path for each in place.all()] == [place.file("e")]


def test_none_goes_for_one_that_could_not_be_written(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    place.put("a", content(100))

    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        place.put("b", fail)
    assert [path for path in place.path.iterdir()] == [place.file("a")]


def test_a_smaller_budget_is_kept_from_the_next_start_on(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    for chat_id in ("a", "b"):
        place.put(chat_id, content(50))
    used(place, a=2, b=1)
    SnapshotFolder(place.path, 60).prune(["a", "b"])
    assert [each.path for each in place.all()] == [place.file("a")]


def test_only_chats_that_are_there_keep_theirs(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    for chat_id in ("a", "b"):
        place.put(chat_id, content(5))
    place.prune(["b", "c"])
    assert [each.path for each in place.all()] == [place.file("b")]
    place.remove("b")
    place.remove("b")
    assert place.all() == []
    SnapshotFolder(tmp_path / "nowhere", 100).prune(["a"])


@pytest.mark.parametrize("chat_id", ["../../x", "a/b", "", ".", "A", "con", "公园" * 200, "\ud800"])
def test_no_id_names_a_file_elsewhere(tmp_path: Path, chat_id: str) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    place.put(chat_id, content(5))
    assert place.file(chat_id).parent == place.path
    assert place.size(chat_id) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["snapshots"]


def test_others_may_not_read_them(tmp_path: Path) -> None:
    place = SnapshotFolder(tmp_path / "snapshots", 100)
    place.put("a", content(5))
    assert place.path.stat().st_mode & 0o077 == 0
    assert place.file("a").stat().st_mode & 0o077 == 0


def test_a_chat_that_is_switched_to_another_branch_is_written_anew(
    sit: Callable[..., Desk],
) -> None:
    desk = sit()
    desk.say("Hello", LONG)
    first = desk.session.last_reply()
    desk.written()
    desk.dictate(LONG[::-1])
    desk.worker.params = GREEDY.updated(max_tokens=400)
    from kvchat.chat.commands import Regenerate

    desk.do(Regenerate())
    other = desk.written()
    desk.do(Switch(first.id))
    assert desk.written() != other
