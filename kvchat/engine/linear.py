"""Linear layers: plain and quantised, with one call signature.

All take activations (T, in_features) of any float type and return (T, out_features). Which class
a weight gets is decided when the model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT4_GROUP = 32
"""Weights that share one scale and zero point; the block size of Q4_0 and Q4_1."""


ROWS_PER_TILE = 16
"""Rows that our own kernels multiply side by side."""

GROUP_BYTES = {4: 320, 8: 544}
"""Bytes of a group of 32 inputs of those rows: numbers, scales and, with 4 bits, minima."""

SLAB = 2048
"""Rows that are rounded at a time; whole tiles."""


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
    def pack(
        cls, q: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None
    ) -> Int4Linear:
        """Take weights q × scale + minimum.

        `q` is (out_features, in_features) uint8 from 0 to 15, `scale` and `minimum`
        (out_features, in_features / 32).
        """
        # In slabs: it takes four bytes for a number, which whole would be the peak of all memory.
        convert = torch._convert_weight_to_int4pack_for_cpu
        packed = torch.cat([convert(rows.to(torch.int32), 1) for rows in q.split(SLAB)])
        pair = torch.stack([scale, minimum + 8 * scale], dim=-1)
        return cls(packed, pair.to(torch.bfloat16).transpose(0, 1).contiguous(), bias)

    @classmethod
    def quantise(cls, weight: Tensor, bias: Tensor | None = None) -> Int4Linear:
        """Round a dense weight (out_features, in_features) to int4."""
        groups = weight.float().unflatten(1, (-1, INT4_GROUP))  # (out, in / 32, 32)
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15).clamp(min=1e-12)
        q = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        return cls.pack(q.flatten(1).to(torch.uint8), scale, low, bias)

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
        high = Int4Linear.pack(u >> 4, 16 * scale, minimum)
        low = Int4Linear.pack(u & 15, scale, torch.zeros_like(scale))
        return cls(high.packed, high.scale_zero, low.packed, low.scale_zero, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16; the halves are summed in float32."""
        x = x.to(torch.bfloat16)
        high = torch._weight_int4pack_mm_for_cpu(x, self.high, INT4_GROUP, self.high_scale_zero)
        low = torch._weight_int4pack_mm_for_cpu(x, self.low, INT4_GROUP, self.low_scale_zero)
        y = high.float() + low
        return y if self.bias is None else y + self.bias


class PackedLinear(nn.Module):
    """4 or 8 bits in groups of 32 inputs, in the layout of our own kernels.

    4-bit weights are q × scale + minimum, 8-bit ones (q - 128) × scale; scales are float16, as in
    most files, so that blocks of Q4_0, Q4_1 and Q8_0 are held exactly. Activations are rounded to
    14 bits per group for a few rows; many rows are multiplied by an unpacked copy, which lives for
    one call.
    """

    FEW = 16
    """Up to this many rows the packed weights are multiplied as they are."""

    def __init__(
        self, blocks: Tensor, bits: int, out_features: int, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks)
        self.register_buffer("bias", bias)
        self.blocks: Tensor
        self.bias: Tensor | None
        self.bits = bits
        self.out_features = out_features
        self.in_features = blocks.shape[1] // GROUP_BYTES[bits] * INT4_GROUP

    @classmethod
    def fits(cls, in_features: int) -> bool:
        """Whether the kernels take rows of this length."""
        return in_features % INT4_GROUP == 0

    @classmethod
    def pack(
        cls, q: Tensor, scale: Tensor, minimum: Tensor, bits: int, bias: Tensor | None = None
    ) -> PackedLinear:
        """Take q (out_features, in_features) uint8, scale and minimum (out, in_features / 32)."""
        blocks = torch.ops.kvchat.pack(q, scale, minimum, bits)
        return cls(blocks, bits, len(q), bias)

    @classmethod
    def quantise(
        cls,
        slabs: Iterable[Tensor],
        out_features: int,
        bits: int,
        bias: Tensor | None = None,
    ) -> PackedLinear:
        """Round dense rows, which come as slabs of a multiple of 16 rows each."""
        done, blocks = 0, torch.empty(0)
        for slab in slabs:
            packed = torch.ops.kvchat.pack(*_round_groups(slab, bits), bits)
            if not done:
                tiles = -(-out_features // ROWS_PER_TILE)
                blocks = packed.new_empty(tiles, packed.shape[1])
            blocks[done : done + len(packed)] = packed
            done += len(packed)
        return cls(blocks, bits, out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; many rows in float32 where the CPU would only imitate bfloat16."""
        threads = torch.get_num_threads()
        if len(x) <= self.FEW:
            y: Tensor = torch.ops.kvchat.linear(
                x, self.blocks, self.bits, self.out_features, threads
            )
        else:
            weight = torch.ops.kvchat.unpack(self.blocks, self.bits, self.out_features, threads)
            dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
            y = F.linear(x.to(dtype), weight.to(dtype))
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows by ids (T,), as an embedding does."""
        found: Tensor = torch.ops.kvchat.embed(self.blocks, self.bits, self.out_features, ids)
        return found


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


def _round_groups(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows to q uint8, scale and minimum: symmetric with 8 bits, from low to high with 4."""
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))  # (out, in / 32, 32)
    if bits == 8:
        scale = (groups.abs().amax(dim=-1) / 127).half()
        q = (groups / scale.float().clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127) + 128
        return q.flatten(1).to(torch.uint8), scale, scale
    low, high = groups.aminmax(dim=-1)
    scale, low = ((high - low) / 15).half(), low.half()
    q = (groups - low.float()[..., None]) / scale.float().clamp(min=1e-12)[..., None]
    return q.round_().clamp_(0, 15).flatten(1).to(torch.uint8), scale, low


AnyLinear = Linear | Int8Linear | Int4Linear | PackedLinear

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
