"""Conversations as rows and back, exactly.

What a damaged database gives is mended as far as possible: a reply whose record is unsound keeps
its text, as if the user had written it, and a message whose parent is lost begins the chat.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime, timezone
from typing import Any, TypeVar, get_args

from kvchat.chat.changes import Place, SavedNode
from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Context, Node, Reply
from kvchat.chat.packing import pack, pack_candidates, unpack, unpack_candidates
from kvchat.chat.prefix import Divergence
from kvchat.chat.provenance import Provenance
from kvchat.chat.store_search import index
from kvchat.engine.errors import SettingError
from kvchat.engine.types import FinishReason, GenerationStats, SamplingParams

LOST = "(This message could not be recovered.)"
"""Stands for a message whose reply was recovered without it."""

T = TypeVar("T")

_ENDS = (*get_args(FinishReason), "interrupted")

_UNKNOWN = datetime.fromtimestamp(0, UTC)

_UNSOUND = (ValueError, TypeError, KeyError, AttributeError, OverflowError, SettingError)
"""What reading a damaged row can raise."""


def to_text(text: str) -> str | bytes:
    """Return text as SQLite takes it; what is not Unicode (lone surrogates) goes as bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def from_text(stored: Any) -> str:
    """Return the text that `to_text` was given."""
    return stored.decode("utf-8", "surrogatepass") if isinstance(stored, bytes) else str(stored)


def to_time(when: datetime) -> str:
    """Return a date with its zone's name, which a chat template may write."""
    return f"{when.isoformat()} {when.tzname() or ''}".rstrip()


def from_time(stored: str, otherwise: datetime = _UNKNOWN) -> datetime:
    """Return the date that `to_time` was given; if it is unsound, another."""
    try:
        iso, _, name = stored.partition(" ")
        when = datetime.fromisoformat(iso)
    except _UNSOUND:
        return otherwise
    offset = when.utcoffset()
    if name and offset is not None:
        when = when.replace(tzinfo=timezone(offset, name))
    return when


def to_json(value: Any) -> str:
    """Return a frozen dataclass as JSON."""
    return json.dumps(asdict(value), ensure_ascii=True, separators=(",", ":"))


def from_json(kind: type[T], data: dict[str, Any]) -> T:
    """Return the dataclass; fields that a newer or older version has are passed over."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})


def save_node(
    db: sqlite3.Connection, chat_id: str, saved: SavedNode, *, candidates: bool = True
) -> None:
    """Write a message, or what is new of it."""
    node, reply = saved.node, saved.node.reply
    row = _row(db, chat_id, node.id)
    if row is None:
        db.execute(
            "INSERT INTO nodes (chat, id, parent, role, content, created, edited) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                chat_id,
                node.id,
                node.parent,
                node.role,
                to_text(node.content),
                to_time(node.created),
                node.edited,
            ),
        )
        row = _row(db, chat_id, node.id)
        assert row is not None
    else:
        db.execute(
            "UPDATE nodes SET content = ?, edited = ? WHERE row = ?",
            (to_text(node.content), node.edited, row),
        )
    if not node.running:
        index(db, row, node.content, reply.thinking if reply else None)
    if reply is not None:
        _save_reply(db, row, saved, reply, candidates)


def remove_node(db: sqlite3.Connection, chat_id: str, node_id: str) -> None:
    """Take a message out, and its words out of the index."""
    row = _row(db, chat_id, node_id)
    db.execute("DELETE FROM search WHERE rowid = ?", (row,))
    db.execute("DELETE FROM nodes WHERE row = ?", (row,))


def save_places(db: sqlite3.Connection, chat_id: str, places: Iterable[Place]) -> None:
    """Write where messages stand."""
    db.executemany(
        "UPDATE nodes SET position = ?, active = ?, dropped = ? WHERE chat = ? AND id = ?",
        [(p.position, p.active, p.dropped, chat_id, p.node_id) for p in places],
    )


def load_conversation(db: sqlite3.Connection, chat_id: str) -> Conversation | None:
    """Return a chat as it was saved; replies that were being written are `interrupted`."""
    found = db.execute(
        "SELECT title, system, started, keep_cache FROM chats WHERE id = ?", (chat_id,)
    ).fetchone()
    if found is None:
        return None
    title, system, started, keep_cache = found
    chat = Conversation(id=chat_id, title=from_text(title), system=from_text(system))
    chat.keep_cache = None if keep_cache is None else bool(keep_cache)
    chat.started = from_time(started, chat.started)
    replies = load_replies(db, "nodes.chat = ?", chat_id)
    rows = db.execute(
        "SELECT row, id, parent, role, content, created, edited, active, dropped FROM nodes "
        "WHERE chat = ? ORDER BY row",
        (chat_id,),
    ).fetchall()
    for row, node_id, parent, role, content, created, edited, _, dropped in rows:
        node = Node(
            node_id,
            parent,
            "user" if role == "user" else "assistant",
            from_text(content),
            from_time(created, chat.started),
            edited=bool(edited),
        )
        if node.role == "assistant":
            node.reply = replies.get(row)
            if node.reply is None:
                node.reply, node.edited = Reply(finish_reason="interrupted"), True
        chat.nodes[node_id] = node
        if dropped:
            chat.dropped[node_id] = dropped
    siblings = db.execute(
        "SELECT id FROM nodes WHERE chat = ? ORDER BY position, row", (chat_id,)
    ).fetchall()
    for (node_id,) in siblings:
        _link(chat, chat.nodes[node_id])
    for row in rows:
        if row[7]:
            chat.active[chat.nodes[row[1]].parent] = row[1]
    _drop_unreachable(chat)
    return chat


def load_replies(db: sqlite3.Connection, where: str, *values: Any) -> dict[int, Reply | None]:
    """Return the replies of some messages by their rows; None for what is unsound."""
    found: dict[int, Reply | None] = {}
    parts: dict[int, list[tuple[Any, ...]]] = {}
    for row, *part in db.execute(
        "SELECT parts.node, start, token_ids, logprobs, ms, candidates "
        f"FROM parts JOIN nodes ON nodes.row = parts.node WHERE {where} "
        "ORDER BY parts.node, start",
        values,
    ):
        parts.setdefault(row, []).append(tuple(part))
    for row, *columns in db.execute(
        "SELECT replies.node, thinking, seed, finish_reason, stop_id, stats, params, kept, "
        "context, covered FROM replies JOIN nodes ON nodes.row = replies.node "
        f"WHERE {where}",
        values,
    ):
        try:
            found[row] = _reply(columns, parts.get(row, ()))
        except _UNSOUND:
            found[row] = None
    return found


def save_end(db: sqlite3.Connection, row: int, reply: Reply) -> None:
    """Write how a reply ended, and its context."""
    db.execute(
        "UPDATE replies SET finish_reason = ?, stop_id = ?, stats = ?, kept = ?, context = ?, "
        "covered = NULL WHERE node = ?",
        (
            reply.finish_reason,
            reply.stop_id,
            to_json(reply.stats) if reply.stats else None,
            reply.context.kept if reply.context else None,
            pack(reply.context.ids) if reply.context else None,
            row,
        ),
    )


def turn_from(stored: str) -> Turn | None:
    """Return a line of the ledger; None if it is unsound."""
    try:
        data = json.loads(stored)
        if data["divergence"] is not None:
            data["divergence"] = from_json(Divergence, data["divergence"])
        return from_json(Turn, data)
    except _UNSOUND:
        return None


def tags_from(stored: str) -> tuple[str, ...]:
    """Return a chat's tags; none if they are unsound."""
    if stored == "[]":
        return ()
    try:
        return tuple(map(str, json.loads(stored)))
    except _UNSOUND:
        return ()


def run_id(db: sqlite3.Connection, run: Provenance | None) -> int | None:
    """Return the row of these circumstances, which is made if need be."""
    if run is None:
        return None
    stored = to_json(run)
    db.execute("INSERT OR IGNORE INTO runs (provenance) VALUES (?)", (stored,))
    found: int = db.execute("SELECT id FROM runs WHERE provenance = ?", (stored,)).fetchone()[0]
    return found


def _row(db: sqlite3.Connection, chat_id: str, node_id: str) -> int | None:
    found = db.execute(
        "SELECT row FROM nodes WHERE chat = ? AND id = ?", (chat_id, node_id)
    ).fetchone()
    return found[0] if found else None


def _save_reply(
    db: sqlite3.Connection, row: int, saved: SavedNode, reply: Reply, candidates: bool
) -> None:
    params = json.dumps([[index, asdict(params)] for index, params in reply.params])
    if saved.start == 0:
        db.execute("DELETE FROM parts WHERE node = ?", (row,))
        db.execute(
            "INSERT OR REPLACE INTO replies (node, params, run) VALUES (?, ?, ?)",
            (row, params, run_id(db, saved.run)),
        )
    thinking = None if reply.thinking is None else to_text(reply.thinking)
    db.execute(
        "UPDATE replies SET thinking = ?, seed = ?, params = ? WHERE node = ?",
        (thinking, reply.seed, params, row),
    )
    if not saved.node.running:
        save_end(db, row, reply)
    elif reply.context is not None:
        db.execute(
            "UPDATE replies SET kept = ?, context = ?, covered = ? "
            "WHERE node = ? AND covered IS NOT ?",
            (reply.context.kept, pack(reply.context.ids), saved.covered, row, saved.covered),
        )
    if reply.token_ids:
        packed = pack_candidates(reply.before, reply.after) if candidates else None
        db.execute(
            "INSERT OR REPLACE INTO parts (node, start, token_ids, logprobs, ms, candidates) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (row, saved.start, pack(reply.token_ids), pack(reply.logprobs), pack(reply.ms), packed),
        )


def _reply(columns: list[Any], parts: Iterable[tuple[Any, ...]]) -> Reply:
    thinking, seed, reason, stop_id, stats, params, kept, context, covered = columns
    reply = Reply(
        thinking=None if thinking is None else from_text(thinking),
        params=[(int(at), _params(values)) for at, values in json.loads(params)],
        seed=seed,
        finish_reason=reason if reason in _ENDS else "interrupted",
        stop_id=stop_id,
        stats=from_json(GenerationStats, json.loads(stats)) if stats else None,
    )
    for start, token_ids, logprobs, ms, candidates in parts:
        ids = unpack("i", token_ids)
        if start != len(reply.token_ids):
            raise ValueError("a part is missing")
        reply.token_ids += ids
        reply.logprobs += unpack("f", logprobs)
        reply.ms += unpack("f", ms)
        before, after = unpack_candidates(len(ids), candidates)
        reply.before += before
        reply.after += after
    if not len(reply.token_ids) == len(reply.logprobs) == len(reply.ms):
        raise ValueError("columns of different lengths")
    if context is not None:
        ids = unpack("i", context)
        if reason is None:
            ids += reply.token_ids[covered:]
        reply.context = Context(int(kept), ids)
    return reply


def _params(values: dict[str, Any]) -> SamplingParams:
    return from_json(SamplingParams, {**values, "stop": tuple(values.get("stop", ()))})


def _link(chat: Conversation, node: Node) -> None:
    """Put a message below its parent, or at the top if that is lost."""
    parent = chat.nodes.get(node.parent) if node.parent is not None else None
    if parent is None or parent.role == node.role:
        node.parent = None
        if node.role == "assistant":
            stand_in = Node(f"{node.id}-lost", None, "user", LOST, node.created)
            chat.nodes[stand_in.id] = stand_in
            chat.children.setdefault(None, []).append(stand_in.id)
            chat.active[stand_in.id] = node.id
            node.parent = stand_in.id
    chat.children.setdefault(node.parent, []).append(node.id)


def _drop_unreachable(chat: Conversation) -> None:
    """Leave out messages that damaged links have cut off in a ring."""
    reached = {node.id for node in chat}
    for node_id in chat.nodes.keys() - reached:
        del chat.nodes[node_id]
        chat.children.pop(node_id, None)
        chat.active.pop(node_id, None)
        chat.dropped.pop(node_id, None)
