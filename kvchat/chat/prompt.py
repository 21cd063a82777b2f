"""From a place in the conversation to the ids that the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvchat.chat.conversation import Conversation
from kvchat.chat.decoded import DecodedContext
from kvchat.chat.nodes import Node
from kvchat.chat.prefix import Passage, plan
from kvchat.engine.errors import TemplateError
from kvchat.engine.token_ids import common_prefix
from kvchat.models.message import Message
from kvchat.models.thinking import ThinkingSplitter

if TYPE_CHECKING:
    from kvchat.models.template import ChatTemplate
    from kvchat.models.tokenizer import Tokenizer

_PROBE = Message("user", "kvchat-probe")
_TAG_TOKENS = 32
"""More than a tag and the line breaks after it can take."""


class PromptBuilder:
    """Renders paths of a conversation and encodes them, keeping ids that are known already.

    Args:
        conversation: whose paths are rendered; replies bring along the ids they were written with.
        tokenizer: of the model.
        template: of the model.
        thinking: switches reasoning on or off where the template allows it; None leaves it.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        thinking: bool | None = None,
    ) -> None:
        self.conversation = conversation
        self.tokenizer = tokenizer
        self.template = template
        self.thinking = thinking
        self._base = DecodedContext(tokenizer)

    def visible_path_to(self, node_id: str | None) -> list[Node]:
        """Return the path to a message without the turns dropped when the context was full."""
        if node_id is None:
            return []
        path = self.conversation.path_to(node_id)
        return path[len(self.conversation.unseen(path)) :]

    def for_reply(self, user_id: str) -> list[int]:
        """Return the prompt for a reply to a user message: everything up to the reply's header."""
        path = self.visible_path_to(user_id)
        return self._encode(path, self._segments(self._messages(path)))

    def for_text(self, parent_id: str | None, text: str) -> list[int]:
        """Return the prompt there would be if `text` were said after a message."""
        path = self.visible_path_to(parent_id)
        messages = [*self._messages(path), Message("user", text)]
        return self._encode(path, self._segments(messages))

    def alone(self, text: str) -> list[int]:
        """Return the prompt of a message with nothing before it but the system prompt."""
        segments = self._segments([*self._messages([]), Message("user", text)])
        return plan(DecodedContext(self.tokenizer), segments).ids

    def for_more_of(self, node: Node, tokens: int | None = None) -> list[int]:
        """Return the prompt that goes on from the first `tokens` tokens of a reply, or from all.

        That is the context it was written in, unless the conversation before it has changed.
        """
        assert node.reply is not None and node.parent is not None
        prompt = self.for_reply(node.parent)
        if node.reply.context is not None:
            context = self.conversation.context_ids(node.id)
            after = len(node.reply.token_ids) + (node.reply.stop_id is not None)
            before = context[: len(context) - after]
            if prompt[: len(before)] == before:
                prompt = before
        return [*prompt, *node.reply.token_ids[:tokens]]

    def for_edited_reply(self, node: Node) -> tuple[list[int], list[int]]:
        """Return the prompt that goes on from a reply the user wrote, and the reply's part of it.

        As many of the original's ids as the text still agrees with are kept.
        """
        assert node.reply is not None and node.parent is not None
        path = self.visible_path_to(node.id)
        segments = self._segments(self._messages(path), continue_final=True)
        prompt = self.for_reply(node.parent)
        # What the user wrote must not merge with the end of the prompt, as line breaks would.
        written = self._known(node.reply.token_ids)
        self._base.update([*prompt, *written], [range(len(prompt) + len(written))])
        ids = plan(self._base, segments).ids
        return ids, ids[common_prefix(prompt, ids) :]

    def certain(self, node_id: str) -> list[int]:
        """Return the ids that the prompt after the next user message is certain to begin with."""
        path = self.visible_path_to(node_id)
        segments = self._segments([*self._messages(path), _PROBE])
        for at in reversed(range(len(segments))):
            if isinstance(text := segments[at], str) and _PROBE.content in text:
                return self._encode(path, segments[:at])
        return []

    def says_here(self, node: Node) -> bool:
        """Whether a reply's ids say here what stands in it: another model's say something else."""
        assert node.reply is not None and node.parent is not None
        ids = node.reply.token_ids
        if len(self._known(ids)) < len(ids):
            return False
        stream = self.tokenizer.stream_decoder(continues=True)
        splitter = self.thinking_splitter(self.for_reply(node.parent))
        pieces = [splitter.push(stream.step(id_)) for id_ in ids]
        pieces += [splitter.push(stream.flush()), splitter.flush()]
        says = "".join(answer for _, answer in pieces)
        # A character that was cut in half may be whole by now, and a stop string inside a token
        # leaves a beginning of it that no token says.
        said = node.content.rstrip("\N{REPLACEMENT CHARACTER}")
        return says.startswith(said) or said.startswith(says)

    def thinking_splitter(self, prompt: Sequence[int]) -> ThinkingSplitter:
        """Return what tells a reply's reasoning from its answer."""
        tags = self.template.thinking_tags
        end = self.tokenizer.decode(prompt[-_TAG_TOKENS:]).rstrip()
        opened = self._opens_thinking and end.endswith(tags.open)
        return ThinkingSplitter(tags, opened=opened)

    @cached_property
    def _opens_thinking(self) -> bool:
        """Whether replies begin inside their reasoning, opened by the template.

        A template that takes this conversation may refuse the short one it is tried on, for want
        of a system prompt say. Then the end of the prompt alone decides.
        """
        try:
            return self.template.opens_thinking(enable_thinking=self.thinking)
        except TemplateError:
            return True

    def _written(self, node: Node) -> Sequence[int]:
        return self._known(node.reply.token_ids) if node.reply and not node.edited else ()

    def _known(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids before the first that only another model has."""
        size = self.tokenizer.vocab_size
        if not ids or max(ids) < size:
            return ids
        return ids[: next(n for n, id_ in enumerate(ids) if id_ >= size)]

    def _messages(self, path: Sequence[Node]) -> list[Message]:
        messages = [
            Message(node.role, node.content, node.reply.thinking if node.reply else None)
            for node in path
        ]
        system = self.conversation.system
        return [Message("system", system), *messages] if system else messages

    def _segments(
        self, messages: Sequence[Message], continue_final: bool = False
    ) -> list[int | str]:
        return self.template.render_segments(
            messages,
            self.tokenizer,
            now=self.conversation.started,
            enable_thinking=self.thinking,
            continue_final=continue_final,
        )

    def _encode(self, path: Sequence[Node], segments: Sequence[int | str]) -> list[int]:
        """Encode a rendering of `path`, and perhaps more, by way of its last reply's context."""
        if path:
            last = path[-1].id
            spans = self.conversation.generated_spans(last)
            self._base.update(self._known(self.conversation.context_to(last)), spans)
        else:
            self._base.update([])
        passages = [Passage(node.content, self._written(node)) for node in path]
        return plan(self._base, segments, passages).ids
