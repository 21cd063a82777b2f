"""KeyLine: the keys that matter most now, on the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual import events, getters
from textual.binding import Binding
from textual.content import Content
from textual.widget import Widget

from kvchat.tui.keymap import short

if TYPE_CHECKING:
    from kvchat.tui.app import KvchatApp

_GAP = "  "


class KeyLine(Widget):
    """Shows as many keys as fit, those of the focused widget first; a click presses one.

    Keys that do nothing now are left out, so there is room for those that do.
    """

    COMPONENT_CLASSES = {"key-line--key", "key-line--what"}  # noqa: RUF012 (Textual's own form)

    DEFAULT_CSS = """
    KeyLine {
        dock: bottom;
        height: 1;
        padding: 0 1;
        background: $footer-background;
        color: $footer-foreground;
        & > .key-line--key { color: $footer-key-foreground; text-style: bold; }
        & > .key-line--what { color: $footer-description-foreground; }
    }
    """

    ALLOW_SELECT = False

    app: getters.app[KvchatApp]

    def on_mount(self) -> None:
        """Follow what the keys do."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    @property
    def keys(self) -> list[Binding]:
        """The keys that are shown, from left to right."""
        fitting: list[Binding] = []
        room = self.content_size.width
        seen = set()
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            if not (binding.show and enabled) or binding.action in seen:
                continue
            seen.add(binding.action)
            room -= cell_len(f"{short(binding.key)} {binding.description}")
            if room < 0:
                break
            fitting.append(binding)
            room -= len(_GAP)
        return fitting

    def render(self) -> Content:
        """Each key, and what it does."""
        key, what = (self.get_visual_style(f"key-line--{part}") for part in ("key", "what"))
        parts: list[Content | str] = []
        for binding in self.keys:
            parts.append(_GAP if parts else "")
            parts.append(Content.styled(short(binding.key), key))
            parts.append(Content.styled(f" {binding.description}", what))
        return Content.assemble(*parts)

    def on_click(self, event: events.Click) -> None:
        """Press the key that was clicked on."""
        offset = event.get_content_offset(self)
        start = 0
        for binding in self.keys:
            end = start + cell_len(f"{short(binding.key)} {binding.description}")
            if offset is not None and start <= offset.x < end:
                self.app.simulate_key(binding.key)
            start = end + len(_GAP)
