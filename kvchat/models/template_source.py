"""Finds a model's chat template among its files."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from kvchat.engine.errors import TemplateError

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For a model that has ChatML's tokens and no template."""

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content | trim }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model that was never taught a chat format."""

_MAX_BYTES = 1 << 22


def default_source(vocabulary: Container[str]) -> str:
    """Return the template for a model that brings none."""
    return CHATML if "<|im_start|>" in vocabulary else PLAIN


def folder_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the template of a model folder, or None.

    `chat_template.jinja` goes before the template in tokenizer_config.json.

    Raises:
        TemplateError: a template is there but cannot be read.
    """
    main = folder / "chat_template.jinja"
    if main.is_file():
        return _choose({"default": _read(main)})
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return _choose({path.stem: _read(path) for path in files} | _configured(tokenizer_config))


def gguf_source(metadata: Mapping[str, Any]) -> str | None:
    """Return the template in a GGUF file's metadata, or None.

    Raises:
        TemplateError: the metadata hold something else than text there.
    """
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(key).removeprefix(".") or "default": metadata[name]
        for name in metadata
        if name == key or name.startswith(f"{key}.")
    }
    return _choose(_checked(named, "the GGUF metadata"))


def token_text(value: Any) -> str:
    """Return the text of a special token as tokenizer_config.json has it: text or an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def gguf_token_text(metadata: Mapping[str, Any], tokens: list[Any], name: str) -> str:
    """Return the text of the special token `name` ("bos", "eos"), empty where there is none."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if isinstance(index, int) and 0 <= index < len(tokens):
        return token_text(tokens[index])
    return ""


def _configured(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    where = "tokenizer_config.json"
    found = tokenizer_config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, list) and all(isinstance(entry, Mapping) for entry in found):
        named = {str(entry.get("name")): entry.get("template") for entry in found}
        return _checked(named, where)
    return _checked({"default": found}, where)


def _checked(named: Mapping[str, Any], where: str) -> dict[str, str]:
    if not all(isinstance(source, str) for source in named.values()):
        raise TemplateError(
            f"The chat template in {where} is not text, so the file is damaged: get it again."
        )
    return dict(named)


def _choose(named: Mapping[str, str]) -> str | None:
    """The template called "default", or the only one that is not for calling tools."""
    chat = {name: source for name, source in named.items() if name != "tool_use" and source.strip()}
    return next(iter(chat.values())) if len(chat) == 1 else chat.get("default")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it is longer than {_MAX_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(
            f"The chat template {path} cannot be read ({error}): get the file again."
        ) from error
