"""ModelPicker: the models on this disk and those worth fetching."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvchat.chat.plain_text import one_line
from kvchat.models.catalog import CATALOG, CatalogEntry, find
from kvchat.models.locate import LocalModel, list_models
from kvchat.tui.memory import available_memory, needed_memory
from kvchat.tui.modals.dialog import Dialog

_LANGUAGES = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "pt": "Portuguese",
    "ru": "Russian",
    "th": "Thai",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
"""Names of languages by their ISO 639-1 codes."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model that was chosen."""

    name: str
    """What `kvchat.load` takes."""
    must_fetch: bool
    """It is not on this disk yet."""


class ModelPicker(Dialog[ModelChoice]):
    """Lists models with size, languages and whether they fit in memory.

    Answers with a ModelChoice; fetching and loading are for others to do.

    Args:
        current: name of the model in use.
        language: ISO 639-1 code of a language it must be fit for; such models come first.
        find_local: lists the models on this disk; called on another thread.
        memory: bytes a model may take; None if unknown.
    """

    TITLE = "Model"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "choose": ("Choose", "Enter"),
        "cancel": ("Back", "Esc"),
    }
    DEFAULT_CSS = """
    ModelPicker {
        .dialog--box { width: 88; height: 92%; }
        OptionList { height: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    }
    """

    def __init__(
        self,
        current: str | None = None,
        *,
        language: str | None = None,
        find_local: Callable[[], Sequence[LocalModel]] = list_models,
        memory: Callable[[], int | None] = available_memory,
    ) -> None:
        super().__init__()
        self._current, self._language = current, language
        self._find_local = find_local
        self._memory = memory()
        self._choices: list[ModelChoice] = []
        self._fits_language: list[bool] = []

    def compose_body(self) -> ComposeResult:
        """Yield the list, which fills when the disk has been searched."""
        if self._language:
            name = _LANGUAGES.get(self._language, self._language)
            note = f"Models that were made for {name} come first."
            yield Static(note, classes="dialog--note", markup=False)
        yield OptionList(markup=False)

    def on_mount(self) -> None:
        """Search the disk."""
        self.query_one(OptionList).focus()
        self._search()

    @work
    async def _search(self) -> None:
        self._show(await asyncio.to_thread(self._find_local))

    def _show(self, local: Sequence[LocalModel]) -> None:
        here = {find(model.path.name): model for model in local}
        there = [entry for entry in CATALOG if entry not in here]
        models = self.query_one(OptionList)
        if local:
            models.add_option(_heading("On this disk"))
        for model in sorted(local, key=lambda model: self._order(find(model.path.name))):
            entry = find(model.path.name)
            about = entry.about if entry else f"{model.kind} in {model.source}"
            self._add(model.name, model.bytes, about, entry, must_fetch=False)
        if there:
            models.add_option(_heading("To fetch"))
        for entry in sorted(there, key=self._order):
            self._add(entry.alias, entry.size, entry.about, entry, must_fetch=True)
        if self._choices:
            models.highlighted = models.get_option_index(str(self._first))

    def _order(self, entry: CatalogEntry | None) -> tuple[bool, int]:
        """Models fit for the language come first, then small ones."""
        fits = entry is not None and self._language in entry.languages
        return self._language is not None and not fits, entry.size if entry else 0

    def _add(
        self, name: str, size: int, about: str, entry: CatalogEntry | None, *, must_fetch: bool
    ) -> None:
        in_use = name == self._current
        words = [_bytes(size), *self._fit(size), *(["in use"] if in_use else [])]
        about = " · ".join([about, *([_languages(entry.languages)] if entry else [])])
        line = Content.assemble(
            "● " if in_use else "  ",
            (one_line(name), "bold"),
            ("  " + " · ".join(words), "$text-muted"),
            "\n  ",
            one_line(about),
        )
        self.query_one(OptionList).add_option(Option(line, id=str(len(self._choices))))
        self._choices.append(ModelChoice(name, must_fetch))
        self._fits_language.append(entry is not None and self._language in entry.languages)

    @property
    def _first(self) -> int:
        """Where the cursor begins: at the first model for the language, else at the current one."""
        if any(self._fits_language):
            return self._fits_language.index(True)
        names = [choice.name for choice in self._choices]
        return names.index(self._current) if self._current in names else 0

    def _fit(self, size: int) -> list[str]:
        """Whether a model fits in memory, in words; nothing when that is not known."""
        if self._memory is None:
            return []
        needed = needed_memory(size)
        if needed <= self._memory:
            return ["fits in memory"]
        return [f"too large: needs {_bytes(needed)} of memory, {_bytes(self._memory)} is free"]

    @on(OptionList.OptionSelected)
    def action_choose(self) -> None:
        """Answer with the model under the cursor."""
        option = self.query_one(OptionList).highlighted_option
        if option is not None and option.id is not None:
            self.dismiss(self._choices[int(option.id)])


def _heading(text: str) -> Option:
    return Option(Content.styled(text, "$text-primary"), disabled=True)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _languages(codes: Sequence[str]) -> str:
    """The first languages by name, and how many more there are."""
    names = [_LANGUAGES.get(code, code) for code in codes[:2]]
    more = len(codes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
