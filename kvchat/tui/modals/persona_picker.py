"""PersonaPicker: manners of answering, to begin a chat with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvchat.chat.plain_text import one_line
from kvchat.settings import Persona
from kvchat.tui.modals.dialog import Dialog

_WORDS = 300
"""Characters of a system prompt that are shown."""


class PersonaPicker(Dialog[str]):
    """Answers with a persona's name.

    Args:
        personas: what to choose from.
        none: said where there are none.
    """

    TITLE = "Personas"
    HINT = "A new chat begins with it"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "choose": ("Begin", "Enter"),
        "cancel": ("Back", "Esc"),
    }
    DEFAULT_CSS = """
    PersonaPicker {
        .dialog--box { width: 76; }
        OptionList { text-wrap: nowrap; text-overflow: ellipsis; }
    }
    """

    def __init__(self, personas: Sequence[Persona], none: str) -> None:
        super().__init__()
        self._personas, self._none = personas, none

    def compose_body(self) -> ComposeResult:
        """Yield the list, or what to do where there is none."""
        if not self._personas:
            yield Static(self._none, markup=False)
            return
        options: list[Option] = []
        for persona in self._personas:
            options += [*([Option("", disabled=True)] if options else []), Option(_line(persona))]
        yield OptionList(*options, markup=False)

    def on_mount(self) -> None:
        """Begin at the first."""
        for personas in self.query(OptionList):
            personas.focus()

    @on(OptionList.OptionSelected)
    def action_choose(self) -> None:
        """Answer with the persona under the cursor."""
        for personas in self.query(OptionList):
            if personas.highlighted is not None:
                self.dismiss(self._personas[personas.highlighted // 2].name)


def _line(persona: Persona) -> Content:
    """Its name and what it sets; its system prompt below."""
    facts = [
        *([persona.model] if persona.model else []),
        *([persona.preset] if persona.preset else []),
        *(f"{name.replace('_', ' ')} {value}" for name, value in persona.sampling.items()),
    ]
    return Content.assemble(
        (one_line(persona.name), "bold"),
        ("".join(f"  ·  {one_line(fact)}" for fact in facts), "$text-muted"),
        "\n",
        one_line((persona.system or "")[:_WORDS]) or ("no system prompt", "$text-muted"),
    )
