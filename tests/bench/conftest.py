"""A model for benchmarks of nothing, and one such benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvchat.bench.plan import LoadSettings, Plan
from kvchat.bench.result import BenchResult
from kvchat.bench.run import run

SMALL = Plan(
    repeats=2,
    prefill_tokens=40,
    decode_prompt=10,
    decode_tokens=6,
    long_contexts=(150, 200),
    turns=3,
    user_tokens=12,
    reply_tokens=9,
    branch_tokens=30,
    starts=1,
    rounds=1,
    light_repeats=2,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random Llama over bytes, ChatML's control tokens added."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: nth for nth, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def result(folder: Path) -> BenchResult:
    """Everything measured once, beside transformers."""
    settings = LoadSettings(model=str(folder), device="cpu", ctx=300, threads=1)
    told: list[str] = []
    found = run(settings, SMALL, compare=["transformers"], progress=told.append)
    assert told[0] == "loading the model"
    return found
