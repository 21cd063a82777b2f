"""Chat template rendering: from messages to the text a model was trained on.

The text is the one Hugging Face's `apply_chat_template` renders. Unlike there, text that comes
from a message can never become a control token; see `ChatTemplate.render_segments`.
"""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from jinja2.environment import Template

from kvchat.engine.errors import TemplateError
from kvchat.models.message import ROLES, Message, as_data, folded, has_system, merged, texts_of
from kvchat.models.stand_ins import replace_all, stand_ins, unused_characters
from kvchat.models.template_env import Refusal, TemplateEnvironment
from kvchat.models.template_source import (
    default_source,
    folder_source,
    gguf_source,
    gguf_token_text,
    token_text,
)
from kvchat.models.thinking import ThinkingTags, tags_in

__all__ = ["ROLES", "ChatTemplate", "Message", "TemplateTokenizer"]

_ENVIRONMENT = TemplateEnvironment()
_ASKED = Message("user", "kvchat-user-probe")
_TOLD = Message("system", "kvchat-system-probe")


class TemplateTokenizer(Protocol):
    """What rendering needs to know of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text."""

    @property
    def add_bos_default(self) -> bool:
        """Whether the model expects every text to begin with `bos_id`."""

    @property
    def control_starts(self) -> Collection[str]:
        """First characters of the tokens a template may write and a user must not."""

    def split(self, text: str) -> list[int | str]:
        """Cut a text into control tokens, as ids, and the plain text between them."""


class ChatTemplate:
    """A chat template, ready to render conversations.

    Args:
        source: the jinja source; it is not compiled before it is needed.
        bos_token: text of the token that begins a text.
        eos_token: text of the token that ends one.
        is_default: the model has no template of its own, and `source` is a guess.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", is_default: bool = False
    ) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.is_default = is_default

    @classmethod
    def from_folder(
        cls, folder: Path, tokenizer_config: Mapping[str, Any], vocabulary: Container[str] = ()
    ) -> Self:
        """Take the template of a Hugging Face model folder, or a default one.

        Args:
            folder: where `chat_template.jinja` may be.
            tokenizer_config: the content of tokenizer_config.json.
            vocabulary: the model's tokens, which decide between the default templates.

        Raises:
            TemplateError: there is a template but it cannot be read.
        """
        source = folder_source(folder, tokenizer_config)
        return cls(
            default_source(vocabulary) if source is None else source,
            bos_token=token_text(tokenizer_config.get("bos_token")),
            eos_token=token_text(tokenizer_config.get("eos_token")),
            is_default=source is None,
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Take the template from a GGUF file's metadata, or a default one.

        Raises:
            TemplateError: the metadata hold something else than text in its place.
        """
        source = gguf_source(metadata)
        tokens = metadata.get("tokenizer.ggml.tokens")
        vocabulary = tokens if isinstance(tokens, list) else []
        return cls(
            default_source(vocabulary) if source is None else source,
            bos_token=gguf_token_text(metadata, vocabulary, "bos"),
            eos_token=gguf_token_text(metadata, vocabulary, "eos"),
            is_default=source is None,
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the source, in hexadecimal."""
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def supports_thinking_switch(self) -> bool:
        """Whether `enable_thinking` may change anything."""
        return "enable_thinking" in self.source

    @property
    def thinking_tags(self) -> ThinkingTags:
        """What the template puts around reasoning."""
        return tags_in(self.source)

    @cached_property
    def accepts_system(self) -> bool:
        """Whether a system prompt is rendered in a place of its own.

        Found out by rendering one: some templates refuse it, some drop it without a word.
        """
        return self._shows(_TOLD, [_TOLD, _ASKED])

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
        literal: Callable[[str], str] | None = None,
    ) -> str:
        """Return the conversation as one text, control tokens spelled out.

        Where the template takes no system prompt, it is put in front of the first user message;
        where it insists on alternating roles, neighbours of one role are merged.

        Args:
            messages: the conversation, oldest first.
            add_generation_prompt: end with the header of the assistant's next message.
            now: the date a template may write; pass the same one for a whole conversation, so
                that its beginning never changes.
            enable_thinking: switches reasoning on or off; None leaves it to the template.
            continue_final: end right after the last message's content (or its reasoning, when
                there is no content yet), an assistant's reply to be continued.
            literal: applied to every text of a message before the template sees it.

        Raises:
            TemplateError: the template refuses the conversation, or is faulty.
        """
        for message in messages:
            if message.role not in ROLES:
                raise TemplateError(
                    f"A message has the role {_one_line(message.role)!r}, which is none of "
                    f"{', '.join(sorted(ROLES))}."
                )
        if literal is not None:
            messages = [
                replace(
                    message,
                    content=literal(message.content),
                    thinking=None if message.thinking is None else literal(message.thinking),
                )
                for message in messages
            ]
        variables = _variables(now, enable_thinking)
        if continue_final:
            return self._render_open(messages, variables)
        return self._render_arranged(messages, add_generation_prompt, variables)

    def render_segments(
        self,
        messages: Sequence[Message],
        tokenizer: TemplateTokenizer,
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
    ) -> list[int | str]:
        """Return the conversation as ids of the control tokens the template wrote, and texts.

        The texts are to be encoded without looking for control tokens in them. While the
        template runs, every character of a message that could begin a control token is replaced
        by a character that occurs nowhere else, so no such token can come from a message in
        whole or in part, whatever the template does with it. A begin-of-text id is put in front
        when the model expects one and the template wrote none. Arguments are those of `render`.

        Raises:
            TemplateError: the template refuses the conversation, or is faulty.
        """
        table = stand_ins(tokenizer.control_starts, [*texts_of(messages)], avoid=self.source)
        original = {mark: char for char, mark in table.items()}
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            now=now,
            enable_thinking=enable_thinking,
            continue_final=continue_final,
            literal=(lambda content: replace_all(content, table)) if table else None,
        )
        segments = tokenizer.split(text)
        if original:
            segments = [
                piece if isinstance(piece, int) else replace_all(piece, original)
                for piece in segments
            ]
        bos = (
            [tokenizer.bos_id] if tokenizer.add_bos_default and tokenizer.bos_id is not None else []
        )
        return segments if segments[:1] == bos else [*bos, *segments]

    def opens_thinking(
        self,
        messages: Sequence[Message] = (_ASKED,),
        *,
        enable_thinking: bool | None = None,
    ) -> bool:
        """Return whether the generation prompt ends inside reasoning the template opened.

        Raises:
            TemplateError: the template refuses the conversation, or is faulty.
        """
        return self._opens(messages, _variables(None, enable_thinking))

    @cached_property
    def _template(self) -> Template:
        return _ENVIRONMENT.compile_bounded(self.source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content must be a list of parts, as some templates for images want it."""
        return not self._shows(_ASKED, [_ASKED], parts=False) and self._shows(
            _ASKED, [_ASKED], parts=True
        )

    def _shows(self, one: Message, messages: Sequence[Message], parts: bool | None = None) -> bool:
        with suppress(Refusal, TemplateError):
            return one.content in self._run(messages, True, _variables(None, None), parts=parts)
        return False

    def _opens(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> bool:
        asked = self._render_arranged(messages, True, variables)
        told = self._render_arranged(messages, False, variables)
        prompt = asked[len(os.path.commonprefix([asked, told])) :]  # noqa: RUF071 - by characters
        return prompt.rfind(self.thinking_tags.open) > prompt.rfind(self.thinking_tags.close)

    def _render_open(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        if not messages or messages[-1].role != "assistant":
            raise TemplateError("Only an assistant's reply can be continued: ask for one first.")
        *history, reply = messages
        name = "thinking" if reply.thinking and not reply.content else "content"
        text: str = getattr(reply, name)
        end = next(unused_characters([self.source, *texts_of(messages)]))
        marked = [*history, replace(reply, **{name: text + end})]
        with suppress(TemplateError):
            head, found, _ = self._render_arranged(marked, False, variables).rpartition(end)
            if found:
                return head
        # The template leaves this part of a reply out, or refuses to end with one: then go on
        # from what the model saw while it was writing.
        if name == "thinking" and not self._opens(history, variables):
            text = f"{self.thinking_tags.open}\n{text}"
        return self._render_arranged(history, True, variables) + text

    def _render_arranged(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        refusal = ""
        for arrangement in self._arrangements(messages):
            try:
                return self._run(arrangement, add_generation_prompt, variables)
            except Refusal as error:
                refusal = _one_line(error)
        raise TemplateError(
            f"The model's chat template refuses this conversation ({refusal}): change its "
            "messages or start a new chat."
        )

    def _arrangements(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """The conversation as it is, then what a template that refused it may take."""
        if self.accepts_system or not has_system(messages):
            yield messages
            yield merged(messages)
        if has_system(messages):
            without = folded(messages)
            yield without
            yield merged(without)

    def _run(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        *,
        parts: bool | None = None,
    ) -> str:
        takes_parts = self._takes_parts if parts is None else parts
        try:
            return _ENVIRONMENT.run(
                self._template,
                {
                    "messages": [as_data(message, takes_parts) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": self.bos_token,
                    "eos_token": self.eos_token,
                    **variables,
                },
            )
        except Refusal:
            raise
        except Exception as error:  # a stranger's program may run into anything
            raise TemplateError(
                f"The model's chat template is faulty ({_one_line(error)}): use another build "
                "of the model, or `kvchat ask --raw`."
            ) from error


def _variables(now: datetime | None, enable_thinking: bool | None) -> dict[str, Any]:
    variables: dict[str, Any] = {"strftime_now": (now or datetime.now()).strftime}
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    return variables


def _one_line(error: object) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return "".join(char for char in words if char.isprintable())[:200]
