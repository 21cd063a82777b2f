from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from kvchat.models.stream_decoder import (
    BYTE_TO_CHAR,
    CHAR_TO_BYTE,
    StreamDecoder,
    TokenBytes,
    byte_level_bytes,
    sentencepiece_bytes,
)


class Raw(dict):
    """Every id stands for the bytes it is."""

    def __missing__(self, raw: bytes) -> bytes:
        return raw


def streamed(decoder: StreamDecoder, ids: list) -> list[str]:
    return [*(decoder.step(id_) for id_ in ids), decoder.flush()]


def test_byte_alphabet_is_one_to_one_and_the_librarys():
    from tokenizers.pre_tokenizers import ByteLevel

    assert len(CHAR_TO_BYTE) == len(BYTE_TO_CHAR) == 256
    assert set(CHAR_TO_BYTE) == set(ByteLevel.alphabet())
    assert byte_level_bytes("ĠhelloĊ") == b" hello\n"


def test_byte_level_token_outside_the_alphabet_is_literal():
    assert byte_level_bytes("<｜User｜>") == "<｜User｜>".encode()


@pytest.mark.parametrize(
    ("token", "raw"),
    [
        ("▁the▁", b" the "),
        ("<0x0A>", b"\n"),
        ("<0xfF>", b"\xff"),
        ("<0x0A", b"<0x0A"),
        ("é", "é".encode()),
    ],
)
def test_sentencepiece_bytes(token, raw):
    assert sentencepiece_bytes(token) == raw


def test_table_is_empty_for_ids_without_a_token():
    table = TokenBytes(["a"].__getitem__, byte_level_bytes)
    holes = TokenBytes({0: "a"}.get, byte_level_bytes)
    assert table[0] == b"a"
    assert (table[-1], holes[7]) == (b"", b"")


@given(st.lists(st.binary(max_size=5)))
def test_pieces_join_to_the_whole_for_any_bytes(chunks):
    text = "".join(streamed(StreamDecoder(Raw()), chunks))
    assert text == b"".join(chunks).decode("utf-8", "replace")


@given(st.binary(max_size=24))
def test_invalid_bytes_are_replaced_as_the_library_does(raw):
    tokens = [BYTE_TO_CHAR[byte] for byte in raw]
    text = "".join(streamed(StreamDecoder(Raw()), [bytes([byte]) for byte in raw]))
    assert text == decoders.ByteLevel().decode(tokens)


@given(st.text(max_size=20))
def test_a_character_comes_out_whole_with_its_last_byte(text):
    raw = text.encode()
    pieces = streamed(StreamDecoder(Raw()), [bytes([byte]) for byte in raw])
    assert [piece for piece in pieces if piece] == list(text)


def test_an_unfinished_character_is_flushed_once():
    decoder = StreamDecoder(Raw())
    assert streamed(decoder, ["👍".encode()[:3]]) == ["", "\N{REPLACEMENT CHARACTER}"]
    assert decoder.flush() == ""


def test_a_real_replacement_character_does_not_stall():
    assert StreamDecoder(Raw()).step("\N{REPLACEMENT CHARACTER}".encode()) == "\ufffd"


def test_skipped_ids_leave_an_open_character_open():
    table = {0: b"\xe4\xbd", 1: b"<eos>", 2: b"\xa0"}
    decoder = StreamDecoder(table, skipped=frozenset({1}))
    assert streamed(decoder, [0, 1, 2]) == ["", "", "你", ""]
    assert unicodedata.name("你").startswith("CJK")


@pytest.mark.parametrize(("strip", "text"), [(True, " a  b"), (False, "  a  b")])
def test_only_one_space_at_the_very_start_is_stripped(strip, text):
    decoder = StreamDecoder(Raw(), strip_space=strip)
    assert "".join(streamed(decoder, [b"", b" ", b" a", b"  b"])) == text
