"""The element types of GGUF tensors: how many elements and bytes a block of each holds.

Numbers and sizes: `ggml_type` and the block structs of ggml (ggml.h, ggml-common.h).
"""

from __future__ import annotations

from enum import Enum


class GGMLType(Enum):
    """A type this program can read, as (number in the file, elements, bytes per block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    I8 = (24, 1, 1)
    I16 = (25, 1, 2)
    I32 = (26, 1, 4)
    I64 = (27, 1, 8)
    F64 = (28, 1, 8)
    BF16 = (30, 1, 2)

    def __init__(self, number: int, block_elements: int, block_bytes: int) -> None:
        self.number = number
        self.block_elements = block_elements
        self.block_bytes = block_bytes


TYPE_BY_NUMBER = {ggml_type.number: ggml_type for ggml_type in GGMLType}

UNREADABLE = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of the types that exist (or once did) and are not read here, for error messages."""
