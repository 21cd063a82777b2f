"""A chat as a whole in the screen: title, tags, files, personas, and a second program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_chat import Chat, chat, dictate
from textual import events
from textual.widgets import Input, OptionList

from kvchat.chat.store import Store
from kvchat.settings import config_file
from kvchat.tui.modals.chat_files import ExportDialog, ImportDialog
from kvchat.tui.modals.chat_list import ChatList
from kvchat.tui.modals.line_editor import LineEditor
from kvchat.tui.modals.persona_picker import PersonaPicker
from kvchat.tui.widgets.path_input import PathInput, completed

pytestmark = pytest.mark.usefixtures("own_folders")


async def dialog(c: Chat, key: str, kind: type) -> None:
    await c.pilot.press(key)
    await c.until(lambda: isinstance(c.app.screen, kind) and c.app.screen.focused is not None)


def told(c: Chat) -> str:
    return "\n".join(note.message for note in c.app._notifications)


async def write(c: Chat, text: str) -> None:
    c.app.screen.query_one(Input).value = text
    await c.pilot.press("enter")


async def test_the_chat_in_view_is_renamed(llm):
    dictate(llm, "One.")
    async with chat() as c:
        await c.pilot.press("alt+r")  # not before something was said
        assert c.app.screen is c.screen
        await c.say("first")
        await dialog(c, "alt+r", LineEditor)
        await write(c, "Otters")
        await c.until(lambda: c.app.screen is c.screen)
        assert c.screen.pane.title == "Otters"
        assert [each.title for each in c.app.keeper.store.chats()] == ["Otters"]


async def test_a_letter_with_alt_is_a_command_as_terminals_send_it(llm):
    async with chat() as c:
        c.screen.prompt.focus()
        c.app.post_message(events.Key("alt+p", "p"))
        await c.until(lambda: isinstance(c.app.screen, PersonaPicker))
        assert c.screen.prompt.message == ""
        await c.pilot.press("escape")
        await c.until(lambda: c.app.screen is c.screen)
        c.screen.prompt.message = "all of this"
        c.app.post_message(events.Key("alt+a", "a"))
        await c.until(lambda: c.screen.prompt.selected_text == "all of this")


async def test_tags_are_given_here_or_in_the_list_and_found_there(llm):
    dictate(llm, "One.", "Two.")
    async with chat() as c:
        await c.say("first")
        await dialog(c, "alt+g", LineEditor)
        await write(c, "#work otters, work")
        await c.until(lambda: c.app.screen is c.screen)
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        await c.say("second")
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatList) and len(c.app.screen._rows) == 2)
        chats = c.app.screen
        await c.pilot.press("down", "f5", *"home", "enter")
        await c.until(lambda: {row.tags for row in chats._rows} == {("home",), ("otters", "work")})
        line = chats.query_one(Input)
        for searched, found in (
            ("#wo", ["first"]),
            ("#OTT #work", ["first"]),
            ("#home", ["second"]),
            ("#home first", []),
            ("#work first", ["first", "first"]),  # its title and its message
        ):
            line.value = searched
            await c.until(lambda found=found: [row.title for row in chats._rows] == found)
        shown = chats._line(next(row for row in chats._store.chats() if row.title == "first"))
        assert "#otters #work" in shown.plain


@pytest.mark.parametrize("format", ["markdown", "html", "json", "openai", "sharegpt"])
async def test_a_chat_is_exported_and_imported(llm, tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    dictate(llm, "The otter sleeps.")
    async with chat() as c:
        await c.say("Tell me: of an animal")
        await dialog(c, "alt+x", ExportDialog)
        assert c.app.screen.query_one(PathInput).value == "Tell-me-of-an-animal.md"
        formats = c.app.screen.query_one(OptionList)
        await c.pilot.press("down")
        await c.until(lambda: formats.has_focus)
        formats.highlighted = formats.get_option_index(format)
        await c.pilot.press("enter")
        await c.until(lambda: "Written to" in told(c))
        [file] = tmp_path.glob("Tell-me*")
        assert "The otter sleeps." in file.read_text()
        if format in ("markdown", "html"):
            return
        await dialog(c, "alt+i", ImportDialog)
        await write(c, str(file))
        await c.until(lambda: "imported" in told(c))
        count = 1 if format == "json" else 2  # ours knows which chat it is
        assert len(c.app.keeper.store.chats()) == count
        assert ("1 chat left alone" in told(c)) == (format == "json")


async def test_a_path_tells_the_format_and_a_format_the_ending(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await dialog(c, "alt+x", ExportDialog)
        line, formats = c.app.screen.query_one(PathInput), c.app.screen.query_one(OptionList)
        for path, format in (
            ("a.html", "html"),
            ("a.sharegpt.jsonl", "sharegpt"),
            ("a.jsonl", "openai"),
        ):
            line.value = path
            await c.until(lambda f=format: formats.highlighted_option.id == f)
        formats.highlighted = formats.get_option_index("json")
        await c.until(lambda: line.value == "a.json")


async def test_a_file_is_overwritten_only_after_asking(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.md").write_text("precious")
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await dialog(c, "alt+x", ExportDialog)
        await c.pilot.press("enter")
        assert isinstance(c.app.screen, ExportDialog)
        assert (tmp_path / "first.md").read_text() == "precious"
        await c.pilot.press("enter")
        await c.until(lambda: "Written to" in told(c))
        assert "One." in (tmp_path / "first.md").read_text()
        assert [each.name for each in tmp_path.glob("*.md*")] == ["first.md"]


async def test_what_cannot_be_exported_or_imported_is_told(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    (tmp_path / "some.jsonl").write_text(f'{json.dumps(messages)}\n{{"x": 1}}\n')
    (tmp_path / "none.json").write_text("nothing")
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await dialog(c, "alt+x", ExportDialog)
        for path in ("", "folder", "no/such/a.md"):
            await write(c, path)
            assert isinstance(c.app.screen, ExportDialog)
        await c.pilot.press("escape")
        await dialog(c, "alt+i", ImportDialog)
        for path in ("", "folder", "no/such/a.json"):
            await write(c, path)
            assert isinstance(c.app.screen, ImportDialog)
        await write(c, "some.jsonl")
        await c.until(lambda: "1 chat imported" in told(c))
        assert "Record 2" in told(c)
        await dialog(c, "alt+i", ImportDialog)
        await write(c, "none.json")
        await c.until(lambda: "none.json" in told(c))


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Down loads").mkdir()
    (tmp_path / "Down loads" / "chats.json").touch()
    assert completed("Do") == "Down loads/"
    assert completed("~/Down") == "~/Down loads/"
    assert completed(f"{tmp_path}/Down loads/c") == f"{tmp_path}/Down loads/chats.json"
    assert completed("Down loads/chats.json") is None
    assert completed("Down loads/") is None
    assert completed("nothing") is None
    assert completed("no\0thing") is None


async def test_tab_takes_the_completion(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "otters.json").touch()
    async with chat() as c:
        await dialog(c, "alt+i", ImportDialog)
        line = c.app.screen.query_one(PathInput)
        await c.pilot.press("o", "t")
        await c.until(lambda: line._suggestion)
        await c.pilot.press("tab")
        assert line.value == "otters.json"


async def test_a_chat_begins_with_a_persona(llm):
    config_file().parent.mkdir(parents=True)
    config_file().write_text(
        '[personas.coder]\nsystem = "Code first."\npreset = "precise"\ntop_k = 7\n'
        '[personas.lost]\npreset = "nothing"\n'
    )
    dictate(llm, "One.")
    async with chat() as c:
        await c.say("first")
        await dialog(c, "alt+p", PersonaPicker)
        await c.pilot.press("enter")
        await c.until(lambda: c.said == [])
        assert c.screen.pane.conversation.system == "Code first."
        assert c.app.worker.params.temperature == 0.2
        assert c.screen.sampling.params.top_k == 7
        await dialog(c, "alt+p", PersonaPicker)
        await c.pilot.press("down", "enter")
        await c.until(lambda: "no preset 'nothing'" in told(c))


async def test_a_persona_brings_its_model(llm):
    config_file().parent.mkdir(parents=True)
    config_file().write_text('[personas.big]\nmodel = "another"\ntemperature = 1.5\n')
    async with chat() as c:
        await dialog(c, "alt+p", PersonaPicker)
        await c.pilot.press("enter")
        await c.until(lambda: c.app.worker.params.temperature == 1.5)
        await c.idle()


async def test_the_present_settings_become_a_persona(llm):
    async with chat(system="Be brief.") as c:
        c.screen.sampling.use_preset("creative")
        await c.until(lambda: c.app.worker.params.temperature == 1.1)
        for taken in (False, True):
            await dialog(c, "alt+s", LineEditor)
            await write(c, "mine")
            if taken:
                assert isinstance(c.app.screen, LineEditor)
                await c.pilot.press("escape")
            await c.until(lambda: c.app.screen is c.screen)
        persona = c.app.settings.personas["mine"]
        assert (persona.system, persona.preset) == ("Be brief.", "creative")
        assert persona.model == "chatml"
        assert 'system = "Be brief."' in config_file().read_text()


async def test_presets_are_in_the_palette(llm):
    async with chat() as c:
        commands = {each.title: each for each in c.app.get_system_commands(c.screen)}
        commands["Preset: precise"].callback()
        await c.until(lambda: c.app.worker.params.temperature == 0.2)
        assert c.screen.sampling.preset == "precise"


async def test_a_chat_that_another_program_writes_is_opened_as_a_copy_in_a_tab(llm):
    dictate(llm, "One.", "Two.", "Three.")
    async with chat() as c:
        await c.say("first")
        theirs = c.screen.pane.conversation.id
        await c.pilot.press("ctrl+n")
        await c.until(lambda: c.said == [])
        await c.say("second")
        other = Store()
        await c.until(c.app.keeper.flush)
        other.claim(theirs)
        await c.pilot.press("ctrl+l")
        await c.until(lambda: isinstance(c.app.screen, ChatList) and len(c.app.screen._rows) == 2)
        await c.pilot.press("down", "down", "ctrl+t")
        await c.until(lambda: c.screen.pane.title == "first (copy)")
        assert len(c.screen.tabs.panes) == 2
        assert "A copy is opened" in told(c)
        await c.say("third")
        assert c.said[-1] == ("assistant", "Three.")
        await c.until(c.app.keeper.flush)
        assert len(other.load(theirs).nodes) == 2
        assert len(other.load(c.screen.pane.conversation.id).nodes) == 4
        other.close()
