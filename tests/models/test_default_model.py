"""The default model, whole: against transformers with independently dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny_checkpoints import gguf_name, halves_apart, reference_greedy, reference_logits
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvchat
from kvchat.engine.types import SamplingParams, TokenGenerated
from kvchat.models.load import LanguageModel

pytestmark = pytest.mark.real_model

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2-greedy.json"

TEXT = (
    "Water boils at a lower temperature on a mountain, because the air above presses less upon "
    "it. In 1654 Otto von Guericke showed with two half-spheres how strong that pressure is:\n"
    "def pressure(height):\n    return 101325 * (1 - 2.25577e-5 * height) ** 5.25588\n"
)


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> LanguageModel:
    return kvchat.load(str(default_model_path), device="cpu", dtype="float32", quant="none")


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    """transformers' Llama with the file's weights, read and dequantised by the gguf package."""
    reader = gguf.GGUFReader(default_model_path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    n_heads, n_kv_heads = (
        field("llama.attention.head_count"),
        field("llama.attention.head_count_kv"),
    )
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    tensors = {t.name: t for t in reader.tensors}
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {}
    for name, _ in model.named_parameters():
        stored = tensors.pop(gguf_name(name))
        array = gguf.quants.dequantize(stored.data, stored.tensor_type)
        heads = {"q_proj": n_heads, "k_proj": n_kv_heads}.get(name.split(".")[-2])
        weights[name] = torch.from_numpy(halves_apart(array, heads) if heads else array.copy())
    assert not tensors
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def greedy(llm: LanguageModel, ids: list[int], n: int) -> list[TokenGenerated]:
    params = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=n)
    events = llm.engine.generate(ids, lambda: params, llm.tokenizer.stream_decoder())
    return [event for event in events if isinstance(event, TokenGenerated)]


def gap(event: TokenGenerated) -> float:
    """How far ahead of the second candidate the first is, in logits."""
    return event.before.logprobs[0] - event.before.logprobs[1]


def divergence(true: Tensor, ours: Tensor) -> float:
    """Mean KL per position, in nats."""
    true, ours = true.log_softmax(-1), ours.log_softmax(-1)
    return float((true.exp() * (true - ours)).sum(-1).mean())


def test_logits_and_greedy_tokens_of_transformers(llm: LanguageModel, reference: Any) -> None:
    ids = llm.tokenizer.encode(TEXT)
    assert len(ids) > 80
    theirs = reference_logits(reference, ids)
    torch.testing.assert_close(llm.score(ids), theirs, atol=1e-3, rtol=0)
    prompt = ids[:30]
    ours = [event.id for event in greedy(llm, prompt, 12)]
    assert ours == reference_greedy(reference, prompt, 12)


def test_cached_chunked_and_whole_agree(llm: LanguageModel) -> None:
    ids = llm.tokenizer.encode(TEXT)
    whole = llm.score(ids)
    cache = llm.model.new_cache()
    chunked = []
    for start, end in [(0, 1), (1, 2), (2, 40), (40, 41), (41, len(ids))]:
        chunk = torch.tensor([ids[start:end]])
        logits, _, _ = llm.model(chunk, cache, start, all_logits=True)
        chunked.append(logits[0])
    torch.testing.assert_close(torch.cat(chunked), whole, atol=1e-3, rtol=0)
    cache.truncate(50)
    again, _, _ = llm.model(torch.tensor([ids[50:]]), cache, 50, all_logits=True)
    torch.testing.assert_close(again[0], whole[50:], atol=1e-3, rtol=0)


@pytest.mark.parametrize("number", range(3))
def test_golden_answers(llm: LanguageModel, number: int) -> None:
    answer = json.loads(GOLDEN.read_text(encoding="utf-8"))["answers"][number]
    prompt = llm.render([{"role": "user", "content": answer["user"]}])
    ids = llm.tokenizer.encode(prompt)
    events = greedy(llm, ids, answer["max_tokens"])
    assert min(map(gap, events)) > 0.05  # else another machine's rounding might decide
    assert (prompt, ids) == (answer["prompt"], answer["prompt_ids"])
    assert [event.id for event in events] == answer["ids"]
    assert "".join(event.text for event in events) == answer["text"]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"dtype": "bfloat16", "quant": "none"}, 0.002),
        ({"dtype": "bfloat16", "quant": "int4"}, 0.005),
        ({"dtype": "bfloat16", "quant": "int8"}, 0.01),
    ],
    ids=["bfloat16", "int4", "int8"],
)
def test_faster_weights_stay_close(
    llm: LanguageModel, default_model_path: Path, settings: dict[str, Any], limit: float
) -> None:
    fast = kvchat.load(str(default_model_path), device="cpu", **settings)
    ids = llm.tokenizer.encode(TEXT)
    measured = divergence(llm.score(ids), fast.score(ids))
    assert 0 < measured <= limit, f"mean KL {measured:.5f} is above {limit}"
