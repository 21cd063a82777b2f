"""GGUF metadata as configuration, and files whose metadata and tensors disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import gguf_metadata, gguf_tensors, reference, save_gguf, write_gguf

from kvchat.engine.errors import KvchatError, ModelFileError, UnsupportedModelError
from kvchat.engine.layers import inverse_frequencies
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_weights import GGUFWeights, model_config
from kvchat.models.weights import build_transformer


@pytest.fixture(scope="module")
def parts() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    model = reference("llama3")
    return gguf_metadata(model), gguf_tensors(model)


Parts = tuple[dict[str, Any], dict[str, np.ndarray]]


def variant(folder: Path, parts: Parts, tensors: Any = None, **changes: Any) -> GGUFFile:
    """A GGUF file with some of the metadata and tensors exchanged, or left out by None."""
    metadata = {**parts[0], **{f"llama.{k.replace('__', '.')}": v for k, v in changes.items()}}
    arrays = {**parts[1], **(tensors or {})}
    return GGUFFile(
        write_gguf(
            folder / "m.gguf",
            {k: v for k, v in metadata.items() if v is not None},
            {k: v for k, v in arrays.items() if v is not None},
        )
    )


def build(file: GGUFFile) -> None:
    build_transformer(
        GGUFWeights(file), dtype=torch.float32, quant="none", device=torch.device("cpu")
    )


def test_metadata_in_our_terms(tmp_path: Path) -> None:
    model = reference("qwen3")
    config, family = model_config(GGUFFile(save_gguf(model, tmp_path / "m.gguf")))
    assert (family.name, config.family) == ("qwen3", "qwen3")
    assert (config.dim, config.n_layers, config.hidden_dim) == (64, 2, 96)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.max_seq_len) == (261, 256)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.rope.theta == 10_000
    assert config.qk_norm
    assert config.tied_embeddings


def test_what_is_left_out_has_a_default(parts: Parts, tmp_path: Path) -> None:
    left_out = dict.fromkeys(
        [
            "attention__key_length",
            "attention__value_length",
            "attention__layer_norm_rms_epsilon",
            "rope__dimension_count",
            "rope__freq_base",
        ]
    )
    file = variant(tmp_path, parts, {"rope_freqs.weight": None}, **left_out)
    config, _ = model_config(file)
    assert (config.head_dim, config.norm_eps, config.rope.theta) == (16, 1e-5, 10_000)
    assert config.rope.divisors is None


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"type": "linear", "factor": 4.0}, 4.0),
        ({"factor": 4.0}, 4.0),
        ({"scale_linear": 4.0}, 4.0),
        ({"type": "none", "factor": 4.0}, 1.0),
        ({"type": "linear", "factor": 0.0}, 1.0),
        ({}, 1.0),
    ],
    ids=str,
)
def test_linear_scaling(
    parts: Parts, tmp_path: Path, scaling: dict[str, Any], factor: float
) -> None:
    """What llama.cpp makes of the keys: linear unless another type is given, 0 for no scaling."""
    keys = {f"rope__{'' if k == 'scale_linear' else 'scaling__'}{k}": v for k, v in scaling.items()}
    config, _ = model_config(variant(tmp_path, parts, {"rope_freqs.weight": None}, **keys))
    theta = config.rope.theta
    expected = theta ** -(torch.arange(8, dtype=torch.float64) / 8) / factor
    torch.testing.assert_close(inverse_frequencies(config.rope, 16), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": 0},
        {"block_count": 2**32 - 1},
        {"block_count": None},
        {"embedding_length": -1},
        {"embedding_length": "64"},
        {"embedding_length": 2, "attention__key_length": None},
        {"attention__head_count": 0},
        {"attention__head_count": 4.0},
        {"attention__head_count_kv": 3},
        {"attention__head_count_kv": [2, 2]},
        dict.fromkeys(
            ["attention__key_length", "attention__value_length", "rope__dimension_count"], 15
        ),
        {"feed_forward_length": None},
        {"context_length": 0},
        {"context_length": None},
        {"attention__layer_norm_rms_epsilon": 0.0},
        {"attention__layer_norm_rms_epsilon": float("nan")},
        {"rope__freq_base": -1.0},
        {"rope__freq_base": "big"},
        {"rope__scaling__factor": float("inf")},
    ],
    ids=str,
)
def test_senseless_metadata(parts: Parts, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="fetch"):
        model_config(variant(tmp_path, parts, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope__scaling__type": "yarn"}, "yarn.*none and linear"),
        ({"rope__dimension_count": 8}, r"rope\.dimension_count 8 beside heads of 16"),
        ({"attention__value_length": 32}, r"attention\.value_length 32"),
        ({"expert_count": 8}, "mixture-of-experts"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(
    parts: Parts, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        model_config(variant(tmp_path, parts, **changes))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"}, {"x": np.ones(4)})
    with pytest.raises(UnsupportedModelError, match=r"\(mamba\).*llama, mistral, qwen2, qwen3"):
        GGUFWeights(GGUFFile(file))


@pytest.mark.parametrize(
    "array", [np.ones(7), np.ones(9), np.zeros(8), -np.ones(8), np.full(8, np.nan)], ids=str
)
def test_rope_divisors_that_make_no_sense(parts: Parts, tmp_path: Path, array: np.ndarray) -> None:
    file = variant(tmp_path, parts, {"rope_freqs.weight": array.astype(np.float32)})
    with pytest.raises(ModelFileError, match="8 numbers above 0"):
        model_config(file)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"token_embd.weight": None}, "no token embedding"),
        ({"token_embd.weight": np.ones(64, np.float32)}, "no token embedding"),
        ({"blk.1.ffn_up.weight": None}, r"lacks the weight 1\.w_up"),
        ({"output_norm.weight": np.ones(65, np.float32)}, r"norm\.weight has the shape \(65,\)"),
        ({"blk.0.attn_q.weight": np.ones((64, 65), np.float32)}, r"wq.*\(64, 65\).*\(64, 64\)"),
        ({"blk.0.attn_q.weight": np.ones((2, 32, 64), np.float32)}, r"wq.*\(2, 32, 64\)"),
        ({"output.weight": np.ones((260, 64), np.float32)}, r"head\.weight.*\(260, 64\)"),
    ],
    ids=["no embedding", "flat embedding", "missing", "norm", "width", "cube", "head"],
)
def test_tensors_that_deny_the_metadata(
    parts: Parts, tmp_path: Path, tensors: dict[str, np.ndarray | None], named: str
) -> None:
    with pytest.raises(ModelFileError, match=named):
        build(variant(tmp_path, parts, tensors))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": 4096},
        {"attention__head_count": 2**30, "attention__head_count_kv": 2**30},
        {"feed_forward_length": 2**31 - 1},
        {"embedding_length": 2**31 - 1},
    ],
    ids=str,
)
def test_sizes_that_the_tensors_deny(parts: Parts, tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(ModelFileError, match=r"configuration says|lacks"):
        build(variant(tmp_path, parts, **changes))


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_weights_of_whole_numbers(parts: Parts, tmp_path: Path, dtype: Any) -> None:
    file = variant(tmp_path, parts, {"blk.0.attn_output.weight": np.ones((64, 64), dtype)})
    with pytest.raises(KvchatError, match=r"attn_output|wo\.weight"):
        build(file)


def test_quantised_rows_of_a_wrong_shape(tmp_path: Path) -> None:
    model = reference("llama3")
    metadata, tensors = gguf_metadata(model), gguf_tensors(model)
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"][:48]
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, tensors, "Q4_1"))
    with pytest.raises(ModelFileError, match=r"w_up.*\(48, 64\)"):
        build_transformer(
            GGUFWeights(file), dtype=torch.float32, quant="auto", device=torch.device("cpu")
        )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_is_read_or_refused(parts: Parts, tmp_path: Path, data: st.DataObject) -> None:
    """Flip bytes of the header, or cut the file: a model or a clear error, nothing else."""
    path = tmp_path / "whole.gguf"
    if not path.exists():
        write_gguf(path, *parts)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 7000))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.none() | st.integers(0, len(content)))])
    try:
        build(GGUFFile(damaged))
    except KvchatError as error:
        assert len(str(error)) > 20
