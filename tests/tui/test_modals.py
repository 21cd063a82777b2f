"""Dialogs: each gives back what was chosen, by key and by mouse, and None when left."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import pytest
from helpers import wait_until
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import OptionList, Tree

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.models.catalog import CATALOG, find
from kvchat.models.locate import LocalModel
from kvchat.tui.keymap import Keymap
from kvchat.tui.memory import available_memory, needed_memory
from kvchat.tui.modals.branch_tree import BranchTree
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.modals.help import HelpScreen, key_groups
from kvchat.tui.modals.model_picker import ModelChoice, ModelPicker
from kvchat.tui.modals.overflow import OverflowQuestion
from kvchat.tui.modals.system_editor import SystemEditor
from kvchat.tui.modals.text_editor import TextEditor
from kvchat.tui.modals.theme_picker import ThemePicker
from kvchat.tui.theming import Themes, load_themes
from kvchat.tui.widgets.action_label import ActionLabel
from kvchat.tui.widgets.message_area import MessageArea
from kvchat.tui.widgets.prompt import PromptArea

OPEN: Any = object()
"""No answer yet."""


class Host(App[None]):
    def __init__(self, themes: Themes | None = None) -> None:
        super().__init__()
        self.answer: Any = OPEN
        self.edited: list[str] = []
        if themes is not None:
            themes.register(self)

    def compose(self) -> ComposeResult:
        yield PromptArea()

    def on_text_editor_edited(self, event: TextEditor.Edited) -> None:
        self.edited.append(event.text)
        event.editor.price = f"{len(event.text)} new tokens"

    async def ask(self, pilot: Pilot[None], dialog: Screen[Any]) -> None:
        def take(answer: Any) -> None:
            self.answer = answer

        await self.push_screen(dialog, take)
        await pilot.pause()

    async def answered(self, pilot: Pilot[None]) -> Any:
        await wait_until(pilot, lambda: self.answer is not OPEN)
        return self.answer

    def shown(self) -> str:
        strips = self.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def local(name: str = "smollm2", size: int = 98_362_432) -> LocalModel:
    entry = find(name)
    path = Path("/models", entry.file if entry else name)
    return LocalModel(name, path, "gguf", size, "kvchat")


def talk() -> Conversation:
    """A question with two replies, the second followed by a question that was edited."""
    conversation = Conversation()
    question = conversation.add_user("Tell me about the sea.")
    for text in ("It is wide.", "[bold]Salt[/]\x1b[2J"):
        reply = conversation.start_reply(question.id)
        conversation.add_text(reply.id, text)
        conversation.finish_reply(reply.id, "stop")
    sky = conversation.add_user("And the sky?")
    for user in (sky, conversation.edit_user(sky.id, "And the moon?")):
        reply = conversation.start_reply(user.id)
        conversation.add_text(reply.id, "Blue.")
        conversation.finish_reply(reply.id, "stop")
    return conversation


def every_dialog() -> dict[str, Screen[Any]]:
    return {
        "themes": ThemePicker(load_themes()),
        "system": SystemEditor("Be [brief]."),
        "editor": TextEditor("Some [text]"),
        "chats": ChatList(Store(Path(mkdtemp()) / "chats.db")),
        "overflow": OverflowQuestion(9000, 8192),
        "models": ModelPicker(find_local=lambda: [local()]),
        "branches": BranchTree(talk()),
    }


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)], ids=str)
@pytest.mark.parametrize("name", every_dialog())
async def test_escape_leaves_and_all_of_it_is_on_the_screen(name: str, size: tuple[int, int]):
    app = Host(load_themes())
    async with app.run_test(size=size) as pilot:
        dialog = every_dialog()[name]
        await app.ask(pilot, dialog)
        box = dialog.query_one(".dialog--box")
        assert dialog.region.contains_region(box.region)
        for label in dialog.query(ActionLabel):
            assert box.content_region.contains_region(label.region)
        await pilot.press("escape")
        assert await app.answered(pilot) is None


@pytest.mark.parametrize("name", every_dialog())
async def test_a_click_on_back_leaves(name: str):
    app = Host(load_themes())
    async with app.run_test() as pilot:
        dialog = every_dialog()[name]
        await app.ask(pilot, dialog)
        await pilot.click(dialog.query(ActionLabel).last())
        assert not await app.answered(pilot)


async def test_themes_are_tried_on_and_put_back():
    app = Host(load_themes())
    async with app.run_test() as pilot:
        app.theme = "paper"
        await app.ask(pilot, ThemePicker(load_themes()))
        await pilot.press("down")
        await wait_until(pilot, lambda: app.theme == "phosphor")
        await pilot.press("escape")
        assert await app.answered(pilot) is None
        assert app.theme == "paper"


async def test_a_theme_is_kept_even_before_it_was_tried_on():
    app = Host(load_themes())
    async with app.run_test() as pilot:
        app.theme = "paper"
        await app.ask(pilot, ThemePicker(load_themes()))
        await pilot.press("down", "enter")
        assert await app.answered(pilot) == "phosphor"
        await pilot.pause(0.2)
        assert app.theme == "phosphor"


async def test_the_users_themes_have_their_own_heading(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCHAT_CONFIG_DIR", str(tmp_path))
    (tmp_path / "themes").mkdir()
    (tmp_path / "themes" / "lamp.toml").write_text('primary = "#ff8800"\nabout = "[warm]"')
    themes = load_themes()
    app = Host(themes)
    async with app.run_test(size=(100, 40)) as pilot:
        await app.ask(pilot, ThemePicker(themes))
        assert "Yours" in app.shown()
        assert "[warm]" in app.shown()


async def test_an_edited_text_comes_back_exactly():
    app = Host()
    text = "two\nlines\twith a tab\x1b[0m"
    async with app.run_test() as pilot:
        await app.ask(pilot, TextEditor(text))
        await pilot.press("!", "ctrl+s")
        assert await app.answered(pilot) == text + "!"


async def test_the_editor_adds_lines_on_enter_and_tells_the_price():
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, TextEditor("a"))
        await pilot.press("enter", "b")
        await wait_until(pilot, lambda: app.edited)
        assert app.edited == ["a\nb"]
        await wait_until(pilot, lambda: "3 new tokens" in app.shown())


async def test_unsaved_changes_are_dropped_only_on_the_second_escape():
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, TextEditor("a"))
        await pilot.press("b", "escape")
        await pilot.pause()
        assert app.answer is OPEN
        assert "not saved" in app.shown()
        await pilot.press("escape")
        assert await app.answered(pilot) is None


async def test_the_system_prompt_may_be_emptied():
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, SystemEditor("Be brief."))
        assert app.screen.query_one(MessageArea).message == "Be brief."
        await pilot.press("alt+a", "backspace", "ctrl+s")
        assert await app.answered(pilot) == ""


@pytest.mark.parametrize(
    ("keys", "answer"),
    [(["enter"], "drop-oldest"), (["down", "enter"], "stop"), (["up", "enter"], None)],
)
async def test_overflow(keys: list[str], answer: str | None):
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, OverflowQuestion(8410, 8192, drop_cost="1,204 new tokens · 2.1 s"))
        assert "8,410 tokens" in app.shown()
        assert "1,204 new tokens" in app.shown()
        await pilot.press(*keys)
        assert await app.answered(pilot) == answer


async def test_overflow_offers_no_stop_where_there_is_no_room():
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, OverflowQuestion(9000, 8192, can_stop=False))
        await pilot.press("down", "enter")
        assert await app.answered(pilot) is None


async def test_models_on_disk_are_loaded_and_others_fetched():
    app = Host()
    async with app.run_test(size=(120, 50)) as pilot:
        picker = ModelPicker("smollm2", find_local=lambda: [local()], memory=lambda: 4_000_000_000)
        await app.ask(pilot, picker)
        await wait_until(pilot, lambda: "in use" in app.shown())
        shown = app.shown()
        assert shown.count("smollm2  ") == 1
        assert "98 MB · fits in memory · in use" in shown
        assert "too large" in shown
        await pilot.press("enter")
        assert await app.answered(pilot) == ModelChoice("smollm2", must_fetch=False)
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, ModelPicker("smollm2", find_local=lambda: [local()]))
        await wait_until(pilot, lambda: app.screen.query_one(OptionList).highlighted is not None)
        await pilot.press("down", "enter")
        choice = await app.answered(pilot)
        assert choice.must_fetch
        assert find(choice.name) is not None


async def test_the_picker_begins_at_a_model_for_the_language():
    app = Host()
    async with app.run_test() as pilot:
        picker = ModelPicker("smollm2", language="zh", find_local=lambda: [local()])
        await app.ask(pilot, picker)
        await wait_until(pilot, lambda: app.screen.query_one(OptionList).highlighted is not None)
        assert "made for Chinese" in app.shown()
        await pilot.press("enter")
        choice = await app.answered(pilot)
        entry = find(choice.name)
        assert entry is not None
        assert "zh" in entry.languages


async def test_the_picker_lists_what_this_disk_really_has(tmp_path, monkeypatch):
    for variable in ("KVCHAT_DATA_DIR", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    folder = tmp_path / "KVCHAT_DATA_DIR" / "models"
    folder.mkdir(parents=True)
    (folder / "[odd]\x1b.gguf").write_bytes(b"GGUF")
    app = Host()
    async with app.run_test(size=(120, 50)) as pilot:
        await app.ask(pilot, ModelPicker())
        await wait_until(pilot, lambda: "[odd]␛" in app.shown())
        assert app.shown().count("MB · ") + app.shown().count("GB · ") > len(CATALOG)


def test_memory_is_told_and_needed():
    told = available_memory()
    assert told is None or 1 << 24 < told < 1 << 50
    assert needed_memory(1_000_000_000) > 1_000_000_000


async def test_the_tree_shows_all_messages_and_goes_to_one():
    conversation = talk()
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, BranchTree(conversation))
        tree = app.screen.query_one(Tree)
        last = conversation.active_path()[-1].id
        await wait_until(pilot, lambda: tree.cursor_node and tree.cursor_node.data == last)
        shown = app.shown()
        assert "[bold]Salt[/]␛[2J" in shown
        lines = [line for line in shown.splitlines() if "●" in line or "○" in line]
        assert sum("●" in line for line in lines) == len(conversation.active_path()) + 1  # legend
        assert sum("○" in line for line in lines) == 3
        await pilot.press("home", "down", "enter")
        assert await app.answered(pilot) == conversation.children[conversation.active[None]][0]


async def test_a_long_conversation_stays_flat():
    conversation = Conversation()
    for number in range(300):
        user = conversation.add_user(f"question {number}")
        reply = conversation.start_reply(user.id)
        conversation.finish_reply(reply.id, "stop")
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, BranchTree(conversation))
        tree = app.screen.query_one(Tree)
        assert len(tree.root.children) == 600


async def test_an_empty_conversation_has_no_message_to_go_to():
    app = Host()
    async with app.run_test() as pilot:
        await app.ask(pilot, BranchTree(Conversation()))
        await pilot.press("enter", "escape")
        assert await app.answered(pilot) is None


async def test_help_shows_keys_by_group_as_they_are_bound():
    class Own(Host):
        BINDING_GROUP_TITLE = "Anywhere"
        BINDINGS: ClassVar = [Binding("f2", "nothing", "Do nothing", id="nothing")]

    Own.__module__ = "kvchat.tui.tests"
    app = Own()
    async with app.run_test(size=(100, 40)) as pilot:
        kinds = (PromptArea, Own)
        groups = key_groups(kinds, Keymap({"prompt.send": "ctrl+enter"}))
        keys = {group.title: dict(group.keys) for group in groups}
        assert keys["Prompt"]["Ctrl+Enter"] == "Send"
        assert keys["Prompt"]["Ctrl+J Shift+Enter"] == "New line"
        assert keys["Anywhere"]["F2"] == "Do nothing"
        await app.ask(pilot, HelpScreen(groups, about="Some [words]."))
        shown = app.shown()
        assert "Some [words]." in shown
        assert "Do nothing" in shown
        await pilot.press("escape")
        assert await app.answered(pilot) is None
