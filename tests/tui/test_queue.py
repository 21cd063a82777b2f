"""Messages sent ahead: shown, changed and withdrawn, by key and by mouse."""

from __future__ import annotations

from helpers import wait_until
from textual.app import App, ComposeResult
from textual.widgets import Input

from kvchat.tui.widgets.action_label import ActionLabel
from kvchat.tui.widgets.queue import Queued, QueuedMessage, QueuedMessages

ONE, TWO, THREE = Queued(1, "one"), Queued(2, "two\nlines"), Queued(3, "[bold]three[/]\x1b[31m")


class Host(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, Queued]] = []

    def compose(self) -> ComposeResult:
        yield Input()
        yield QueuedMessages()

    @property
    def queue(self) -> QueuedMessages:
        return self.query_one(QueuedMessages)

    @property
    def rows(self) -> list[QueuedMessage]:
        return list(self.query(QueuedMessage))

    def on_queued_messages_change_requested(self, event: QueuedMessages.ChangeRequested) -> None:
        self.asked.append(("change", event.queued))

    async def on_queued_messages_withdraw_requested(
        self, event: QueuedMessages.WithdrawRequested
    ) -> None:
        self.asked.append(("withdraw", event.queued))
        await self.queue.show_messages(
            row.queued for row in self.rows if row.queued != event.queued
        )

    def shown(self) -> str:
        strips = self.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def test_an_empty_queue_takes_no_room():
    app = Host()
    async with app.run_test() as pilot:
        assert not app.queue.display
        await app.queue.show_messages([ONE])
        await pilot.pause()
        assert app.queue.size.height == 1
        await app.queue.show_messages([])
        await pilot.pause()
        assert not app.queue.display


async def test_messages_are_shown_in_order_as_harmless_text():
    app = Host()
    async with app.run_test() as pilot:
        await app.queue.show_messages([ONE, TWO, THREE])
        await pilot.pause()
        assert [row.queued for row in app.rows] == [ONE, TWO, THREE]
        assert "two lines" in app.shown()
        assert "[bold]three[/]␛[31m" in app.shown()
        assert "\x1b" not in app.shown()
        await app.queue.show_messages([TWO, Queued(3, "changed")])
        await pilot.pause()
        assert [row.queued.text for row in app.rows] == ["two\nlines", "changed"]


async def test_keys_change_and_withdraw():
    app = Host()
    async with app.run_test() as pilot:
        await app.queue.show_messages([ONE, TWO, THREE])
        app.rows[0].focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: app.asked)
        assert app.asked == [("change", TWO)]
        await pilot.press("delete")
        await wait_until(pilot, lambda: len(app.asked) == 2 and len(app.rows) == 2)
        assert app.asked[1] == ("withdraw", TWO)
        assert app.rows[1].has_focus
        await pilot.press("up", "backspace")
        await wait_until(pilot, lambda: len(app.asked) == 3 and len(app.rows) == 1)
        assert app.asked[2] == ("withdraw", ONE)


async def test_the_mouse_changes_and_withdraws():
    app = Host()
    async with app.run_test() as pilot:
        await app.queue.show_messages([ONE, TWO])
        await pilot.pause()
        change, withdraw = app.rows[1].query(ActionLabel)
        await pilot.click(change)
        await pilot.click(withdraw)
        await wait_until(pilot, lambda: len(app.asked) == 2)
        assert app.asked == [("change", TWO), ("withdraw", TWO)]


async def test_a_narrow_screen_keeps_the_actions():
    app = Host()
    async with app.run_test(size=(40, 10)) as pilot:
        await app.queue.show_messages([Queued(1, "word " * 100)])
        await pilot.pause()
        assert app.rows[0].size.height == 1
        assert "change  withdraw" in app.shown()
        assert "…" in app.shown()
