"""Whole chats on tiny models: real engine, tokenizer and template, random weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from template_zoo import ZOO, ZooTemplate, byte_tokenizer
from tiny import tiny_model

from kvchat.chat.nodes import Node
from kvchat.chat.session import ChatSession
from kvchat.engine.engine import STASH_BUDGET, Engine
from kvchat.engine.model import Transformer
from kvchat.engine.sampling import Draw, Sampler
from kvchat.engine.types import SamplingParams, TokenGenerated
from kvchat.models.load import LanguageModel
from kvchat.models.message import Message
from kvchat.models.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=12)
CHUNK = 16
"""Tokens per prefill chunk."""


@lru_cache
def shared_model(vocab_size: int, max_seq_len: int = 4096) -> Transformer:
    return tiny_model(vocab_size=vocab_size, max_seq_len=max_seq_len)


@lru_cache
def tokenizer_of(name: str) -> Tokenizer:
    return byte_tokenizer(ZOO[name])


MERGES = "o+w ow+n b+r br+own Ġ+brown T+h Th+e o+x f+ox Ġ+fox a+b ab+c ï+¿ ï¿+½ Ċ+Ċ ĊĊ+Ċ Ġ+Ġ .+Ċ"


@lru_cache
def merging_tokenizer() -> Tokenizer:
    """ChatML's tokens, and merges: the same text has many spellings."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    merges = [tuple(merge.split("+")) for merge in MERGES.split()]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(ZOO["chatml"].control_tokens))
    return Tokenizer(backend, eos_token_id=backend.token_to_id("<|im_end|>"))


class DictatedSampler(Sampler):
    """The real sampler, with the logits raised of what it is to draw next."""

    def __init__(self, exempt_ids: Iterable[int]) -> None:
        super().__init__(tuple(exempt_ids))
        self.dictated: list[int] = []

    def sample(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        params: SamplingParams,
        generator: torch.Generator | None = None,
    ) -> Draw:
        if self.dictated:
            logits = logits.clone()
            logits[self.dictated.pop(0)] += 1e6
        return super().sample(logits, context, params, generator)


def tiny_llm(
    name: str = "chatml",
    *,
    tokenizer: Tokenizer | None = None,
    zoo: ZooTemplate | None = None,
    ctx: int | None = None,
    stash_bytes: int = STASH_BUDGET,
    chunk_size: int = CHUNK,
) -> LanguageModel:
    """A model with one of the zoo's templates and a token for every byte."""
    tokenizer = tokenizer or tokenizer_of(name)
    engine = Engine(
        shared_model(tokenizer.vocab_size),
        eog_ids=tokenizer.eog_ids,
        exempt_ids=tokenizer.exempt_ids,
        max_seq_len=ctx,
        stash_budget=stash_bytes,
        chunk_size=chunk_size,
    )
    engine.sampler = DictatedSampler(tokenizer.exempt_ids)
    return LanguageModel(
        name=name,
        path=Path("tiny.gguf"),
        engine=engine,
        tokenizer=tokenizer,
        template=(zoo or ZOO[name]).chat_template(),
        defaults=GREEDY,
        dtype="float32",
        quant="none",
        device="cpu",
    )


def tiny_session(
    name: str = "chatml",
    system: str = "",
    *,
    llm: LanguageModel | None = None,
    session: dict[str, Any] | None = None,
    **settings: Any,
) -> ChatSession:
    return ChatSession(llm or tiny_llm(name, **settings), system, **(session or {}))


def dictate(session: ChatSession, reply: str | Sequence[int], stop: bool = True) -> None:
    """Make the next reply say this, control tokens recognised, and end."""
    tokenizer = session.llm.tokenizer
    ids = tokenizer.encode(reply) if isinstance(reply, str) else list(reply)
    assert isinstance(session.llm.engine.sampler, DictatedSampler)
    session.llm.engine.sampler.dictated = [*ids, *([tokenizer.eos_token_id] if stop else [])]


def say(session: ChatSession, text: str, reply: str | Sequence[int] | None = None) -> Node:
    """Send a message, dictate the whole reply if it is given, and return the reply."""
    ordinary = session.params
    if reply is not None:
        dictate(session, reply)
        session.params = ordinary.updated(max_tokens=1000)
    list(session.send(text))
    session.params = ordinary
    return session.last_reply()


def cold_reply(llm: LanguageModel, ids: Sequence[int], params: SamplingParams) -> list[int]:
    """What a fresh engine says to a prompt."""
    tokenizer = llm.tokenizer
    fresh = Engine(
        llm.model,
        eog_ids=tokenizer.eog_ids,
        exempt_ids=tokenizer.exempt_ids,
        max_seq_len=llm.engine.max_seq_len,
        chunk_size=4096,
    )
    events = fresh.generate(ids, lambda: params, tokenizer.stream_decoder(continues=True))
    return [event.id for event in events if isinstance(event, TokenGenerated)]


def spelled(tokenizer: Tokenizer, parts: Iterable[int | str]) -> list[int | str]:
    """Ids or segments as control ids and the texts between them."""
    out: list[int | str] = []
    run: list[int | str] = []
    for part in [*parts, -1]:
        if isinstance(part, str) or (part >= 0 and not tokenizer.is_control(part)):
            run.append(part)
            continue
        raw = b"".join(p.encode() if isinstance(p, str) else tokenizer.token_bytes(p) for p in run)
        out += [text] if (text := raw.decode("utf-8", "replace")) else []
        out.append(part)
        run = []
    return out[:-1]


def messages_of(session: ChatSession, path: Sequence[Node]) -> list[Message]:
    """What the template is given for a path, told once more."""
    seen = path[len(session.conversation.unseen(path)) :]
    system = session.conversation.system
    return ([Message("system", system)] if system else []) + [
        Message(node.role, node.content, node.reply.thinking if node.reply else None)
        for node in seen
    ]


def held_exactly(session: ChatSession) -> None:
    """The cache's length and contents are those of its ids."""
    engine = session.llm.engine
    cache = engine._context.cache
    ids = list(engine.ids)
    assert len(ids) == cache.length <= engine.max_seq_len
    assert engine.stash_bytes <= engine.stash.budget
    if not ids:
        return
    fresh = Engine(session.llm.model, chunk_size=4096)
    list(fresh.prefill(ids))
    for kept, new in (
        (cache.keys, fresh._context.cache.keys),
        (cache.values, fresh._context.cache.values),
    ):
        for a, b in zip(kept, new, strict=True):
            torch.testing.assert_close(a[:, : len(ids)], b[:, : len(ids)], atol=1e-4, rtol=1e-4)
