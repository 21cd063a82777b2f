"""The plain chat in this process, with a tiny model that babbles bytes."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_checkpoints import edit_json, reference, save_folder

from kvchat.chat import slash
from kvchat.chat.events import TextAdded
from kvchat.chat.lines import LINE_LIMIT, Pipe
from kvchat.chat.plain import PlainChat
from kvchat.chat.plain_commands import COMMANDS
from kvchat.chat.reply_writer import ReplyWriter
from kvchat.engine.errors import KvchatError, ModelNotFoundError

OPTIONS = {"device": "cpu", "dtype": "float32", "quant": "none"}
SAMPLING = {"temperature": 0.0, "max_tokens": 6, "seed": 1}

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


class Typed:
    """Lines typed in advance; notes what they were typed at."""

    def __init__(self, *lines: str, interactive: bool = True) -> None:
        self.interactive = interactive
        self.waiting = list(lines)
        self.prompts: list[str] = []
        self.given: list[str] = []

    def read(self, prompt: str, text: str = "") -> str:
        self.prompts.append(prompt)
        self.given.append(text)
        if not self.waiting:
            raise EOFError
        return self.waiting.pop(0)


class Paper:
    """An output that keeps everything, and may do something at each write."""

    is_terminal = False

    def __init__(self) -> None:
        self.text = ""
        self.dimmed = ""
        self.on_write: Callable[[str], None] = lambda _: None

    def write(self, text: str, *, dim: bool = False) -> None:
        self.text += text
        self.dimmed += text if dim else ""
        self.on_write(text)


class Chat:
    """A plain chat, fed with lines."""

    def __init__(self, model: Path, *, interactive: bool = True, ctx: int | None = None) -> None:
        self.lines = Typed(interactive=interactive)
        self.paper = Paper()
        self.notes: list[str] = []
        self.chat = PlainChat(
            self.lines,
            self.paper,
            note=self.notes.append,
            progress=lambda _: None,
            sampling=SAMPLING,
        )
        self.chat.load(str(model), {**OPTIONS, "ctx": ctx})
        self.paper.text = self.paper.dimmed = ""

    def type(self, *lines: str) -> str:
        """Type lines; return what is written, and keep what is noted of these alone."""
        self.lines.waiting += lines
        self.paper.text, self.notes[:], self.chat.ended = "", [], False
        self.chat.run()
        return self.paper.text

    @property
    def path(self) -> list[str]:
        return [node.content for node in self.chat.conversation.active_path()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference("smollm2"), tmp_path_factory.mktemp("models") / "babbler")


@pytest.fixture
def opened() -> Iterator[list[PlainChat]]:
    chats: list[PlainChat] = []
    yield chats
    for chat in chats:
        chat.close()


@pytest.fixture
def start(model: Path, opened: list[PlainChat]) -> Callable[..., Chat]:
    def started(folder: Path = model, **settings: bool | int) -> Chat:
        one = Chat(folder, **settings)  # type: ignore[arg-type]
        opened.append(one.chat)
        return one

    return started


def test_lines_are_messages_and_replies_are_lines(start: Callable[..., Chat]) -> None:
    chat = start(interactive=False)
    written = chat.type("Hi", "", "   ", "You")
    assert chat.path[::2] == ["Hi", "You"]
    assert written == "".join(f"{reply}\n" for reply in chat.path[1::2])
    assert not chat.notes and not chat.chat.failed
    assert chat.chat.session.ledger[1].reused > 0


def test_a_slash_can_be_sent_and_lines_can_go_on(start: Callable[..., Chat]) -> None:
    chat = start(interactive=False)
    chat.type("//not a command", "one\\", "two\\\\", "end\\")
    assert chat.path[::2] == ["/not a command", "one\ntwo\\\\", "end\n"]


def test_a_file_is_attached_by_name_or_by_its_path(
    start: Callable[..., Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("milk")
    monkeypatch.setenv("HOME", str(tmp_path))
    chat = start()
    said = chat.type("see @notes.txt", "~/notes.txt")
    sent = chat.path[::2]
    assert sent[0] == "see notes.txt\n\nnotes.txt (4 bytes):\n```\nmilk\n```"
    assert sent[1] == "~/notes.txt\n\n~/notes.txt (4 bytes):\n```\nmilk\n```"
    tokens = len(chat.chat.session.llm.tokenizer.encode_plain(sent[0]))
    told = f"(attached: notes.txt (4 bytes); the message has {tokens:,} tokens)\n"
    assert told in said
    assert said.index(told) < said.index(chat.path[1])


def test_a_file_that_cannot_be_attached_is_told_and_nothing_is_sent(
    start: Callable[..., Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    chat = start()
    chat.type("see @picture.png")
    assert chat.path == []
    assert chat.lines.given[-1] == "see @picture.png"
    assert chat.notes == ["picture.png is not attached: it is no text (there are NUL bytes in it)."]


def test_the_prompt_counts_messages(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi\\", "there")
    assert chat.lines.prompts == ["1> ", "... ", "3> "]


@pytest.mark.parametrize(("line", "near"), [("/regn", "/regen"), ("/xyzzy", "/help"), ("/", "/")])
def test_an_unknown_command_is_answered_with_a_hint(
    start: Callable[..., Chat], line: str, near: str
) -> None:
    chat = start(interactive=False)
    chat.type(line, "Hi")
    assert near in chat.notes[0]
    assert chat.chat.failed
    assert chat.path[0] == "Hi"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_command_breaks_an_empty_chat(
    start: Callable[..., Chat],
    command: slash.SlashCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # /save writes where it is told
    chat = start(interactive=False)
    chat.type(f"/{command.name}", f"/{command.name} 7 x", "Hi")
    assert all("unforeseen" not in note for note in chat.notes)
    assert command.name == "quit" or chat.path[-2:-1] == ["Hi"]


def test_the_help_lists_every_command(start: Callable[..., Chat]) -> None:
    written = start().type("/help")
    assert all(f"/{command.name} {command.arguments}".rstrip() in written for command in COMMANDS)


def test_settings_hold_from_the_next_reply_on(start: Callable[..., Chat]) -> None:
    chat = start()
    listed = chat.type("Hi", "/set max-tokens 2", "/set", "You", "/set max_tokens default")
    assert [turn.decoded for turn in chat.chat.session.ledger] == [6, 2]
    assert "max_tokens          2\n" in listed
    assert chat.chat.session.params.max_tokens is None
    chat.type("/set temprature 1", "/set top_p 7", "/set top_p", "/set top_k 1.5")
    assert "temperature" in chat.notes[0]
    assert len(chat.notes) == 4


def test_regenerate_branch_and_back(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi", "/set temperature 5", "/regen")
    first, second = chat.chat.conversation.children[chat.chat.conversation.active[None]]
    listed = chat.type("/branch")
    assert "message 2, 1 of 2" in listed and "*  2  message 2, 2 of 2" in listed
    chat.type("/branch 1")
    assert chat.chat.conversation.active_path()[-1].id == first
    chat.type("/undo")
    assert chat.chat.conversation.active_path()[-1].id == second
    chat.type("/undo")
    assert chat.chat.conversation.active_path()[-1].id == first
    chat.type("/branch 3")
    assert "1 to 2" in chat.notes[0]


def test_edit_a_message_and_a_reply_and_go_on(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi", "You", "/edit 1 Ho")
    assert chat.path[0] == "Ho" and len(chat.path) == 2
    chat.type("/edit 2 said so", "/history")
    assert chat.path == ["Ho", "said so"]
    assert "2  model (2 of 2, edited): said so" in chat.paper.text
    chat.type("/continue")
    assert chat.path[1].startswith("said so") and len(chat.path[1]) > len("said so")


def test_an_edit_without_text_brings_the_old_one(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi", "/edit 1", "Ho")
    assert chat.lines.given[2] == "Hi"
    assert chat.path[0] == "Ho"
    piped = start(interactive=False)
    piped.type("Hi", "/edit 1")
    assert piped.chat.failed and piped.path[0] == "Hi"


def test_delete_and_undo(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi", "You")
    whole = chat.path
    chat.type("/delete 3")
    assert chat.path == whole[:2]
    chat.type("/undo")
    assert chat.path == whole
    chat.type("/undo", "/undo")
    assert chat.path == []
    chat.type("/undo")
    assert "nothing to undo" in chat.notes[0]


def test_a_message_whose_reply_was_deleted_is_answered_again(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("Hi", "/delete 2")
    assert chat.path == ["Hi"]
    chat.type("/regen")
    assert chat.path[0] == "Hi" and len(chat.path) == 2


def test_the_system_prompt_is_shown_changed_and_taken_away(start: Callable[..., Chat]) -> None:
    chat = start()
    written = chat.type("/system Be brief.", "/system")
    assert "Be brief.\n" in written
    assert chat.chat.conversation.system == "Be brief."
    chat.type("/system off")
    assert chat.chat.conversation.system == ""
    chat.type("/undo")
    assert chat.chat.conversation.system == "Be brief."


def test_the_ledger_tells_what_every_turn_cost(start: Callable[..., Chat]) -> None:
    chat = start()
    written = chat.type("Hi", "/regen", "/stats")
    assert "turn 1: reused 0 · new" in written
    assert "6 decoded, length" in written
    assert "reuse stopped at token" in written
    assert "of 256 tokens" in written and "stash:" in written


def test_a_transcript_is_saved_once(start: Callable[..., Chat], tmp_path: Path) -> None:
    chat = start()
    file = tmp_path / "a chat.md"
    chat.type("/system Be brief.", "Hi", f"/save {file}")
    text = file.read_text("utf-8")
    assert f"## You\n\nHi\n\n## {chat.chat.session.llm.name}\n" in text
    assert "## System\n\nBe brief." in text
    chat.type("You", f"/save {file}", f"/save {tmp_path / 'none' / 'x.md'}", "/save a\0b", "/save")
    assert file.read_text("utf-8") == text
    assert len(chat.notes) == 4 and "exists already" in chat.notes[0]


def test_thinking_is_switched_where_the_template_can(
    start: Callable[..., Chat], model: Path, tmp_path: Path
) -> None:
    chat = start()
    chat.type("/think off")
    assert "no switch" in chat.notes[0]
    folder = save_folder(reference("smollm2"), tmp_path / "thinker")
    edit_json(folder / "tokenizer_config.json", chat_template=THINKING)
    chat = start(folder)
    chat.type("Hi", "/think off", "You", "/think maybe")
    plain, switched = chat.chat.session.ledger
    assert switched.new > plain.new
    assert "/think on" in chat.notes[0]


def test_thinking_stands_under_a_heading() -> None:
    paper = Paper()
    reply = ReplyWriter(paper)
    for text, thinking in (("Let ", True), ("me see", True), ("It is\n", False), ("so.", False)):
        reply.add(TextAdded(text, thinking))
    reply.finish()
    reply.add(TextAdded("Plain.", thinking=False))
    reply.finish()
    assert paper.text == "[thinking]\nLet me see\n[answer]\nIt is\nso.\nPlain.\n"
    assert paper.dimmed == "[thinking]\nLet me see[answer]\n"


LONG = "word " * 12


def test_a_full_context_is_asked_about(start: Callable[..., Chat]) -> None:
    chat = start(ctx=150)
    chat.type(LONG)
    chat.type(LONG, "n")
    assert len(chat.path) == 2
    assert "Drop the oldest turns?" in chat.lines.prompts[-2]
    assert chat.lines.given[-1] == LONG  # to be changed and sent again
    chat.type(LONG, "y")
    assert len(chat.path) == 4
    assert chat.chat.session.ledger[-1].dropped_turns == 1
    chat.type("/history")
    assert "1  you (no longer seen by the model)" in chat.paper.text


def test_a_full_context_stops_a_script(start: Callable[..., Chat]) -> None:
    chat = start(ctx=150, interactive=False)
    chat.type(LONG, LONG, LONG)
    assert chat.chat.failed and "150" in chat.notes[0]
    assert not chat.chat.conversation.dropped


def test_a_message_that_fails_comes_back(start: Callable[..., Chat]) -> None:
    chat = start(ctx=100)
    chat.type("word " * 50)
    assert "alone" in chat.notes[0]
    assert chat.lines.given[1] == "word " * 50
    assert chat.path == []


def test_ctrl_c_stops_the_reply_and_not_the_chat(start: Callable[..., Chat]) -> None:
    chat = start()
    chat.type("/set max_tokens 100")
    stops = iter([True])
    chat.paper.on_write = lambda _: next(stops, None) and signal.raise_signal(signal.SIGINT)
    chat.type("Hi", "/continue")
    first, second = chat.chat.session.ledger
    assert first.finish_reason == "cancelled" and 0 < first.decoded < 100
    assert second.finish_reason != "cancelled"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_prompt_says_how_to_leave(start: Callable[..., Chat]) -> None:
    chat = start()
    read = chat.lines.read

    def interrupted(prompt: str, text: str = "") -> str:
        line = read(prompt, text)
        if line == "^C":
            signal.raise_signal(signal.SIGINT)
        return line

    chat.lines.read = interrupted  # type: ignore[method-assign]
    written = chat.type("^C", "Hi")
    assert "/quit" in written
    assert chat.path[0] == "Hi"


def test_ctrl_c_ends_a_script(start: Callable[..., Chat]) -> None:
    chat = start(interactive=False)
    chat.paper.on_write = lambda _: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        chat.type("Hi")
    assert len(chat.path) == 2


def test_a_model_that_is_not_there_is_told(opened: list[PlainChat]) -> None:
    chat = PlainChat(Typed(), Paper(), note=print, progress=print)
    opened.append(chat)
    with pytest.raises(ModelNotFoundError):
        chat.load("no-such-model", OPTIONS)


def test_piped_lines_are_utf8_or_left_out() -> None:
    pipe = Pipe(io.BytesIO("\ufeffgrüß\r\n".encode() + b"\xff\n" + "你好".encode()))
    assert pipe.read("") == "grüß"
    with pytest.raises(KvchatError, match="Line 2"):
        pipe.read("")
    assert pipe.read("") == "你好"
    with pytest.raises(EOFError):
        pipe.read("")


def test_an_endless_line_ends_the_input() -> None:
    pipe = Pipe(io.BytesIO(b"x" * (LINE_LIMIT + 2)))
    with pytest.raises(KvchatError, match="16 MiB"):
        pipe.read("")
    with pytest.raises(EOFError):
        pipe.read("")
