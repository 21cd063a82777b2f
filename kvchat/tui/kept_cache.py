"""The KV snapshot of the chat in view: whether one is kept on the disk, and what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import SystemCommand

from kvchat.chat.commands import KeepCache
from kvchat.tui.widgets.cache_panel import mebibytes

if TYPE_CHECKING:
    from kvchat.tui.main_screen import MainScreen


class KeptCache:
    """Tells about the snapshot of the chat in view, and switches it on and off.

    Args:
        screen: has the chat.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen

    def command(self) -> SystemCommand:
        """Return the palette's entry, with what a snapshot takes before it is written."""
        about = f"{'on' if self._kept else 'off'} now  ·  {self._size()}"
        return SystemCommand("Keep the cache of this chat", about, self.toggle)

    def toggle(self) -> None:
        """Keep a snapshot, or no longer."""
        if self.screen.app.worker is None:
            return
        keep, size = not self._kept, self._size()
        self.screen.submit(KeepCache(keep))
        if keep:
            text = f"The cache of this chat is kept for when it is opened again: {size}."
        else:
            text = "The cache of this chat is no longer kept."
        self.screen.notify(text, timeout=6, markup=False)

    @property
    def _kept(self) -> bool:
        keeper = self.screen.app.keeper
        return keeper is not None and keeper.snapshots.wanted(self.screen.pane.conversation)

    def _size(self) -> str:
        feed, chat = self.screen.feed, self.screen.pane.conversation
        if feed.cache is None or feed.session is None or feed.session.conversation is not chat:
            return "its size is known once the model has read it"
        if feed.cache.snapshot_bytes:
            return f"{mebibytes(feed.cache.snapshot_bytes)} on the disk"
        return f"about {mebibytes(feed.cache.would_take)} of disk, and more as it grows"
