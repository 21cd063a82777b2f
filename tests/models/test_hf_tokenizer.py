from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import NASTY, PIECES, byte_level_metadata, sentencepiece_metadata
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from kvchat.engine.errors import TokenizerError
from kvchat.models.gguf_tokenizer import from_gguf_metadata
from kvchat.models.hf_tokenizer import from_folder

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
}


def backend(metadata: dict[str, Any] | None = None) -> Backend:
    return Backend.from_str(from_gguf_metadata(metadata or byte_level_metadata())._full.to_str())


def folder(path: Path, tokenizer: Backend, **files: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in ({"tokenizer_config": CONFIG} | files).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("metadata", "bos"),
    [(byte_level_metadata(), "<|im_start|>"), (sentencepiece_metadata(), "<s>")],
)
def test_it_is_what_transformers_loads(tmp_path, metadata, bos):
    path = folder(tmp_path, backend(metadata), tokenizer_config=CONFIG | {"bos_token": bos})
    ours, oracle = from_folder(path), AutoTokenizer.from_pretrained(path)
    for text in (*NASTY, *PIECES, " ".join(PIECES)):
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)


def test_named_tokens_come_from_the_configuration(tmp_path):
    tokenizer = from_folder(folder(tmp_path, backend()))
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_id in tokenizer.eog_ids


def test_named_tokens_come_from_the_special_tokens_map(tmp_path):
    named = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    path = folder(tmp_path, backend(), special_tokens_map=named, tokenizer_config={})
    assert from_folder(path).eos_text == "<|im_end|>"


@pytest.mark.parametrize("eos", [7, [7, 8]])
def test_generation_config_names_more_ends(tmp_path, eos):
    path = folder(tmp_path, backend(), generation_config={"eos_token_id": eos})
    tokenizer = from_folder(path)
    assert tokenizer.eog_ids >= {7, tokenizer.eos_token_id}
    assert (8 in tokenizer.eog_ids) == (eos == [7, 8])


def test_the_first_end_stands_in_for_an_unnamed_one(tmp_path):
    path = folder(tmp_path, backend(), tokenizer_config={}, config={"eos_token_id": [8, 7]})
    assert from_folder(path).eos_token_id == 8


def with_bos_processor() -> Backend:
    tokenizer = backend()
    bos = "<|im_start|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("make", "flag", "expected"),
    [
        (backend, {}, False),
        (backend, {"add_bos_token": True}, True),
        (with_bos_processor, {}, True),
        (with_bos_processor, {"add_bos_token": False}, False),
    ],
)
def test_whether_sequences_begin_with_bos(tmp_path, make, flag, expected):
    tokenizer = from_folder(folder(tmp_path, make(), tokenizer_config=CONFIG | flag))
    assert tokenizer.add_bos_default is expected
    assert tokenizer.bos_id not in tokenizer.encode("fox")


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    tokenizer = backend()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    loaded = from_folder(folder(tmp_path, tokenizer))
    assert loaded.decode(loaded.encode("the quick brown fox")) == "the quick brown fox"


def test_tokens_only_the_configuration_marks_are_added(tmp_path):
    tokenizer = backend()
    the = tokenizer.token_to_id("the")
    marked = {str(the): {"content": "the", "special": True}, "3": {"content": "nothing"}, "x": 1}
    path = folder(tmp_path, tokenizer, tokenizer_config=CONFIG | {"added_tokens_decoder": marked})
    loaded = from_folder(path)
    assert the in loaded.control_ids
    assert 3 not in loaded.control_ids


def test_added_tokens_beyond_the_vocabulary_keep_their_ids(tmp_path):
    tokenizer = backend()
    tokenizer.add_tokens([AddedToken("<new>"), AddedToken("   "), AddedToken("\n\n\n")])
    loaded = from_folder(folder(tmp_path, tokenizer))
    run = tokenizer.token_to_id("\n\n\n")
    assert loaded.encode_plain("a\n\n\nb <new>")[1] == run
    assert loaded.encode("<new>") == [tokenizer.token_to_id("<new>")]
    assert loaded.vocab_size == run + 1


def test_a_missing_file_says_what_to_put_where(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json\. Put"):
        from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_corrupt_tokenizer_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="corrupt"):
        from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "special_tokens_map"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_corrupt_configuration_is_an_error(tmp_path, name, content):
    path = folder(tmp_path, backend())
    (path / f"{name}.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        from_folder(path)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 3, "eos_token": ["x"], "added_tokens_decoder": [1]},
        {"bos_token": "<none>", "add_bos_token": "yes", "added_tokens_decoder": {"1": {}}},
    ],
)
def test_odd_values_in_a_configuration_are_passed_over(tmp_path, config):
    tokenizer = from_folder(folder(tmp_path, backend(), tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.bos_text, tokenizer.add_bos_default) == (None, "", False)


def test_other_kinds_of_vocabulary_are_refused(tmp_path):
    path = folder(tmp_path, Backend(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(TokenizerError, match="WordLevel"):
        from_folder(path)


@pytest.mark.parametrize("config", [{"bos_token": "\ud800"}, {"eos_token": {"content": "\udfff"}}])
def test_text_that_no_file_can_hold_is_an_error(tmp_path, config):
    path = folder(tmp_path, backend(), tokenizer_config=CONFIG | config)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        from_folder(path)


def test_ids_far_apart_take_no_time(tmp_path):
    path = folder(tmp_path, backend())
    data = json.loads((path / "tokenizer.json").read_text())
    data["model"]["vocab"]["!!"] = 2**31
    (path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = from_folder(path)
    assert tokenizer.vocab_size == 2**31 + 1
    assert 2**31 in tokenizer.exempt_ids
