"""The written file: read by the independent reader, loaded and run by ours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from synthetic import CONTROL, Shape, write

from kvchat.models.load import load

SHAPE = Shape(
    n_layers=8, dim=128, n_heads=4, n_kv_heads=2, hidden_dim=256, vocab_size=600, max_seq_len=256
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "random.gguf"
    write(path, SHAPE)
    return path


def test_blocks_are_of_the_kinds_that_a_small_real_file_has(path: Path) -> None:
    kinds = Counter(t.tensor_type.name for t in gguf.GGUFReader(path).tensors)
    # Of eight layers the first, the last, and two between get more bits.
    assert kinds == {"Q8_0": 1 + 4, "Q5_0": 8 * 5 + 4, "Q6_K": 4, "Q4_K": 4, "F32": 1 + 8 * 5}


def test_weights_are_centred_and_of_the_wanted_size(path: Path) -> None:
    residual = (2 * SHAPE.n_layers) ** -0.5
    wanted = {
        "token_embd": 0.1,
        "ffn_down": SHAPE.hidden_dim**-0.5 * residual,
        "attn_output": SHAPE.dim**-0.5 * residual,
    }
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name == "F32":
            continue
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        std = wanted.get(part, SHAPE.dim**-0.5)
        assert weights.std() == pytest.approx(std, rel=0.1), tensor.name
        assert abs(weights.mean()) < 0.1 * std, tensor.name
        assert len(np.unique(weights, axis=0)) == len(weights), tensor.name


def test_a_prompt_gives_predictions_of_a_sane_size(path: Path) -> None:
    llm = load(path, device="cpu", dtype="float32", quant="none")
    ids = llm.tokenizer.encode_plain("the harbour was quiet")
    assert llm.tokenizer.decode(ids) == "the harbour was quiet"
    assert len(ids) < len("the harbour was quiet")
    spread = llm.score(ids).std(dim=-1)
    assert bool(((spread > 0.3) & (spread < 30)).all())
    assert llm.config.tied_embeddings
    assert {llm.tokenizer.decode([i]) for i in llm.tokenizer.control_ids} == set(CONTROL)


def test_the_same_seed_writes_the_same_bytes(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "again.gguf", SHAPE)
    write(tmp_path / "other.gguf", SHAPE, seed=1)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
    assert (tmp_path / "other.gguf").read_bytes() != path.read_bytes()


def test_classes_are_kept_as_they_are_and_agree(path: Path) -> None:
    exact = load(path, device="cpu", dtype="float32", quant="none")
    as_set = load(path, device="cpu")
    ids = list(range(1, 60))
    gap = exact.score(ids).log_softmax(-1) - as_set.score(ids).log_softmax(-1)
    assert gap.abs().max() < 0.5
    assert not torch.equal(gap, torch.zeros_like(gap))
