"""Linear layers: plain and quantised, with one call signature.

All take activations (T, in_features) of any float type and return (T, out_features). Which class
a weight gets is decided when the model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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


class Int8Linear(nn.Module):
    """Symmetric int8 with one scale per output feature; activations in bfloat16."""

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("q", q)  # (out_features, in_features) int8
        self.register_buffer("scale", scale.to(torch.bfloat16))  # (out_features,)
        self.register_buffer("bias", bias)
        self.q: Tensor
        self.scale: Tensor
        self.bias: Tensor | None

    @classmethod
    def fits(cls, out_features: int, in_features: int) -> bool:
        """Whether torch's operator takes a weight of this shape; of others it reads past the end.

        It loads 16 inputs at a time and has no code for a rest.
        """
        return in_features % 16 == 0

    @classmethod
    def quantise(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """Round a dense weight (out_features, in_features) to int8."""
        scale = (weight.abs().amax(dim=1).float() / 127).clamp(min=1e-12).to(torch.bfloat16)
        q = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        # In slabs: the float32 copies of a whole output head would be the peak of all memory.
        for rows, small, divisor in zip(
            weight.split(SLAB), q.split(SLAB), scale.float()[:, None].split(SLAB), strict=True
        ):
            small.copy_((rows.float() / divisor).round_().clamp_(-127, 127))
        return cls(q, scale, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in bfloat16."""
        y = torch._weight_int8pack_mm(x.to(torch.bfloat16), self.q, self.scale)
        return y if self.bias is None else y + self.bias


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
        packed = torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)
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


class PackedLinear(nn.Module):
    """4 or 8 bits in groups of 32 inputs, in the layout of our own kernels.

    4-bit weights are q × scale + minimum, 8-bit ones (q - 128) × scale; scales are float16, as in
    most files, so that blocks of Q4_0, Q4_1 and Q8_0 are held exactly. Activations are rounded to
    16 bits per group for a few rows; many rows are multiplied in bfloat16 by an unpacked copy,
    which lives for one call.
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
        """Multiply; float32 for a few rows, bfloat16 for many."""
        threads = torch.get_num_threads()
        if len(x) <= self.FEW:
            y: Tensor = torch.ops.kvchat.linear(
                x, self.blocks, self.bits, self.out_features, threads
            )
        else:
            weight = torch.ops.kvchat.unpack(self.blocks, self.bits, self.out_features, threads)
            y = F.linear(x.to(weight.dtype), weight)
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows by ids (T,), as an embedding does."""
        found: Tensor = torch.ops.kvchat.embed(self.blocks, self.bits, self.out_features, ids)
        return found


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


def weight_class(model: nn.Module) -> str:
    """Return the class of most of a model's linear weights: int4, int8 or a dtype's name."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes[f"int{module.bits}"] += module.out_features * module.in_features
        elif isinstance(module, Int4Linear):
            sizes["int4"] += module.packed.numel() * 2
        elif isinstance(module, Int8Linear):
            sizes["int8"] += module.q.numel()
        elif isinstance(module, Linear):
            sizes[str(module.weight.dtype).removeprefix("torch.")] += module.weight.numel()
    return sizes.most_common(1)[0][0]


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a module, shared ones counted once."""
    seen = {t.data_ptr(): t.nbytes for t in module.buffers()}
    return sum(seen.values())
