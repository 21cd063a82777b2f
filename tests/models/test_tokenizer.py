from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import NASTY, byte_level_metadata, sentencepiece_metadata, texts
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from kvchat.engine.errors import TokenizerError
from kvchat.models.eog import eog_ids
from kvchat.models.gguf_tokenizer import from_gguf_metadata
from kvchat.models.tokenizer import LONG, Tokenizer


def flagged() -> Tokenizer:
    """Byte-level, with every flag an added token can have, and runs of spaces as tokens."""
    metadata = byte_level_metadata()
    vocab = {token: id_ for id_, token in enumerate(metadata["tokenizer.ggml.tokens"][:-6])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>", rstrip=True)])
    backend.add_tokens(
        [
            AddedToken("<think>", lstrip=True, normalized=False),
            AddedToken("hello", single_word=True),
            AddedToken("éé", normalized=True),
            AddedToken("  ", normalized=False),
            AddedToken("<|im_", normalized=False),
        ]
    )
    return Tokenizer(backend)


def overlapping() -> Tokenizer:
    """Control tokens that begin, contain and end each other."""
    from template_zoo import ZooTemplate, byte_tokenizer

    control = ("€", "€<", "<<s>>", "<s", "<s>", "<|im_", "<|im_start|>", "s><s>", "|>", "hello h")
    return byte_tokenizer(ZooTemplate("", control_tokens=control, tags=("<s><", "m_start")))


TOKENIZERS = {
    "byte-level": from_gguf_metadata(byte_level_metadata("gpt-2")),
    "byte-level NFC": from_gguf_metadata(byte_level_metadata("qwen2")),
    "sentencepiece": from_gguf_metadata(sentencepiece_metadata()),
    "sentencepiece, no prefix": from_gguf_metadata(
        sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    ),
    "sentencepiece, prefix everywhere": from_gguf_metadata(sentencepiece_metadata("phi3")),
    "flags": flagged(),
    "overlapping": overlapping(),
}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def flattened(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(tokenizer.split(text)):
        ids += [part] if isinstance(part, int) else tokenizer.encode_plain(part, place == 0)
    return ids


@each
@given(text=texts)
@settings(max_examples=150)
def test_split_and_plain_encoding_make_up_encode(tokenizer, text):
    assert flattened(tokenizer, text) == tokenizer.encode(text)
    assert {
        part for part in tokenizer.split(text) if isinstance(part, int)
    } <= tokenizer.control_ids


@each
@given(text=texts)
def test_plain_text_never_becomes_a_control_token(tokenizer, text):
    for at_start in (False, True):
        assert tokenizer.control_ids.isdisjoint(tokenizer.encode_plain(text, at_start))


@each
@given(text=texts)
def test_normalize_is_what_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text)


@each
@pytest.mark.parametrize("text", NASTY)
def test_plain_text_survives(tokenizer, text):
    back = b"".join(map(tokenizer.token_bytes, tokenizer.encode_plain(text))).decode()
    assert back in {text, unicodedata.normalize("NFC", text), f" {text}"}


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece, no prefix"])
@given(text=texts)
def test_text_is_unchanged_where_nothing_normalises(name, text):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.normalize(text) == text.replace("▁", " " if "sentence" in name else "▁")


@given(text=texts)
def test_nfc_leaves_control_tokens_alone(text):
    tokenizer = TOKENIZERS["byte-level NFC"]
    assert tokenizer.normalize("<think>\u0338") == "<think>\u0338"
    assert tokenizer.normalize("e\u0301") == "é"


@given(text=st.text(alphabet="<s>|im_hello €") | texts)
@settings(max_examples=300)
def test_the_longest_control_token_is_cut_first(text):
    tokenizer = TOKENIZERS["overlapping"]
    assert flattened(tokenizer, text) == tokenizer.encode(text)


def test_ids_of_a_template_line():
    tokenizer = TOKENIZERS["byte-level"]
    start, end, think = (tokenizer.encode(t)[0] for t in ("<|im_start|>", "<|im_end|>", "<think>"))
    assert tokenizer.split("<|im_start|>user\n<think><|im_end|>") == [start, "user\n", think, end]
    assert tokenizer.is_control(think)
    assert not tokenizer.is_control(tokenizer.encode("a")[0])


def test_flags_decide_what_is_cut():
    tokenizer = TOKENIZERS["flags"]
    id_of = {
        tokenizer.token_bytes(id_).decode("utf-8", "replace"): id_ for id_ in tokenizer.control_ids
    }
    assert tokenizer.split("a <think> b<|im_end|> \nc") == [
        "a", id_of["<think>"], " b", id_of["<|im_end|>"], "c",
    ]  # fmt: skip
    assert tokenizer.split("othello hello") == ["othello ", id_of["hello"]]
    assert tokenizer.split("<|im_x") == [id_of["<|im_"], "x"]
    assert tokenizer.normalize("a <think> b<|im_end|> \nc") == "a<think> b<|im_end|>c"


def test_runs_of_spaces_are_text_and_not_control():
    tokenizer = TOKENIZERS["flags"]
    run = tokenizer.encode("a  b")[1]
    assert tokenizer.token_bytes(run) == b"  "
    assert tokenizer.encode_plain("a  b") == tokenizer.encode("a  b")
    assert tokenizer.split("a  b") == ["a  b"]
    assert run not in tokenizer.control_ids


def test_merging_up_to_a_control_token_is_undone():
    backend = Backend(
        BPE(vocab={"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, merges=[("<", "s"), ("<s", ">")])
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("s<s>") == [1, 4]
    assert tokenizer.encode_plain("s<s>") == [1, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "start", "middle"),
    [
        ("sentencepiece", ["▁the"], ["t", "he"]),
        ("sentencepiece, no prefix", ["t", "he"], ["t", "he"]),
        ("sentencepiece, prefix everywhere", ["▁the"], ["▁the"]),
    ],
)
def test_prefix_space_at_the_start_only(name, start, middle):
    tokenizer = TOKENIZERS[name]

    def spelled(ids):
        return b"".join(map(tokenizer.token_bytes, ids))

    assert (
        spelled(tokenizer.encode_plain("the", at_start=True))
        == "".join(start).replace("▁", " ").encode()
    )
    assert spelled(tokenizer.encode_plain("the")) == "".join(middle).replace("▁", " ").encode()


@each
@given(data=st.data(), skip=st.booleans())
def test_stream_joins_to_decode(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    stream = tokenizer.stream_decoder(skip_special_tokens=skip)
    assert "".join([*map(stream.step, ids), stream.flush()]) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["byte-level", "byte-level NFC", "flags"])
@given(data=st.data(), skip=st.booleans())
def test_byte_level_decode_is_the_librarys_for_any_ids(name, data, skip):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert tokenizer.decode(ids, skip) == tokenizer._full.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "sentence" in name])
@given(text=texts, skip=st.booleans())
def test_sentencepiece_decode_is_the_librarys_for_any_text(name, text, skip):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip) == tokenizer._full.decode(ids, skip_special_tokens=skip)


def test_a_continuing_stream_keeps_its_first_space():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("fox")
    assert "".join(map(tokenizer.stream_decoder().step, ids)) == "fox"
    assert "".join(map(tokenizer.stream_decoder(continues=True).step, ids)) == " fox"


def test_bos_is_added_once():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("fox")
    assert tokenizer.encode("fox", add_bos=True) == [1, *ids]
    assert tokenizer.encode("<s>fox", add_bos=True)[:2] != [1, 1]
    assert TOKENIZERS["flags"].encode("fox", add_bos=True) == TOKENIZERS["flags"].encode("fox")


def test_named_tokens():
    tokenizer = TOKENIZERS["sentencepiece"]
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "</s>")
    assert (TOKENIZERS["flags"].bos_text, TOKENIZERS["flags"].eos_text) == ("", "")
    assert tokenizer.eog_ids == {2, *tokenizer.encode("<s><|im_end|>")[1:]}


def test_exempt_ids_are_control_punctuation_and_white_space():
    tokenizer = TOKENIZERS["byte-level"]
    spared = {tokenizer.token_bytes(id_) for id_ in tokenizer.exempt_ids}
    assert {
        b" ",
        b"\n",
        b",",
        b".",
        b"!",
        b"<|im_end|>",
        b"<think>",
        b"#",
    } <= spared
    assert spared.isdisjoint({b"a", b"1", b"+", b"=", b"`", b"\xe4"})


@each
def test_ids_beyond_the_vocabulary_are_empty(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""


@each
def test_lone_surrogates_are_replaced(tokenizer):
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a\ufffd")
    assert flattened(tokenizer, "\udcff<think>") == tokenizer.encode("\udcff<think>")
    assert tokenizer.normalize("a\ud83db") == "a\ufffdb"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Replace("_", " ")])
def test_an_unknown_decoder_is_refused(decoder):
    backend = Backend(BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer(backend)


def test_end_of_generation_by_declaration_and_by_text():
    assert eog_ids([5], {"<|eot_id|>": 1, "<|end|>": 2, "other": 3}) == {5, 1, 2}


@pytest.mark.parametrize("pair", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
def test_a_channels_end_does_not_end_the_reply(pair):
    added = {"<|end|>": 2, pair[0]: 3, pair[1]: 4}
    assert eog_ids([], added) == {3, 4}
    assert eog_ids([], {"<|end|>": 2, pair[0]: 3}) == {2, 3}


def test_importing_it_loads_neither_torch_nor_the_library():
    code = (
        "import sys; import kvchat.models.tokenizer, kvchat.models.gguf_tokenizer;"
        "import kvchat.models.hf_tokenizer;"
        "sys.exit(bool({'torch', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["byte-level", "byte-level NFC"])
def test_a_long_text_has_the_ids_of_its_lines(name):
    tokenizer = TOKENIZERS[name]
    line = "Otters sleep, 3 at a time; <|im_end|> 水獭 🦦.\n"
    lines = LONG // len(line) + 1
    expected = tokenizer.encode(line) * lines
    assert tokenizer.encode(line * lines) == expected
