"""Our own format: a JSON list of chats in which nothing is lost.

Every message of every branch is there, with what the model saw and drew. A chat:

- `kvchat`: version of the schema, 1.
- `id`, `title`, `system`: texts. `started`: ISO 8601 with offset.
- `messages`: parents before children, siblings in their order.

A message:

- `id`; `parent`: id of the message it follows, null for the first.
- `active`: whether it is the one of its siblings that is on, or leads to, the active path.
- `role`: `user` or `assistant`, in turns; `content`; `created`: ISO 8601.
- `edited`: the user rewrote this reply, or it came without tokens.
- `dropped`: how many of the first messages on its path the model does not see from this one on.
- `reply`, in an assistant's messages: see below.

A reply (tokens are lists with one entry each, `null` standing for a token that the user typed or
for what is not known):

- `thinking`: text or null. `seed`: whole number or null.
- `finish_reason`: `stop`, `length`, `cancelled`, `interrupted`; null while it was being written,
  which is read as `interrupted`. `stop_id`: the id that ended it, or null.
- `token_ids`, `logprobs` (natural logarithms), `ms` (since the token before).
- `before`, `after`: the top candidates as the model had them and as the sampler left them, each
  `{"ids": [...], "logprobs": [...]}`.
- `params`: settings over time, each with the index of the token it holds `from`.
- `stats`: what it cost, or null; the names are those of `GenerationStats`.
- `context`: `{"kept", "ids"}` or null: the ids the model had in its context when the reply ended
  are the first `kept` of the context before it on the same branch, then `ids`.

Numbers of single precision have the nine digits that tell them apart.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from datetime import datetime
from typing import Any, get_args

from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Context, Node, Reply, ReplyEnd
from kvchat.chat.transfer.fields import expect, get, text_of, time_of
from kvchat.chat.transfer.records import RecordError
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import Candidates, FinishReason, GenerationStats, SamplingParams

VERSION = 1

_ENDS: tuple[ReplyEnd, ...] = (*get_args(FinishReason), "interrupted")
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a chat of ours."""
    return "kvchat" in record


# Out


def write(conversation: Conversation) -> str:
    """Return a conversation as JSON on one line."""
    record = {
        "kvchat": VERSION,
        "id": conversation.id,
        "title": conversation.title,
        "system": conversation.system,
        "started": conversation.started.isoformat(),
        "messages": [_message_out(conversation, node) for node in conversation],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _message_out(conversation: Conversation, node: Node) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": node.id,
        "parent": node.parent,
        "active": conversation.active.get(node.parent) == node.id,
        "role": node.role,
        "content": node.content,
        "created": node.created.isoformat(),
    }
    if node.id in conversation.dropped:
        record["dropped"] = conversation.dropped[node.id]
    if node.reply is not None:
        record |= {"edited": node.edited, "reply": _reply_out(node.reply)}
    return record


def _reply_out(reply: Reply) -> dict[str, Any]:
    context = reply.context
    return {
        "thinking": reply.thinking,
        "seed": reply.seed,
        "finish_reason": reply.finish_reason,
        "stop_id": reply.stop_id,
        "token_ids": reply.token_ids.tolist(),
        "logprobs": _floats_out(reply.logprobs),
        "ms": _floats_out(reply.ms),
        "before": [_candidates_out(one) for one in reply.before],
        "after": [_candidates_out(one) for one in reply.after],
        "params": [{"from": index, **asdict(params)} for index, params in reply.params],
        "stats": asdict(reply.stats) if reply.stats else None,
        "context": {"kept": context.kept, "ids": context.ids.tolist()} if context else None,
    }


def _candidates_out(candidates: Candidates) -> dict[str, Any]:
    return {"ids": candidates.ids.tolist(), "logprobs": _floats_out(candidates.logprobs)}


def _floats_out(values: Iterable[float]) -> list[float | str | None]:
    """JSON has no NaN, which is null here, and no infinities, which are texts."""
    return [
        float(f"{value:.9g}") if math.isfinite(value) else None if math.isnan(value) else str(value)
        for value in values
    ]


# In


def read(record: dict[str, Any]) -> Conversation:
    """Make a conversation of a record; raises RecordError."""
    version = get(record, "kvchat", int)
    if version != VERSION:
        raise RecordError(
            f"its schema has version {version}, and this kvchat reads version {VERSION}; "
            "a newer kvchat may read it"
        )
    conversation = Conversation(
        system=text_of(get(record, "system", str)),
        id=_id(record),
        title=text_of(get(record, "title", str)),
    )
    conversation.started = _moment(record, "started")
    contexts: dict[str | None, int] = {None: 0}
    for nth, message in enumerate(get(record, "messages", list), start=1):
        try:
            _add(conversation, contexts, expect(message, dict, "it"))
        except (RecordError, KvchatError) as error:
            raise RecordError(f"message {nth}: {error}") from None
    return conversation


def _add(
    conversation: Conversation, contexts: dict[str | None, int], record: dict[str, Any]
) -> None:
    """Add a message; `contexts` has the length of the context after each one so far."""
    node_id, parent, role = _id(record), record.get("parent"), record.get("role")
    before = conversation.nodes.get(parent) if isinstance(parent, str) else None
    if before is None and parent is not None:
        raise RecordError("its parent does not stand before it")
    if role != ("user" if before is None or before.role == "assistant" else "assistant"):
        raise RecordError("users and assistants do not take turns")
    if node_id in conversation.nodes:
        raise RecordError("its id is that of another one")
    reply = _reply(get(record, "reply", dict)) if role == "assistant" else None
    held = contexts[parent]
    if reply is not None and reply.context is not None:
        if reply.context.kept > held:
            raise RecordError("its context keeps more than there was before it")
        held = reply.context.kept + len(reply.context.ids)
    contexts[node_id] = held
    conversation.nodes[node_id] = Node(
        node_id,
        parent,
        role,
        text_of(get(record, "content", str)),
        _moment(record, "created"),
        reply,
        edited=record.get("edited") is True,
    )
    conversation.children.setdefault(parent, []).append(node_id)
    if record.get("active") is True:
        conversation.active[parent] = node_id
    if dropped := _whole(record, "dropped"):
        conversation.dropped[node_id] = max(0, dropped)


def _reply(record: dict[str, Any]) -> Reply:
    ids = _ids(record, "token_ids")
    reply = Reply(
        thinking=None if record.get("thinking") is None else text_of(get(record, "thinking", str)),
        token_ids=ids,
        logprobs=_floats(record, "logprobs", len(ids)),
        ms=_floats(record, "ms", len(ids)),
        before=_candidates(record, "before", len(ids)),
        after=_candidates(record, "after", len(ids)),
        params=[_params(each) for each in get(record, "params", list)],
        seed=_whole(record, "seed"),
        finish_reason=_end(record.get("finish_reason")),
        stop_id=_whole(record, "stop_id"),
    )
    if record.get("stats") is not None:
        reply.stats = _stats(get(record, "stats", dict))
    if record.get("context") is not None:
        context = get(record, "context", dict)
        kept = get(context, "kept", int)
        reply.context = Context(max(0, kept), _ids(context, "ids"))
    return reply


def _id(record: dict[str, Any]) -> str:
    if not (text := text_of(get(record, "id", str))):
        raise RecordError("its id is empty")
    return text


def _moment(record: dict[str, Any], name: str) -> datetime:
    if (moment := time_of(get(record, name, str))) is None:
        raise RecordError(f"'{name}' is no time in ISO 8601")
    return moment


def _end(value: object) -> ReplyEnd:
    if value is None:
        return "interrupted"
    for end in _ENDS:
        if value == end:
            return end
    raise RecordError(f"'finish_reason' must be one of {', '.join(_ENDS)}")


def _whole(record: dict[str, Any], name: str) -> int | None:
    return None if record.get(name) is None else get(record, name, int)


def _ids(record: dict[str, Any], name: str) -> array[int]:
    values = get(record, name, list)
    try:
        ids = array("i", values)
    except (TypeError, OverflowError):
        raise RecordError(f"'{name}' must be a list of token ids") from None
    if ids and min(ids) < 0:
        raise RecordError(f"'{name}' has a negative id")
    return ids


def _floats(record: dict[str, Any], name: str, count: int) -> array[float]:
    values = get(record, name, list)
    try:
        numbers = array("f", map(_float, values))
    except (TypeError, OverflowError):
        raise RecordError(f"'{name}' must be a list of numbers") from None
    if len(numbers) != count:
        raise RecordError(f"'{name}' has {len(numbers)} entries for {count} tokens")
    return numbers


def _float(value: Any) -> float:
    number: float = math.nan if value is None else _INFINITE.get(value, value)
    return number


def _candidates(record: dict[str, Any], name: str, count: int) -> list[Candidates]:
    found = []
    for each in get(record, name, list):
        ids = _ids(expect(each, dict, f"'{name}'"), "ids")
        found.append(Candidates(ids, _floats(each, "logprobs", len(ids))))
    if len(found) != count:
        raise RecordError(f"'{name}' has {len(found)} entries for {count} tokens")
    return found


def _params(value: object) -> tuple[int, SamplingParams]:
    record = expect(value, dict, "'params'")
    given = {name: record[name] for name in SamplingParams.names() if name in record}
    stop = expect(given.get("stop", []), list, "'stop'")
    for name in ("penalise_all", "temperature_last"):
        expect(given.get(name, False), bool, f"'{name}'")
    return get(record, "from", int), SamplingParams(**given | {"stop": tuple(stop)})


def _stats(record: dict[str, Any]) -> GenerationStats:
    # A file of an older version lacks what came later, which has a default.
    values = {
        field.name: record.get(field.name)
        for field in fields(GenerationStats)
        if field.name in record or field.default is MISSING
    }
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            raise RecordError(f"'{name}' of the stats must be a number")
    return GenerationStats(**values)  # type: ignore[arg-type]


def _is_finite(value: float) -> bool:
    return abs(value) < 2**63  # NaN is not, and no whole number that would not fit into a float
