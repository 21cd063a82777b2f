"""What the command palette offers: everything that has a key, for those who do not know it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.widget import Widget

from kvchat.tui.keymap import Keymap, own_bindings

Node = Widget | App[Any]

_NOT_OFFERED = frozenset(("command_palette", "app.command_palette"))


def palette_commands(nodes: Iterable[tuple[str, Node]], keymap: Keymap) -> Iterator[SystemCommand]:
    """Yield a command for every binding of these nodes that can be used now.

    Args:
        nodes: what has bindings, each with what its commands' names begin with.
        keymap: which keys the user has bound.
    """
    for prefix, node in nodes:
        for binding in own_bindings(type(node)):
            if binding.action in _NOT_OFFERED or not _is_enabled(node, binding):
                continue
            keys = " or ".join(keymap.pressed(binding))
            about = f"{binding.tooltip}  ·  {keys}" if binding.tooltip else keys
            yield SystemCommand(prefix + binding.description, about, _runner(node, binding.action))


def _is_enabled(node: Node, binding: Binding) -> bool:
    name = binding.action.partition("(")[0]
    return bool(node.check_action(name, ()))


def _runner(node: Node, action: str) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await node.run_action(action)

    return run
