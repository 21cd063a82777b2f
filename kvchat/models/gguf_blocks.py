"""Turns the quantised blocks of GGUF tensors into numbers.

A tensor's row is a run of blocks, each a few scales and small integers packed together. Layouts
and the order of the floating-point operations are those of ggml (ggml-common.h, ggml-quants.c),
so results are the same to the last bit. Every function below takes blocks as uint8
(n, bytes per block) and returns float32 (n, elements per block), or the parts that make it, in
plain torch operations that run on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvchat.engine.linear import Blocks
from kvchat.models.gguf_types import GGMLType

SLAB_ELEMENTS = 1 << 19
"""How many elements are dequantised at a time: temporaries stay below 20 MB and near the cache."""

# The 16 levels of the IQ4 types, denser around zero.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(blocks: Tensor, ggml_type: GGMLType, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode rows of blocks, uint8 (rows, bytes per row), to (rows, columns) of `dtype`.

    Quantised types go through float32; plain ones are converted directly.
    """
    flat = blocks.reshape(-1, ggml_type.block_bytes)
    out = torch.empty(len(flat), ggml_type.block_elements, dtype=dtype, device=blocks.device)
    decode = _DECODE[ggml_type]
    slab = SLAB_ELEMENTS // ggml_type.block_elements
    for start in range(0, len(flat), slab):
        out[start : start + slab] = decode(flat[start : start + slab])
    return out.view(len(blocks), -1)


def blocks_of(rows: Tensor, ggml_type: GGMLType) -> Blocks | None:
    """Take rows apart, exactly, into whole numbers, scales and minima.

    Args:
        rows: uint8 (rows, bytes per row).
        ggml_type: any type.

    Returns:
        The blocks, scales and minima in float32, or None for a type that holds anything else.
    """
    if ggml_type not in _PARTS:
        return None
    take, bits = _PARTS[ggml_type]
    q, scale, minimum = take(rows.reshape(-1, ggml_type.block_bytes))
    n = len(rows)
    minimum = None if minimum is None else minimum.reshape(n, -1)
    return Blocks(q.view(n, -1), scale.reshape(n, -1), minimum, bits)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 (n, 1)."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """(n, bytes) to (n, 2 * bytes): of each run of bytes, all low halves, then all high ones."""
    runs = packed.reshape(len(packed), -1, run)
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def _bit_fields(packed: Tensor, run: int, bits: int) -> Tensor:
    """(n, bytes) to (n, 8 / bits * bytes): of each run of bytes, all lowest fields first."""
    runs = packed.reshape(len(packed), -1, run)
    mask = (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1)


def _scaled(q: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Scale q (n, elements) group by group, with scale and minimum (n, groups)."""
    groups = q.view(*scale.shape, -1).float().mul_(scale.unsqueeze(2))
    if minimum is not None:
        groups.add_(minimum.unsqueeze(2))
    return groups.flatten(1)


def _stored(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype)


Parts = tuple[Tensor, Tensor, Tensor | None]
"""Of n blocks: q (n, elements) uint8, scale and minimum (n, groups) float32; see `Blocks`."""


def _q4_0(blocks: Tensor) -> Parts:
    """Float16 scale; 32 integers of 4 bits, offset by 8."""
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    """Float16 scale and minimum; 32 integers of 4 bits."""
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    """Float16 scale; 32 fifth bits; 32 times the lower 4 bits; offset by 16."""
    q = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return q, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    """Float16 scale and minimum; 32 fifth bits; 32 times the lower 4 bits."""
    q = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return q, _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    return _bit_fields(packed, 1, 1) << 4


def _q8_0(blocks: Tensor) -> Parts:
    """Float16 scale; 32 signed bytes."""
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Tensor:
    """16 times 4-bit scale and 4-bit minimum; 256 integers of 2 bits; the float16s of both."""
    scale = _half(blocks, 80) * (blocks[:, :16] & 15)
    minimum = -(_half(blocks, 82) * (blocks[:, :16] >> 4))
    return _scaled(_bit_fields(blocks[:, 16:80], 32, 2), scale, minimum)


def _q3_k(blocks: Tensor) -> Tensor:
    """256 third bits, set where 4 is not to be taken off; 256 times the lower 2 bits; 16 scales
    of 6 bits offset by 32 (4 low bits in 8 bytes, 2 high bits in 4); their float16 scale.
    """
    low, high = _nibbles(blocks[:, 96:104], 8), _bit_fields(blocks[:, 104:108], 4, 2)
    scale = _half(blocks, 108) * ((low | high << 4).view(torch.int8) - 32)
    third = _bit_fields(blocks[:, :32], 32, 1)
    q = (_bit_fields(blocks[:, 32:96], 32, 2) | third << 2).view(torch.int8) - 4
    return _scaled(q, scale)


def _q4_k(blocks: Tensor) -> Parts:
    """Float16 scales of scales and minima; 8 times 6 bits of each; 256 integers of 4 bits."""
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    """As Q4_K, with 256 fifth bits before the lower four."""
    fifth = _bit_fields(blocks[:, 16:48], 32, 1) << 4
    return _nibbles(blocks[:, 48:], 32) | fifth, *_k_scales(blocks)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, each float32 (n, 8).

    The first four of either stand in the low 6 bits of bytes 0-3 and 4-7. The last four have
    their low 4 bits in the halves of bytes 8-11, their high 2 in the high 2 bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:16].chunk(3, dim=1)
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q6_k(blocks: Tensor) -> Parts:
    """256 times the lower 4 bits, the upper 2 bits, 16 signed bytes of scales, their float16."""
    q = _nibbles(blocks[:, :128], 64) | _bit_fields(blocks[:, 128:192], 32, 2) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return q, scale, None


def _iq4_nl(blocks: Tensor) -> Tensor:
    """Float16 scale; 32 numbers of levels."""
    return _scaled(_iq4_levels(_nibbles(blocks[:, 2:], 16)), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Float16 scale; 8 scales of 6 bits offset by 32 (2 high bits each, then 4 low bits each);
    256 numbers of levels.
    """
    low, high = _nibbles(blocks[:, 4:8], 1), _bit_fields(blocks[:, 2:4], 1, 2)
    scale = _half(blocks, 0) * ((low | high << 4).view(torch.int8) - 32)
    return _scaled(_iq4_levels(_nibbles(blocks[:, 8:], 16)), scale)


def _iq4_levels(q: Tensor) -> Tensor:
    levels = torch.tensor(_IQ4_LEVELS, dtype=torch.float32, device=q.device)
    return levels.index_select(0, q.flatten().int()).view_as(q)


def _rebuilt(take: Callable[[Tensor], Parts], bits: int) -> Callable[[Tensor], Tensor]:
    def decode(blocks: Tensor) -> Tensor:
        q, scale, minimum = take(blocks)
        if minimum is None:  # of 8 bits, the difference wraps around to what it should be
            q = (q - (1 << (bits - 1))).view(torch.int8)
        return _scaled(q, scale, minimum)

    return decode


_PARTS: dict[GGMLType, tuple[Callable[[Tensor], Parts], int]] = {
    GGMLType.Q4_0: (_q4_0, 4),
    GGMLType.Q4_1: (_q4_1, 4),
    GGMLType.Q4_K: (_q4_k, 4),
    GGMLType.Q5_0: (_q5_0, 5),
    GGMLType.Q5_1: (_q5_1, 5),
    GGMLType.Q5_K: (_q5_k, 5),
    GGMLType.Q6_K: (_q6_k, 6),
    GGMLType.Q8_0: (_q8_0, 8),
}
"""Types that are whole numbers with a scale, and how many bits those have."""

_DECODE: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.F32: _stored(torch.float32),
    GGMLType.F16: _stored(torch.float16),
    GGMLType.BF16: _stored(torch.bfloat16),
    GGMLType.F64: _stored(torch.float64),
    GGMLType.I8: _stored(torch.int8),
    GGMLType.I16: _stored(torch.int16),
    GGMLType.I32: _stored(torch.int32),
    GGMLType.I64: _stored(torch.int64),
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    **{kind: _rebuilt(take, bits) for kind, (take, bits) in _PARTS.items()},
}
