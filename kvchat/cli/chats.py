"""`kvchat chats`: the chats that were saved, and files of chats."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvchat.chat.chat_files import read_file, write_chats, write_file
from kvchat.chat.plain_text import one_line
from kvchat.chat.tags import tags_in
from kvchat.cli import FAILED
from kvchat.cli.chat_snapshots import snapshots
from kvchat.cli.chat_tables import SHORT, Id, Ids, Json, open_store, show_table, to_json
from kvchat.cli.output import Output, note
from kvchat.engine.errors import KvchatError, SettingError

chats = typer.Typer()
chats.add_typer(snapshots, name="snapshots")


@chats.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    """The chats that were saved, and files of chats. Without a command it lists them."""
    if context.invoked_subcommand is None:
        list_chats()


@chats.command("list")
def list_chats(
    text: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="Only chats with this in their title or a tag.")
    ] = "",
    tag: Annotated[str | None, typer.Option("--tag", help="Only chats with this tag.")] = None,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Those that were deleted and can come back.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List chats, those changed last first."""
    output = Output()
    found = open_store().chats(text, tag=tag, deleted=deleted)
    if as_json:
        output.write(to_json([chat._asdict() for chat in found]))
    elif found:
        show_table(
            output,
            ("ID", "Changed", "Messages", "Title"),
            [
                (
                    chat.id[:SHORT],
                    f"{chat.changed:%Y-%m-%d %H:%M}",
                    f"{chat.messages:,}",
                    " ".join(["★"] * chat.pinned + [chat.title] + [f"#{t}" for t in chat.tags]),
                )
                for chat in found
            ],
        )
    else:
        note("no chats are here")


@chats.command()
def show(id: Id) -> None:
    """Print a chat's active path as Markdown."""
    store = open_store()
    write_chats(store, [store.find(id)], "markdown", Output())


@chats.command()
def search(
    text: Annotated[list[str], typer.Argument(metavar="TEXT...", help="Words to look for.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most messages to show.")] = 50,
    as_json: Json = False,
) -> None:
    """Find messages in all chats, newest first."""
    output = Output()
    hits = open_store().search(" ".join(text), limit=limit)
    if as_json:
        output.write(to_json([asdict(hit) for hit in hits]))
        return
    for hit in hits:
        who = "you" if hit.role == "user" else "model"
        title = one_line(hit.title)
        output.write(f"{hit.chat_id[:SHORT]}  {hit.when:%Y-%m-%d %H:%M}  {who}, in {title}\n")
        output.write(f"  {one_line(hit.excerpt)}\n")
    if not hits:
        note("nothing was found")


@chats.command()
def rename(
    id: Id,
    title: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TITLE]...", help="Without one it is called by its first words."),
    ] = None,
) -> None:
    """Give a chat another title."""
    store = open_store()
    store.rename(store.find(id), " ".join(title or []).strip())


@chats.command()
def pin(
    ids: Ids,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
) -> None:
    """Keep chats at the top of the list."""
    store = open_store()
    for chat_id in [store.find(each) for each in ids]:
        store.pin(chat_id, not off)


@chats.command()
def tag(
    id: Id,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Words of your own.")],
    off: Annotated[bool, typer.Option("--off", help="Take them away.")] = False,
) -> None:
    """Give a chat tags; `kvchat chats list --tag` lists the chats with one."""
    store = open_store()
    chat_id = store.find(id)
    before = {tag for chat in store.chats() if chat.id == chat_id for tag in chat.tags}
    named = set(tags_in(" ".join(tags)))
    store.tag(chat_id, before - named if off else before | named)


@chats.command()
def duplicate(id: Id) -> None:
    """Copy a chat with all its branches, and print the copy's id."""
    store = open_store()
    copy = store.duplicate(store.find(id))
    Output().write(f"{copy}\n")


@chats.command()
def delete(ids: Ids) -> None:
    """Take chats off the list; `kvchat chats restore` brings them back within thirty days."""
    store = open_store()
    for chat_id in [store.find(each) for each in ids]:
        store.delete(chat_id)
        note(f"deleted; `kvchat chats restore {chat_id[:SHORT]}` brings it back")


@chats.command()
def restore(ids: Ids) -> None:
    """Bring back chats that were deleted."""
    store = open_store()
    deleted = [chat.id for chat in store.chats(deleted=True)]
    for beginning in ids:
        found = [chat_id for chat_id in deleted if chat_id.startswith(beginning)]
        if len(found) != 1:
            many = "more than one deleted chat begins" if found else "no deleted chat begins"
            raise KvchatError(f"{many} with {beginning!r}; see `kvchat chats list --deleted`")
        store.restore(found[0])


@chats.command("export")
def export_chats(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Ids, or how they begin; without them all chats."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new file to write.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="json|markdown|html|openai|sharegpt",
            help="By default what FILE ends in, or json, which loses nothing.",
        ),
    ] = None,
) -> None:
    """Write chats to a file or to stdout."""
    from kvchat.chat.transfer import WRITERS, format_of

    name = format or (format_of(output) if output else "json")
    if name not in WRITERS:
        told = f"'{format}' is no format" if format else f"the end of '{output}' tells no format"
        raise SettingError(f"{told}; --format takes {', '.join(WRITERS)}")
    store = open_store()
    wanted = [store.find(each) for each in ids] if ids else [chat.id for chat in store.chats()]
    if output is None:
        write_chats(store, wanted, name, Output())
    else:
        count = write_file(store, wanted, name, output)
        note(f"{_count(count)} written to {output}")


@chats.command("import")
def import_chats(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of kvchat (JSON or Markdown), ChatGPT or Open WebUI, or of ShareGPT or "
            "OpenAI messages.",
        ),
    ],
) -> None:
    """Add the chats of files to those that are here.

    Branches, tokens and the ledger come back from kvchat's JSON alone; from Markdown the messages.
    """
    store = open_store()
    sound = True
    for path in files:
        done = read_file(store, path)
        for bad in done.bad:
            note(f"{path}, record {bad.number}: {bad.reason}")
        here = f"; {_count(done.here)} left alone, being here already" if done.here else ""
        note(f"{_count(done.added)} imported from {path}{here}")
        sound = sound and not done.bad
    if not sound:
        raise typer.Exit(FAILED)


def _count(n: int) -> str:
    return f"{n:,} chat" + ("s" if n != 1 else "")
