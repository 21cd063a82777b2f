"""ImportDialog and ExportDialog: which file, and in which format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvchat.chat.transfer import WRITERS, format_of
from kvchat.tui.modals.dialog import Answer, Dialog
from kvchat.tui.widgets.path_input import PathInput

_ABOUT = {
    "markdown": "to read; kvchat reads the messages back, without branches",
    "html": "a page to read, with the colours of the tokens",
    "json": "loses nothing: kvchat reads it back with all branches",
    "openai": "messages, one chat a line",
    "sharegpt": "conversations, one chat a line",
}
"""The formats as they are offered; `WRITERS` has the rest."""


class FileDialog(Dialog[Answer]):
    """What the two have in common: a path, and a word about it."""

    DEFAULT_CSS = """
    FileDialog {
        .dialog--box { width: 76; }
        PathInput, PathInput:focus { height: 1; padding: 0 1; background: $panel; }
        .file-dialog--word { height: auto; color: $text-warning; }
    }
    """

    def on_mount(self) -> None:
        """One can type at once."""
        self.query_one(PathInput).focus()

    @property
    def path(self) -> Path | None:
        """What was typed."""
        return self.query_one(PathInput).path

    def say(self, text: str) -> None:
        """Tell something about the path."""
        self.query_one(".file-dialog--word", Static).update(text)

    @on(Input.Changed)
    def _changed(self) -> None:
        self.say("")


class ImportDialog(FileDialog[Path]):
    """Answers with the Path of a file of chats."""

    TITLE = "Import chats"
    HINT = "Tab completes the path"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "choose": ("Import", "Enter"),
        "cancel": ("Cancel", "Esc"),
    }

    def compose_body(self) -> ComposeResult:
        """Yield what can be read, and the path."""
        yield Static(
            "A file of kvchat (JSON, which has all branches, or Markdown), ChatGPT or Open WebUI, "
            "or of ShareGPT or OpenAI messages. Chats that are here already stay as they are.",
            classes="dialog--note",
            markup=False,
        )
        yield PathInput(placeholder="~/Downloads/conversations.json")
        yield Static("", classes="file-dialog--word", markup=False)

    @on(Input.Submitted)
    def action_choose(self) -> None:
        """Answer with the path, if there is a file."""
        path = self.path
        if path is None:
            self.say("Write the path of a file.")
        elif path.is_dir():
            self.say("This is a folder; choose a file in it.")
        elif not path.exists():
            self.say("There is no such file.")
        else:
            self.dismiss(path)


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """Where a chat goes, and as what."""

    path: Path
    format: str
    replace: bool
    """The file that is there gives way: the user has been asked."""


class ExportDialog(FileDialog[ExportChoice]):
    """Answers with an ExportChoice.

    Args:
        name: of the file to begin with, without its ending.
    """

    TITLE = "Export this chat"
    HINT = "Tab completes the path · Down: formats"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "choose": ("Export", "Enter"),
        "cancel": ("Cancel", "Esc"),
    }

    def __init__(self, name: str) -> None:
        super().__init__()
        self._file_name = name
        self._asked_about: Path | None = None

    def compose_body(self) -> ComposeResult:
        """Yield the path and the formats."""
        yield PathInput(self._file_name + WRITERS["markdown"].suffixes[0])
        yield Static("", classes="file-dialog--word", markup=False)
        width = max(map(len, _ABOUT)) + 2
        yield OptionList(
            *(
                Option(
                    Content.assemble((name.ljust(width), "bold"), (about, "$text-muted")), id=name
                )
                for name, about in _ABOUT.items()
            ),
            markup=False,
        )

    def key_down(self) -> None:
        """Go from the path to the formats."""
        if self.query_one(PathInput).has_focus:
            self.query_one(OptionList).focus()

    @on(Input.Changed)
    def _follow_path(self) -> None:
        """A name's ending tells the format."""
        formats = self.query_one(OptionList)
        if (path := self.path) is not None and (named := format_of(path)):
            with self.prevent(OptionList.OptionHighlighted):
                formats.highlighted = formats.get_option_index(named)

    @on(OptionList.OptionHighlighted)
    def _follow_format(self, event: OptionList.OptionHighlighted) -> None:
        """A format has an ending of its own."""
        path, line = self.path, self.query_one(PathInput)
        if event.option_id is None or path is None or format_of(path) == event.option_id:
            return
        text = line.value
        endings = [suffix for writer in WRITERS.values() for suffix in writer.suffixes]
        old = max((e for e in endings if text.lower().endswith(e)), key=len, default="")
        with self.prevent(Input.Changed):
            line.value = text[: len(text) - len(old)] + WRITERS[event.option_id].suffixes[0]
        self.say("")

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def action_choose(self) -> None:
        """Answer with the path and the format; ask first before a file is overwritten."""
        path, option = self.path, self.query_one(OptionList).highlighted_option
        if path is None:
            self.say("Write the path of a file.")
        elif path.is_dir():
            self.say("This is a folder; write the name of a file in it.")
        elif not path.absolute().parent.is_dir():
            self.say("There is no such folder.")
        elif path.exists() and path != self._asked_about:
            self._asked_about = path
            self.say("There is a file of this name. Enter again overwrites it.")
        elif option is not None and option.id is not None:
            self.dismiss(ExportChoice(path, option.id, path == self._asked_about))
