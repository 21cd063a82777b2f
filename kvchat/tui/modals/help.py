"""HelpScreen: every key, by what it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import ItemGrid, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.widgets import Static

from kvchat.tui.keymap import Keymap, own_bindings
from kvchat.tui.modals.dialog import Dialog


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


def key_groups(kinds: Iterable[type[DOMNode]], keymap: Keymap) -> list[KeyGroup]:
    """Collect the described keys of kinds of widgets and screens, and of the app.

    Args:
        kinds: each is a group, under its `BINDING_GROUP_TITLE`.
        keymap: which keys the user has bound.
    """
    groups = []
    for kind in kinds:
        keys: dict[str, list[str]] = {}
        for binding in own_bindings(kind):
            pressed = keys.setdefault(binding.description, [])
            pressed += [key for key in keymap.pressed(binding) if key not in pressed]
        title = kind.BINDING_GROUP_TITLE or kind.__name__
        groups.append(KeyGroup(title, tuple((" ".join(v), what) for what, v in keys.items())))
    return groups


def _table(group: KeyGroup, width: int) -> Content:
    lines = [
        Content.assemble((pressed.ljust(width), "$text-accent"), what)
        for pressed, what in group.keys
    ]
    return Content("\n").join([Content.styled(group.title, "bold $text-primary"), *lines])
