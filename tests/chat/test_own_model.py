"""With which model a chat goes on that is opened again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from chat.store_helpers import say
from chat.tiny_chat import tiny_llm
from tiny_checkpoints import reference, save_folder

from kvchat.chat.conversation import Conversation
from kvchat.chat.own_model import own_model
from kvchat.chat.provenance import Provenance
from kvchat.chat.store import Store


@pytest.fixture(scope="module")
def otter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(reference("smollm2"), tmp_path_factory.mktemp("models") / "otter")


@pytest.fixture
def model_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, list]]:
    """Saves a chat that some model wrote, and tells which one it goes on with."""
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path))

    def find(name: str, path: Path, replies: int = 1) -> tuple[str, list[str]]:
        store, chat, told = Store(tmp_path / "chats.db"), Conversation(), []
        for nth in range(replies):
            say(chat, str(nth), [1, 2])
        chat.add_user("and")
        run = Provenance.of(replace(tiny_llm(), name=name, path=path))
        store.save(chat, run)
        found = own_model(store, store.load(chat.id), "smollm2", told.append)
        store.close()
        return found, told

    return find


def test_it_is_the_one_that_wrote_it(model_of, otter: Path) -> None:
    assert model_of(str(otter), otter) == (str(otter), [])


def test_a_name_that_means_it_still_is_kept(model_of, otter: Path, tmp_path: Path) -> None:
    copytree(otter, tmp_path / "models" / "otter")
    assert model_of("otter", tmp_path / "models" / "otter") == ("otter", [])


def test_one_that_has_moved_is_found_by_its_name(model_of, otter: Path, tmp_path: Path) -> None:
    copytree(otter, tmp_path / "models" / "otter")
    assert model_of("otter", Path("/nowhere/otter")) == ("otter", [])


def test_a_path_wins_over_another_model_of_the_same_name(
    model_of, otter: Path, tmp_path: Path
) -> None:
    copytree(otter, tmp_path / "models" / "otter")
    assert model_of("otter", otter) == (str(otter), [])


def test_without_it_the_one_of_the_settings_goes_on_and_that_is_told(model_of) -> None:
    found, [told] = model_of("gone", Path("/nowhere/gone.gguf"))
    assert found == "smollm2"
    assert "gone, which is not on this disk" in told and "smollm2" in told


def test_a_model_of_the_settings_that_is_not_there_yet_is_fetched_without_a_word(model_of) -> None:
    assert model_of("smollm2", Path("/nowhere/smollm2.gguf")) == ("smollm2", [])


def test_a_chat_without_replies_has_none(model_of, otter: Path) -> None:
    assert model_of(str(otter), otter, replies=0) == ("smollm2", [])
