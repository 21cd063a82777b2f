"""Chats of many turns, written without running a model."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from statistics import median

from kvchat.bench import texts
from kvchat.chat.conversation import Conversation
from kvchat.chat.nodes import Node
from kvchat.chat.prompt import PromptBuilder
from kvchat.engine.token_ids import common_prefix
from kvchat.models.load import LanguageModel
from kvchat.models.tokenizer import Tokenizer

USER_TOKENS, REPLY_TOKENS = 40, 260


def bookkeeping_ms(llm: LanguageModel, *, turns: int, repeats: int) -> float:
    """Time to find out what the next prompt of a long chat shares with what the model holds.

    The chat may be far longer than the context: its ids are compared, not run. As in the program,
    what is certain of each prompt was rendered in idle time before it.

    Args:
        llm: whose template and tokenizer are used.
        turns: length of the chat before the first timed prompt, 300 tokens a turn.
        repeats: prompts that are timed, one turn after the other.

    Returns:
        Milliseconds to render, encode and compare a prompt; the median.
    """
    conversation = Conversation()
    prompts = PromptBuilder(conversation, llm.tokenizer, llm.template)
    held: list[int] = []
    took: list[float] = []
    for nth in range(turns + repeats):
        user = conversation.add_user(texts.message(llm.tokenizer, USER_TOKENS, nth))
        started = time.perf_counter()
        ids = prompts.for_reply(user.id)
        common_prefix(held, ids)
        took.append((time.perf_counter() - started) * 1e3)
        reply = write_reply(conversation, llm.tokenizer, user, nth, before=ids)
        held = conversation.context_ids(reply.id)
        prompts.certain(reply.id)
    return median(took[turns:])


def chat_of(tokenizer: Tokenizer, messages: int) -> Conversation:
    """Write a chat of so many messages, as one that was kept from another day."""
    conversation = Conversation()
    for nth in range(messages // 2):
        user = conversation.add_user(texts.message(tokenizer, USER_TOKENS, nth))
        write_reply(conversation, tokenizer, user, nth)
    return conversation


def write_reply(
    conversation: Conversation,
    tokenizer: Tokenizer,
    user: Node,
    nth: int,
    before: Sequence[int] | None = None,
) -> Node:
    """Reply to a message with a text that ends as a model's does.

    Args:
        conversation: where to.
        tokenizer: of the model that is said to have written it.
        user: the message.
        nth: makes replies begin with different words.
        before: the ids of the prompt; None leaves the reply's context unknown.
    """
    stop_id = tokenizer.eos_token_id
    ids = texts.tokens(tokenizer, REPLY_TOKENS, nth)
    node = conversation.start_reply(user.id)
    assert node.reply is not None
    node.reply.token_ids = array("i", ids)
    conversation.add_text(node.id, tokenizer.decode(ids))
    ended = [] if stop_id is None else [stop_id]
    context_ids = None if before is None else [*before, *ids, *ended]
    return conversation.finish_reply(node.id, "stop", stop_id=stop_id, context_ids=context_ids)
