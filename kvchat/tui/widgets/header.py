"""ChatHeader: which model answers, and how it runs, on one line."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from kvchat.chat.plain_text import one_line


class ChatHeader(Widget):
    """The line at the top."""

    COMPONENT_CLASSES = {"header--name", "header--facts"}  # noqa: RUF012 (Textual's own form)

    DEFAULT_CSS = """
    ChatHeader {
        dock: top;
        height: 1;
        padding: 0 2;
        background: $panel;
        color: $text-muted;
        & > .header--name { color: $text-primary; text-style: bold; }
        & > .header--facts { color: $text-muted; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._model = "kvchat"
        self._facts: tuple[str, ...] = ()

    def show_model(self, model: str, *facts: str) -> None:
        """Show a model's name and a few facts about it."""
        self._model, self._facts = one_line(model), facts
        self.refresh()

    def render(self) -> Content:
        """Name, then facts as far as they fit."""
        name = Content.styled(self._model, self.get_visual_style("header--name"))
        facts = Content.styled("".join(f"  ·  {fact}" for fact in self._facts if fact))
        return Content.assemble(name, facts)
