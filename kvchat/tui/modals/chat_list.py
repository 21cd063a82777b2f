"""ChatList: all chats, what they are called and what was said in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import ClassVar, Literal

from rich.cells import cell_len
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from kvchat.chat.plain_text import one_line
from kvchat.chat.store import ChatSummary, Store
from kvchat.chat.store_search import Hit
from kvchat.chat.tags import has_tags, split_search, tags_in
from kvchat.engine.errors import KvchatError
from kvchat.tui.modals.dialog import Dialog

MOST = 500
"""Rows that are shown; a search finds the rest."""
_SHORTEST = 16
"""Cells of a title that its tags leave."""


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """The chat that was chosen, and the message that a search found in it."""

    chat_id: str
    node_id: str | None = None
    beside: bool = False
    """It goes into a tab of its own."""


Field = Literal["title", "tags"]
_ASKED: dict[Field, str] = {
    "title": "The new title; Enter keeps it.",
    "tags": "Its tags, with spaces between them; Enter keeps them.",
}


class ChatList(Dialog[ChatChoice]):
    """Lists chats, and searches all messages as one types. Answers with a ChatChoice.

    Args:
        store: where the chats are.
        current: the chat in view.
        open_ids: all chats that are open, which cannot be deleted here.
        renamed: gets the id and the title of a chat that was given one.
        now: the time, for dates that read like "today".
    """

    TITLE = "Chats"
    HINT = (
        "Enter open · Ctrl+T new tab · #tag · F2 rename\n"
        "F3 copy · F4 pin · F5 tags · Del delete · F10 undo"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "into_list", "List", show=False),
        Binding("f2", "rename", "Rename", id="chats.rename", priority=True),
        Binding("f3", "duplicate", "Duplicate", id="chats.duplicate", priority=True),
        Binding("f4", "pin", "Pin", id="chats.pin", priority=True),
        Binding("f5", "edit_tags", "Tags", id="chats.tags", priority=True),
        Binding("ctrl+t", "open_beside", "Open in a new tab", id="chats.new-tab", priority=True),
        Binding("delete", "delete", "Delete", id="chats.delete"),
        Binding("f10", "undo", "Undo delete", id="chats.undo", priority=True),
    ]
    DEFAULT_CSS = """
    ChatList {
        .dialog--box { width: 92; height: 90%; }
        Input, Input:focus { height: 1; padding: 0 1; background: $panel; margin-bottom: 1; }
        OptionList { height: 1fr; }
        .chat-list--word { color: $text-muted; height: auto; }
    }
    """

    def __init__(
        self,
        store: Store,
        current: str | None = None,
        open_ids: Collection[str] = (),
        *,
        renamed: Callable[[str, str], None] = lambda chat_id, title: None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._open_ids = open_ids
        self._tell_renamed = renamed
        self._now = now
        self._rows: list[ChatSummary | Hit] = []
        self._deleted: list[str] = []
        self._changing = asyncio.Lock()
        self._editing: tuple[Field, str] | None = None
        """What of which chat stands in the line above the list."""

    def compose_body(self) -> ComposeResult:
        """Yield the search line, the list, and a line for a word about it."""
        yield Input(placeholder="Search titles, #tags and messages", compact=True)
        yield OptionList(markup=False)
        yield Static("", classes="chat-list--word", markup=False)

    def on_mount(self) -> None:
        """Show all chats; one can type at once."""
        self.query_one(Input).focus()
        self._find("")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self._editing is None:
            self._find(event.value.strip())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        match self._editing:
            case ("title", chat_id):
                self._rename(chat_id, event.value.strip())
                self._end_editing()
            case ("tags", chat_id):
                self._change(partial(self._store.tag, chat_id, tags_in(event.value)))
                self._end_editing()
            case None:
                self._open_highlighted()

    def _open_highlighted(self, *, beside: bool = False) -> None:
        if self._rows:
            self._choose(self.query_one(OptionList).highlighted or 0, beside=beside)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_index)

    @work(thread=True, exclusive=True, group="find", exit_on_error=False)
    def _find(self, text: str) -> None:
        """Look up on another thread: the screen never waits for the disk."""
        worker = get_current_worker()
        words, tags = split_search(text)
        try:
            tagged = [chat for chat in self._store.chats() if has_tags(chat.tags, tags)]
            ids = {chat.id for chat in tagged}
            chats = [c for c in self._store.chats(words) if c.id in ids] if words else tagged
            rows: list[ChatSummary | Hit] = [*chats[:MOST]]
            if words:
                rows += [hit for hit in self._store.search(words) if hit.chat_id in ids]
        except KvchatError as error:
            self.app.call_from_thread(self._say, str(error))
        else:
            if not worker.is_cancelled:  # something else is looked for by now
                self.app.call_from_thread(self._show, rows)

    def _show(self, rows: Sequence[ChatSummary | Hit]) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        self._rows = list(rows)
        options.clear_options()
        options.add_options([Option(self._line(row)) for row in rows])
        if rows:
            options.highlighted = min(at, len(rows) - 1)
        self._say("" if rows else "No chat has that in it.")

    def _line(self, row: ChatSummary | Hit) -> Content:
        if isinstance(row, Hit):
            text = Content(row.excerpt)
            for start, end in row.marks:
                text = text.stylize("bold underline", start, end)
            return Content.assemble(f"  {one_line(row.title)[:24]} · ", text)
        place = "● " if row.id == self._current else "○ " if row.id in self._open_ids else "  "
        pin = "★ " if row.pinned else ""
        tags = "".join(f" #{one_line(tag)}" for tag in row.tags)
        count = f"{row.messages:,} message" + ("s" if row.messages != 1 else "")
        facts = f"  {self._when(row.changed)} · {count}"
        title = one_line(row.title) or "Untitled"
        named = Content.assemble(place, pin, title)
        room = self.query_one(OptionList).scrollable_content_region.width - len(facts)
        for_title = max(room - cell_len(tags), _SHORTEST)
        if named.cell_length > for_title:
            named = named.truncate(for_title, ellipsis=True)
        named = Content.assemble(named, (tags, "$text-accent"))
        return Content.assemble(named.truncate(max(room, 0), pad=True), (facts, "$text-muted"))

    def _when(self, time: datetime) -> str:
        days = (self._now().date() - time.date()).days
        if days == 0:
            return f"today {time:%H:%M}"
        return "yesterday" if days == 1 else f"{time:%Y-%m-%d}"

    def _choose(self, index: int, *, beside: bool = False) -> None:
        row = self._rows[index]
        if isinstance(row, Hit):
            self.dismiss(ChatChoice(row.chat_id, row.node_id, beside))
        else:
            self.dismiss(ChatChoice(row.id, beside=beside))

    def action_open_beside(self) -> None:
        """Open the chat in a tab of its own."""
        self._open_highlighted(beside=True)

    def action_into_list(self) -> None:
        """Move down from the search line."""
        self.query_one(OptionList).focus()

    def action_rename(self) -> None:
        """Give the chat another title, in the line above."""
        if (chat := self._highlighted) is not None:
            self._edit("title", chat.id, chat.title)

    def action_edit_tags(self) -> None:
        """Give the chat other tags, in the line above."""
        if (chat := self._highlighted) is not None:
            self._edit("tags", chat.id, "".join(f"#{tag} " for tag in chat.tags))

    def action_duplicate(self) -> None:
        """Make a copy of the chat."""
        if (chat := self._highlighted) is not None:
            self._change(partial(self._store.duplicate, chat.id))

    def action_pin(self) -> None:
        """Keep the chat at the top, or no longer."""
        if (chat := self._highlighted) is not None:
            self._change(partial(self._store.pin, chat.id, not chat.pinned))

    def action_delete(self) -> None:
        """Delete the chat; it can be brought back."""
        chat = self._highlighted
        if chat is None:
            return
        if chat.id == self._current or chat.id in self._open_ids:
            self._say("This chat is open. Close its tab before you delete it.")
            return
        self._change(partial(self._store.delete, chat.id), partial(self._deleted.append, chat.id))

    def action_undo(self) -> None:
        """Bring back what was deleted here last."""
        if self._deleted:
            self._change(partial(self._store.restore, self._deleted.pop()))

    def action_cancel(self) -> None:
        """Leave, or leave what was being changed as it was."""
        if self._editing is not None:
            self._end_editing()
        else:
            self.dismiss(None)

    @property
    def _highlighted(self) -> ChatSummary | None:
        index = self.query_one(OptionList).highlighted
        row = self._rows[index] if index is not None and index < len(self._rows) else None
        return row if isinstance(row, ChatSummary) else None

    def _edit(self, field: Field, chat_id: str, text: str) -> None:
        self._editing = field, chat_id
        line = self.query_one(Input)
        line.value = text
        line.focus()
        self._say(_ASKED[field])

    def _end_editing(self) -> None:
        self._editing = None
        self.query_one(Input).value = ""
        self._find("")

    def _rename(self, chat_id: str, title: str) -> None:
        self._change(
            partial(self._store.rename, chat_id, title),
            partial(self._tell_renamed, chat_id, title),
        )

    def _change(self, change: Callable[[], object], then: Callable[[], None] | None = None) -> None:
        """Change something on another thread, in turn, also if the list is closed meanwhile."""
        self.app.run_worker(self._changed(change, then))

    async def _changed(self, change: Callable[[], object], then: Callable[[], None] | None) -> None:
        async with self._changing:
            try:
                await asyncio.to_thread(change)
            except KvchatError as error:
                if self.is_attached:
                    self._say(str(error))
                else:
                    self.app.notify(str(error), severity="error", timeout=10, markup=False)
                return
            if then is not None:
                then()
            if self.is_attached:
                self._find("" if self._editing else self.query_one(Input).value.strip())

    def _say(self, text: str) -> None:
        self.query_one(".chat-list--word", Static).update(text)
