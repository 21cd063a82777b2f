"""What can be done with a chat as a whole: its title, its tags, files of chats."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvchat.chat.tags import tags_in
from kvchat.engine.errors import KvchatError
from kvchat.tui.modals.line_editor import LineEditor

if TYPE_CHECKING:
    from kvchat.chat.chat_files import Imported
    from kvchat.chat.keeper import Keeper
    from kvchat.tui.main_screen import MainScreen

log = logging.getLogger(__name__)

_BAD_SHOWN = 3


class ChatRecords:
    """Changes what the store has of the chat in view, and takes chats in and out.

    Args:
        screen: has the chat.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen

    async def rename(self) -> None:
        """Give the chat in view another title."""
        if (keeper := self._saved()) is None:
            return
        pane = self.screen.pane
        chat = pane.conversation
        note = "Without one the chat is called by its first words."
        editor = LineEditor(chat.title or pane.suggested, title="Title of this chat", note=note)
        title = await self.screen.app.push_screen_wait(editor)
        if title is not None and await self._change(keeper.store.rename, chat.id, title):
            self.screen.chats.renamed(chat.id, title)

    async def edit_tags(self) -> None:
        """Give the chat in view other tags."""
        if (keeper := self._saved()) is None:
            return
        chat_id = self.screen.pane.conversation.id
        try:
            chats = await asyncio.to_thread(keeper.store.chats)
        except KvchatError as error:
            self._complain(error)
            return
        found = [chat for chat in chats if chat.id == chat_id]
        text = " ".join(f"#{tag}" for chat in found for tag in chat.tags)
        key = self.screen.app.keymap.first("chat.chats")
        editor = LineEditor(
            text,
            title="Tags of this chat",
            note=f"Words with spaces between them; {key} and #word find the chats that have one.",
            placeholder="#work #otters",
        )
        answer = await self.screen.app.push_screen_wait(editor)
        if answer is not None:
            await self._change(keeper.store.tag, chat_id, tags_in(answer))

    async def export(self) -> None:
        """Write the chat in view into a file."""
        if (keeper := self._saved()) is None:
            return
        from kvchat.chat.chat_files import write_file
        from kvchat.tui.modals.chat_files import ExportDialog

        pane = self.screen.pane
        name = re.sub(r"\W+", "-", pane.title).strip("-_") or "chat"
        choice = await self.screen.app.push_screen_wait(ExportDialog(name))
        if choice is None:
            return
        ids = [pane.conversation.id]
        await asyncio.to_thread(keeper.flush)
        try:
            await asyncio.to_thread(
                write_file, keeper.store, ids, choice.format, choice.path, replace=choice.replace
            )
        except KvchatError as error:
            self._complain(error)
        else:
            self.screen.notify(f"Written to {choice.path}.", title="Export", markup=False)

    async def import_file(self) -> None:
        """Add the chats of a file to those that are here."""
        keeper = self.screen.app.keeper
        if keeper is None:
            return
        from kvchat.chat.chat_files import read_file
        from kvchat.tui.modals.chat_files import ImportDialog

        path = await self.screen.app.push_screen_wait(ImportDialog())
        if path is None:
            return
        try:
            done = await asyncio.to_thread(read_file, keeper.store, path)
        except KvchatError as error:
            self._complain(error)
        else:
            for bad in done.bad:
                log.warning("%s, record %s: %s", path, bad.number, bad.reason)
            self._tell_imported(done)

    def _tell_imported(self, done: Imported) -> None:
        key = self.screen.app.keymap.first("chat.chats")
        lines = [f"{_count(done.added)} imported" + (f"; {key} lists them." if done.added else ".")]
        if done.here:
            lines.append(f"{_count(done.here)} left alone, being here already.")
        lines += [f"Record {bad.number}: {bad.reason}" for bad in done.bad[:_BAD_SHOWN]]
        if (more := len(done.bad) - _BAD_SHOWN) > 0:
            lines.append(f"And {more:,} more that could not be read; the log has all.")
        self.screen.notify(
            "\n".join(lines),
            title="Import",
            severity="warning" if done.bad else "information",
            timeout=6 + 4 * len(lines),
            markup=False,
        )

    def _saved(self) -> Keeper | None:
        """Return the keeper, if the chat in view is one that is saved."""
        if not self.screen.pane.conversation.nodes:
            self.screen.notify("Nothing has been said in this chat yet.", timeout=4)
            return None
        return self.screen.app.keeper

    async def _change(self, change: Callable[..., object], *args: object) -> bool:
        try:
            await asyncio.to_thread(change, *args)
        except KvchatError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: KvchatError) -> None:
        self.screen.notify(str(error), severity="error", timeout=10, markup=False)


def _count(n: int) -> str:
    return f"{n:,} chat" + ("s" if n != 1 else "")
