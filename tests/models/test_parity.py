"""Every family computes what transformers computes from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ByteStream
from tiny_checkpoints import (
    CASES,
    reference,
    reference_greedy,
    reference_logits,
    round_weights,
    save_folder,
    save_gguf,
    some_ids,
    to_v4_style,
)
from torch import Tensor

import kvchat
from kvchat.engine.engine import Engine
from kvchat.engine.types import SamplingParams, TokenGenerated
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_weights import GGUFWeights
from kvchat.models.hf import HFWeights
from kvchat.models.weights import WeightSource, build_transformer

WINDOWLESS = sorted(CASES.keys() - {"mistral", "qwen2-windows", "qwen3-windows"})
"""GGUF files of these families carry no window."""

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=30)


def engine_of(source: WeightSource, **settings: int) -> Engine:
    model = build_transformer(source, dtype=torch.float32, quant="none", device=torch.device("cpu"))
    return Engine(model, **settings)


def greedy(engine: Engine, ids: list[int]) -> list[int]:
    events = engine.generate(ids, lambda: GREEDY, ByteStream())
    return [event.id for event in events if isinstance(event, TokenGenerated)]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.5  # else a tolerance of 1e-4 would show nothing
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def in_type(model: Any, dtype: torch.dtype) -> Any:
    """Convert the weights, and not the rotary frequencies, which no checkpoint holds."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


@pytest.mark.parametrize("style", ["single", "sharded", "version 4"])
@pytest.mark.parametrize("name", CASES)
def test_hf_logits_and_greedy_tokens(name: str, style: str, tmp_path: Path) -> None:
    model = reference(name)
    save_folder(model, tmp_path, shard="40KB" if style == "sharded" else "1GB")
    if style == "version 4":
        to_v4_style(tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (style == "sharded")
    engine = engine_of(HFWeights(tmp_path), chunk_size=16)
    ids = some_ids(40)
    assert_close(engine.score(ids), reference_logits(model, ids))
    assert greedy(engine, ids[:20]) == reference_greedy(model, ids[:20], 30)


@pytest.mark.parametrize("name", WINDOWLESS)
def test_gguf_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = reference(name)
    engine = engine_of(GGUFWeights(GGUFFile(save_gguf(model, tmp_path / "m.gguf"))))
    ids = some_ids(40)
    assert_close(engine.score(ids), reference_logits(model, ids))
    assert greedy(engine, ids[:20]) == reference_greedy(model, ids[:20], 30)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama3", "llama-biased", "mistral-no-window", "qwen2", "qwen3"])
def test_quantised_gguf_is_the_dequantised_model(name: str, kind: str, tmp_path: Path) -> None:
    model = reference(name)
    source = GGUFWeights(GGUFFile(save_gguf(model, tmp_path / "m.gguf", kind)))
    round_weights(model, kind)
    ids = some_ids(40)
    theirs = reference_logits(model, ids)
    assert_close(engine_of(source).score(ids), theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", ["llama3", "llama-biased", "qwen2", "qwen3"])
def test_packed_int4_is_the_dequantised_model_up_to_bfloat16(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = reference(name)
    source = GGUFWeights(GGUFFile(save_gguf(model, tmp_path / "m.gguf", kind)))
    round_weights(model, kind)
    packed = build_transformer(
        source, dtype=torch.float32, quant="auto", device=torch.device("cpu")
    )
    ids = some_ids(40)
    theirs = reference_logits(model, ids).log_softmax(-1)
    ours = Engine(packed).score(ids).log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert divergence.mean() < 0.02


def test_split_gguf(tmp_path: Path) -> None:
    model = reference("llama3")
    save_gguf(model, tmp_path / "m.gguf", split_max_tensors=6)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    ids = some_ids(20)
    for part in (parts[0], parts[-1]):
        engine = engine_of(GGUFWeights(GGUFFile(part)))
        assert_close(engine.score(ids), reference_logits(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama3-tied", "qwen3", "qwen2-windows"])
def test_half_precision_checkpoints_in_float32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = reference(name)
    in_type(model, dtype)
    engine = engine_of(HFWeights(save_folder(model, tmp_path)))
    ids = some_ids(40)
    assert_close(engine.score(ids), reference_logits(in_type(model, torch.float32), ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(dtype: str, tmp_path: Path) -> None:
    model = reference("llama3")
    llm = kvchat.load(str(save_folder(model, tmp_path)), device="cpu", dtype=dtype)
    ids = some_ids(40)
    ours, theirs = llm.score(ids), reference_logits(model, ids)
    assert llm.dtype == dtype
    assert 0 < (ours - theirs).abs().mean() < 0.05


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_load_runs_the_same_model(name: str, container: str, tmp_path: Path) -> None:
    model = reference(name)
    if container == "folder":
        path = save_folder(model, tmp_path / "model")
    else:
        path = save_gguf(model, tmp_path / "model.gguf")
    llm = kvchat.load(str(path), device="cpu", dtype="float32", quant="none")
    ids = llm.tokenizer.encode("the cat, 你好")
    assert_close(llm.score(ids), reference_logits(model, ids))
    assert llm.tokenizer.decode(ids) == "the cat, 你好"
    assert llm.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
