"""4-bit weights in tiles for tensor cores: what they hold and how they lie, on a CPU."""

from __future__ import annotations

from itertools import product

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.cuda.int4 import TiledInt4Linear, from_tiles, multiplies_tiles, to_tiles
from kvchat.engine.linear import Int4Linear, weight_class
from kvchat.models.gguf_blocks import blocks_of
from kvchat.models.gguf_types import GGMLType

SHAPES = [(16, 32), (32, 64), (48, 96), (16, 128), (64, 576), (2064, 160)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(out_features: int, in_features: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 16, (out_features, in_features), generator=generator).to(torch.uint8)


def words_by_hand(q: Tensor, inner_tiles: int) -> Tensor:
    """The layout word by word: what each of the 32 lanes holds of each pair of tiles."""
    rows, width = q.shape
    shape = rows // 8, width // (16 * inner_tiles), 32, inner_tiles // 2
    words = torch.zeros(shape, dtype=torch.int64)
    for tile, outer, lane, pair in product(*map(range, shape)):
        row, first = tile * 8 + lane // 4, (outer * inner_tiles + 2 * pair) * 16
        even = [first + 8 * half + 2 * (lane % 4) for half in range(4)]
        order = [*even, *(k + 1 for k in even)]  # even inputs are in the word's lower half
        words[tile, outer, lane, pair] = sum(int(q[row, k]) << 4 * n for n, k in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_give_back_what_they_were_given(shape: tuple[int, int]) -> None:
    q = numbers(*shape)
    assert torch.equal(from_tiles(to_tiles(q)), q)


@pytest.mark.parametrize(
    ("shape", "inner_tiles"), [((16, 32), 2), ((16, 96), 2), ((24, 64), 4), ((16, 256), 8)]
)
def test_tiles_lie_as_the_operator_reads_them(shape: tuple[int, int], inner_tiles: int) -> None:
    q = numbers(*shape)
    tiles = to_tiles(q)
    with torch.device("meta"):
        made = torch._convert_weight_to_int4pack(
            torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8), inner_tiles
        )
    words = tiles.view(torch.int32)
    assert words.shape == made.shape
    assert torch.equal(words, words_by_hand(q, inner_tiles))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_cpu_operator(shape: tuple[int, int], with_bias: bool) -> None:
    weight, x = normal(*shape), normal(3, shape[1], seed=1)
    bias = normal(shape[0], seed=2) if with_bias else None
    tiled, plain = (kind.quantise(weight, bias) for kind in (TiledInt4Linear, Int4Linear))
    y = tiled(x)
    torch.testing.assert_close(y.float(), plain(x).float(), atol=0.02 * y.abs().max(), rtol=0.02)
    assert weight_class(torch.nn.ModuleList([tiled])) == "int4"


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q4_1])
def test_gguf_blocks_are_held_as_they_are(kind: GGMLType) -> None:
    number = gguf.GGMLQuantizationType[kind.name]
    blocks = gguf.quants.quantize(normal(48, 96).numpy(), number)
    held = blocks_of(torch.from_numpy(blocks), kind)
    assert held is not None
    layer = TiledInt4Linear.pack([held])
    assert torch.equal(from_tiles(layer.packed), held.q)
    dense = torch.from_numpy(gguf.quants.dequantize(blocks, number))
    # A bfloat16 keeps 8 bits of scale and zero, and of the weight itself.
    spread = held.scale.abs().repeat_interleave(32, dim=1)
    assert ((layer.unpacked().float() - dense).abs() <= (15 + 8 + 16) * 2**-8 * spread).all()


def test_many_rows_are_multiplied_like_few() -> None:
    layer, x = TiledInt4Linear.quantise(normal(32, 64)), normal(300, 64, seed=1)
    assert torch.equal(layer(x), F.linear(x.bfloat16(), layer.unpacked()))


def test_the_check_of_the_operator_holds_where_weights_are_unpacked() -> None:
    assert multiplies_tiles(torch.device("cpu"))
