"""A Hugging Face model folder -> Tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.engine.errors import TokenizerError
from kvchat.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def from_folder(path: str | Path) -> Tokenizer:
    """Build the tokenizer of a model folder.

    Reads `tokenizer.json`, and where they are there `tokenizer_config.json`,
    `special_tokens_map.json`, `generation_config.json` and `config.json`. Raises `TokenizerError`
    when the first is missing or any of them is corrupt.
    """
    folder = Path(path)
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    backend = _backend(folder / "tokenizer.json")
    _add_missing(backend, config)

    declared = [
        id_
        for name in ("generation_config.json", "config.json")
        for id_ in _eos_ids(_json(folder / name))
    ]
    bos_id = _named(backend, config, "bos_token")
    eos_id = _named(backend, config, "eos_token")
    if eos_id is None and declared:
        eos_id = declared[0]
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_token_id=eos_id,
        add_bos_default=add_bos,
        declared_eog=declared,
    )


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    if not path.is_file():
        raise TokenizerError(
            f"{path.parent} has no tokenizer.json. Put the model's tokenizer.json from the Hub "
            "next to its weights (older tokenizer.model files are not read)."
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as problem:  # the library raises plain Exception
        raise TokenizerError(
            f"{path} is corrupt or newer than this program ({problem}). Download it again."
        ) from problem
    if not isinstance(backend.model, BPE):
        raise TokenizerError(
            f"{path} holds a {type(backend.model).__name__} vocabulary; only BPE ones are "
            "supported. Choose another model."
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # fails on lone surrogates, \ud800 in JSON
    except (OSError, ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path} cannot be read ({problem}). Download it again.") from problem
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object. Download it again.")
    return value


def _add_missing(backend: Backend, config: dict[str, Any]) -> None:
    """Add the tokens that only the configuration marks as added, as transformers does."""
    from tokenizers import AddedToken

    added = backend.get_added_tokens_decoder()
    extra = config.get("added_tokens_decoder")
    marked: list[tuple[AddedToken, int | None]] = [
        (AddedToken(flags["content"], **_flags(flags)), int(id_))
        for id_, flags in (extra.items() if isinstance(extra, dict) else ())
        if isinstance(flags, dict) and isinstance(flags.get("content"), str) and id_.isdecimal()
    ]
    marked += [
        (AddedToken(text, special=True, normalized=False), backend.token_to_id(text))
        for text in (_content(config, name) for name in ("bos_token", "eos_token"))
        if text
    ]
    for token, id_ in marked:
        if id_ is None or id_ in added or backend.token_to_id(token.content) != id_:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _flags(flags: dict[str, Any]) -> dict[str, bool]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: flags[name] for name in names if isinstance(flags.get(name), bool)}


def _content(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _named(backend: Backend, config: dict[str, Any], name: str) -> int | None:
    text = _content(config, name)
    return backend.token_to_id(text) if text else None


def _eos_ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [id_ for id_ in ids if isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0]
