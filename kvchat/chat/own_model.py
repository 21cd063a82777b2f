"""A chat's own model: the one that wrote its last reply, where that is on this disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.chat.plain_text import one_line
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation
    from kvchat.chat.store import Store


def last_author(store: Store, chat: Conversation) -> dict[str, Any] | None:
    """Return what the last reply on the active path was written with, as far as that is known.

    Raises:
        StoreError: the database cannot be read.
    """
    replies = (node for node in reversed(chat.active_path()) if node.reply is not None)
    found = (store.provenance(chat.id, node.id) for node in replies)
    return next((known for known in found if known is not None), None)


def own_model(store: Store, chat: Conversation, otherwise: str, tell: Callable[[str], None]) -> str:
    """Return which model a chat that is opened again goes on with, as `kvchat.load` takes it.

    Args:
        store: has the chat.
        chat: the chat.
        otherwise: the model of the settings, for a chat without replies or whose own is gone.
        tell: gets a text for the user if it is gone.

    Raises:
        StoreError: the database cannot be read.
    """
    known = last_author(store, chat)
    if known is None:
        return otherwise
    name, path = str(known["model"]), Path(known["path"])
    named = _located(name)
    if named is not None and (named == path or _located(str(path)) is None):
        return name  # by its name where that still means it, or where it has moved
    if _located(str(path)) is not None:
        return str(path)
    if name != otherwise:
        tell(
            f"This chat was written with {one_line(name)}, which is not on this disk any more; it "
            f"goes on with {otherwise}."
        )
    return otherwise


def _located(name: str) -> Path | None:
    from kvchat.models.locate import locate

    try:
        return locate(name)
    except KvchatError:
        return None
