"""`kvchat chats snapshots`: the KV caches of chats that are kept on the disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.chat.snapshots import folder_beside, mebibytes
from kvchat.cli.chat_tables import SHORT, Ids, Json, open_store, show_table, to_json
from kvchat.cli.output import Output, note
from kvchat.engine.errors import KvchatError
from kvchat.settings import Settings

if TYPE_CHECKING:
    from kvchat.chat.snapshot_folder import SnapshotFolder
    from kvchat.chat.store import Store

snapshots = typer.Typer()

_KEPT = {True: "yes", False: "no", None: "as set"}


@dataclass(frozen=True, slots=True)
class _Row:
    """A chat with a snapshot, or one that is to have one."""

    id: str
    title: str
    kept: bool | None
    """None is as the settings say."""
    bytes: int | None
    """On the disk; None while there is no snapshot."""
    expected_bytes: int | None
    """At most, once there is one; None if that is not known, or no matter any more."""
    used: datetime | None


@snapshots.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    """KV caches that are kept on the disk. Without a command it lists them."""
    if context.invoked_subcommand is None:
        list_snapshots()


@snapshots.command("list")
def list_snapshots(as_json: Json = False) -> None:
    """List the snapshots with their sizes, and chats that are to have one."""
    output, store = Output(), open_store()
    settings, folder = _place(store)
    rows = _rows(store, folder)
    if as_json:
        output.write(to_json([asdict(row) for row in rows]))
        return
    if not rows:
        note("no snapshots are here; /keep on in a chat, or --snapshots, keeps some")
        return
    show_table(
        output,
        ("ID", "Used", "Size", "Kept", "Title"),
        [
            (
                row.id[:SHORT],
                f"{row.used:%Y-%m-%d %H:%M}" if row.used else "not yet",
                _size(row),
                _KEPT[row.kept],
                row.title,
            )
            for row in rows
        ],
    )
    total = sum(row.bytes or 0 for row in rows)
    note(f"{mebibytes(total)} of {settings.snapshots_mb:,} MiB are used, in {folder.path}")


@snapshots.command("on")
def switch_on(ids: Ids) -> None:
    """Keep the caches of chats, from the next time on that they are open."""
    store = open_store()
    for chat_id in [store.find(each) for each in ids]:
        size = _expected(store, chat_id)
        about = f", at most {mebibytes(size)}" if size else ""
        store.keep_cache(chat_id, True)
        note(f"{chat_id[:SHORT]}: kept when it is open next{about}")


@snapshots.command("off")
def switch_off(ids: Ids) -> None:
    """Keep the caches of chats no longer, and remove their snapshots."""
    store = open_store()
    _, folder = _place(store)
    for chat_id in [store.find(each) for each in ids]:
        store.keep_cache(chat_id, False)
        note(f"{chat_id[:SHORT]}: no longer kept; {_removed(folder, chat_id)}")


@snapshots.command()
def clear(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Ids, or how they begin; without them all."),
    ] = None,
) -> None:
    """Remove snapshots; chats that keep their caches get new ones when they are open."""
    store = open_store()
    _, folder = _place(store)
    wanted = [store.find(each) for each in ids] if ids else list(store.keeping())
    for chat_id in wanted:
        if folder.size(chat_id) or ids:
            note(f"{chat_id[:SHORT]}: {_removed(folder, chat_id)}")
    if not ids:
        folder.prune(())  # what belongs to no chat


def _place(store: Store) -> tuple[Settings, SnapshotFolder]:
    settings, _ = Settings.load()
    return settings, folder_beside(store.path, settings.snapshots_mb * 2**20)


def _rows(store: Store, folder: SnapshotFolder) -> list[_Row]:
    """Return those that were used last first; those that have none yet at the end."""
    titles = {chat.id: chat.title for chat in (*store.chats(), *store.chats(deleted=True))}
    found = {each.path: each for each in folder.all()}
    rows = []
    for chat_id, kept in store.keeping().items():
        each = found.get(folder.file(chat_id))
        if each is not None:
            used = datetime.fromtimestamp(each.used_at).astimezone()
            rows.append(_Row(chat_id, titles[chat_id], kept, each.nbytes, None, used))
        elif kept:
            expected = _expected(store, chat_id)
            rows.append(_Row(chat_id, titles[chat_id], kept, None, expected, None))
    return sorted(rows, key=lambda row: row.used.timestamp() if row.used else 0.0, reverse=True)


def _size(row: _Row) -> str:
    if row.bytes is not None:
        return mebibytes(row.bytes)
    return f"at most {mebibytes(row.expected_bytes)}" if row.expected_bytes else "not known"


def _expected(store: Store, chat_id: str) -> int | None:
    """Return what a chat's cache took in memory when it was last open, which is a bit more."""
    for node in reversed(store.load(chat_id).active_path()):
        if node.reply is not None and node.reply.stats is not None:
            return node.reply.stats.kv_bytes
    return None


def _removed(folder: SnapshotFolder, chat_id: str) -> str:
    try:
        size = folder.remove(chat_id)
    except OSError as error:
        raise KvchatError(
            f"{folder.file(chat_id)} cannot be removed: {error.strerror or error}"
        ) from error
    return f"{mebibytes(size)} are free again" if size else "there was no snapshot"
