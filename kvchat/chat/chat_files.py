"""Chats of the store to files, and from files to the store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from kvchat.chat.own_model import last_author
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.chat.conversation import Conversation
    from kvchat.chat.store import Store
    from kvchat.chat.transfer import Author, BadRecord, Writable
    from kvchat.models.tokenizer import Tokenizer


@dataclass(slots=True)
class Imported:
    """What became of a file."""

    added: int = 0
    here: int = 0
    """Chats that were in the store before."""
    bad: list[BadRecord] = field(default_factory=list)


def read_file(store: Store, path: Path) -> Imported:
    """Save the chats of a file; those that are in the store already stay as they are.

    Raises:
        KvchatError: the file cannot be read or a chat cannot be saved; those before it are kept.
    """
    from kvchat.chat.transfer import BadRecord, read

    here = {chat.id for chat in store.chats()}
    deleted = {chat.id for chat in store.chats(deleted=True)}
    done = Imported()
    for each in read(path):
        if isinstance(each, BadRecord):
            done.bad.append(each)
        elif each.id in here:
            done.here += 1
        else:
            if each.id in deleted:
                each.id = uuid4().hex
            store.save(each)
            here.add(each.id)
            done.added += 1
    return done


def write_file(
    store: Store, ids: Sequence[str], format: str, path: Path, *, replace: bool = False
) -> int:
    """Write chats into a file, and return how many there were.

    Args:
        store: where the chats are.
        ids: which of them.
        format: a name in `kvchat.chat.transfer.WRITERS`.
        path: the file.
        replace: whether a file of this name gives way, once the new one is whole.

    Raises:
        KvchatError: there is a file of this name, or it cannot be written.
    """
    beside = path.with_name(f"{path.name}.part") if replace else path
    try:
        file = beside.open("x", encoding="utf-8", newline="\n")
    except FileExistsError:
        raise KvchatError(f"{beside} exists already; choose another name.") from None
    except OSError as error:
        raise KvchatError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with file:
            count = write_chats(store, ids, format, file)
        if replace:
            beside.replace(path)
        return count
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()  # half a file would pass for a whole one
        if isinstance(error, OSError):
            raise KvchatError(f"{path} cannot be written: {error.strerror}") from error
        raise


def write_chats(store: Store, ids: Sequence[str], format: str, file: Writable) -> int:
    """Write chats, and return how many there were."""
    from kvchat.chat.transfer import write

    chats = (store.load(chat_id) for chat_id in ids)
    return write(chats, format, file, lambda chat: _author(store, chat))


def _author(store: Store, chat: Conversation) -> Author:
    """Find out who wrote the last reply, and its tokens' texts if that model is still there."""
    from kvchat.chat.transfer import Author, pieces_of

    if (known := last_author(store, chat)) is None:
        return Author()
    tokenizer = _tokenizer(Path(known["path"]), known["fingerprint"])
    return Author(known["model"], pieces_of(tokenizer) if tokenizer else None)


@lru_cache(maxsize=4)
def _tokenizer(path: Path, fingerprint: str | None) -> Tokenizer | None:
    """Load a model's tokenizer without the model; None if its files have changed."""
    from kvchat.chat import provenance
    from kvchat.models import gguf_tokenizer, hf_tokenizer
    from kvchat.models.gguf import GGUFFile

    if fingerprint is None or provenance.fingerprint(path) != fingerprint:
        return None
    try:
        if path.is_dir():
            return hf_tokenizer.from_folder(path)
        return gguf_tokenizer.from_gguf_metadata(GGUFFile(path).metadata)
    except KvchatError:
        return None
