"""Tokenizer: text to ids and back, over the `tokenizers` library.

Built by `kvchat.models.gguf_tokenizer.from_gguf_metadata` or
`kvchat.models.hf_tokenizer.from_folder`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvchat.engine.errors import TokenizerError
from kvchat.models.control_cutter import ControlCutter
from kvchat.models.eog import eog_ids
from kvchat.models.stream_decoder import (
    REPLACED_SPACE,
    StreamDecoder,
    TokenBytes,
    byte_level_bytes,
    sentencepiece_bytes,
)
from kvchat.models.surrogates import without_surrogates

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

LONG = 20_000
"""Characters that take milliseconds to encode, which another thread would notice."""


class Tokenizer:
    """Text to ids and back.

    Some ids stand for added tokens, such as `<|im_end|>` or `<think>`: their text is cut out of
    the input before anything else happens. Those whose text is more than white space are called
    control tokens here, whether or not the model's files mark them as special, for they are what
    a template writes and a user must not.

    Attributes:
        vocab_size: one more than the highest id that has a token; the model's embedding may have
            more rows.
        bos_id: the id a sequence begins with, if the model has one.
        eos_token_id: the id a sequence ends with, if the model has one.
        bos_text: text of `bos_id`, "" without one.
        eos_text: text of `eos_token_id`, "" without one.
        add_bos_default: whether the model's own files say that a sequence begins with bos.
        control_ids: ids of the control tokens.
        eog_ids: ids that end a reply.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos_default: bool = False,
        declared_eog: Iterable[int] = (),
    ) -> None:
        """Wrap `backend`, whose added tokens are complete.

        `declared_eog`: what the files name as end of generation, next to `eos_token_id`.
        Raises `TokenizerError` where the backend's decoder is of an unknown kind.
        """
        added = backend.get_added_tokens_decoder()
        self._control = {id_: token for id_, token in added.items() if not _is_blank(token.content)}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._full = backend
        blank = [token for id_, token in added.items() if id_ not in self._control]
        self._plain = _knowing_only(blank, backend)
        self._inner = _continuing(self._plain, blank)
        # Tokens that are not in the model's own vocabulary are numbered anew in each backend.
        renumbered = ((self._plain.token_to_id(t.content), id_) for id_, t in added.items())
        self._plain_ids = {new: id_ for new, id_ in renumbered if new is not None and new != id_}

        spell, self._strips_space, self._spells_verbatim = _decoding(backend)
        self._bytes = TokenBytes(backend.id_to_token, spell)

        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self.bos_id = bos_id
        self.eos_token_id = eos_token_id
        self.bos_text = self._text(bos_id)
        self.eos_text = self._text(eos_token_id)
        self.add_bos_default = add_bos_default
        self.control_ids = frozenset(self._control)
        declared = {*declared_eog, *(() if eos_token_id is None else (eos_token_id,))}
        self.eog_ids = eog_ids(declared, {t.content: id_ for id_, t in self._control.items()})

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Return the ids of `text`, its control tokens recognised.

        `add_bos` puts bos first, where there is one and the text does not begin with it.
        """
        ids = _ids(self._full, text)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_plain(self, text: str, at_start: bool = False) -> list[int]:
        """Return the ids of `text` as ordinary text: never a control token, whatever it says.

        `at_start` tells whether the text begins the sequence, where a SentencePiece vocabulary
        puts a space before it; otherwise it stands after a control token.
        """
        ids = _ids(self._plain if at_start else self._inner, text)
        if self._plain_ids:
            ids = [self._plain_ids.get(id_, id_) for id_ in ids]
        if self.control_ids.isdisjoint(ids):
            return ids
        return [id_ for found in ids for id_ in self._pieces(found)]

    def split(self, text: str) -> list[int | str]:
        """Cut `text` into the ids of its control tokens and the plain strings between them.

        `encode` gives those ids, and between them what `encode_plain` gives for the strings
        (the first of them `at_start` if nothing is before it). White space which a control token
        swallows is in neither.
        """
        text = without_surrogates(text)
        if self._quick_cutter is not None:
            return self._quick_cutter(text)
        encoding = self._cutter.encode(text, add_special_tokens=False)
        # Only starts can be relied on: the end of a composed character is that of its first part.
        starts = [*(start for start, _ in encoding.offsets), len(text)]
        parts: list[int | str] = []
        for cut, (start, end) in zip(encoding.ids, pairwise(starts), strict=True):
            if cut in self._control_by_cut:
                parts.append(self._control_by_cut[cut])
            elif parts and isinstance(parts[-1], str):
                parts[-1] += text[start:end]
            else:
                parts.append(text[start:end])
        return parts

    def normalize(self, text: str) -> str:
        """Return `text` as it comes back from decoding its ids: in NFC where the tokenizer does
        that, without white space that a control token swallows, otherwise as it is."""
        if self._verbatim:
            return without_surrogates(text)
        return self.decode(self.encode(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of a whole sequence of ids.

        Invalid UTF-8 is replaced as `StreamDecoder` says. `clean_up_tokenization_spaces` is never
        applied: it would change the spacing of code.
        """
        skipped = self._special if skip_special_tokens else frozenset()
        raw = b"".join(self._bytes[id_] for id_ in ids if id_ not in skipped)
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def stream_decoder(
        self, skip_special_tokens: bool = False, continues: bool = False
    ) -> StreamDecoder:
        """Return a decoder that takes ids one by one.

        A SentencePiece vocabulary spells a space before the first word of a sequence. By default
        the stream is a whole sequence, so that space is dropped, and the pieces join to exactly
        `decode(ids)`. A stream that `continues` other text keeps every space.
        """
        return StreamDecoder(
            self._bytes,
            skipped=self._special if skip_special_tokens else frozenset(),
            strip_space=self._strips_space and not continues,
        )

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes this id adds to a stream; empty for ids that have no token."""
        return self._bytes[id]

    def is_control(self, id: int) -> bool:
        """Whether this id is a control token."""
        return id in self.control_ids

    @cached_property
    def control_starts(self) -> frozenset[str]:
        """First characters of the control tokens' texts."""
        return frozenset(self.decode([id_]).strip()[:1] for id_ in self.control_ids)

    @cached_property
    def exempt_ids(self) -> frozenset[int]:
        """Ids that penalties spare: control tokens, and those of only punctuation or white space.

        Penalised, they would keep a model from ending its turn or its sentences.
        """
        # Not a range: a damaged file may have one token at id 0 and one at two billion.
        texts = ((id_, self._bytes[id_]) for id_ in self._full.get_vocab().values())
        return self.control_ids | {id_ for id_, text in texts if _is_separator(text)}

    def _text(self, id_: int | None) -> str:
        return "" if id_ is None else self._full.id_to_token(id_) or ""

    def _pieces(self, id_: int) -> Iterable[int]:
        """The id itself, or for a control token that merging came up with, its characters."""
        if id_ not in self._control:
            return (id_,)
        token = self._full.id_to_token(id_) or ""
        found = (piece.id for char in token for piece in self._full.model.tokenize(char))
        return (piece for piece in found if piece not in self._control)

    @cached_property
    def _quick_cutter(self) -> ControlCutter | None:
        """Cuts where text alone decides; None where flags do, or a token of white space could
        take the beginning of a control token."""
        added = self._full.get_added_tokens_decoder().values()
        flagged = any(token.lstrip or token.rstrip or token.single_word for token in added)
        normalised = any(token.normalized for token in self._control.values())
        ids = {token.content: id_ for id_, token in self._control.items()}
        if flagged or normalised or not ids or any(_is_blank(text[0]) for text in ids):
            return None
        return ControlCutter(ids)

    @cached_property
    def _cutter(self) -> Backend:
        """Cuts as the library does: to its model, all text between added tokens is id 0."""
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import WordLevel

        cutter = Backend(WordLevel({"": 0}, unk_token=""))
        cutter.normalizer = self._full.normalizer
        cutter.add_tokens(list(self._full.get_added_tokens_decoder().values()))
        return cutter

    @cached_property
    def _control_by_cut(self) -> dict[int, int]:
        cuts = self._cutter.get_vocab()
        return {cuts[token.content]: id_ for id_, token in self._control.items()}

    @cached_property
    def _verbatim(self) -> bool:
        swallows = any(token.lstrip or token.rstrip for token in self._control.values())
        return self._spells_verbatim and self._full.normalizer is None and not swallows


def _ids(backend: Backend, text: str) -> list[int]:
    text = without_surrogates(text)
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False).ids
    # The same ids; only for a batch does the library let other threads go on meanwhile.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def _is_blank(text: str) -> bool:
    """Whether a token is white space: vocabularies add runs of it to be matched whole."""
    return not text.replace(REPLACED_SPACE, " ").strip()


def _is_separator(raw: bytes) -> bool:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and all(
        char.isspace() or unicodedata.category(char).startswith("P") for char in text
    )


def _knowing_only(added: list[AddedToken], backend: Backend) -> Backend:
    """Return a tokenizer over the same model that knows only these added tokens.

    The library's own `encode_special_tokens` would still find those added tokens that are not
    marked special, such as `<think>`.
    """
    from tokenizers import Tokenizer as Backend

    plain = Backend(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    plain.add_tokens(added)
    return plain


def _continuing(plain: Backend, added: list[AddedToken]) -> Backend:
    """Return `plain` for text in the middle: without the prefix space of a sequence's start."""
    from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence

    anchored, never = '"prepend_scheme":"first"', '"prepend_scheme":"never"'
    state = _state(plain.pre_tokenizer)
    if anchored not in state:
        return plain
    inner = _knowing_only(added, plain)
    rule = PreTokenizerSequence([])
    rule.__setstate__(state.replace(anchored, never).encode())
    inner.pre_tokenizer = rule
    return inner


def _decoding(backend: Backend) -> tuple[Callable[[str], bytes], bool, bool]:
    """Return how tokens spell bytes, whether the text loses a first space, and whether decoding
    gives back what was encoded to the letter (apart from normalisation and control tokens)."""
    parts = json.loads(_state(backend.decoder) or "{}")
    kinds = {part["type"]: part for part in parts.get("decoders", [parts]) if "type" in part}
    if kinds.keys() == {"ByteLevel"}:
        padded = '"add_prefix_space":true' in _state(backend.pre_tokenizer)
        return byte_level_bytes, False, not padded

    replace, strip = kinds.get("Replace"), kinds.get("Strip")
    known = (
        kinds.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        and ("Metaspace" in kinds or replace is not None)
        and (replace is None or _replaces_spaces(replace))
        and (strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0))
    )
    if not known:
        raise TokenizerError(
            f"The tokenizer's decoder ({', '.join(kinds) or 'none'}) is of an unknown kind; "
            "byte-level and SentencePiece ones are supported. Choose another model."
        )
    unprefixed = kinds.get("Metaspace", {}).get("prepend_scheme", "never") == "never"
    return sentencepiece_bytes, strip is not None or not unprefixed, False


def _replaces_spaces(replace: Mapping[str, Any]) -> bool:
    return (replace["pattern"], replace["content"]) == ({"String": REPLACED_SPACE}, " ")


def _state(part: Any) -> str:
    """A component's own JSON; the library shows it in no other way. Empty without a component."""
    return "" if part is None else part.__getstate__().decode()
