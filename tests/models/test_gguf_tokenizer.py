from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import (
    NASTY,
    PIECES,
    byte_level_metadata,
    sentencepiece_metadata,
    texts,
    write_gguf,
)
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from kvchat.engine.errors import TokenizerError
from kvchat.models.gguf_tokenizer import from_gguf_metadata
from kvchat.models.pretokenizers import PRE_TOKENIZERS

KEY = "tokenizer.ggml."


def without(metadata: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key.removeprefix(KEY) not in names}


def encoded(oracle: Any, text: str) -> list[int]:
    return oracle.encode(text, add_special_tokens=False)


@pytest.mark.real_model
def test_the_default_models_tokenizer_is_what_transformers_builds(default_model_path: Path):
    reader = GGUFReader(default_model_path)
    fields = {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    tokenizer = from_gguf_metadata({key: field.contents() for key, field in fields.items()})
    oracle = AutoTokenizer.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name
    )

    for text in NASTY:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == text
        if not any(map(str.isnumeric, text)):
            assert ids == encoded(oracle, text)

    # transformers leaves out the digit rule of the published tokenizer.json, which shows where
    # numbers follow white space.
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in (*NASTY, "a  1", "x =   12345\n    42", "\n\n7"):
        assert tokenizer.encode(text) == encoded(oracle, text)

    assert (tokenizer.bos_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eog_ids == {0, 2}
    assert not tokenizer.add_bos_default
    assert tokenizer.control_ids == set(range(17))


@pytest.mark.parametrize(
    "metadata",
    [
        sentencepiece_metadata(),
        sentencepiece_metadata("phi3"),
        byte_level_metadata("llama-bpe"),
        byte_level_metadata("qwen35"),
        byte_level_metadata("tekken"),
        byte_level_metadata("gpt-4o"),
        byte_level_metadata("gpt-2"),
    ],
    ids=lambda m: f"{m['general.architecture']} {m.get(KEY + 'pre', 'sentencepiece')}",
)
def test_small_vocabularies_are_what_transformers_builds(metadata, tmp_path):
    path = write_gguf(tmp_path, metadata)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = from_gguf_metadata(metadata)
    # transformers brings no NFC and leaves out tokens that are not spelled in the byte alphabet.
    for text in (*NASTY, *PIECES, "".join(PIECES), " ".join(PIECES)):
        if tokenizer.normalize(text) in {text, text.removeprefix(" "), text.replace("▁", " ")}:
            ids = tokenizer.encode(text)
            assert ids == encoded(oracle, text)
            assert tokenizer.decode(ids) == oracle.decode(ids)


def test_every_rule_covers_all_text():
    """Merging starts from words, so a rule must not lose what stands between its matches."""
    for name in PRE_TOKENIZERS:
        tokenizer = from_gguf_metadata(byte_level_metadata(name))
        for text in NASTY:
            assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ve", " 1234", " x", " ", " y", "!!", "\n"]),
        ("smollm", ["I", "'ve", " ", "1", "2", "3", "4", " x", " ", " y", "!!", "\n"]),
        ("llama-bpe", ["I", "'ve", " ", "123", "4", " x", " ", " y", "!!\n"]),
        ("qwen2", ["I", "'ve", " ", "1", "2", "3", "4", " x", " ", " y", "!!\n"]),
        ("gpt-4o", ["I've", " ", "123", "4", " x", " ", " y", "!!\n"]),
        ("deepseek-v3", ["I", "'ve", " ", "123", "4", " x", " ", " y", "!!\n"]),
        ("deepseek-coder", ["I", "'", "ve", " ", "1", "2", "3", "4", " x", " ", " y", "!!", "\n"]),
    ],
)
def test_words_of_a_rule(pre, words):
    tokenizer = from_gguf_metadata(byte_level_metadata(pre))
    found = tokenizer._full.pre_tokenizer.pre_tokenize_str("I've 1234 x  y!!\n")
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in found] == words


def test_added_tokens_outside_the_byte_alphabet_stay_whole():
    metadata = byte_level_metadata("deepseek-r1-qwen")
    tokenizer = from_gguf_metadata(metadata)
    (id_,) = tokenizer.encode("<｜User｜>")
    assert metadata[f"{KEY}tokens"][id_] == "<｜User｜>"
    assert tokenizer.decode([id_]) == "<｜User｜>"


def test_an_ordinary_token_spelled_literally_is_reached_by_its_bytes():
    metadata = byte_level_metadata("gpt-2")
    tokens = metadata[f"{KEY}tokens"]
    place = tokens.index("Ġthe")
    tokens[place] = " the"
    tokenizer = from_gguf_metadata(metadata)
    assert tokenizer.encode(" the") == [place]
    assert tokenizer.token_bytes(place) == b" the"


def test_special_and_whole_tokens_differ_only_for_the_reader():
    tokenizer = from_gguf_metadata(byte_level_metadata())
    ids = tokenizer.encode("<think>a<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a"
    assert tokenizer.control_ids >= {ids[0], ids[-1]}


def test_a_mislabelled_end_of_turn_is_special_all_the_same():
    metadata = byte_level_metadata()
    place = metadata[f"{KEY}tokens"].index("<|im_end|>")
    metadata[f"{KEY}token_type"][place] = 1
    tokenizer = from_gguf_metadata(without(metadata, "eos_token_id"))
    assert tokenizer.encode("<|im_end|>") == [place]
    assert place in tokenizer.eog_ids


def test_ends_named_in_the_metadata_all_count():
    metadata = byte_level_metadata(
        **{f"{KEY}eot_token_id": 3, f"{KEY}eom_token_id": 4, f"{KEY}eos_token_id": 5}
    )
    assert from_gguf_metadata(metadata).eog_ids >= {3, 4, 5}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (sentencepiece_metadata(), True),
        (sentencepiece_metadata(**{f"{KEY}add_bos_token": False}), False),
        (byte_level_metadata("qwen2"), False),
        (byte_level_metadata("qwen2", **{f"{KEY}add_bos_token": True}), True),
        (byte_level_metadata("llama-bpe"), True),
    ],
)
def test_whether_sequences_begin_with_bos(metadata, expected):
    assert from_gguf_metadata(metadata).add_bos_default is expected


def test_old_sentencepiece_files_do_not_name_their_ends():
    tokenizer = from_gguf_metadata(
        without(sentencepiece_metadata(), "bos_token_id", "eos_token_id")
    )
    assert (tokenizer.bos_id, tokenizer.eos_token_id) == (1, 2)


def test_control_tokens_are_no_product_of_merging():
    metadata = sentencepiece_metadata()
    tokens = metadata[f"{KEY}tokens"]
    tokens[300:304] = ["</", "s>", "<", ">"]
    tokenizer = from_gguf_metadata(metadata)
    assert 2 not in {piece.id for piece in tokenizer._full.model.tokenize("</s>")}
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_plain("</s>"))) == b"</s>"
    assert tokenizer.encode("</s>") == [2]


@given(text=texts)
def test_byte_fallback_spells_what_has_no_token(text):
    tokenizer = from_gguf_metadata(sentencepiece_metadata(**{f"{KEY}add_space_prefix": False}))
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "model is missing"),
        ({f"{KEY}model": "t5"}, "'t5' are not supported"),
        ({f"{KEY}model": 7}, "wrong type"),
        (byte_level_metadata("falcon-9"), "falcon-9.*Hugging Face folder"),
        (without(byte_level_metadata(), "pre"), "none named"),
        (without(byte_level_metadata(), "tokens"), "tokens is missing"),
        (without(byte_level_metadata(), "merges"), "merges is missing"),
        (without(sentencepiece_metadata(), "scores"), "neither merges nor scores"),
        (sentencepiece_metadata("gemma2"), "Gemma"),
        (byte_level_metadata(**{f"{KEY}tokens": []}), "empty"),
        (byte_level_metadata(**{f"{KEY}tokens": "abc"}), "not a list of strings"),
        (byte_level_metadata(**{f"{KEY}tokens": ["a", 1]}), "not a list of strings"),
        (byte_level_metadata(**{f"{KEY}token_type": [1, 1]}), "one number for each"),
        (byte_level_metadata(**{f"{KEY}token_type": ["x"] * 506}), "one number for each"),
        (byte_level_metadata(**{f"{KEY}merges": ["ab"]}), "malformed merge"),
        (byte_level_metadata(**{f"{KEY}merges": ["q zzz"]}), "do not fit together"),
        (byte_level_metadata(**{f"{KEY}eos_token_id": 9999}), "eos_token_id is 9999"),
        (byte_level_metadata(**{f"{KEY}bos_token_id": -1}), "bos_token_id is -1"),
        (byte_level_metadata(**{f"{KEY}bos_token_id": "1"}), "wrong type"),
        (byte_level_metadata(**{f"{KEY}add_bos_token": "yes"}), "wrong type"),
        (sentencepiece_metadata(**{f"{KEY}scores": [0.0]}), "one number for each"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(metadata, says):
    with pytest.raises(TokenizerError, match=says):
        from_gguf_metadata(metadata)


def test_a_token_of_absurd_length_is_refused():
    metadata = sentencepiece_metadata()
    metadata[f"{KEY}tokens"][-3] = "a" * 1_000_000
    with pytest.raises(TokenizerError, match="absurd"):
        from_gguf_metadata(metadata)


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.integers(), max_size=4),
)


@given(st.sampled_from([byte_level_metadata(), sentencepiece_metadata()]), st.data())
def test_corrupt_metadata_is_an_error_or_still_a_tokenizer(metadata, data):
    broken = data.draw(st.dictionaries(st.sampled_from(sorted(metadata)), junk, max_size=3))
    try:
        tokenizer = from_gguf_metadata({**metadata, **broken})
    except TokenizerError:
        return
    assert tokenizer.decode(tokenizer.encode("a b")) in {"a b", "", "a", "b", "ab", " "}
