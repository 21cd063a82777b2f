"""Tiny random checkpoints of every family, as transformers saves them and as GGUF files.

transformers builds and runs the reference; the weights are large enough for logits to differ by
whole units, so that agreeing to 1e-4 means something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

VOCAB = 261
"""256 bytes, one merged token and four control tokens."""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Small enough for all three of its ranges of wavelengths to occur in a head of 16."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-odd-heads": (
        "Llama",
        {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama3-tied": (
        "Llama",
        {"head_dim": 16, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "Llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "tinyllama": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "mistral": (
        "Mistral",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "sliding_window": 7},
    ),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "Qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
}
"""Name to family and what differs from the common sizes."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": 257,
    "eos_token_id": 259,
}


def reference(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """transformers' model for one of the cases, random, float32."""
    family, differences = CASES[name]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = config_class(**{**SIZES, **differences, **changes}, attn_implementation="eager")
    model = model_class(config).float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(0.5 * noise)
        elif weight.ndim == 1:
            weight.copy_(1 + 0.2 * noise)
        else:
            weight.copy_(noise * 1.5 / weight.shape[1] ** 0.5)


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """(T, vocab_size) float32."""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def reference_greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """The n ids that follow, each from a run of the whole text."""
    text = list(ids)
    for _ in range(n):
        text.append(int(reference_logits(model, text)[-1].argmax()))
    return text[len(ids) :]


def some_ids(n: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()


def byte_alphabet() -> list[str]:
    """One character per byte, as byte-level vocabularies spell them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json: one id per byte, four control tokens; and its configuration."""
    vocabulary = {token: id_ for id_, token in enumerate([*byte_alphabet(), "th"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": CONTROL[0], "eos_token": CONTROL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_folder(model: Any, folder: Path, *, shard: str = "1GB") -> Path:
    """A Hugging Face folder with weights, configuration and tokenizer."""
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return folder


def edit_json(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value = {k: v for k, v in {**value, **changes}.items() if k not in remove}
    path.write_text(json.dumps(value))


def to_v4_style(folder: Path) -> None:
    """Rewrite config.json the way transformers 4 wrote rotary settings."""
    path = folder / "config.json"
    rope = json.loads(path.read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    edit_json(
        path, remove=("rope_parameters",), rope_theta=theta, rope_scaling=scaling, layer_types=None
    )


# GGUF, written the way llama.cpp's converter does.

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def side_by_side(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder query or key rows so that the two features of a rotation are neighbours."""
    rows = np.arange(len(weight)).reshape(n_heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return weight[rows]


def halves_apart(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo `side_by_side`."""
    rows = np.arange(len(weight)).reshape(n_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return weight[rows]


def gguf_metadata(model: Any) -> dict[str, Any]:
    """Sizes and tokenizer, by key."""
    c = model.config
    arch = {"mistral": "llama"}.get(c.model_type, c.model_type)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters
    sizes = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in sizes.items()},
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*byte_alphabet(), "th", *CONTROL],
        "tokenizer.ggml.token_type": [1] * 257 + [3] * len(CONTROL),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 259,
    }


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """All weights under llama.cpp's names; llama's query and key rows reordered."""
    c = model.config
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = weight.numpy()
        part = name.split(".")[-2]
        if part in heads and c.model_type in ("llama", "mistral"):
            array = side_by_side(array, heads[part])
        tensors[gguf_name(name)] = np.ascontiguousarray(array)
    if c.rope_parameters["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq.numpy()
        plain = c.rope_parameters["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    return tensors


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    **writer_options: Any,
) -> Path:
    """A GGUF file, its matrices in one of ggml's types; sizes are int, so that lies can be told."""
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]), **writer_options)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    number = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.ndim == 2 and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(model: Any, path: Path, kind: str = "F32", **writer_options: Any) -> Path:
    return write_gguf(path, gguf_metadata(model), gguf_tensors(model), kind, **writer_options)


@torch.no_grad()
def round_weights(model: Any, kind: str) -> None:
    """Give the model the weights that a GGUF file of this type holds of it."""
    number = gguf.GGMLQuantizationType[kind]
    for _, weight in model.named_parameters():
        if weight.ndim == 2:
            packed = gguf.quants.quantize(weight.numpy(), number)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, number)))
