"""TabRow: the open chats, on one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, HorizontalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

TabState = Literal["", "writing", "waiting", "unread"]

_MARKS: dict[TabState, str] = {"": "", "writing": "▸ ", "waiting": "… ", "unread": "● "}
_SAID: dict[TabState, str] = {
    "": "",
    "writing": "\nA reply is being written here.",
    "waiting": "\nA message waits here to be sent.",
    "unread": "\nThere is a new reply.",
}
_CLOSE, _NEW = " × ", " + "
_MIDDLE = 2


@dataclass(frozen=True, slots=True)
class TabView:
    """What the row shows of a chat."""

    key: int
    """Whatever its owner knows it by."""
    title: str
    state: TabState = ""


class ChatTab(Horizontal):
    """One tab: a mark, a title, and a cross to close it."""

    DEFAULT_CSS = """
    ChatTab {
        width: 1fr;
        min-width: 10;
        max-width: 28;
        height: 1;
        color: $text-muted;
        pointer: pointer;
        .chat-tab--title {
            width: 1fr;
            padding: 0 0 0 1;
            text-wrap: nowrap;
            text-overflow: ellipsis;
        }
        .chat-tab--close { width: 3; }
        .chat-tab--close:hover { color: $text-error; text-style: bold; }
        &:hover { background: $foreground 8%; }
        &.-active {
            color: $text;
            background: $background;
            .chat-tab--title { text-style: bold; }
        }
    }
    """

    def __init__(self, view: TabView) -> None:
        super().__init__()
        self.view = view
        self._title = Static(classes="chat-tab--title", markup=False)

    def compose(self) -> ComposeResult:
        """The mark and the title; the cross."""
        yield self._title
        close = Static(_CLOSE, classes="chat-tab--close", markup=False)
        close.tooltip = "Close this chat's tab"
        yield close

    def on_mount(self) -> None:
        """Show what there is."""
        self.show(self.view)

    def show(self, view: TabView) -> None:
        """Show another state of the chat."""
        self.view = view
        self._title.update(Content(_MARKS[view.state] + view.title))
        self._title.tooltip = Content(view.title + _SAID[view.state])

    def on_click(self, event: events.Click) -> None:
        """Go there; the middle button and the cross close it."""
        event.stop()
        on_cross = event.widget is not None and event.widget.has_class("chat-tab--close")
        if on_cross or event.button == _MIDDLE:
            self.post_message(TabRow.CloseRequested(self.view.key))
        else:
            self.post_message(TabRow.Chosen(self.view.key))


class TabRow(HorizontalScroll, can_focus=False):
    """The tabs from left to right; not there while only one chat is open."""

    DEFAULT_CSS = """
    TabRow {
        height: 1;
        padding: 0 1;
        display: none;
        background: $panel;
        scrollbar-size-horizontal: 0;
        &.-several { display: block; }
        .tab-row--new { width: 3; color: $text-muted; pointer: pointer; }
        .tab-row--new:hover { color: $text; text-style: bold; }
    }
    """

    @dataclass
    class Chosen(Message):
        """The user goes to a tab."""

        key: int

    @dataclass
    class CloseRequested(Message):
        """The user wants a tab closed."""

        key: int

    class NewRequested(Message):
        """The user wants another tab."""

    def compose(self) -> ComposeResult:
        """What opens another tab; the tabs come before it."""
        new = Static(_NEW, classes="tab-row--new", markup=False)
        new.tooltip = "Open another tab"
        yield new

    def show(self, views: Sequence[TabView], active: int) -> None:
        """Show these tabs, `active` the one in view."""
        tabs = {tab.view.key: tab for tab in self.query(ChatTab)}
        wanted = {view.key for view in views}
        for key, tab in tabs.items():
            if key not in wanted:
                tab.remove()
        for view in views:
            if view.key not in tabs:
                tabs[view.key] = ChatTab(view)
                self.mount(tabs[view.key], before=self.query_one(".tab-row--new"))
            elif tabs[view.key].view != view:
                tabs[view.key].show(view)
            tabs[view.key].set_class(view.key == active, "-active")
        self.set_class(len(views) > 1, "-several")
        if active in tabs:
            self.call_after_refresh(self.scroll_to_widget, tabs[active], animate=False)

    def on_click(self, event: events.Click) -> None:
        """Ask for another tab."""
        if event.widget is not None and event.widget.has_class("tab-row--new"):
            event.stop()
            self.post_message(self.NewRequested())
