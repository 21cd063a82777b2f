"""The GGUF reader against files of the `gguf` package, and against files that lie."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.engine.errors import (
    KvchatError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_types import GGMLType

QUANTISED = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q6_K, GGMLType.BF16)
METADATA: dict[str, tuple[str, Any]] = {
    "t.u8": ("add_uint8", 255),
    "t.i8": ("add_int8", -128),
    "t.u16": ("add_uint16", 65_535),
    "t.i16": ("add_int16", -32_768),
    "t.u32": ("add_uint32", 2**32 - 1),
    "t.i32": ("add_int32", -(2**31)),
    "t.u64": ("add_uint64", 2**64 - 1),
    "t.i64": ("add_int64", -(2**63)),
    "t.f32": ("add_float32", 0.5),
    "t.f64": ("add_float64", 0.1),
    "t.yes": ("add_bool", True),
    "t.no": ("add_bool", False),
    "t.text": ("add_string", "naïve 你好 🙂"),
    "t.whole": ("add_array", [1, -2, 3]),
    "t.real": ("add_array", [0.5, -0.25]),
    "t.flags": ("add_array", [True, False, True]),
    "t.tokens": ("add_array", ["a", "Ġb", "▁", "你", "<|im_end|>"]),
}


def write_model(path: Path, **writer_options: Any) -> dict[str, np.ndarray]:
    """Write a small model of many types; returns its tensors as the writer was given them."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama", **writer_options)
    for key, (method, value) in METADATA.items():
        getattr(writer, method)(key, value)
    tensors: dict[str, np.ndarray] = {
        "norm.weight": rng.standard_normal(5, dtype=np.float32),
        "half.weight": rng.standard_normal((2, 3)).astype(np.float16),
        "experts.weight": rng.standard_normal((2, 3, 4), dtype=np.float32),
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for kind in QUANTISED:
        blocks = rng.integers(0, 256, (3, 2 * kind.block_bytes), dtype=np.uint8)
        tensors[f"{kind.name}.weight"] = blocks
        raw = gguf.GGMLQuantizationType(kind.number)
        writer.add_tensor(f"{kind.name}.weight", blocks, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_model(path)
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "big.gguf", split_max_tensors=3)
    return sorted(tmp_path.glob("big-*.gguf"))


def read_everything(path: Path) -> None:
    with GGUFFile(path) as file:
        dict(file.metadata)
        for name in file.tensors:
            file.tensor(name, torch.float32)


# Files as they should be


def test_metadata_comes_as_plain_python_values(model: Path) -> None:
    with GGUFFile(model) as file:
        values = dict(file.metadata)
        assert "t.tokens" in file.metadata
        assert "t.nothing" not in file.metadata
    assert values.pop("general.architecture") == "llama"
    assert values == {key: value for key, (_, value) in METADATA.items()}
    assert {key: type(value) for key, value in values.items()} == {
        key: type(value) for key, (_, value) in METADATA.items()
    }


def test_tensors_agree_with_the_other_reader(model: Path) -> None:
    theirs = {t.name: t for t in gguf.GGUFReader(model).tensors}
    with GGUFFile(model) as file:
        assert list(file.tensors) == list(theirs)
        for name, info in file.tensors.items():
            other = theirs[name]
            assert info.shape == tuple(reversed(other.shape.tolist()))
            assert info.type.number == other.tensor_type
            assert (info.offset, info.nbytes) == (other.data_offset, other.n_bytes)
            with np.errstate(all="ignore"):
                values = gguf.quants.dequantize(other.data, other.tensor_type)
            ours = file.tensor(name, torch.float32)
            assert ours.shape == info.shape
            np.testing.assert_array_equal(ours.numpy(), values.reshape(info.shape))
            assert file.tensor(name, torch.bfloat16).dtype == torch.bfloat16


def test_blocks_are_the_stored_bytes_row_by_row(model: Path, tmp_path: Path) -> None:
    written = write_model(tmp_path / "again.gguf")
    with GGUFFile(model) as file:
        np.testing.assert_array_equal(
            file.blocks("Q4_1.weight").numpy(), written["Q4_1.weight"]
        )  # fmt: skip
        assert file.blocks("experts.weight").shape == (6, 16)
        assert file.blocks("norm.weight").shape == (1, 20)


def test_version_2_reads_the_same(model: Path, tmp_path: Path) -> None:
    content = bytearray(model.read_bytes())
    content[4] = 2
    (tmp_path / "v2.gguf").write_bytes(content)
    with GGUFFile(model) as new, GGUFFile(tmp_path / "v2.gguf") as old:
        assert dict(old.metadata) == dict(new.metadata)
        assert dict(old.tensors) == dict(new.tensors)


def test_views_outlive_the_file_and_never_change_it(model: Path) -> None:
    before = model.read_bytes()
    with GGUFFile(model) as file:
        view = file.blocks("Q8_0.weight")
    assert int(view.sum()) > 0
    view.zero_()
    assert model.read_bytes() == before


def test_released_pages_come_back(model: Path) -> None:
    with GGUFFile(model) as file:
        before = {name: file.blocks(name).clone() for name in file.tensors}
        for name in file.tensors:
            file.release(name)
        for name, blocks in before.items():
            assert torch.equal(file.blocks(name), blocks)


def test_opening_loads_no_torch(model: Path) -> None:
    code = (
        "import sys\nfrom kvchat.models.gguf import GGUFFile\n"
        "file = GGUFFile(sys.argv[1])\nassert file.metadata['t.u8'] == 255\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(model)], check=True, timeout=60)


def test_a_closed_file_says_so(model: Path) -> None:
    file = GGUFFile(model)
    file.close()
    file.close()
    with pytest.raises(ModelFileError, match="closed"):
        file.blocks("norm.weight")


@pytest.mark.real_model
def test_default_model_agrees_with_the_other_reader(default_model_path: Path) -> None:
    reader = gguf.GGUFReader(default_model_path)
    with GGUFFile(default_model_path) as file:
        for key, value in file.metadata.items():
            assert reader.fields[key].contents() == value
        assert len(file.tensors) == len(reader.tensors)
        for other in reader.tensors[:12]:
            values = gguf.quants.dequantize(other.data, other.tensor_type)
            ours = file.tensor(other.name, torch.float32)
            np.testing.assert_array_equal(ours.numpy(), values)


# Split models


def test_any_part_opens_the_whole_model(parts: list[Path], model: Path) -> None:
    assert len(parts) == 3
    with GGUFFile(model) as whole:
        for path in parts:
            with GGUFFile(path) as file:
                assert file.metadata["t.text"] == METADATA["t.text"][1]
                assert list(file.tensors) == list(whole.tensors)
                for name in whole.tensors:
                    assert torch.equal(file.blocks(name), whole.blocks(name))
                    file.release(name)


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"big-00002-of-00003\.gguf"):
        GGUFFile(parts[0])


def test_a_renamed_part_says_what_its_name_should_end_in(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ModelFileError, match=r"-00001-of-00003\.gguf"):
        GGUFFile(other)


def test_parts_of_different_models_do_not_mix(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelFileError, match="part 2 of 3"):
        GGUFFile(parts[0])


def test_a_part_that_is_no_part_is_refused(parts: list[Path], model: Path) -> None:
    parts[1].write_bytes(model.read_bytes())
    with pytest.raises(ModelFileError, match="part 1 of 1"):
        GGUFFile(parts[0])


# Files that lie, written by hand


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def image(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    data: bytes = bytes(64),
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        3,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


HUGE = 2**64 - 1
U32, BOOL, STRING, ARRAY = 4, 7, 8, 9


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file"),
        (b"GGUF", "cut short"),
        (image(n_pairs=HUGE), "metadata keys"),
        (image(n_tensors=HUGE), "tensors"),
        (image((struct.pack("<Q", HUGE),)), "name"),
        (image((pair(b"\xff", U32, bytes(4)),)), "not UTF-8"),
        (image((pair("k", 99, bytes(4)),)), "unknown kind 99"),
        (image((pair("k", U32, bytes(4)), pair("k", U32, bytes(4)))), "'k' occurs twice"),
        (image((pair("k", STRING, struct.pack("<Q", HUGE)),)), "cut short"),
        (image((pair("k", ARRAY, array(99, 1, b"")),)), "array of unknown kind 99"),
        (image((pair("k", ARRAY, array(U32, HUGE, b"")),)), "too long"),
        (image((pair("k", ARRAY, array(U32, 10_000, b"")),)), "10000 items in 'k'"),
        (image((pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", HUGE))),)), "past"),
        (image((pair("k", ARRAY, array(ARRAY, 1, b"") * 9),)), "too deep"),
        (image((pair("general.alignment", U32, struct.pack("<I", 0)),)), "alignment 0"),
        (image((pair("general.alignment", U32, struct.pack("<I", 48)),)), "alignment 48"),
        (image((pair("general.alignment", STRING, text("32")),)), "whole number"),
        (image((), (tensor("w"), tensor("w"))), "'w' occurs twice"),
        (image((), (tensor("w", (1,) * 5),)), "5 dimensions"),
        (image((), (tensor("w", (2**32, 2**32)),)), "should end"),
        (image((), (tensor("w", (8, 0)),)), "empty dimension"),
        (image((), (tensor("w", (33,), kind=2),)), "do not fill blocks of 32"),
        (image((), (tensor("w", offset=8),)), "not aligned"),
        (image((), (tensor("w", offset=2**64 - 32),)), "should end"),
        (image((), (tensor("w", (17,)),)), "should end"),
        (image((pair("split.count", U32, struct.pack("<I", 2**32 - 1)),)), "part 1 of"),
        (image((pair("split.count", BOOL, b"\1"),)), "whole number"),
    ],
)  # fmt: skip
def test_lies_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=words) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_sound_files_by_hand_open(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    nested = array(ARRAY, 2, array(U32, 2, struct.pack("<2I", 1, 2)) + array(STRING, 1, text("x")))
    path.write_bytes(
        image(
            (pair("k", ARRAY, nested), pair("latin", STRING, text(b"caf\xe9")),
             pair("general.alignment", U32, struct.pack("<I", 64))),
            (tensor("w", (8, 2)), tensor("same bytes", (16,)), tensor("one", ())),
            alignment=64,
            data=np.arange(16, dtype=np.float32).tobytes(),
        )
    )  # fmt: skip
    with GGUFFile(path) as file:
        assert file.metadata["k"] == [[1, 2], ["x"]]
        assert file.metadata["latin"] == r"caf\xe9"
        assert torch.equal(file.tensor("w", torch.float32), torch.arange(16.0).view(2, 8))
        assert torch.equal(file.tensor("same bytes", torch.float32), torch.arange(16.0))
        assert file.tensor("one", torch.float32).shape == ()


def test_a_token_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    path.write_bytes(image((pair("k", ARRAY, array(STRING, 2, text("a") + text(b"\xff"))),)))
    with GGUFFile(path) as file, pytest.raises(ModelFileError, match=r"xff.* in 'k'"):
        file.metadata["k"]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (struct.pack("<I", 1), "version 1"),
        (struct.pack("<I", 4), "version 4"),
        (struct.pack("<I", 0), "version 0"),
        (struct.pack(">I", 3), "big-endian"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, version: bytes, words: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + version + bytes(64))
    with pytest.raises(UnsupportedModelError, match=words):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("kind", "name"), [(16, "IQ2_XXS"), (34, "TQ1_0"), (39, "MXFP4"), (77, "unknown type 77")]
)
def test_unreadable_types_are_named_with_those_that_are_not(
    tmp_path: Path, kind: int, name: str
) -> None:
    path = tmp_path / "rare.gguf"
    path.write_bytes(image((), (tensor("blk.0.attn_q.weight", (256,), kind=kind),)))
    with pytest.raises(UnsupportedModelError, match=rf"attn_q.* as {name},.*Q4_K"):
        GGUFFile(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_folder_is_not_a_model_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a file"):
        GGUFFile(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a file"):
        GGUFFile(tmp_path / "pipe.gguf")


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be cut there")
def test_a_file_cut_while_open_raises_instead_of_killing(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(model.read_bytes())
    with GGUFFile(path) as file:
        os.truncate(path, 0)
        for read in (
            lambda: file.tensor("norm.weight", torch.float32),
            lambda: dict(file.metadata),
        ):
            with pytest.raises(ModelFileError, match="shorter"):
                read()


# Files damaged anywhere


def test_cut_anywhere(model: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    with GGUFFile(model) as file:
        header = min(info.offset for info in file.tensors.values())
        end = max(info.offset + info.nbytes for info in file.tensors.values())
    path = tmp_path / "cut.gguf"
    for size in (*range(header), *range(header, end, 31), end - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            GGUFFile(path)
    path.write_bytes(content[:end])
    read_everything(path)


@pytest.mark.parametrize(
    "change",
    [lambda b: b ^ 1, lambda b: b ^ 128, lambda b: 255],
    ids=["low bit", "high bit", "255"],
)
def test_any_byte_changed(model: Path, tmp_path: Path, change: Callable[[int], int]) -> None:
    content = model.read_bytes()
    with GGUFFile(model) as file:
        header = min(info.offset for info in file.tensors.values())
    path = tmp_path / "changed.gguf"
    for at in range(header):
        damaged = bytearray(content)
        damaged[at] = change(content[at])
        path.write_bytes(damaged)
        try:
            read_everything(path)
        except KvchatError as error:
            assert str(path) in str(error)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_eight_bytes_replaced(
    model: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(model.read_bytes())
    at = data.draw(st.integers(8, len(content) - 8))
    number = data.draw(st.integers(0, 64) | st.integers(2**31 - 2, 2**33) | st.integers(0, HUGE))
    struct.pack_into("<Q", content, at, number)
    path = tmp_path_factory.getbasetemp() / "replaced.gguf"
    path.write_bytes(content)
    try:
        read_everything(path)
    except KvchatError as error:
        assert str(path) in str(error)
