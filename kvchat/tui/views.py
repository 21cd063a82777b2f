"""What the widgets show of a conversation: from the tree to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvchat.chat.conversation import Conversation
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Node
from kvchat.engine.types import SamplingParams
from kvchat.tui.widgets.cache_panel import TurnSpan
from kvchat.tui.widgets.message_block import Mark, MessageView

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel


def message_view(
    conversation: Conversation,
    node: Node,
    turns: Mapping[str, Turn],
    llm: LanguageModel | None = None,
    *,
    unseen: bool = False,
) -> MessageView:
    """Return what the transcript shows of a message.

    Args:
        conversation: where the message is.
        node: the message.
        turns: what replies cost.
        llm: the model, if one is loaded: its tokenizer finds where settings were changed.
        unseen: whether it was left out of the model's context.
    """
    reply, turn = node.reply, turns.get(node.id)
    return MessageView(
        node_id=node.id,
        role=node.role,
        text=node.content,
        thinking=(reply.thinking or "") if reply else "",
        edited=node.edited,
        finish_reason=reply.finish_reason if reply else None,
        siblings=conversation.siblings(node.id),
        ledger=turn.line() if turn else "",
        dropped=unseen,
        marks=tuple(_marks(conversation, node, llm)) if llm else (),
    )


def _marks(conversation: Conversation, node: Node, llm: LanguageModel) -> Iterator[Mark]:
    """Yield where the settings changed while a reply was written.

    The record knows the token; which character that is, only reading the tokens again tells.
    """
    reply = node.reply
    if reply is None or node.edited or reply.context is None or len(reply.params) < 2:
        return
    before = dict(zip((at for at, _ in reply.params[1:]), reply.params, strict=False))
    after = dict(reply.params[1:])
    from kvchat.chat.prompt import PromptBuilder  # there since the model is

    stream = llm.tokenizer.stream_decoder(continues=True)
    ids = conversation.context_ids(node.id)
    said = len(reply.token_ids) + (reply.stop_id is not None)
    prompts = PromptBuilder(conversation, llm.tokenizer, llm.template)
    splitter = prompts.thinking_splitter(ids[: len(ids) - said])
    thought = answered = 0
    for index, token_id in enumerate(reply.token_ids):
        if index in after:
            thinking = splitter.thinking is not False and bool(reply.thinking)
            offset = thought if thinking else answered
            yield Mark(offset, changes(before[index][1], after[index]), thinking)
        thinking_text, answer_text = splitter.push(stream.step(token_id))
        thought += len(thinking_text)
        answered += len(answer_text)


def turn_spans(conversation: Conversation, path: Sequence[Node]) -> list[TurnSpan]:
    """Return how the context's tokens are divided among the turns of a path.

    Turns that were dropped have none; one that shortened the context (by dropping the thinking of
    an earlier reply, say) takes that off the turns before it, oldest first.
    """
    sizes: list[int] = []
    unseen = len(conversation.unseen(path))
    for at, node in enumerate(path):
        if node.reply is None or node.reply.context is None or at < unseen:
            sizes += [0] * (node.reply is not None)
            continue
        end = node.reply.context.kept + len(node.reply.context.ids)
        excess = max(0, sum(sizes) - end)
        for i, size in enumerate(sizes):
            taken = min(size, excess)
            sizes[i], excess = size - taken, excess - taken
        sizes.append(end - sum(sizes))
    return [TurnSpan(size, str(n)) for n, size in enumerate(sizes, 1) if size]


def changes(old: SamplingParams, new: SamplingParams) -> str:
    """Return which settings differ, as `temperature 0.8 → 1.2`."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_shown(getattr(old, name))} → {_shown(getattr(new, name))}"
        for name in SamplingParams.names()
        if getattr(old, name) != getattr(new, name)
    )


def _shown(value: object) -> str:
    if value is None:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
