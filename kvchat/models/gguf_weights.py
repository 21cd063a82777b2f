"""GGUF files as weights and configuration of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.config import ModelConfig, RopeConfig
from kvchat.engine.errors import ModelFileError, UnsupportedModelError
from kvchat.engine.linear import Blocks
from kvchat.models.config_values import MAX_LAYERS, check_config, number, size
from kvchat.models.families import GGUF_NAMES, Family, family_of_gguf, file_name
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_blocks import blocks_of
from kvchat.models.gguf_types import GGMLType
from kvchat.models.weights import ALL

_WHOLE_NUMBERS = (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64)


class GGUFWeights:
    """The weights of an open GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config, self.family = model_config(file)
        self.pairs = self.family.gguf_pairs
        self.paths = file.paths
        self.nbytes = sum(info.nbytes for info in file.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the file holds a weight of this name."""
        return file_name(GGUF_NAMES, name) in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self.file.tensors[file_name(GGUF_NAMES, name)].shape)

    def dense(self, name: str, dtype: torch.dtype, rows: slice = ALL) -> Tensor:
        """Return rows of a weight unpacked to `dtype`."""
        key = file_name(GGUF_NAMES, name)
        kind = self.file.tensors[key].type
        if kind in _WHOLE_NUMBERS:
            raise UnsupportedModelError(
                f"the weight {key} has the type {kind.name}, whole numbers without a scale; take "
                "another conversion of the model"
            )
        return self.file.tensor(key, dtype, rows)

    def blocks(self, name: str, rows: slice = ALL) -> Blocks | None:
        """Return rows of a weight as whole numbers, where the file holds them so."""
        key = file_name(GGUF_NAMES, name)
        return blocks_of(self.file.blocks(key)[rows], self.file.tensors[key].type)

    def bits(self, name: str) -> float:
        """Return how many bits a number of a weight takes."""
        kind = self.file.tensors[file_name(GGUF_NAMES, name)].type
        return 8 * kind.block_bytes / kind.block_elements

    def release(self, name: str) -> int:
        """Let go of the mapped pages of a weight; returns its bytes in the file."""
        key = file_name(GGUF_NAMES, name)
        self.file.release(key)
        return self.file.tensors[key].nbytes


def model_config(file: GGUFFile) -> tuple[ModelConfig, Family]:
    """Translate a GGUF file's metadata into our terms.

    Raises:
        UnsupportedModelError: the architecture or its kind of rope scaling.
        ModelFileError: a size is missing or makes no sense.
    """
    architecture = str(file.metadata.get("general.architecture", ""))
    family = family_of_gguf(architecture)
    prefix = f"{architecture}."
    # By key: items() would decode the whole vocabulary on the way.
    raw = {
        key.removeprefix(prefix): file.metadata[key]
        for key in file.metadata
        if key.startswith(prefix)
    }
    if raw.get("expert_count"):
        raise UnsupportedModelError("mixture-of-experts models are not supported yet")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError("the GGUF file has no token embedding; fetch the model again")
    dim, n_layers = size(raw, "embedding_length"), size(raw, "block_count", high=MAX_LAYERS)
    n_heads = size(raw, "attention.head_count")
    head_dim = size(raw, "attention.key_length", dim // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(raw, key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{key} {raw[key]} beside heads of {head_dim} features is not supported"
            )
    config = ModelConfig(
        family=family.name,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=size(raw, "attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=size(raw, "feed_forward_length"),
        vocab_size=embedding.shape[0],
        max_seq_len=size(raw, "context_length"),
        norm_eps=number(raw, "attention.layer_norm_rms_epsilon", 1e-5),
        rope=_rope(raw, file, head_dim),
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(
            {"sliding_window": raw.get("attention.sliding_window")}, n_layers
        ),
        tied_embeddings="output.weight" not in file.tensors,
    )
    return check_config(config), family


def _rope(raw: Mapping[str, Any], file: GGUFFile, head_dim: int) -> RopeConfig:
    """Read rotary settings; llama3 scaling is a tensor of divisors and not in the metadata."""
    theta = number(raw, "rope.freq_base", 10_000.0)
    divisors = None
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.tensor("rope_freqs.weight", torch.float32).flatten().tolist())
        if len(divisors) != head_dim // 2 or not all(0 < divisor < 1e30 for divisor in divisors):
            raise ModelFileError(
                f"rope_freqs.weight must hold {head_dim // 2} numbers above 0; fetch it again"
            )
    kind = raw.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"rope scaling of type {kind!s:.40} is not supported; supported are none and linear"
        )
    factor = raw.get("rope.scaling.factor", raw.get("rope.scale_linear"))
    if kind == "none" or factor in (None, 0, 1):
        return RopeConfig(theta=theta, divisors=divisors)
    factor = number({"rope.scaling.factor": factor}, "rope.scaling.factor")
    return RopeConfig(theta=theta, scaling="linear", factor=factor, divisors=divisors)
