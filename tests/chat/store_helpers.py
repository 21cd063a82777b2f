"""Conversations without a model, and how two of them are compared bit for bit.

Without hypothesis, which takes a while to import: programs that are killed import this too.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict
from typing import Any

from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Node
from kvchat.engine.types import Candidates, GenerationStats, SamplingParams, TokenGenerated

PARAMS = SamplingParams()
STATS = GenerationStats(3, 4, 5, 1.25, 0.1, 7 / 3, 4096)


def token(token_id: int, params: SamplingParams = PARAMS, width: int = 3) -> TokenGenerated:
    """A token event with as many candidates as asked for."""
    near = range(token_id, token_id + width)
    before = Candidates(array("i", near), array("f", [-0.1 * n for n in near]))
    after = Candidates(before.ids[: width // 2], before.logprobs[: width // 2])
    return TokenGenerated(
        0, token_id, f"<{token_id}>", -token_id / 7, token_id / 3, before, after, params
    )


def write(
    chat: Conversation, node: Node, ids: list[int], params: SamplingParams = PARAMS, width: int = 3
) -> None:
    """Let a running reply grow."""
    for token_id in ids:
        chat.add_token(node.id, token(token_id, params, width))
        chat.add_text(node.id, f"<{token_id}>", thinking=token_id % 5 == 0)


def say(chat: Conversation, text: str, ids: list[int], reason: str = "stop") -> Node:
    """Add a turn with a reply of these tokens."""
    node = chat.start_reply(chat.add_user(text).id)
    node.reply.seed = 2**63 - 1
    write(chat, node, ids)
    context = [*chat.context_ids(node.id), 1000, *ids, 2]
    return chat.finish_reply(
        node.id, reason, stop_id=2 if reason == "stop" else None, stats=STATS, context_ids=context
    )


def image(chat: Conversation) -> dict[str, Any]:
    """Everything about a conversation as values that compare by their bits."""
    return {
        "id": chat.id,
        "title": chat.title,
        "system": chat.system,
        "keep_cache": chat.keep_cache,
        "started": (chat.started, chat.started.utcoffset(), chat.started.tzname()),
        "nodes": {node_id: _node(node) for node_id, node in chat.nodes.items()},
        "children": chat.children,
        "active": chat.active,
        "dropped": {at: n for at, n in chat.dropped.items() if at in chat.nodes},
    }


def _node(node: Node) -> tuple[Any, ...]:
    reply = node.reply
    whole: tuple[Any, ...] = ()
    if reply is not None:
        whole = (
            reply.thinking,
            reply.token_ids.tobytes(),
            reply.logprobs.tobytes(),
            reply.ms.tobytes(),
            [(c.ids.tobytes(), c.logprobs.tobytes()) for c in (*reply.before, *reply.after)],
            [(at, asdict(params)) for at, params in reply.params],
            reply.seed,
            reply.finish_reason,
            reply.stop_id,
            reply.stats,
            reply.context and (reply.context.kept, reply.context.ids.tobytes()),
        )
    return node.id, node.parent, node.role, node.content, node.created, node.edited, whole


def turn(reply_id: str, reused: int = 1) -> Turn:
    return Turn(
        reply_id=reply_id,
        reused=reused,
        restored=0,
        new=2,
        decoded=3,
        finish_reason="stop",
        prefill_ms=1.5,
        ttft_ms=0.1,
        decode_tps=100 / 3,
        uncached_ttft_ms=None,
        divergence=None,
    )
