"""A conversation with everything in it that a conversation can have."""

from __future__ import annotations

from array import array
from math import inf, log

from kvchat.chat.conversation import Conversation
from kvchat.engine.types import Candidates, GenerationStats, SamplingParams, TokenGenerated

STATS = GenerationStats(
    reused=3, new=4, completion_tokens=2, prefill_ms=1.25, ttft_ms=2.5, decode_ms=0.1, kv_bytes=99
)


def token(index: int, id_: int, probability: float, params: SamplingParams) -> TokenGenerated:
    ids, logprobs = array("i", [id_, 7]), array("f", [log(probability), log(0.01)])
    return TokenGenerated(
        index=index,
        id=id_,
        text="",
        logprob=log(probability),
        ms=1 / 3,
        before=Candidates(ids, logprobs),
        after=Candidates(ids, array("f", [0.0, -inf])),
        params=params,
    )


def reply_to(
    chat: Conversation, user_id: str, text: str, ids: list[int], thinking: str = ""
) -> str:
    """Let the model say ids, half of them with other settings."""
    node = chat.start_reply(user_id)
    assert node.reply is not None
    node.reply.seed = 2**62
    for index, id_ in enumerate(ids):
        params = SamplingParams(temperature=0.1 + (index >= len(ids) // 2), stop=("x", "\n"))
        chat.add_token(node.id, token(index, id_, 0.99 if index else 0.03, params))
    if thinking:
        chat.add_text(node.id, thinking, thinking=True)
    chat.add_text(node.id, text)
    before = chat.context_ids(node.parent or "")
    chat.finish_reply(node.id, "stop", stop_id=2, stats=STATS, context_ids=[*before, 1, 5, *ids, 2])
    return node.id


def rich_chat() -> Conversation:
    chat = Conversation(system="Be *brief*.", title="公园 & <parks>")
    first = chat.add_user("Where to?\n\n```\ncode\n```")
    answer = reply_to(chat, first.id, "To the park.", [10, 11, 12, 13], thinking="Hm.\nA park?")
    second = chat.add_user("Why?")
    reply_to(chat, second.id, "Because.", [20, 21])
    chat.edit_user(second.id, "Why not home?")
    third = chat.active_path()[-1]
    cut = chat.start_reply(third.id)
    chat.finish_reply(cut.id, "interrupted")
    edited = chat.edit_reply(answer, "To the *zoo*.")
    typed = chat.fork_reply(answer, 2, [99])
    chat.add_text(typed.id, "To a")
    chat.finish_reply(typed.id, "cancelled", stats=STATS)
    chat.select(edited.id)
    chat.add_user("Zoo? 👩‍👩‍👧")
    chat.branch(third.id)
    chat.select(edited.id)
    chat.drop(third.id, 2)
    return chat
