"""Hugging Face folders: configuration and the search for weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import LLAMA3_ROPE, edit_json, reference, save_folder
from transformers import AutoConfig, AutoModelForCausalLM

from kvchat.engine.config import RopeConfig
from kvchat.engine.errors import KvchatError, ModelFileError, UnsupportedModelError
from kvchat.engine.layers import inverse_frequencies
from kvchat.models.hf import HFWeights, model_config, read_json
from kvchat.models.weights import build_transformer

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
"""Sizes and switches as the authors publish them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_reads_in_them(name: str) -> None:
    raw = dict(PUBLISHED[name])
    ours, _ = model_config(raw)
    kind = raw.pop("model_type")
    theirs = AutoConfig.for_model(kind, **raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    rotary = type(model.model.rotary_emb)(theirs)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    first = "model.layers.0.self_attn."
    assert shapes[f"{first}q_proj.weight"] == (ours.n_heads * ours.head_dim, ours.dim)
    assert shapes[f"{first}k_proj.weight"] == (ours.n_kv_heads * ours.head_dim, ours.dim)
    assert shapes["model.embed_tokens.weight"] == (ours.vocab_size, ours.dim)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (ours.hidden_dim, ours.dim)
    assert (f"{first}q_norm.weight" in shapes) == ours.qk_norm
    assert ("lm_head.weight" in shapes) != ours.tied_embeddings
    assert f"model.layers.{ours.n_layers - 1}.mlp.up_proj.weight" in shapes
    assert f"model.layers.{ours.n_layers}.mlp.up_proj.weight" not in shapes
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    window = theirs.sliding_window if name.startswith("Mistral") else None
    assert ours.sliding_windows == (() if window is None else (window,) * ours.n_layers)
    torch.testing.assert_close(
        inverse_frequencies(ours.rope, ours.head_dim).float(), rotary.inv_freq, rtol=1e-5, atol=0
    )


def plain(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }
    return {k: v for k, v in {**raw, **changes}.items() if v != "absent"}


def test_what_is_left_out_has_the_authors_default() -> None:
    config, _ = model_config(plain(num_key_value_heads="absent", rms_norm_eps=None))
    assert (config.n_kv_heads, config.head_dim, config.max_seq_len) == (4, 16, 2048)
    assert config.norm_eps == 1e-6
    assert config.rope == RopeConfig(theta=10_000.0)
    assert not config.tied_embeddings
    mistral, _ = model_config(plain(architectures=["MistralForCausalLM"]))
    assert mistral.sliding_windows == (4096, 4096)


def test_layer_types_decide_over_max_window_layers() -> None:
    raw = plain(
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
    )
    assert model_config(raw)[0].sliding_windows == (8, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert model_config({**raw, "layer_types": kinds})[0].sliding_windows == (8, None)
    for wrong in (["full_attention"], "full_attention", ["chunked_attention"] * 2, [None, 3]):
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            model_config({**raw, "layer_types": wrong})


SENSELESS: list[dict[str, Any]] = [
    {"hidden_size": "absent"},
    {"hidden_size": None},
    {"hidden_size": "64"},
    {"hidden_size": 64.5},
    {"hidden_size": [64]},
    {"hidden_size": -64},
    {"hidden_size": True},
    {"hidden_size": 2**80},
    {"hidden_size": 3},  # no feature is left for a head
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 2**31 - 1},
    {"num_attention_heads": 0},
    {"num_attention_heads": -4},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 0},
    {"head_dim": 15},
    {"intermediate_size": {}},
    {"vocab_size": 0},
    {"max_position_embeddings": -1},
    {"rms_norm_eps": -1e-5},
    {"rms_norm_eps": "tiny"},
    {"rms_norm_eps": float("nan")},
    {"rms_norm_eps": float("inf")},
    {"tie_word_embeddings": "no"},
    {"rope_theta": 0},
    {"rope_theta": "big"},
    {"rope_scaling": "linear"},
    {"rope_scaling": [1]},
    {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": {"type": "linear", "factor": -2}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
    {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 0}},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
    {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"},
    {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": "yes"},
    {"quantization_config": "awq"},
]


@pytest.mark.parametrize("changes", SENSELESS, ids=str)
def test_senseless_values(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="fetch"):
        model_config(plain(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\(GPT2LMHeadModel\).*LlamaForCausalLM"),
        ({"architectures": "absent"}, "none given"),
        ({"architectures": []}, "none given"),
        ({"architectures": "LlamaForCausalLM"}, "none given"),
        ({"architectures": [None, 3]}, "None, 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn.*default, linear and llama3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": ["default"]}}, "default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq.*GGUF"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        model_config(plain(**changes))


keys = st.sampled_from(
    sorted({key for raw in PUBLISHED.values() for key in raw} | LLAMA3_ROPE.keys())
)
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
nested = st.recursive(values, lambda v: st.lists(v, max_size=2) | st.dictionaries(keys, v))
families = st.sampled_from([raw["architectures"] for raw in PUBLISHED.values()])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, nested, max_size=5), families)
def test_any_configuration_is_read_or_refused(raw: dict[str, Any], names: list[str]) -> None:
    try:
        config, _ = model_config({**plain(architectures=names), **raw})
    except KvchatError as error:
        assert 20 < len(str(error)) < 500
    else:
        assert config.n_heads % config.n_kv_heads == 0
        assert torch.isfinite(inverse_frequencies(config.rope, 16)).all()


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    for broken in (b"", b"{", b"[1]", b"null", b"\xff\xfe{}", b"[" * 200_000, b"{'a': 1}"):
        path.write_bytes(broken)
        with pytest.raises(ModelFileError, match=r"x\.json"):
            read_json(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelFileError, match=r"x\.json"):
        read_json(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(reference("llama3"), tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save_folder(reference("llama3"), tmp_path / "model", shard="60KB")


def build(folder: Path) -> None:
    build_transformer(
        HFWeights(folder), dtype=torch.float32, quant="none", device=torch.device("cpu")
    )


def replace_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change some weights in the single file of a folder; None takes one out."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **{k.replace("__", "."): v for k, v in changes.items()}}
    path.unlink()
    save_file({k: v for k, v in weights.items() if v is not None}, path)


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b"nonsense",
        struct.pack("<Q", 66)
        + b'{"a":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4000000000]}}'[
            :66
        ],
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 99\n",
    ],
    ids=["empty", "short", "2^63", "2^40", "90MB", "list", "text", "cut header", "lfs"],
)
def test_files_that_are_no_safetensors(folder: Path, weights: bytes) -> None:
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelFileError, match=r"model\.safetensors.*fetch"):
        build(folder)


@pytest.mark.parametrize("kept", [7, 8, 100, 0.5, -1])
def test_a_truncated_file(folder: Path, kept: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 7 or kept < 0 else kept * len(content))])
    with pytest.raises(ModelFileError, match=r"model\.safetensors.*fetch"):
        build(folder)


def test_a_header_that_lies_about_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    header["model.norm.weight"]["shape"] = [2**40]
    lie = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(lie)) + lie + content[end:])
    with pytest.raises(ModelFileError, match=r"model\.safetensors.*fetch"):
        build(folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """Flip bytes of the header, or cut the file: a model or a clear error, nothing else."""
    path, whole = folder / "model.safetensors", folder / "whole"
    if not whole.exists():
        path.rename(whole)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path.unlink(missing_ok=True)
    path.write_bytes(content[: data.draw(st.none() | st.integers(0, len(content)))])
    try:
        build(folder)
    except KvchatError as error:
        assert len(str(error)) > 20


def test_a_missing_weight_is_named(folder: Path) -> None:
    replace_weights(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelFileError, match=r"w_up"):
        build(folder)


@pytest.mark.parametrize("shape", [(64,), (64, 63), (1, 64, 64), (), (0, 64)], ids=str)
def test_a_wrong_shape(folder: Path, shape: tuple[int, ...]) -> None:
    replace_weights(folder, **{"model.layers.0.self_attn.q_proj.weight": torch.ones(shape)})
    with pytest.raises(ModelFileError, match=r"wq\.weight has the shape.*\(64, 64\)"):
        build(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats(folder: Path, dtype: torch.dtype) -> None:
    weight = torch.ones(64, 64).to(dtype)
    replace_weights(folder, **{"model.layers.0.self_attn.o_proj.weight": weight})
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.weight.*type (I|B|F8).*F32, F16"):
        build(folder)


def test_float64_weights_are_fine(folder: Path) -> None:
    replace_weights(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.float64)})
    build(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 4096},
        {"vocab_size": 2**31 - 1},
        {"hidden_size": 2**31 - 1, "head_dim": 16},
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30},
        {"head_dim": 2**31 - 2},
        {"intermediate_size": 2**31 - 1},
    ],
    ids=str,
)
def test_sizes_that_the_weights_deny(folder: Path, changes: dict[str, int]) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelFileError, match=r"configuration says|lacks"):
        build(folder)


def test_tied_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = save_folder(reference("llama3"), tmp_path / "model")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    source = HFWeights(folder)
    model = build_transformer(source, dtype=torch.float32, quant="none", device=torch.device("cpu"))
    assert source.has("head.weight")
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_untied_without_a_head(tmp_path: Path) -> None:
    folder = save_folder(reference("llama3-tied"), tmp_path / "model")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"head\.weight"):
        build(folder)


def test_other_files_beside_the_weights_are_ignored(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, folder / "adapter_model.safetensors")
    build(folder)


def test_shards_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    build(shards)


def test_a_missing_shard(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelFileError, match=f"{victim.name} is missing"):
        build(shards)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "sub/model.safetensors", "", ".", "..", 3]
)
def test_an_index_that_names_no_file_of_the_folder(shards: Path, name: object) -> None:
    outside = shards.parent / "outside.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, outside)
    index = shards / "model.safetensors.index.json"
    homes = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**homes, "model.norm.weight": name})
    with pytest.raises(ModelFileError, match="fetch the model again"):
        build(shards)


@pytest.mark.parametrize("weight_map", [None, {}, [], "all", 7])
def test_an_index_without_a_map(shards: Path, weight_map: object) -> None:
    edit_json(shards / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelFileError, match="fetch the model again"):
        build(shards)


def test_an_index_with_wrong_tensors(shards: Path) -> None:
    """Where a weight is, the files themselves say; that one is missing is noticed."""
    index = shards / "model.safetensors.index.json"
    homes = json.loads(index.read_text())["weight_map"]
    names = sorted(set(homes.values()))
    swapped = {key: names[(names.index(name) + 1) % len(names)] for key, name in homes.items()}
    edit_json(index, weight_map={**swapped, "no.such.weight": names[0]})
    build(shards)
    edit_json(index, weight_map={"model.norm.weight": names[0]})
    with pytest.raises(ModelFileError, match="lacks the weight"):
        build(shards)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*pickle.*safetensors"):
        HFWeights(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no safetensors weights"):
        HFWeights(folder)
