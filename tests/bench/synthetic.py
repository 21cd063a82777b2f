"""Random weights in the shape of a real model, as a GGUF file: for measuring, not for chatting.

    python tests/bench/synthetic.py PATH

writes what a Qwen2.5 0.5B quantised to Q4_K_M looks like: about 390 MB. Rows that are no multiple
of 256 long cannot be held in K-blocks, so most of such a small file is Q5_0 and Q8_0. Every block
is random by itself, and scaled so that activations keep the size they have in a trained model.
Other programs read the file too: the format is the `gguf` package's, the vocabulary byte-level.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvchat.models.stream_decoder import BYTE_TO_CHAR

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġ a", "i n", "r e", "Ġt he", "o n", "e r", "a t", "Ġ s", "n d", "o u")
"""A few of the merges that every English vocabulary begins with; the rest never occurs in text."""

NORMAL, CONTROL_TYPE, UNUSED = 1, 3, 5
"""Values of `tokenizer.ggml.token_type`."""

BIAS, EMBEDDING = 0.1, 0.1
"""Standard deviations; that of the embedding, which is the head too, makes predictions peaked."""

Blocks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2 model with tied embeddings; those of the 0.5B by default."""

    n_layers: int = 24
    dim: int = 896
    n_heads: int = 14
    n_kv_heads: int = 2
    hidden_dim: int = 4864
    vocab_size: int = 151_936
    max_seq_len: int = 32_768


def write(path: Path, shape: Shape | None = None, seed: int = 0) -> None:
    """Write a file; the same seed writes the same bytes."""
    shape = shape or Shape()
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("random weights")
    writer.add_block_count(shape.n_layers)
    writer.add_embedding_length(shape.dim)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_feed_forward_length(shape.hidden_dim)
    writer.add_context_length(shape.max_seq_len)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    _add_tokenizer(writer, shape.vocab_size)
    for name, tensor, kind in _tensors(shape, np.random.default_rng(seed)):
        raw_dtype = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, tensor, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    tokens = [BYTE_TO_CHAR[byte] for byte in range(256)]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    controls = {name: len(tokens) + nth for nth, name in enumerate(CONTROL)}
    types = [NORMAL] * len(tokens) + [CONTROL_TYPE] * len(CONTROL)
    tokens += CONTROL
    types += [UNUSED] * (vocab_size - len(tokens))
    tokens += [f"[PAD{nth}]" for nth in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(controls["<|im_end|>"])
    writer.add_pad_token_id(controls["<|endoftext|>"])
    writer.add_chat_template(TEMPLATE)


def _tensors(
    shape: Shape, random: np.random.Generator
) -> Iterator[tuple[str, NDArray[Any], str | None]]:
    """Yield name, data and block type of every tensor, as a quantiser to Q4_K_M chooses them."""

    def matrix(name: str, rows: int, columns: int, *, more: bool, std: float) -> Any:
        kind = ("Q6_K" if more else "Q4_K") if columns % 256 == 0 else "Q8_0" if more else "Q5_0"
        return name, _BLOCKS[kind](random, rows, columns, std), kind

    def vector(name: str, values: NDArray[np.float64]) -> Any:
        return name, values.astype(np.float32), None

    dim, hidden, depth = shape.dim, shape.hidden_dim, shape.n_layers
    kv_dim = shape.n_kv_heads * dim // shape.n_heads
    std, hidden_std, residual = dim**-0.5, hidden**-0.5, (2 * depth) ** -0.5
    yield matrix("token_embd.weight", shape.vocab_size, dim, more=True, std=EMBEDDING)
    yield vector("output_norm.weight", np.ones(dim))
    for i in range(depth):
        # A third of the layers between the first and the last eighth, and all of those two.
        more = i < depth // 8 or i >= 7 * depth // 8 or (i - depth // 8) % 3 == 2
        at = f"blk.{i}."
        yield vector(f"{at}attn_norm.weight", np.ones(dim))
        yield vector(f"{at}ffn_norm.weight", np.ones(dim))
        for name, rows in (("q", dim), ("k", kv_dim), ("v", kv_dim)):
            wide = name == "v" and more
            yield matrix(f"{at}attn_{name}.weight", rows, dim, more=wide, std=std)
            yield vector(f"{at}attn_{name}.bias", random.normal(0, BIAS, rows))
        yield matrix(f"{at}attn_output.weight", dim, dim, more=False, std=std * residual)
        yield matrix(f"{at}ffn_gate.weight", hidden, dim, more=False, std=std)
        yield matrix(f"{at}ffn_up.weight", hidden, dim, more=False, std=std)
        yield matrix(f"{at}ffn_down.weight", dim, hidden, more=more, std=hidden_std * residual)


def _scales(random: np.random.Generator, n: int, scale: float) -> Blocks:
    """N float16 scales around `scale`, of either sign, as (n, 2) bytes."""
    scales: NDArray[Any] = scale * random.uniform(0.7, 1.3, n) * random.choice((-1, 1), n)
    return scales.astype(np.float16).view(np.uint8).reshape(n, 2)


def _bytes(random: np.random.Generator, n: int, width: int) -> Blocks:
    return random.integers(0, 256, (n, width), dtype=np.uint8)


def _q5_0(random: np.random.Generator, rows: int, columns: int, std: float) -> Blocks:
    n = rows * columns // 32
    scales = _scales(random, n, std / 9.2)  # numbers from -16 to 15
    return np.hstack([scales, _bytes(random, n, 20)]).reshape(rows, -1)


def _q8_0(random: np.random.Generator, rows: int, columns: int, std: float) -> Blocks:
    n = rows * columns // 32
    scales = _scales(random, n, std / 73.9)  # numbers from -128 to 127
    return np.hstack([scales, _bytes(random, n, 32)]).reshape(rows, -1)


def _q4_k(random: np.random.Generator, rows: int, columns: int, std: float) -> Blocks:
    """Numbers from 0 to 15; minima of 7.5 steps centre them. Six-bit scales are 32 to 63."""
    n = rows * columns // 256
    scale = random.integers(32, 64, (n, 8), dtype=np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    first = low | (high >> 4) << 6
    packed = np.hstack([first, first, high & 15 | (high & 15) << 4])  # minima are as the scales
    step = (std / 4.6 / 48 * random.uniform(0.7, 1.3, (n, 1))).astype(np.float16)
    pair = np.hstack([step, step * np.float16(7.5)]).astype(np.float16).view(np.uint8)
    return np.hstack([pair, packed, _bytes(random, n, 128)]).reshape(rows, -1)


def _q6_k(random: np.random.Generator, rows: int, columns: int, std: float) -> Blocks:
    """Numbers from -32 to 31, 16 scales of either sign in a block."""
    n = rows * columns // 256
    sign = random.choice((-1, 1), (n, 16))
    scales = (random.integers(64, 128, (n, 16)) * sign).astype(np.int8).view(np.uint8)
    step = _scales(random, n, std / 18.5 / 96)
    return np.hstack([_bytes(random, n, 192), scales, step]).reshape(rows, -1)


_BLOCKS = {"Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k, "Q8_0": _q8_0}


def main() -> None:
    """Write the file that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/bench/synthetic.py PATH")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
