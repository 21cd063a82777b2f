"""Every architecture's difference from the plain block, as data: a new family is a new row.

The plain block is Llama's: RMSNorm before attention and MLP, rotary embedding over the whole head,
grouped-query attention, gated SiLU. Biases need no entry: a linear layer has one where the file
holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvchat.engine.errors import UnsupportedModelError
from kvchat.models.config_values import size, switch

Windows = tuple[int | None, ...]


def _no_windows(config: Mapping[str, Any], n_layers: int) -> Windows:
    return ()


def _same_window(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Mistral: one window for every layer, unless it is null; 4096 where nothing is said."""
    if config.get("sliding_window", 4096) is None:
        return ()
    return (size(config, "sliding_window", 4096),) * n_layers


def _upper_windows(config: Mapping[str, Any], n_layers: int) -> Windows:
    """Qwen: when it is switched on, a window on the layers listed, else on the upper ones."""
    if not switch(config, "use_sliding_window") or config.get("sliding_window") is None:
        return ()
    window = size(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        full = size(config, "max_window_layers", 28, low=0)
        return tuple(None if i < full else window for i in range(n_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != n_layers or not {*map(str, kinds)} <= {*known}:
        raise UnsupportedModelError(
            f"layer_types of this model's configuration must name, for each of its {n_layers} "
            f"layers, one of {', '.join(known)}; other kinds are not supported"
        )
    return tuple(known[kind] for kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table."""

    name: str
    hf_architectures: tuple[str, ...]
    """`architectures` of config.json."""
    gguf_architectures: tuple[str, ...]
    """`general.architecture` of a GGUF file."""
    gguf_pairs: bool
    """Whether GGUF stores query and key rows with the two features of a rotation side by side."""
    qk_norm: bool = False
    windows: Callable[[Mapping[str, Any], int], Windows] = _no_windows


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        hf_architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        gguf_pairs=True,
    ),
    Family(
        name="mistral",
        hf_architectures=("MistralForCausalLM",),
        gguf_architectures=("mistral",),
        gguf_pairs=True,
        windows=_same_window,
    ),
    Family(
        name="qwen2",
        hf_architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        gguf_pairs=False,
        windows=_upper_windows,
    ),
    Family(
        name="qwen3",
        hf_architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        gguf_pairs=False,
        qk_norm=True,
        windows=_upper_windows,
    ),
)

HF_NAMES: dict[str, str] = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "head.bias": "lm_head.bias",
    "attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "w_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "w_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "w_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "wq.bias": "model.layers.{}.self_attn.q_proj.bias",
    "wk.bias": "model.layers.{}.self_attn.k_proj.bias",
    "wv.bias": "model.layers.{}.self_attn.v_proj.bias",
    "wo.bias": "model.layers.{}.self_attn.o_proj.bias",
    "w_gate.bias": "model.layers.{}.mlp.gate_proj.bias",
    "w_up.bias": "model.layers.{}.mlp.up_proj.bias",
    "w_down.bias": "model.layers.{}.mlp.down_proj.bias",
}
"""Our names of weights to those of safetensors files; `{}` stands for the layer."""

GGUF_NAMES: dict[str, str] = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "head.bias": "output.bias",
    "attention_norm.weight": "blk.{}.attn_norm.weight",
    "mlp_norm.weight": "blk.{}.ffn_norm.weight",
    "q_norm.weight": "blk.{}.attn_q_norm.weight",
    "k_norm.weight": "blk.{}.attn_k_norm.weight",
    "wq.weight": "blk.{}.attn_q.weight",
    "wk.weight": "blk.{}.attn_k.weight",
    "wv.weight": "blk.{}.attn_v.weight",
    "wo.weight": "blk.{}.attn_output.weight",
    "w_gate.weight": "blk.{}.ffn_gate.weight",
    "w_up.weight": "blk.{}.ffn_up.weight",
    "w_down.weight": "blk.{}.ffn_down.weight",
    "wq.bias": "blk.{}.attn_q.bias",
    "wk.bias": "blk.{}.attn_k.bias",
    "wv.bias": "blk.{}.attn_v.bias",
    "wo.bias": "blk.{}.attn_output.bias",
    "w_gate.bias": "blk.{}.ffn_gate.bias",
    "w_up.bias": "blk.{}.ffn_up.bias",
    "w_down.bias": "blk.{}.ffn_down.bias",
}
"""Our names of weights to those of GGUF files."""


def family_of_hf(architectures: list[str]) -> Family:
    """Return the row for config.json's `architectures`.

    Raises:
        UnsupportedModelError: naming the architecture and those that are supported.
    """
    for family in FAMILIES:
        if any(name in family.hf_architectures for name in architectures):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.hf_architectures)
    raise _unsupported(", ".join(architectures) or "none given", supported)


def family_of_gguf(architecture: str) -> Family:
    """Return the row for a GGUF file's `general.architecture`.

    Raises:
        UnsupportedModelError: naming the architecture and those that are supported.
    """
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.gguf_architectures)
    raise _unsupported(architecture or "none given", supported)


def _unsupported(architecture: str, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model's architecture ({architecture:.80}) is not supported; "
        f"supported are {supported}"
    )


def file_name(names: Mapping[str, str], name: str) -> str:
    """Return a weight's name in a file; ours are `head.weight` or, in layer 3, `3.wq.weight`."""
    layer, _, rest = name.partition(".")
    return names[rest].format(layer) if layer.isdigit() else names[name]
