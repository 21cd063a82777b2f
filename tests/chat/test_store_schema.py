"""Databases of other versions, of other programs, and where nothing can be written."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from chat.store_helpers import image, say

from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.chat.store_errors import StoreError
from kvchat.chat.store_repair import repair
from kvchat.chat.store_schema import MIGRATIONS, prepare

NEXT = (*MIGRATIONS, "ALTER TABLE chats ADD COLUMN colour TEXT NOT NULL DEFAULT 'green';")
"""What the next version may do."""


def fill(path: Path) -> Conversation:
    store, chat = Store(path), Conversation("Be brief.")
    say(chat, "公园", [1, 2])
    store.save(chat)
    store.close()
    return chat


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


def test_an_older_database_is_migrated_and_a_copy_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    chat = fill(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        copy = prepare(db, path, NEXT)
        assert db.execute("SELECT colour FROM chats").fetchall() == [("green",)]
        assert prepare(db, path, NEXT) is None
    assert copy is not None
    assert (version(path), version(copy)) == (len(NEXT), len(MIGRATIONS))
    assert image(Store(copy).load(chat.id)) == image(chat)
    assert copy.stat().st_mode & 0o077 == 0


def test_the_thinking_in_older_chats_is_found_after_the_migration(tmp_path: Path) -> None:
    path, told = tmp_path / "chats.db", []
    store, chat = Store(path), Conversation()
    node = chat.start_reply(chat.add_user("where").id)
    chat.add_text(node.id, "a park \ud800", thinking=True)
    chat.add_text(node.id, "home")
    chat.finish_reply(node.id, "stop")
    store.save(chat)
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE search SET terms = 'home' WHERE terms LIKE '%home%'")
        db.execute("PRAGMA user_version = 2")
        db.commit()
    store = Store(path, tell=told.append)
    assert [hit.node_id for hit in store.search("park")] == [node.id]
    assert [hit.node_id for hit in store.search("home")] == [node.id]
    assert len(told) == 1 and "version-2" in told[0]
    assert image(store.load(chat.id)) == image(chat)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    chat = fill(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        with pytest.raises(sqlite3.OperationalError):
            prepare(db, path, (*NEXT, "DROP TABLE turns;\nSELECT nothing;"))
        assert not db.in_transaction
    assert version(path) == len(MIGRATIONS)
    assert image(Store(path).load(chat.id)) == image(chat)


def test_a_newer_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    fill(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        prepare(db, path, NEXT)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(StoreError, match="newer kvchat"):
        Store(path).chats()
    with pytest.raises(StoreError, match="newer kvchat"):
        Store(path).save(Conversation())
        Store(path).tidy()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (x)")
        db.commit()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store(path).chats()
    assert path.read_bytes() == before


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that others can reach into."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


READER = """
import os, sys
from pathlib import Path
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import Store
from kvchat.chat.store_errors import StoreError
if os.geteuid() == 0:
    os.setuid(65534)
store = Store(Path(sys.argv[1]), tell=print)
chat = store.chats()[0]
assert len(store.load(chat.id).nodes) == 2
assert len(store.search("公园")) == 1
try:
    store.rename(chat.id, "x")
except StoreError as error:
    print("refused:", error)
store.close()
"""


def in_a_folder_that_cannot_be_written(script: str, path: Path) -> str:
    """Run a program that may not write there, and return what it printed."""
    for file in path.parent.iterdir():
        file.chmod(0o444)
    path.parent.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_that_cannot_be_written_can_be_read(public_folder: Path) -> None:
    path = public_folder / "chats.db"
    fill(path)
    told = in_a_folder_that_cannot_be_written(READER, path)
    assert told.startswith("refused:") and "permissions" in told


def filled_and_killed(path: Path) -> None:
    """Leave chats as a program does that is killed: beside the file."""
    store = Store(path)
    store.chats()
    keep = Store(path)
    keep.chats()
    chat = Conversation()
    say(chat, "公园", [1, 2])
    store.save(chat)
    beside = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal", "-shm")}
    store.close()
    keep.close()
    for suffix, data in beside.items():
        Path(f"{path}{suffix}").write_bytes(data)


def test_what_a_killed_program_left_can_be_read_where_nothing_can_be_written(
    public_folder: Path,
) -> None:
    path = public_folder / "chats.db"
    filled_and_killed(path)
    assert in_a_folder_that_cannot_be_written(READER, path).startswith("refused:")


MISSING = """
import os, sys
from pathlib import Path
from kvchat.chat.store import Store
if os.geteuid() == 0:
    os.setuid(65534)
store = Store(Path(sys.argv[1]), tell=print)
assert store.chats() == []
"""


def test_what_cannot_be_read_there_is_told(public_folder: Path) -> None:
    path = public_folder / "chats.db"
    filled_and_killed(path)
    Path(f"{path}-shm").unlink()
    told = in_a_folder_that_cannot_be_written(MISSING, path)
    assert told == f"{path}: what was written last is missing until it can be written.\n"


SAVER = """
import os, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from chat.saver_desk import Desk
from kvchat.chat.commands import Send
from kvchat.chat.store import Store
with TemporaryDirectory() as elsewhere:  # for what is imported late
    warm = Desk(Store(Path(elsewhere) / "chats.db"))
    warm.do(Send("zero"))
    warm.close()
if os.geteuid() == 0:
    os.setuid(65534)
desk = Desk(Store(Path(sys.argv[1]), tell=print))
desk.do(Send("one"))
desk.do(Send("two"))
while not desk.told:
    pass
print(len(desk.chat.nodes), len(desk.told), desk.told[0])
desk.worker.shutdown(5)
os._exit(0)
"""


@pytest.mark.parametrize("there", [True, False])
def test_a_chat_goes_on_in_memory_where_nothing_can_be_written(
    public_folder: Path, there: bool
) -> None:
    path = public_folder / "chats.db"
    if there:
        fill(path)
    told = in_a_folder_that_cannot_be_written(SAVER, path)
    assert told.startswith("4 1 This chat cannot be saved now and goes on in memory.")
    assert str(path) in told


def first_version(path: Path) -> Conversation:
    """A database as the first version of the tables had it."""
    chat = Conversation("Be brief.", title="公园")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        prepare(db, path, MIGRATIONS[:1])
        db.execute(
            "INSERT INTO chats (id, title, system, started, changed) VALUES (?, ?, ?, ?, 1)",
            (chat.id, chat.title, chat.system, chat.started.isoformat()),
        )
    return chat


def test_chats_of_the_first_version_keep_their_caches_as_the_settings_say(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    chat = first_version(path)
    store = Store(path)
    assert store.load(chat.id).keep_cache is None
    store.keep_cache(chat.id, True)
    assert store.keeping() == {chat.id: True}
    assert store.load(chat.id).keep_cache is True
    assert version(path.with_name("chats.db.version-1")) == 1


def test_what_the_third_version_left_out_for_all_branches_is_left_out_anew(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        prepare(db, path, MIGRATIONS[:3])
        db.execute("INSERT INTO chats (id, started, changed) VALUES ('a', '', 1)")
        db.execute(
            "INSERT INTO nodes (chat, id, active, dropped, role, content, created, edited) "
            "VALUES ('a', 'u', 1, 1, 'user', 'hi', '', 0)"
        )
    assert Store(path).load("a").dropped == {}
    assert version(path.with_name("chats.db.version-3")) == 3


def test_a_damaged_database_of_the_first_version_is_recovered_with_its_titles(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    chat = first_version(path)
    repair(path)
    store = Store(path)
    assert [(each.id, each.title) for each in store.chats()] == [(chat.id, "公园")]
    assert version(path) == len(MIGRATIONS)
