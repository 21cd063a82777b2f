"""ThemePicker: themes in a list, tried on as the cursor moves."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.timer import Timer
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from kvchat.tui.modals.dialog import Dialog
from kvchat.tui.theming import ThemeEntry, Themes

_PREVIEW_AFTER = 0.08
"""Seconds the cursor must rest: restyling the screen is felt while a key repeats."""
_SECTIONS = {"kvchat": "kvchat", "yours": "Yours", "Textual": "Textual's"}


class ThemePicker(Dialog[str]):
    """Shows each theme live. Answers with its name; Escape puts the old one back.

    Args:
        themes: the themes to choose from, known to the app.
    """

    TITLE = "Theme"
    HINT = "↑↓ try on"
    BUTTONS: ClassVar[dict[str, tuple[str, str]]] = {
        "keep": ("Keep", "Enter"),
        "cancel": ("Back", "Esc"),
    }
    DEFAULT_CSS = """
    ThemePicker {
        align: right middle;
        background: transparent;
        .dialog--box { width: 62; height: 92%; }
        OptionList { height: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    }
    """

    def __init__(self, themes: Themes) -> None:
        super().__init__()
        self._themes = themes
        self._before = ""
        self._timer: Timer | None = None

    def compose_body(self) -> ComposeResult:
        """Yield the list, with a heading for each source."""
        self._before = self.app.theme
        options: list[Option] = []
        source = None
        for name, entry in self._themes.entries.items():
            if entry.source != source:
                source = entry.source
                options += [Option("")] * bool(options)
                options.append(Option(Content.styled(_SECTIONS[source], "$text-muted")))
                for heading in options[-2:]:
                    heading.disabled = True
            options.append(Option(_line(name, entry), id=name))
        yield OptionList(*options, markup=False)

    def on_mount(self) -> None:
        """Begin at the theme in use."""
        themes = self.query_one(OptionList)
        themes.highlighted = themes.get_option_index(self._before)
        themes.focus()

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        if self._timer is not None:
            self._timer.stop()
        name = event.option_id
        if name is not None:
            self._timer = self.set_timer(_PREVIEW_AFTER, lambda: self._wear(name))

    @on(OptionList.OptionSelected)
    def action_keep(self) -> None:
        """Keep the theme under the cursor."""
        option = self.query_one(OptionList).highlighted_option
        name = (option and option.id) or self._before
        self._wear(name)
        self.dismiss(name)

    def action_cancel(self) -> None:
        """Put the old theme back."""
        self._wear(self._before)
        self.dismiss(None)

    def _wear(self, name: str) -> None:
        if self._timer is not None:
            self._timer.stop()
        if self.app.theme != name:
            self.app.theme = name


def _line(name: str, entry: ThemeEntry) -> Content:
    """A swatch in the theme's own colours, its name, and what it is."""
    theme = entry.theme
    colours = (theme.primary, theme.accent or theme.primary, theme.success or theme.primary)
    kind = "terminal" if theme.ansi else "dark" if theme.dark else "light"
    swatch = [
        ("■", f"{colour} on {theme.background}" if theme.background else colour)
        for colour in colours
    ]
    return Content.assemble(*swatch, f"  {name:<21}", (entry.about or kind, "$text-muted"))
