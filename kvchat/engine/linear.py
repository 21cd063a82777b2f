"""Linear layers: plain and quantised, with one call signature.

All take activations (T, in_features) of any float type and return (T, out_features). Which class
a weight gets is decided when the model is loaded.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT4_GROUP = 32
"""Weights that share one scale and zero point; the block size of Q4_0 and Q4_1."""


SLAB = 2048
"""Rows that are rounded at a time."""


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


AnyLinear = Linear | Int8Linear | Int4Linear


def weight_class(model: nn.Module) -> str:
    """Return the class of most of a model's linear weights: int4, int8 or a dtype's name."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, Int4Linear):
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
