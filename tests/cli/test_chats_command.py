"""`kvchat chats`: the list, and files in and out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import reference, save_folder

import kvchat as package
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store

Kvchat = Callable[..., Any]

MESSAGES = [{"role": "user", "content": "公园在哪里?"}, {"role": "assistant", "content": "There."}]


@pytest.fixture
def parks(kvchat: Kvchat, tmp_path: Path) -> str:
    """The id of a chat in the store."""
    path = tmp_path / "parks.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "title": "Parks"}))
    assert kvchat("chats", "import", path).status == 0
    (chat,) = json.loads(kvchat("chats", "list", "--json").out)
    return str(chat["id"])


def test_import_adds_the_good_and_names_the_bad(kvchat: Kvchat, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [
        {"messages": MESSAGES},
        {"messages": 3},
        {"conversations": [{"from": "human", "value": "Hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    ran = kvchat("chats", "import", path)
    assert ran.status == 1
    bad, done = ran.err.splitlines()
    assert f"{path}, record 2: " in bad
    assert "2 chats imported" in done
    assert len(Store().chats()) == 2


def test_files_that_cannot_be_read_fail(kvchat: Kvchat, tmp_path: Path) -> None:
    ran = kvchat("chats", "import", tmp_path / "absent.json")
    assert ran.status == 1 and "cannot be read" in ran.err


def test_a_whole_export_comes_back(kvchat: Kvchat, parks: str, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    assert kvchat("chats", "export", "-o", path).status == 0
    again = kvchat("chats", "import", path)
    assert (
        again.status == 0 and "0 chats imported" in again.err and "1 chat left alone" in again.err
    )
    before = Store().load(parks)
    (tmp_path / "data" / "chats.db").unlink()
    for rest in (tmp_path / "data").glob("chats.db-*"):
        rest.unlink()
    assert kvchat("chats", "import", path).status == 0
    after = Store().load(parks)
    assert [n.content for n in after] == [n.content for n in before]
    assert (after.id, after.title, after.started) == (before.id, before.title, before.started)


def test_a_chat_that_was_deleted_comes_back_as_a_copy(
    kvchat: Kvchat, parks: str, tmp_path: Path
) -> None:
    kvchat("chats", "export", "-o", tmp_path / "all.json")
    kvchat("chats", "delete", parks)
    kvchat("chats", "import", tmp_path / "all.json")
    (chat,) = Store().chats()
    assert chat.id != parks and chat.title == "Parks"


def test_rename_pin_tag_and_duplicate(kvchat: Kvchat, parks: str) -> None:
    short = parks[:6]
    copy = kvchat("chats", "duplicate", short).out.strip()
    assert {chat.id for chat in Store().chats()} == {parks, copy}
    assert Store().chats()[0].id == copy
    for command in (
        ("pin", short),
        ("rename", short, "Two", "words\x1b[31m"),
        ("tag", short, "#work", "home", "work"),
        ("tag", short, "later"),
        ("tag", short, "--off", "#home", "absent"),
    ):
        ran = kvchat("chats", *command)
        assert (ran.status, ran.out, ran.err) == (0, "", "")
    first = Store().chats()[0]
    assert (first.id, first.pinned, first.tags) == (parks, True, ("later", "work"))
    assert first.title == "Two words\x1b[31m"
    assert "Two words␛[31m #later #work" in kvchat("chats", "list", "--tag", "work").out
    kvchat("chats", "pin", short, "--off")
    kvchat("chats", "rename", short)
    assert Store().chats()[-1].title == "公园在哪里?"
    assert not any(chat.pinned for chat in Store().chats())


def test_a_chat_that_is_open_elsewhere_is_not_deleted(kvchat: Kvchat, parks: str) -> None:
    elsewhere = Store()
    elsewhere.claim(parks)
    ran = kvchat("chats", "delete", parks)
    assert ran.status == 1 and "open in another kvchat" in ran.err
    assert len(Store().chats()) == 1
    elsewhere.delete(parks)
    assert Store().chats() == []


def test_list_search_and_show(kvchat: Kvchat, parks: str) -> None:
    assert parks[:8] in kvchat("chats", "list").out
    assert "no chats" in kvchat("chats", "list", "nothing like it").err
    found = kvchat("chats", "search", "公园").out
    assert found.startswith(parks[:8]) and "公园在哪里?" in found
    (hit,) = json.loads(kvchat("chats", "search", "公园", "--json").out)
    assert hit["chat_id"] == parks
    assert "nothing was found" in kvchat("chats", "search", "elephant").err
    shown = kvchat("chats", "show", parks[:6]).out
    assert shown.startswith("# Parks\n") and "There." in shown
    assert kvchat("chats", "show", "nobody").status == 1


def test_without_a_command_the_chats_are_listed(kvchat: Kvchat, parks: str) -> None:
    ran = kvchat("chats")
    assert ran.status == 0 and ran.out == kvchat("chats", "list").out and parks[:8] in ran.out
    assert kvchat("chats", "nonsense").status == 2


def test_delete_and_restore(kvchat: Kvchat, parks: str) -> None:
    assert kvchat("chats", "delete", parks[:8]).status == 0
    assert Store().chats() == []
    assert parks[:8] in kvchat("chats", "list", "--deleted").out
    assert kvchat("chats", "restore", "zz").status == 1
    assert kvchat("chats", "restore", parks[:8]).status == 0
    assert [chat.id for chat in Store().chats()] == [parks]


def test_exports_go_to_stdout_or_to_new_files(kvchat: Kvchat, parks: str, tmp_path: Path) -> None:
    assert json.loads(kvchat("chats", "export", parks[:8]).out)[0]["id"] == parks
    assert json.loads(kvchat("chats", "export", "-f", "openai").out)["messages"] == MESSAGES
    path = tmp_path / "page.html"
    assert kvchat("chats", "export", "-o", path).status == 0
    assert "<h1>Parks</h1>" in path.read_text(encoding="utf-8")
    taken = kvchat("chats", "export", "-o", path)
    assert taken.status == 1 and "exists already" in taken.err
    unknown = kvchat("chats", "export", "-o", tmp_path / "x.doc")
    assert unknown.status == 2 and "--format takes json" in unknown.err
    assert kvchat("chats", "export", "-f", "doc").status == 2


def test_nothing_is_left_of_an_export_that_failed(
    kvchat: Kvchat, parks: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert kvchat("chats", "export", parks, "nobody", "-o", path).status == 1
    assert not path.exists()


def test_pages_have_the_colours_of_a_model_that_is_here(
    kvchat: Kvchat, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from kvchat.chat.provenance import Provenance

    folder = save_folder(reference("smollm2"), tmp_path_factory.mktemp("model") / "babbler")
    llm = package.load(str(folder), device="cpu", dtype="float32", quant="none")
    session = package.ChatSession(llm)
    session.params = session.params.updated(max_tokens=12, seed=1, temperature=1.0)
    list(session.send("Hello"))
    chat: Conversation = session.conversation
    Store().save(chat, Provenance.of(llm))
    page = kvchat("chats", "export", "-f", "html").out
    assert 'class="p1" title="' in page and "babbler" in page
    (folder / "config.json").write_text("{}")
    from kvchat.chat import chat_files

    chat_files._tokenizer.cache_clear()
    assert 'title="' not in kvchat("chats", "export", "-f", "html").out
