"""4-bit weights in the tiles that torch's operator for CUDA multiplies.

The layout is that of torch's source (aten/src/ATen/native/cuda/int4mm.cu). It is written out here,
in operators that run anywhere, so that many rows can be multiplied by unpacked weights, and so that
all but the one operator can be tested without a GPU.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.linear import INT4_GROUP, SLAB, Int4Linear


class TiledInt4Linear(Int4Linear):
    """The weights of `Int4Linear`, in tiles for tensor cores.

    A tile is 8 rows by 16 inputs, one of each kind of matrix that a tensor core takes in one
    instruction; two of them, side by side, are a word for each of 32 lanes. `packed` is uint8,
    (out_features / 8, in_features / (32 × pairs), 32, 4 × pairs) with 1, 2 or 4 pairs of tiles.
    """

    FEW = 128
    """Up to this many rows the packed weights are multiplied as they are. Chosen by figures that
    others have published; not measured."""

    @staticmethod
    def arranged(q: Tensor) -> Tensor:
        """Lay rows of numbers, a multiple of 8 of them, in tiles."""
        return to_tiles(q)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16; many rows by an unpacked copy, which lives for one call."""
        x = x.to(torch.bfloat16)
        if x.is_cuda and len(x) <= self.FEW:
            y = torch._weight_int4pack_mm(
                x.contiguous(), self.packed.view(torch.int32), INT4_GROUP, self.scale_zero
            )
        else:
            y = F.linear(x, self.unpacked())
        return y if self.bias is None else y + self.bias

    def unpacked(self) -> Tensor:
        """The weights that the operator multiplies with, (out_features, in_features) bfloat16."""
        scale, zero = self.scale_zero.float().permute(2, 1, 0).unsqueeze(-1)  # (out, in / 32, 1)
        groups = torch.empty(
            *scale.shape[:2], INT4_GROUP, dtype=torch.bfloat16, device=self.packed.device
        )
        for start in range(0, len(groups), SLAB):  # whole, what is computed would take much memory
            rows = slice(start, start + SLAB)
            q = from_tiles(self.packed[start // 8 : (start + SLAB) // 8])
            levels = q.unflatten(1, (-1, INT4_GROUP)).float() - 8
            groups[rows] = levels * scale[rows] + zero[rows]
        return groups.flatten(1)


def to_tiles(q: Tensor) -> Tensor:
    """Put numbers from 0 to 15, (out_features, in_features) uint8, into tiles of two to a byte.

    The more pairs of tiles stand together, the more a lane reads at once: up to 16 bytes.
    """
    pairs = next(n for n in (4, 2, 1) if q.shape[1] % (32 * n) == 0)
    # An input's number within a pair of tiles is 16 tile + 8 half + 2 column + odd.
    split = q.view(len(q) // 8, 8, -1, pairs, 2, 2, 4, 2)
    lanes = split.permute(0, 2, 1, 6, 3, 7, 4, 5)  # (…, row, column, pair, odd, tile, half)
    low, high = lanes.flatten(5).unflatten(5, (4, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed.flatten(2, 3).flatten(3)


def from_tiles(packed: Tensor) -> Tensor:
    """Take the numbers out of tiles again, (out_features, in_features) uint8."""
    pairs = packed.shape[3] // 4
    lanes = torch.stack((packed & 15, packed >> 4), dim=-1)
    lanes = lanes.view(*packed.shape[:2], 8, 4, pairs, 2, 2, 2)
    split = lanes.permute(0, 2, 1, 4, 6, 7, 3, 5)
    return split.reshape(len(packed) * 8, -1)


@cache
def multiplies_tiles(device: torch.device) -> bool:
    """Whether the operator runs on this GPU and agrees with what it is taken to compute."""
    generator = torch.Generator().manual_seed(0)
    # Widths for each number of pairs, one of them with a rest after whole steps of the kernel.
    for width in (1024, 576, 96):
        weight = torch.randn(48, width, generator=generator)
        x = torch.randn(3, width, generator=generator)
        try:
            layer = TiledInt4Linear.quantise(weight.to(device))
            found = layer(x.to(device)).float()
        except (RuntimeError, AssertionError):  # it takes compute capability 8.0; or no CUDA at all
            return False
        expected = F.linear(x.to(device), layer.unpacked().float())
        if not torch.allclose(found, expected, atol=0.02 * float(expected.abs().max())):
            return False
    return True
