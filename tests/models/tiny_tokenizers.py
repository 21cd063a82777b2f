"""Small vocabularies, trained on the spot, in the two shapes language models use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvchat.models.pretokenizers import PRE_TOKENIZERS

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and doesn't look back.\n\n"
    "def add(a, b):\n    return a + b  # 12345\n"
    "你好，世界！今天天气很好。 Привет, мир! Ünïcödé naïve café. 👩‍👩‍👧 👍🏽\n"
) * 3

NASTY = (
    "",
    " ",
    "   ",
    "hello",
    " hello  world ",
    "\n\n\tif x:\r\n        return 'it\\'s'  # done\n",
    "你好，世界！我们今天去哪里？",
    "مرحبا بالعالم، كيف الحال؟",
    "हिन्दी में लिखा हुआ",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷",
    "cafe\u0301 Z\u0351\u036b\u0343a\u0335lgo A\u030a",
    "3.14159 + 2,000,000 = ½ Ⅳ ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end| > <|im_star|> <s> </s> <unk> <0x0A> <think>no</think>",
    "a\u0000b\u200b\ufeff\ufffd",
    "I'LL we've DON'T x’s",
    "word" * 200,
)

PIECES = (
    "<|im_start|>", "<|im_end|>", "<think>", "</s>", "<s>", "<unk>", "<|im_", "end|>", "<", ">",
    " ", "  ", "\n", "\t", "▁", "hello", "don't", "12", "é", "e\u0301", "\u0338", "你", "👩‍👩‍👧",
)  # fmt: skip

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
"""Text that mixes control tokens, look-alikes, spaces and all of Unicode (no lone surrogates)."""


def _trained(pre_tokenizer: Any, alphabet: list[str], size: int) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as GGUF writes them."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizer
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([CORPUS], trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


def byte_level_metadata(pre: str = "qwen2", **more: Any) -> dict[str, Any]:
    rule = PRE_TOKENIZERS["gpt-2"]
    cut = pre_tokenizers.Split(Regex(rule.splits[0]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens, merges = _trained(pre_tokenizers.Sequence([cut, byte_level]), alphabet, 500)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]
    whole = ["<think>", "</think>"]
    n = len(tokens)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + special + whole,
        "tokenizer.ggml.token_type": [1] * n + [3] * len(special) + [4] * len(whole),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 2,
    } | more


def sentencepiece_metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    tokens, _ = _trained(pre_tokenizers.Metaspace(), ["▁"], 400)
    single = [token for token in tokens if len(token) == 1]
    longer = [token for token in tokens if len(token) > 1]
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    start = ["<unk>", "<s>", "</s>"]
    n = len(tokens)
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*start, *raw_bytes, *longer, *single, "<|im_end|>", "<think>"],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(n)] + [0.0] * 2,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * n + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def write_gguf(folder: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with this tokenizer and the least of a model around it."""
    import numpy as np

    path = folder / "tiny.gguf"
    architecture = metadata["general.architecture"]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
