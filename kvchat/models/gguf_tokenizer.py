"""A GGUF file's metadata -> Tokenizer.

The file carries the vocabulary and, for byte-level ones, the merges, but not the rules for cutting
text into words; those come from `kvchat.models.pretokenizers`. Format: `tokenizer.ggml.*` in the
GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvchat.engine.errors import KvchatError, TokenizerError
from kvchat.models.eog import EOG_TEXTS
from kvchat.models.pretokenizers import DIGITS, PRE_TOKENIZERS, PreTokenizer
from kvchat.models.stream_decoder import BYTE_TO_CHAR, CHAR_TO_BYTE, REPLACED_SPACE
from kvchat.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Values of `tokenizer.ggml.token_type`; others are ordinary tokens."""

_LONGEST_TOKEN = 4096
"""Characters. The search for merges is quadratic in it; real vocabularies stay far below."""

_USE_FOLDER = "Use the model's Hugging Face folder (with tokenizer.json) instead of this file."


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises `TokenizerError` for a tokenizer this program cannot rebuild exactly, and for metadata
    that contradicts itself.
    """
    kind = _get(metadata, "model", str)
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise TokenizerError(
            f"GGUF tokenizers of the kind {kind!r} are not supported, only "
            f"{' and '.join(map(repr, _BUILDERS))}. {_USE_FOLDER}"
        )
    vocabulary, ids = _vocabulary(metadata, kind)
    try:
        backend, add_bos = builder(metadata, vocabulary)
    except KvchatError:
        raise
    except Exception as problem:  # the library raises plain Exception
        raise TokenizerError(
            f"The file's vocabulary and merges do not fit together ({problem}). {_USE_FOLDER}"
        ) from problem
    _add_tokens(backend, vocabulary)
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_token_id=ids["eos"],
        add_bos_default=_get(metadata, "add_bos_token", bool, add_bos),
        declared_eog=[id_ for name, id_ in ids.items() if id_ is not None and name != "bos"],
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    """Token texts by id."""
    special: set[int]
    """Ids that are matched whole in the text and hidden from the reader, like `<|im_end|>`."""
    whole: set[int]
    """Ids that are matched whole in the text, like `<think>`."""
    bytes: set[int]
    """Ids like `<0x0A>`, a byte of a character that has no token."""


_Ids = dict[str, int | None]


def _vocabulary(metadata: Mapping[str, Any], kind: str) -> tuple[_Vocabulary, _Ids]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError(f"The file's vocabulary is empty. {_USE_FOLDER}")
    types = _numbers(metadata, "token_type", len(tokens)) or [1] * len(tokens)
    ids: _Ids = {
        name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")
    }
    for name, text in _DEFAULT_TEXTS.get(kind, {}).items():
        if ids[name] is None and text in tokens:
            ids[name] = tokens.index(text)

    def of_type(*wanted: int) -> set[int]:
        return {id_ for id_, type_ in enumerate(types) if type_ in wanted}

    # Converters have labelled tokens that end a turn as ordinary ones.
    ends = {id_ for id_, text in enumerate(tokens) if text in EOG_TEXTS}
    named = {id_ for id_ in ids.values() if id_ is not None}
    special = of_type(_CONTROL, _UNKNOWN) | ends | named
    whole = of_type(_USER_DEFINED) - special
    return _Vocabulary(tokens, special, whole, of_type(_BYTE)), ids


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers
    from tokenizers.models import BPE

    rule = _rule(metadata)
    # Added tokens stand in the file as they read. Some ordinary ones do too, by mistake of
    # converters, and are reached only in the byte alphabet.
    added = vocabulary.special | vocabulary.whole
    vocab = {
        token if id_ in added else _byte_spelling(token): id_
        for id_, token in enumerate(vocabulary.tokens)
    }
    merges = [_merge(text) for text in _strings(metadata, "merges")]
    backend = Backend(BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _rule(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = _get(metadata, "pre", str, "")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise TokenizerError(
            f"The file's rule for cutting text into words ({name or 'none named'}) is not known "
            f"here, and a guess would silently give wrong tokens. {_USE_FOLDER}"
        )
    return rule


def _pre_tokenizer(rule: PreTokenizer) -> Any:
    from tokenizers import Regex, pre_tokenizers

    cuts = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern is DIGITS
        else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in rule.splits
    ]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, encode])


def _byte_spelling(token: str) -> str:
    if CHAR_TO_BYTE.keys() >= set(token):
        return token
    return "".join(BYTE_TO_CHAR[byte] for byte in token.encode())


def _merge(text: str) -> tuple[str, str]:
    left, separator, right = text.partition(" ")
    if not (left and separator and right):
        raise TokenizerError(f"The file has a malformed merge rule {text[:40]!r}. {_USE_FOLDER}")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    architecture = str(metadata.get("general.architecture", ""))
    if architecture.startswith("gemma"):
        raise TokenizerError(f"Gemma's tokenizer cannot be rebuilt from GGUF. {_USE_FOLDER}")
    if "tokenizer.ggml.merges" in metadata:
        merges = [_merge(text) for text in _strings(metadata, "merges")]
    else:
        merges = _merges_by_score(metadata, vocabulary)
    vocab = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    backend = Backend(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))

    prefixed = _get(metadata, "add_space_prefix", bool, True)
    if architecture == "phi3" and prefixed:
        # Phi-3 puts the space before every stretch of text, also before one that begins with one.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(REPLACED_SPACE), normalizers.Replace(" ", REPLACED_SPACE)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            REPLACED_SPACE, prepend_scheme="first" if prefixed else "never", split=False
        )
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(REPLACED_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges_by_score(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Derive the merges that give what SentencePiece does with its scores.

    SentencePiece always joins the adjacent pair whose joint token scores best; so every way to
    cut a token in two tokens is a merge, best score first. Ties go to longer pieces, then to
    earlier tokens, as in transformers.
    """
    tokens = vocabulary.tokens
    scores = _numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise TokenizerError(f"The file has neither merges nor scores. {_USE_FOLDER}")
    atomic = vocabulary.special | vocabulary.whole | vocabulary.bytes
    vocab = {token: id_ for id_, token in enumerate(tokens) if id_ not in atomic}
    if max(map(len, vocab), default=0) > _LONGEST_TOKEN:
        raise TokenizerError(f"The file has a token of absurd length. {_USE_FOLDER}")
    ranked = []
    for token, id_ in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                order = (-scores[id_], -len(left), -len(right), id_, vocab[left], vocab[right])
                ranked.append((order, left, right))
    ranked.sort()
    return [(left, right) for _, left, right in ranked]


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    def added(ids: set[int], special: bool) -> list[AddedToken]:
        texts = (vocabulary.tokens[id_] for id_ in sorted(ids))
        return [AddedToken(text, normalized=False, special=special) for text in texts]

    backend.add_special_tokens(added(vocabulary.special, True))
    backend.add_tokens(added(vocabulary.whole, False))


_Builder = Callable[[Mapping[str, Any], _Vocabulary], "tuple[Backend, bool]"]
_BUILDERS: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece}
"""`tokenizer.ggml.model` -> what builds it and says whether bos is added by default."""

_DEFAULT_TEXTS = {"llama": {"bos": "<s>", "eos": "</s>"}}
"""Texts of ids that old files of a kind do not name."""


def _get(metadata: Mapping[str, Any], key: str, kind: type[Any], default: Any = None) -> Any:
    """Return `tokenizer.ggml.{key}` checked to be of `kind`; without a default it must be there."""
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, kind):
        state = "is missing from" if value is None else "has the wrong type in"
        raise TokenizerError(f"tokenizer.ggml.{key} {state} the file. {_USE_FOLDER}")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = _get(metadata, key, Sequence)
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"tokenizer.ggml.{key} is not a list of strings. {_USE_FOLDER}")
    return list(values)


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> list[float] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    try:
        numbers = [value + 0 for value in values]
    except TypeError:
        numbers = []
    if len(numbers) != length:
        raise TokenizerError(
            f"tokenizer.ggml.{key} does not hold one number for each of the {length} tokens. "
            f"{_USE_FOLDER}"
        )
    return numbers


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    key = f"{name}_token_id"
    if f"tokenizer.ggml.{key}" not in metadata:
        return None
    id_ = int(_get(metadata, key, int))
    if not 0 <= id_ < n_tokens:
        raise TokenizerError(
            f"tokenizer.ggml.{key} is {id_}, but the vocabulary has {n_tokens} tokens. "
            f"{_USE_FOLDER}"
        )
    return id_
