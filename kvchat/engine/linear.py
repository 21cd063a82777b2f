"""Linear layers: plain and quantised, with one call signature.

All take activations (T, in_features) of any float type and return (T, out_features). Which class
a weight gets is decided when the model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT4_GROUP = 32
"""Weights that share one scale and zero point; the block size of Q4_0 and Q4_1."""


ROWS_PER_TILE = 16
"""Rows that our own kernels multiply side by side."""

SLAB = 2048
"""Rows that are rounded at a time; whole tiles."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a weight as small whole numbers, which files and our kernels hold alike.

    A weight is q × scale + minimum, or (q - 2^(bits - 1)) × scale where there are no minima.
    """

    q: Tensor
    """(rows, in_features) uint8, below 2^bits."""
    scale: Tensor
    """(rows, in_features / 32); with 6 bits (rows, in_features / 16)."""
    minimum: Tensor | None
    """(rows, in_features / 32)."""
    bits: int
    """4, 5, 6 or 8."""

    @property
    def form(self) -> tuple[int, bool]:
        """Bits, and whether there are minima: what rows must agree in to be one layer."""
        return self.bits, self.minimum is not None

    def to(self, device: torch.device) -> Blocks:
        """Move to a device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return Blocks(self.q.to(device), self.scale.to(device), minimum, self.bits)

    def at(self, rows: Tensor) -> Blocks:
        """Choose rows by their indices."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return Blocks(self.q[rows], self.scale[rows], minimum, self.bits)


class Linear(nn.Module):
    """A dense weight (out_features, in_features) in float32, float16 or bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in the weight's type."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows by ids (T,), as an embedding does."""
        return F.embedding(ids, self.weight)


class Int4Linear(nn.Module):
    """Asymmetric int4 in groups of 32 inputs, as torch's own CPU operator packs it.

    A weight is (q - 8) × scale + zero with q from 0 to 15, which holds Q4_0 and Q4_1 blocks as
    they are: their numbers are mapped, never rounded again to other levels.
    """

    def __init__(self, packed: Tensor, scale_zero: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("packed", packed)  # (out_features, in_features / 2) uint8
        self.register_buffer("scale_zero", scale_zero)  # (in_features / 32, out_features, 2) bf16
        self.register_buffer("bias", bias)
        self.packed: Tensor
        self.scale_zero: Tensor
        self.bias: Tensor | None

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whether torch's operator takes a weight of this shape."""
        return out_features % 16 == 0 and in_features % INT4_GROUP == 0

    @classmethod
    def pack(cls, slabs: Iterable[Blocks], bias: Tensor | None = None) -> Self:
        """Take blocks of 4 bits, which come as slabs of a multiple of 16 rows each."""
        numbers, pairs = [], []
        for slab in slabs:
            zero = 0 * slab.scale if slab.minimum is None else slab.minimum + 8 * slab.scale
            pairs.append(torch.stack([slab.scale, zero], dim=-1).to(torch.bfloat16))
            numbers.append(slab.q)
        # The operator's tiles have up to 64 rows, wherever one slab ends and the next begins.
        packed = torch.cat([cls.arranged(q) for q in torch.cat(numbers).split(SLAB)])
        return cls(packed, torch.cat(pairs).transpose(0, 1).contiguous(), bias)

    @staticmethod
    def arranged(q: Tensor) -> Tensor:
        """Lay rows of numbers, (rows, in_features) uint8, as the operator reads them."""
        return torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)

    @classmethod
    def quantise(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Round a dense weight (out_features, in_features) to int4."""
        groups = weight.float().unflatten(1, (-1, INT4_GROUP))  # (out, in / 32, 32)
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15).clamp(min=1e-12)
        q = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        blocks = Blocks(q.flatten(1).to(torch.uint8), scale, low, 4)
        return cls.pack(in_slabs(blocks), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16; the operator is thirty times slower with other activations."""
        y = torch._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self.packed, INT4_GROUP, self.scale_zero
        )
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """8 bits in groups of 32 inputs, held as two int4 weights: the halves of each number.

    A weight is u × scale + minimum with u = 16 high + low from 0 to 255. torch's own int8 operator
    has one scale for a whole row, which loses twice as much as the quality guard allows.
    """

    def __init__(
        self,
        high: Tensor,
        high_scale_zero: Tensor,
        low: Tensor,
        low_scale_zero: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("high", high)  # each half as in Int4Linear
        self.register_buffer("high_scale_zero", high_scale_zero)
        self.register_buffer("low", low)
        self.register_buffer("low_scale_zero", low_scale_zero)
        self.register_buffer("bias", bias)
        self.high: Tensor
        self.high_scale_zero: Tensor
        self.low: Tensor
        self.low_scale_zero: Tensor
        self.bias: Tensor | None

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whether torch's operator takes a weight of this shape."""
        return Int4Linear.fits(out_features, in_features)

    @classmethod
    def quantise(cls, slabs: Iterable[Tensor], bias: Tensor | None = None) -> Int8Linear:
        """Round dense rows, which come as slabs of any number of rows, to 8 bits."""
        rounded = [_round_to_bytes(slab) for slab in slabs]
        u, scale, minimum = (torch.cat(parts) for parts in zip(*rounded, strict=True))
        high = Int4Linear.pack(in_slabs(Blocks(u >> 4, 16 * scale, minimum, 4)))
        low = Int4Linear.pack(in_slabs(Blocks(u & 15, scale, torch.zeros_like(scale), 4)))
        return cls(high.packed, high.scale_zero, low.packed, low.scale_zero, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16; the halves are summed in float32."""
        x = x.to(torch.bfloat16)
        high = torch._weight_int4pack_mm_for_cpu(x, self.high, INT4_GROUP, self.high_scale_zero)
        low = torch._weight_int4pack_mm_for_cpu(x, self.low, INT4_GROUP, self.low_scale_zero)
        y = high.float() + low
        return y if self.bias is None else y + self.bias


class PackedLinear(nn.Module):
    """Blocks of 4, 5, 6 or 8 bits, in the layout of our own kernels.

    Scales and minima are float16, as in most files, so that blocks of Q4_0, Q4_1, Q5_0, Q5_1 and
    Q8_0 are held exactly. Activations are rounded to 14 bits per group.
    """

    def __init__(  # noqa: PLR0917 (in the order of `Blocks.form`)
        self,
        blocks: Tensor,
        bits: int,
        minima: bool,
        out_features: int,
        in_features: int,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.register_buffer("bias", bias)
        self.blocks: Tensor
        self.bias: Tensor | None
        self.bits = bits
        self.minima = minima
        self.out_features = out_features
        self.in_features = in_features

    @classmethod
    def fits(cls, in_features: int) -> bool:
        """Whether the kernels take rows of this length."""
        return in_features % INT4_GROUP == 0

    @classmethod
    def pack(
        cls, slabs: Iterable[Blocks], out_features: int, bias: Tensor | None = None
    ) -> PackedLinear:
        """Take blocks of one form, which come as slabs of a multiple of 16 rows each."""
        done, blocks = 0, torch.empty(0)
        for slab in slabs:
            packed = torch.ops.kvchat.pack(slab.q, slab.scale, slab.minimum, slab.bits)
            if not done:
                tiles = -(-out_features // ROWS_PER_TILE)
                blocks = packed.new_empty(tiles, packed.shape[1])
            blocks[done : done + len(packed)] = packed
            done += len(packed)
        return cls(blocks, *slab.form, out_features, slab.q.shape[1], bias)

    @classmethod
    def quantise(
        cls,
        slabs: Iterable[Tensor],
        out_features: int,
        bits: int,
        bias: Tensor | None = None,
    ) -> PackedLinear:
        """Round dense rows to 4 or 8 bits; slabs as in `pack`."""
        return cls.pack((_round_groups(slab, bits) for slab in slabs), out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; returns float32."""
        y: Tensor = torch.ops.kvchat.linear(
            x, self.blocks, self.bits, self.minima, self.out_features, torch.get_num_threads()
        )
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows by ids (T,), as an embedding does."""
        found: Tensor = torch.ops.kvchat.embed(
            self.blocks, self.bits, self.minima, self.out_features, ids
        )
        return found


class Stacked(nn.Module):
    """Layers of different classes that multiply the same activations, one below another."""

    def __init__(self, parts: Sequence[AnyLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by every part; returns (T, the sum of their out_features) float32."""
        return torch.cat([part(x).float() for part in self.parts], dim=1)


def in_slabs(blocks: Blocks) -> Iterator[Blocks]:
    """Take blocks apart into slabs: what packing needs for one is the peak of all memory."""
    for rows in torch.arange(len(blocks.q)).split(SLAB):
        yield blocks.at(rows)


def _round_to_bytes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows to u uint8, scale and minimum (rows, in_features / 32) float32.

    A group is taken symmetric about 0 or from its lowest weight to its highest, whichever is
    nearer: the first holds blocks of Q8_0 as they are, the second those of Q4_1.
    """
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))  # (rows, in / 32, 32)
    low, high = groups.aminmax(dim=-1)
    symmetric = (torch.maximum(high, -low) / 127).clamp(min=1e-12)
    spanning = ((high - low) / 255).clamp(min=1e-12)
    found = []
    for scale, minimum in ((symmetric, -128 * symmetric), (spanning, low)):
        u = ((groups - minimum[..., None]) / scale[..., None]).round_().clamp_(0, 255)
        gap = (u * scale[..., None] + minimum[..., None] - groups).square_().sum(dim=-1)
        found.append((gap, u, scale, minimum))
    (gap_a, u_a, scale_a, minimum_a), (gap_b, u_b, scale_b, minimum_b) = found
    nearer = gap_b < gap_a
    u = torch.where(nearer[..., None], u_b, u_a).flatten(1).to(torch.uint8)
    return u, torch.where(nearer, scale_b, scale_a), torch.where(nearer, minimum_b, minimum_a)


def _round_groups(weight: Tensor, bits: int) -> Blocks:
    """Round rows: symmetric with 8 bits, from the lowest of a group to its highest with 4."""
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))  # (out, in / 32, 32)
    if bits == 8:
        scale = (groups.abs().amax(dim=-1) / 127).half()
        q = (groups / scale.float().clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127) + 128
        return Blocks(q.flatten(1).to(torch.uint8), scale, None, 8)
    low, high = groups.aminmax(dim=-1)
    scale, low = ((high - low) / 15).half(), low.half()
    q = (groups - low.float()[..., None]) / scale.float().clamp(min=1e-12)[..., None]
    return Blocks(q.round_().clamp_(0, 15).flatten(1).to(torch.uint8), scale, low, 4)


AnyLinear = Linear | Int8Linear | Int4Linear | PackedLinear | Stacked

AnyEmbedding = Linear | PackedLinear
"""What rows can be looked up in."""


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions; elsewhere torch converts at every use."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def weight_class(model: nn.Module) -> str:
    """Return the class of most of a model's linear weights: int4, int8 or a dtype's name."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes[f"int{module.bits}"] += module.out_features * module.in_features
        elif isinstance(module, Int4Linear):
            sizes["int4"] += module.packed.numel() * 2
        elif isinstance(module, Int8Linear):
            sizes["int8"] += module.high.numel() * 2
        elif isinstance(module, Linear):
            sizes[str(module.weight.dtype).removeprefix("torch.")] += module.weight.numel()
    return sizes.most_common(1)[0][0]


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a module, shared ones counted once."""
    seen = {t.data_ptr(): t.nbytes for t in module.buffers()}
    return sum(seen.values())
