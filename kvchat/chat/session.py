"""ChatSession: a conversation that a model answers, each turn prefilling only what is new.

A session asks the prompt builder for the ids of the whole conversation, hands them to the engine
(which reuses what it holds) and records everything about the reply in the tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from kvchat.chat.conversation import Conversation, Deleted
from kvchat.chat.events import ChatEvent, ReplyStarted, TextAdded, TurnFinished
from kvchat.chat.ledger import Loaded, PrefillSpeed, Price, Turn
from kvchat.chat.nodes import Node
from kvchat.chat.prefix import divergence
from kvchat.chat.prompt import PromptBuilder
from kvchat.chat.reuse import ReuseWatch, Source
from kvchat.engine.errors import ContextOverflowError, KvchatError
from kvchat.engine.types import (
    CacheEngine,
    GenerationFinished,
    PrefillFinished,
    PrefillProgress,
    SamplingParams,
    TextStream,
    TokenGenerated,
)

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel
    from kvchat.models.thinking import ThinkingSplitter

Overflow = Literal["ask", "stop", "drop-oldest"]
"""What to do when a conversation no longer fits: `ask` and `stop` refuse the turn (with `ask`,
whoever drives the session offers the choice), `drop-oldest` leaves old turns out."""

REPLY_ROOM = 256
"""Tokens of context that a reply should have at least before old turns are dropped for it."""


class ChatSession:
    """A conversation with a model.

    Args:
        llm: the model; one session at a time may use it.
        system: system prompt of a new conversation.
        conversation: one to go on with instead.
        params: sampling settings; the model's own defaults if not given.
        overflow: what to do when the context is full.
        thinking: switches reasoning on or off where the template allows it; None leaves it.
    """

    def __init__(
        self,
        llm: LanguageModel,
        system: str = "",
        *,
        conversation: Conversation | None = None,
        params: SamplingParams | None = None,
        overflow: Overflow = "ask",
        thinking: bool | None = None,
    ) -> None:
        self.llm = llm
        self.conversation = conversation or Conversation(system=system)
        self.params = params or llm.defaults
        """Replace it at any time, from any thread: it is read once for every token."""
        self.overflow: Overflow = overflow
        self.ledger: list[Turn] = []
        self.loaded = Loaded()
        """What became of a snapshot since the last turn."""
        self.speed = PrefillSpeed()
        self._reuse = ReuseWatch()
        self.prompts = PromptBuilder(self.conversation, llm.tokenizer, llm.template, thinking)

    @property
    def engine(self) -> CacheEngine:
        """The model's engine, as far as a session knows it."""
        return self.llm.engine

    # Turns

    def send(self, text: str, *, overflow: Overflow | None = None) -> Iterator[ChatEvent]:
        """Say something and yield the reply as it is written.

        Raises:
            ContextOverflowError: it does not fit; nothing has changed.
            KvchatError: another failure; if nothing was replied yet, nothing has changed.
        """
        with self._attempt():
            yield from self._reply(self.conversation.add_user(text), overflow)

    def regenerate(
        self, node_id: str | None = None, *, overflow: Overflow | None = None
    ) -> Iterator[ChatEvent]:
        """Write another reply beside this one, which stays, or one to a message of the user's.

        By default that is the end of the active path.
        """
        node = self.conversation.node(node_id) if node_id else self._end() or self.last_reply()
        user = node if node.role == "user" else self.conversation.node(node.parent or "")
        with self._attempt():
            yield from self._reply(user, overflow)

    def edit(
        self, node_id: str, text: str, *, overflow: Overflow | None = None
    ) -> Iterator[ChatEvent]:
        """Change a message on a new branch; the old one stays.

        A message of the user's is answered anew. A reply is not: continue it, or say something.
        """
        if self.conversation.node(node_id).role == "user":
            with self._attempt():
                yield from self._reply(self.conversation.edit_user(node_id, text), overflow)
        else:
            self.conversation.edit_reply(node_id, text)

    def continue_reply(self, reply_id: str | None = None) -> Iterator[ChatEvent]:
        """Go on with a reply that was cut or edited (by default the last one).

        What another model wrote is gone on with on a branch, as if the user had written it.

        Raises:
            ContextOverflowError: the context is full.
        """
        started = time.perf_counter()
        node = self.conversation.finished_reply(reply_id)[0] if reply_id else self.last_reply()
        end, is_copy = self._end(), not node.edited and not self.prompts.says_here(node)
        if is_copy:
            node = self.conversation.edit_reply(node.id, node.content)
        if node.edited:
            try:
                ids, written = self.prompts.for_edited_reply(node)
                self._check_room(len(ids))
            except KvchatError:
                if is_copy and end is not None:
                    self.conversation.delete(node.id)
                    self.conversation.branch(end.id)
                raise
            self.conversation.resume_edited(node.id, written)
        else:
            ids = self.prompts.for_more_of(node)
            self._check_room(len(ids))
            node = self.conversation.continue_reply(node.id)
        self.conversation.select(node.id)
        yield from self._write(node, ids, started)

    def fork(self, reply_id: str, tokens: int, token_id: int | None = None) -> Iterator[ChatEvent]:
        """Go on from the first `tokens` tokens of a reply, on a branch of its own.

        `token_id` takes the place of what the model said next.

        Raises:
            ContextOverflowError: the context is full.
        """
        started = time.perf_counter()
        node, _ = self.conversation.finished_reply(reply_id)
        if not node.edited and not self.prompts.says_here(node):
            raise KvchatError(
                "Another model wrote this reply, so this one cannot go on in the middle of it. "
                "Continue it at its end, or regenerate it."
            )
        ids = self.prompts.for_more_of(node, tokens)
        chosen = [] if token_id is None else [token_id]
        self._check_room(len(ids) + len(chosen))
        node = self.conversation.fork_reply(reply_id, tokens, chosen)
        yield from self._write(node, [*ids, *chosen], started)

    def last_reply(self) -> Node:
        """Return the last reply on the active path.

        Raises:
            KvchatError: there is none.
        """
        for node in reversed(self.conversation.active_path()):
            if node.reply is not None:
                return node
        raise KvchatError("There is no reply yet; say something first.")

    # Changes that generate nothing

    def select(self, node_id: str) -> None:
        """Go to the branch of a message; `settle` brings its cache back."""
        self.conversation.select(node_id)

    def set_system(self, text: str) -> str:
        """Change the system prompt and return the old one; the next turn reads all of it anew."""
        return self.conversation.set_system(text)

    def set_thinking(self, thinking: bool | None) -> None:
        """Switch reasoning on or off where the template allows it; None leaves it."""
        llm = self.llm
        self.prompts = PromptBuilder(self.conversation, llm.tokenizer, llm.template, thinking)

    def delete(self, node_id: str) -> Deleted:
        """Delete a message and all that follows it; `conversation.restore` undoes it."""
        return self.conversation.delete(node_id)

    # Looking ahead

    def certain(self) -> list[int]:
        """Return what the next turn is certain to begin with; nothing if that would not fit.

        That is the rendering up to the user's next words: the end of the last reply, and the
        whole reply once more where the template shortens it (drops its thinking, say).
        """
        end = self._end()
        if end is None or end.role == "user":
            return []
        ids = self.prompts.certain(end.id)
        return ids if len(ids) <= self.engine.max_seq_len else []

    def settle(self) -> Iterator[PrefillProgress]:
        """Prefill in idle time what the next turn is certain to begin with.

        A cancel ends it quietly. Afterwards a turn prefills the user's words and the reply's
        header only.
        """
        ids = self.certain()
        if not ids:
            return
        started = time.perf_counter()
        source, cached = self._source(self._end()), list(self.engine.ids)
        progress = None
        for progress in self.engine.prefill(ids):
            yield progress
        if progress is not None:
            done = progress.done == progress.new
            self._reuse.note(source, cached, ids, progress.reused, idle=done)
            if done:
                ms = (time.perf_counter() - started) * 1e3
                self.speed.add(progress.reused, progress.new, ms)

    def price(self, text: str, instead_of: str | None = None) -> Price:
        """Estimate what sending `text` would cost, or putting it in a message's place."""
        if instead_of is not None:
            parent = self.conversation.node(instead_of).parent
        else:
            end = self._end()
            parent = end.id if end else None
        ids = self.prompts.for_text(parent, text)
        reused = self.engine.reusable(ids)
        new = len(ids) - reused
        return Price(reused, new, self.speed.estimate(new, reused))

    # How a reply comes about

    def _reply(self, user: Node, overflow: Overflow | None) -> Iterator[ChatEvent]:
        started = time.perf_counter()
        ids, dropped = self._make_room(user, overflow or self.overflow)
        node = self.conversation.start_reply(user.id)
        yield from self._write(node, ids, started, dropped)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Undo what a turn did to the tree if it fails before the reply has a token."""
        chat = self.conversation
        known, dropped, end = set(chat.nodes), dict(chat.dropped), self._end()
        try:
            yield
        except Exception:
            added = [node for node in chat if node.id not in known]
            if not any(node.reply and node.reply.token_ids for node in added):
                for node in added[:1]:
                    chat.delete(node.id)
                chat.dropped = dropped
                if end is not None:
                    chat.branch(end.id)
            raise

    def _write(
        self, node: Node, ids: list[int], started: float, dropped: int = 0
    ) -> Iterator[ChatEvent]:
        """Run the engine on a prompt, which ends with what the reply has so far; record it all."""
        engine, conversation, reply = self.engine, self.conversation, node.reply
        assert reply is not None
        prompt = ids[: len(ids) - len(reply.token_ids)]
        cached = list(engine.ids)
        source = self._source(node if reply.token_ids else conversation.node(node.parent or ""))
        prefilled: PrefillFinished | None = None
        finished: GenerationFinished | None = None
        ttft_ms = 0.0
        try:
            stream, splitter = self._take_up(node, prompt)
            yield ReplyStarted(node.id, node.content, reply.thinking or "")
            for event in engine.generate(ids, lambda: self.params, stream):
                match event:
                    case PrefillFinished():
                        prefilled = event
                        self.speed.add(event.reused, event.new, event.ms)
                        self._reuse.note(source, cached, ids, event.reused)
                        reply.seed = event.seed if reply.seed is None else reply.seed
                    case TokenGenerated():
                        ttft_ms = ttft_ms or (time.perf_counter() - started) * 1e3
                        conversation.add_token(node.id, event)
                    case GenerationFinished():
                        finished = event
                if isinstance(event, TokenGenerated | GenerationFinished):
                    yield from self._add_text(node, splitter.push(event.text))
                if finished is not None:
                    yield from self._add_text(node, splitter.flush())
                yield event
        finally:
            stop_id = finished.stop_id if finished else None
            conversation.finish_reply(
                node.id,
                finished.reason if finished else "interrupted",
                stop_id=stop_id,
                stats=finished.stats if finished else None,
                context_ids=[*prompt, *reply.token_ids, *([] if stop_id is None else [stop_id])],
            )
        assert finished is not None
        turn = Turn(
            reply_id=node.id,
            reused=finished.stats.reused,
            restored=prefilled.restored if prefilled else 0,
            new=finished.stats.new,
            decoded=finished.stats.completion_tokens,
            finish_reason=finished.reason,
            prefill_ms=finished.stats.prefill_ms,
            ttft_ms=ttft_ms,
            decode_tps=finished.stats.decode_tps,
            uncached_ttft_ms=self.speed.estimate(finished.stats.prompt_tokens),
            divergence=divergence(self.llm.tokenizer, cached, ids),
            dropped_turns=dropped,
            seed=prefilled.seed if prefilled else 0,
            proposed=finished.stats.proposed,
            accepted=finished.stats.accepted,
            loaded=min(self.loaded.tokens, finished.stats.reused),
            snapshot_problem=self.loaded.problem,
            reuse_ended=self._reuse.take(),
        )
        self.loaded = Loaded()
        self.ledger.append(turn)
        yield TurnFinished(turn)

    def _add_text(self, node: Node, pieces: tuple[str, str]) -> Iterator[TextAdded]:
        for text, thinking in zip(pieces, (True, False), strict=True):
            if text:
                self.conversation.add_text(node.id, text, thinking=thinking)
                yield TextAdded(text, thinking)

    def _take_up(self, node: Node, prompt: list[int]) -> tuple[TextStream, ThinkingSplitter]:
        """Return the decoders of a reply, brought up to the tokens that it has already.

        The text is set to what those tokens say: a character that was cut in half when the reply
        was stopped may be completed now.
        """
        reply = node.reply
        assert reply is not None
        stream = self.llm.tokenizer.stream_decoder(continues=True)
        splitter = self.prompts.thinking_splitter(prompt)
        pieces = [splitter.push(stream.step(token_id)) for token_id in reply.token_ids]
        reply.thinking = "".join(thought for thought, _ in pieces) or None
        node.content = "".join(answer for _, answer in pieces)
        return stream, splitter

    # Overflow

    def _make_room(self, user: Node, overflow: Overflow) -> tuple[list[int], int]:
        """Return a prompt for a reply to `user` that fits, and how many old turns it leaves out.

        Raises:
            ContextOverflowError: the message alone is too long, or dropping is not allowed.
        """
        limit = self.engine.max_seq_len
        droppable = len(self.prompts.visible_path_to(user.id)) > 1
        room = min(REPLY_ROOM, limit // 4) if droppable and overflow != "stop" else 1
        ids = self.prompts.for_reply(user.id)
        if len(ids) + room <= limit:
            return ids, 0
        alone = len(self.prompts.alone(user.content))
        if alone + 1 > limit:
            raise ContextOverflowError(
                f"This message alone takes {alone:,} tokens and the context holds {limit:,}; "
                "shorten it, or raise --ctx if the model allows it.",
                needed=alone + 1,
                limit=limit,
            )
        if overflow != "drop-oldest":
            self._check_room(len(ids) + room - 1, can_drop=True, can_begin=len(ids) < limit)
        # More is freed than this turn needs: every dropping costs a new prefill of what remains.
        target, path = limit - max(room, limit // 4), self.conversation.path_to(user.id)
        before = unseen = len(self.conversation.unseen(path))
        while len(ids) > target and unseen + 1 < len(path):
            unseen += 2
            self.conversation.drop(user.id, unseen)
            ids = self.prompts.for_reply(user.id)
        return ids, (unseen - before) // 2

    def _check_room(self, needed: int, *, can_drop: bool = False, can_begin: bool = False) -> None:
        limit = self.engine.max_seq_len
        if needed + 1 > limit:
            raise ContextOverflowError(
                f"The conversation would need {needed:,} tokens and the context holds {limit:,}; "
                "drop the oldest turns, start a new chat, or raise --ctx if the model allows it.",
                needed=needed + 1,
                limit=limit,
                can_drop=can_drop,
                can_begin=can_begin,
            )

    def _source(self, end: Node | None) -> Source:
        return Source.of(self.prompts, self.conversation.path_to(end.id) if end else [])

    def _end(self) -> Node | None:
        path = self.conversation.active_path()
        return path[-1] if path else None
