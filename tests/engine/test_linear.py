"""Quantised linear layers against the dense matrices they stand for."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor, nn

from kvchat.engine.linear import Blocks, Int4Linear, Int8Linear, Linear, weight_bytes, weight_class
from kvchat.models.gguf_blocks import blocks_of
from kvchat.models.gguf_types import GGMLType

ROWS = pytest.mark.parametrize("T", [1, 2, 17])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dense_takes_any_activations(T: int, dtype: torch.dtype, with_bias: bool) -> None:
    weight, x = normal(24, 40).to(dtype), normal(T, 40, seed=1)
    bias = normal(24, seed=2).to(dtype) if with_bias else None
    exact = x.to(dtype).double() @ weight.double().T + (0 if bias is None else bias.double())
    y = Linear(weight, bias)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), exact, atol=0.15 if dtype != torch.float32 else 1e-5, rtol=0
    )


@ROWS
@pytest.mark.parametrize("shape", [(32, 64), (48, 96), (16, 32)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8(T: int, shape: tuple[int, int], with_bias: bool) -> None:
    weight, x = normal(*shape), normal(T, shape[1], seed=1)
    bias = normal(shape[0], seed=2) if with_bias else None
    layer = Int8Linear.quantise(weight.split(20), bias)
    held = held_in_8_bits(layer)
    groups = weight.double().unflatten(1, (-1, 32))
    # Half a step, and what a bfloat16 loses of the scale.
    allowed = (0.5 / 127 + 2**-8) * groups.abs().amax(dim=-1, keepdim=True)
    assert ((held.unflatten(1, (-1, 32)) - groups).abs() <= allowed).all()
    assert (held - weight.double()).norm() <= 0.006 * weight.double().norm()
    assert_equal_up_to_bfloat16(layer(x), x, held, bias)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_int8_holds_blocks_but_for_the_scale(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(normal(32, 96).numpy(), number)
    dense = torch.from_numpy(gguf.quants.dequantize(blocks, number))
    held = held_in_8_bits(Int8Linear.quantise([dense]))
    assert (held - dense.double()).norm() <= 2.5e-3 * dense.double().norm()


def test_int8_of_nothing_but_zeros() -> None:
    layer = Int8Linear.quantise([torch.zeros(16, 32)])
    assert not layer(normal(3, 32)).any()


def test_packing_in_slabs_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(160, 64)
    whole = Int4Linear.quantise(weight)
    monkeypatch.setattr("kvchat.engine.linear.SLAB", 64)
    assert torch.equal(Int4Linear.quantise(weight).packed, whole.packed)


@pytest.mark.parametrize("height", [16, 32, 48, 96])
def test_slabs_may_end_within_the_operators_tiles(height: int) -> None:
    """As those of matrices that are stacked do."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (192, 64), generator=generator).to(torch.uint8)
    blocks = Blocks(q, normal(192, 2), normal(192, 2, seed=1), 4)
    whole = Int4Linear.pack([blocks])
    parts = Int4Linear.pack(blocks.at(rows) for rows in torch.arange(192).split(height))
    assert torch.equal(parts.packed, whole.packed)
    assert torch.equal(parts.scale_zero, whole.scale_zero)


@ROWS
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (64, 160)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int4(T: int, shape: tuple[int, int], with_bias: bool) -> None:
    weight, x = normal(*shape), normal(T, shape[1], seed=1)
    bias = normal(shape[0], seed=2) if with_bias else None
    layer = Int4Linear.quantise(weight, bias)
    held = unpacked(layer)
    step = layer.scale_zero[..., 0].T.double().repeat_interleave(32, dim=1)
    assert ((held - weight.double()).abs() <= step * 0.6).all()
    assert_equal_up_to_bfloat16(layer(x), x, held, bias)


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q4_1])
def test_int4_holds_gguf_blocks_as_they_are(kind: GGMLType) -> None:
    number = gguf.GGMLQuantizationType[kind.name]
    blocks = gguf.quants.quantize(normal(48, 96).numpy(), number)
    parts = blocks_of(torch.from_numpy(blocks), kind)
    assert parts is not None
    scale = parts.scale
    dense = torch.from_numpy(gguf.quants.dequantize(blocks, number)).double()
    spread = scale.double().abs().repeat_interleave(32, dim=1)
    # A bfloat16 keeps 8 bits, so a weight of up to 15 scales moves by up to a few hundredths.
    held = unpacked(Int4Linear.pack([parts]))
    assert ((held - dense).abs() <= (15 + 8) * 2**-8 * spread).all()


@pytest.mark.parametrize(
    ("out_features", "in_features", "fits"),
    [(16, 32, True), (576, 1536, True), (24, 32, False), (16, 48, False), (8, 31, False)],
)
def test_int4_fits(out_features: int, in_features: int, fits: bool) -> None:
    assert Int4Linear.fits(out_features, in_features) == fits


def test_weight_bytes_counts_shared_weights_once() -> None:
    shared = normal(8, 4)
    layers = torch.nn.ModuleList([Linear(shared), Linear(shared), Linear(normal(2, 4), normal(2))])
    assert weight_bytes(layers) == 4 * (32 + 8 + 2)


def held_in_8_bits(layer: Int8Linear) -> Tensor:
    """The weights that the layer stands for, the halves read off by themselves."""
    high = Int4Linear(layer.high, layer.high_scale_zero)
    return unpacked(high) + unpacked(Int4Linear(layer.low, layer.low_scale_zero))


def unpacked(layer: Int4Linear) -> Tensor:
    """The weights that the operator multiplies with, read off its products with unit vectors."""
    in_features = layer.packed.shape[1] * 2
    bare = Int4Linear(layer.packed, layer.scale_zero)
    columns = bare(torch.eye(in_features)).double().T
    scale, zero = layer.scale_zero.double().permute(2, 1, 0)  # (out, in / 32) each
    scale, zero = (t.repeat_interleave(32, dim=1) for t in (scale, zero))
    levels = ((columns - zero) / scale).round()
    assert levels.min() >= -8
    assert levels.max() <= 7
    return levels * scale + zero


def assert_equal_up_to_bfloat16(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with a float64 product; the error allowed is bfloat16's in x and in the result."""
    x = x.to(torch.bfloat16).double()
    exact = x @ weight.T
    size = x.abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= 2**-7 * size + 1e-6).all()
    assert (y.double() - exact).norm() <= 2**-7 * exact.norm()


def test_the_weight_class_is_that_of_most_weights() -> None:
    small, large = torch.randn(16, 32), torch.randn(64, 64)
    assert weight_class(nn.ModuleList([Linear(small), Int4Linear.quantise(large)])) == "int4"
    assert weight_class(nn.ModuleList([Linear(small), Int8Linear.quantise([large])])) == "int8"
    assert weight_class(nn.ModuleList([Linear(large), Int8Linear.quantise([small])])) == "float32"
