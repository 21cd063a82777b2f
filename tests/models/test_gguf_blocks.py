"""Dequantisation against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kvchat.models.gguf_blocks import SLAB_ELEMENTS, blocks_of, dequantize
from kvchat.models.gguf_types import TYPE_BY_NUMBER, UNREADABLE, GGMLType

INTEGERS = {
    GGMLType.I8: np.int8,
    GGMLType.I16: np.int16,
    GGMLType.I32: np.int32,
    GGMLType.I64: np.int64,
}
FLOATS = [t for t in GGMLType if t not in INTEGERS and t is not GGMLType.F64]


def random_blocks(
    ggml_type: GGMLType, rows: int, blocks_per_row: int, seed: int = 0
) -> torch.Tensor:
    """Bytes without any order: the scales among them are NaN, infinite, subnormal, negative."""
    rng = np.random.default_rng(seed)
    nbytes = blocks_per_row * ggml_type.block_bytes
    return torch.from_numpy(rng.integers(0, 256, (rows, nbytes), dtype=np.uint8))


def reference(blocks: torch.Tensor, ggml_type: GGMLType) -> torch.Tensor:
    with np.errstate(all="ignore"):
        kind = gguf.GGMLQuantizationType(ggml_type.number)
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind).copy())


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    both_nan = ours.isnan() & theirs.isnan()
    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
    assert torch.equal(ours.view(bits)[~both_nan], theirs.view(bits)[~both_nan])


@pytest.mark.parametrize("ggml_type", FLOATS, ids=lambda t: t.name)
def test_float32_equals_the_reference_bit_for_bit(ggml_type: GGMLType) -> None:
    blocks = random_blocks(ggml_type, rows=48, blocks_per_row=16)
    assert_same_bits(dequantize(blocks, ggml_type), reference(blocks, ggml_type))


@pytest.mark.parametrize("ggml_type", FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00], ids=hex)
def test_every_kind_of_scale(ggml_type: GGMLType, scale: int) -> None:
    """Zeros, the smallest and largest float16, infinities and NaN wherever a scale may stand."""
    blocks = random_blocks(ggml_type, rows=3, blocks_per_row=2, seed=scale)
    for at in (0, 2, 80, 82, 108, 208):
        if at + 2 <= ggml_type.block_bytes:
            blocks[:, at], blocks[:, at + 1] = scale & 255, scale >> 8
    assert_same_bits(dequantize(blocks, ggml_type), reference(blocks, ggml_type))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ggml_type", FLOATS, ids=lambda t: t.name)
def test_other_dtypes_are_the_float32_result_rounded(
    ggml_type: GGMLType, dtype: torch.dtype
) -> None:
    blocks = random_blocks(ggml_type, rows=5, blocks_per_row=3)
    assert_same_bits(dequantize(blocks, ggml_type, dtype), dequantize(blocks, ggml_type).to(dtype))


@pytest.mark.parametrize("ggml_type", INTEGERS, ids=lambda t: t.name)
def test_integers_keep_their_values(ggml_type: GGMLType) -> None:
    blocks = random_blocks(ggml_type, rows=4, blocks_per_row=6)
    expected = torch.from_numpy(blocks.numpy().view(INTEGERS[ggml_type]).copy())
    assert torch.equal(dequantize(blocks, ggml_type, torch.int64), expected.long())
    assert torch.equal(dequantize(blocks, ggml_type), expected.float())


def test_float64_is_rounded_to_what_is_asked_for() -> None:
    values = torch.randn(3, 7, dtype=torch.float64)
    blocks = values.view(torch.uint8)
    assert torch.equal(dequantize(blocks, GGMLType.F64, torch.float64), values)
    assert torch.equal(dequantize(blocks, GGMLType.F64), values.float())


@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_0, GGMLType.Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_more_than_one_slab(ggml_type: GGMLType, rows: int) -> None:
    blocks_per_row = SLAB_ELEMENTS // ggml_type.block_elements + 5
    blocks = random_blocks(ggml_type, rows, blocks_per_row)
    assert_same_bits(dequantize(blocks, ggml_type), reference(blocks, ggml_type))


def test_rows_may_come_in_any_order() -> None:
    """Un-permuting the rows of a quantised matrix is a choice of rows of blocks."""
    blocks = random_blocks(GGMLType.Q4_K, rows=6, blocks_per_row=2)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    straight = dequantize(blocks, GGMLType.Q4_K)
    assert_same_bits(dequantize(blocks[order], GGMLType.Q4_K), straight[order])
    assert_same_bits(dequantize(blocks[1::2], GGMLType.Q4_K), straight[1::2])


WHOLE = {
    GGMLType.Q4_0: (4, False),
    GGMLType.Q4_1: (4, True),
    GGMLType.Q4_K: (4, True),
    GGMLType.Q5_0: (5, False),
    GGMLType.Q5_1: (5, True),
    GGMLType.Q5_K: (5, True),
    GGMLType.Q6_K: (6, False),
    GGMLType.Q8_0: (8, False),
}
"""Types that are whole numbers with a scale: their bits, and whether they have minima."""


@pytest.mark.parametrize("ggml_type", WHOLE, ids=lambda t: t.name)
def test_blocks_rebuild_the_weights_exactly(ggml_type: GGMLType) -> None:
    columns = 512
    rows = random_blocks(ggml_type, 7, columns // ggml_type.block_elements)
    scales = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    size = torch.randn(7, generator=torch.Generator().manual_seed(1)).half().view(7, 1)
    for block in rows.split(ggml_type.block_bytes, dim=1):  # numbers as trained models have them
        for at in scales.get(ggml_type.name, (0,)):
            block[:, at : at + 2] = size.view(torch.uint8)
    blocks = blocks_of(rows, ggml_type)
    assert blocks is not None
    assert blocks.form == WHOLE[ggml_type]
    assert blocks.q.dtype == torch.uint8
    assert blocks.q.shape == (7, columns)
    assert int(blocks.q.max()) < 2**blocks.bits
    offset = 0 if blocks.minimum is not None else 2 ** (blocks.bits - 1)
    rebuilt = (blocks.q.float() - offset).view(*blocks.scale.shape, -1) * blocks.scale[..., None]
    if blocks.minimum is not None:
        rebuilt += blocks.minimum[..., None]
    assert torch.equal(rebuilt.view(7, columns), reference(rows, ggml_type))
    assert torch.equal(blocks.at(torch.tensor([3, 1])).scale, blocks.scale[[3, 1]])


@pytest.mark.parametrize("ggml_type", set(FLOATS) - set(WHOLE), ids=lambda t: t.name)
def test_other_types_are_no_blocks(ggml_type: GGMLType) -> None:
    assert blocks_of(random_blocks(ggml_type, 1, 1), ggml_type) is None


@pytest.mark.parametrize("ggml_type", GGMLType, ids=lambda t: t.name)
def test_numbers_and_sizes_are_ggmls(ggml_type: GGMLType) -> None:
    kind = gguf.GGMLQuantizationType[ggml_type.name]
    assert ggml_type.number == kind
    assert gguf.GGML_QUANT_SIZES[kind] == (ggml_type.block_elements, ggml_type.block_bytes)


def test_every_type_of_ggml_has_a_name_here() -> None:
    names = {number: t.name for number, t in TYPE_BY_NUMBER.items()} | UNREADABLE
    for kind in gguf.GGMLQuantizationType:
        assert names[kind.value] == kind.name
