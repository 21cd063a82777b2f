"""The keys as the user has bound them: checked, and named for those who read."""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import Keys, format_key

_MODIFIERS = frozenset(("ctrl", "shift", "alt", "super", "hyper", "meta"))
_SIGNS = {
    sign: binding.key
    for sign in string.punctuation.replace(",", "")
    for binding in Binding.make_bindings([Binding(sign, "")])
}
"""Textual's names for them; a comma parts one key from another."""
_NAMES = frozenset((*(key.value for key in Keys), *_SIGNS.values(), "space"))
_WORDS = {
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "escape": "Esc",
    "enter": "Enter",
    "delete": "Del",
    "backspace": "Backspace",
    "pageup": "PgUp",
    "pagedown": "PgDn",
}
"""Names that every terminal can show, and nobody takes for other keys."""


@dataclass(frozen=True, slots=True)
class Keymap:
    """Keys that replace others, by the id of what they do."""

    keys: Mapping[str, str]
    problems: tuple[str, ...] = ()
    """What is wrong with the user's keys, one text each."""

    @classmethod
    def of(cls, wanted: Mapping[str, str]) -> Keymap:
        """Take over what can be used; a wrong name or key would silently bind nothing."""
        known = _bindings_by_id()
        keys: dict[str, str] = {}
        problems: list[str] = []
        for name, pressed in wanted.items():
            parts = [_normal(part) for part in pressed.split(",") if part.strip()]
            wrong = [part for part in parts if not _is_key(part)]
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                problems.append(f"[keys] there is nothing called '{name}'{hint}")
            elif wrong or not parts:
                said = ", ".join(map(repr, wrong)) or repr(pressed)
                problems.append(f"[keys] '{name}': there is no key {said}; write 'ctrl+x' or 'f5'")
            else:
                keys[name] = ",".join(parts)
        return cls(keys, (*problems, *_clashes(keys, known)))

    def pressed(self, binding: Binding) -> list[str]:
        """Return the keys of a binding, named."""
        return [shown(key) for key in self.keys.get(binding.id or "", binding.key).split(",")]

    def first(self, name: str) -> str:
        """Return the first key of what has this id, named."""
        return self.pressed(_bindings_by_id()[name][0])[0]


def own_bindings(kind: type) -> Iterator[Binding]:
    """Yield the described bindings that kvchat's own classes give to a kind of node."""
    for cls in kind.__mro__:
        if cls.__module__.startswith("kvchat."):
            for binding in cls.__dict__.get("BINDINGS", ()):
                if isinstance(binding, Binding) and binding.description:
                    yield binding


def shown(key: str) -> str:
    """Return a key's name as it is printed on keyboards: Ctrl+X, Up."""
    *modifiers, last = key.strip().split("+")
    name = _WORDS.get(last) or format_key(last)
    return "+".join([*map(str.capitalize, modifiers), name[:1].upper() + name[1:]])


def short(key: str) -> str:
    """Return a key's name where there is little room: ^X, Up."""
    return shown(key).replace("Ctrl+", "^")


def _bindings_by_id() -> dict[str, list[Binding]]:
    """All bindings that can be changed; some widgets of one kind share theirs."""
    found: dict[str, list[Binding]] = {}
    for kind in _kinds(DOMNode):
        for binding in own_bindings(kind):
            if binding.id and binding not in found.setdefault(binding.id, []):
                found[binding.id].append(binding)
    return found


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _kinds(sub)


def _clashes(keys: Mapping[str, str], known: Mapping[str, list[Binding]]) -> Iterable[str]:
    """Tell which of the user's keys take another command's key away."""
    for name, pressed in keys.items():
        group = name.partition(".")[0]
        for other, bindings in known.items():
            if other == name or other.partition(".")[0] not in (group, "chat", "app"):
                continue
            taken = set(keys.get(other, bindings[0].key).split(",")) & set(pressed.split(","))
            if taken and not (other in keys and other < name):
                yield f"[keys] {shown(taken.pop())} is both '{name}' and '{other}'"


def _normal(key: str) -> str:
    """Write a key as Textual does: lower case, signs by their names."""
    *modifiers, last = key.strip().split("+")
    if modifiers or len(last) > 1:
        last = last.lower()
    return "+".join([*(modifier.strip().lower() for modifier in modifiers), _SIGNS.get(last, last)])


def _is_key(key: str) -> bool:
    *modifiers, last = key.split("+")
    return _MODIFIERS.issuperset(modifiers) and (
        last in _NAMES or (last.isalnum() and len(last) == 1)
    )
