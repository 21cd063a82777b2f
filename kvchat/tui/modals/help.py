"""HelpScreen: every key, by what it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import ItemGrid, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.keys import format_key
from textual.widgets import Static

from kvchat.tui.modals.dialog import Dialog

_SYMBOLS = {"up": "↑", "down": "↓", "left": "←", "right": "→", "escape": "Esc", "enter": "Enter"}


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys that belong together."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """What is pressed, and what it does."""


class HelpScreen(Dialog[None]):
    """Shows keys by group. Answers nothing.

    Args:
        groups: what to show; `key_groups` collects it.
        about: a few sentences above the keys.
    """

    TITLE = "Keys"
    DEFAULT_CSS = """
    HelpScreen {
        .dialog--box { width: 96; }
        VerticalScroll { height: auto; max-height: 1fr; scrollbar-size-vertical: 1; }
        ItemGrid { height: auto; grid-gutter: 1 4; }
        .help--group { height: auto; }
    }
    """

    def __init__(self, groups: Sequence[KeyGroup], about: str = "") -> None:
        super().__init__()
        self._groups, self._about = groups, about

    def compose_body(self) -> ComposeResult:
        """Yield the groups, side by side where there is room."""
        with VerticalScroll():
            if self._about:
                yield Static(self._about, classes="dialog--note", markup=False)
            with ItemGrid(min_column_width=38):
                pressed = (pressed for group in self._groups for pressed, _ in group.keys)
                width = max(map(len, pressed), default=0) + 2
                for group in self._groups:
                    yield Static(_table(group, width), classes="help--group")


def key_groups(
    app: App[Any], nodes: Iterable[DOMNode], keymap: Mapping[str, str] | None = None
) -> list[KeyGroup]:
    """Collect the described keys of the app and of parts of its screen, one group for each kind.

    Args:
        app: comes last.
        nodes: widgets and screens; only bindings of kvchat's own classes are taken.
        keymap: keys that replace others, by binding id, as given to `App.set_keymap`.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for node in (*nodes, app):
        title = node.BINDING_GROUP_TITLE or _spaced(type(node).__name__)
        if isinstance(node, App):
            title = "Anywhere"
        keys = groups.setdefault(title, {})
        for binding in _own_bindings(type(node)):
            pressed = (keymap or {}).get(binding.id or "") or binding.key
            shown = keys.setdefault(binding.description, [])
            shown += [name for key in pressed.split(",") if (name := _shown(key)) not in shown]
    if app.ENABLE_COMMAND_PALETTE:
        groups["Anywhere"]["Command palette"] = [_shown(app.COMMAND_PALETTE_BINDING)]
    return [
        KeyGroup(title, tuple((" ".join(pressed), what) for what, pressed in keys.items()))
        for title, keys in groups.items()
        if keys
    ]


def _own_bindings(kind: type) -> Iterable[Binding]:
    for cls in kind.__mro__:
        if cls.__module__.startswith("kvchat.") or cls is App:
            for binding in cls.__dict__.get("BINDINGS", ()):
                made = binding if isinstance(binding, Binding) else Binding(*binding)
                if made.description and not made.system:
                    yield made


def _shown(key: str) -> str:
    *modifiers, last = key.strip().split("+")
    name = _SYMBOLS.get(last) or format_key(last)
    return "+".join([*map(str.capitalize, modifiers), name[:1].upper() + name[1:]])


def _spaced(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize()


def _table(group: KeyGroup, width: int) -> Content:
    lines = [
        Content.assemble((pressed.ljust(width), "$text-accent"), what)
        for pressed, what in group.keys
    ]
    return Content("\n").join([Content.styled(group.title, "bold $text-primary"), *lines])
