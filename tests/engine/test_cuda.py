"""What only a GPU can show. Everything else about it is tested on a CPU, in float32."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny import ByteStream, RandomWeights, tiny_config
from torch import Tensor

from kvchat.engine.cuda.graphs import GraphRecorder
from kvchat.engine.cuda.int4 import TiledInt4Linear, from_tiles, multiplies_tiles
from kvchat.engine.engine import Engine
from kvchat.engine.kv_cache import KVCache
from kvchat.engine.model import Transformer
from kvchat.engine.sampling import Sampler
from kvchat.engine.static_step import StaticStep
from kvchat.engine.step import DecodeStep, EagerStep
from kvchat.engine.types import SamplingParams, TokenGenerated
from kvchat.models.load import pick_step
from kvchat.models.weights import build_transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

SHAPES = [{}, {"qk_norm": True}, {"sliding_windows": (4, 300)}, {"tied_embeddings": True}]


def model(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    source = RandomWeights(tiny_config(dim=64, hidden_dim=96, head_dim=16, **changes), 0)
    return build_transformer(source, dtype=dtype, quant="none", device=torch.device("cuda"))


def captured(model: Transformer) -> StaticStep:
    step = pick_step(model, kernels=False)
    assert isinstance(step, StaticStep)
    return step


def random_ids(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(step: DecodeStep, cache: KVCache, ids: list[int]) -> Tensor:
    return torch.stack([step(i, cache) for i in ids]).cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_captured_step_is_the_eager_one(
    shape: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Across spans, growing memory and a cut."""
    plain = model(**shape)
    step = captured(plain)
    ours, theirs = plain.new_cache(), plain.new_cache()
    ids = random_ids(500)
    for part, cut in ((ids[:300], 200), (ids[300:], 0)):
        a, b = run(step, ours, part), run(EagerStep(plain), theirs, part)
        torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
        ours.truncate(cut)
        theirs.truncate(cut)
    assert not caplog.records, "it fell back to the eager step"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_captured_step_in_half_precision(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    plain = model(dtype)
    ids = random_ids(40)
    a = run(captured(plain), plain.new_cache(), ids).log_softmax(-1)
    b = run(EagerStep(plain), plain.new_cache(), ids).log_softmax(-1)
    assert (b.exp() * (b - a)).sum(-1).mean() < 2e-3
    assert not caplog.records


def test_without_memory_for_a_graph_it_goes_on_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """The error is the one that the allocator raises."""
    plain = model()
    stream = torch.cuda.current_stream()

    def new_recorder():
        record = GraphRecorder(plain.device)

        def greedy(work):
            def and_too_much() -> None:
                work()
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

            return record(and_too_much)

        return greedy

    step = StaticStep(plain, new_recorder)
    with caplog.at_level(logging.WARNING):
        a = run(step, plain.new_cache(), [1, 2, 3])
    assert "no room for a captured step" in caplog.text
    assert torch.cuda.current_stream() == stream
    b = run(EagerStep(plain), plain.new_cache(), [1, 2, 3])
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_what_cannot_be_captured_goes_on_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """Reading a number from the device is not allowed in a capture."""
    plain = model()
    stream = torch.cuda.current_stream()

    def new_recorder():
        record = GraphRecorder(plain.device)
        return lambda work: record(lambda: (work(), torch.ones(1, device="cuda").item())[0])

    step = StaticStep(plain, new_recorder)
    with caplog.at_level(logging.WARNING):
        a = run(step, plain.new_cache(), [1, 2, 3])
    assert "could not be captured" in caplog.text
    assert torch.cuda.current_stream() == stream
    b = run(EagerStep(plain), plain.new_cache(), [1, 2, 3])
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0}, {"top_k": 0, "top_p": 0.8}, {"top_k": 3}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_on_the_device_draws_what_the_host_draws(
    dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    params, sampler = SamplingParams(**changes), Sampler(range(5))
    for seed in range(50):
        noise = torch.randn(50_000, generator=torch.Generator().manual_seed(seed))
        logits, context = (noise * 4).to(dtype), random_ids(300, seed)
        draws = [
            sampler.sample(logits.to(device), context, params, torch.Generator().manual_seed(seed))
            for device in ("cuda", "cpu")
        ]
        assert draws[0].id == draws[1].id
        assert draws[0].after == draws[1].after
        assert draws[0].before.ids == draws[1].before.ids
        assert draws[0].logprob == pytest.approx(draws[1].logprob, abs=1e-4)


def test_the_same_greedy_text_as_on_a_cpu() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=120)
    texts = []
    for device in ("cuda", "cpu"):
        source = RandomWeights(tiny_config(), 3)
        plain = build_transformer(
            source, dtype=torch.float32, quant="none", device=torch.device(device)
        )
        engine = Engine(plain, step=pick_step(plain, kernels=False))
        events = engine.generate(random_ids(200), lambda: params, ByteStream())
        texts.append([event.id for event in events if isinstance(event, TokenGenerated)])
    assert texts[0] == texts[1]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="the operator takes compute capability 8.0",
)
@pytest.mark.parametrize("T", [1, 7, 16, 17, 128, 200])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (576, 576), (3072, 576), (64, 4096)])
def test_int4_products_are_those_of_unpacked_weights(shape: tuple[int, int], T: int) -> None:
    layer = TiledInt4Linear.quantise(torch.randn(shape).cuda())
    q = from_tiles(layer.packed)
    words = layer.packed.view(torch.int32)
    made = torch._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], 2 * words.shape[-1])
    assert torch.equal(words, made)
    x = torch.randn(T, shape[1], device="cuda")
    found, expected = layer(x).float(), x @ layer.unpacked().float().T
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert multiplies_tiles(torch.device("cuda"))


def test_a_captured_step_with_int4(caplog: pytest.LogCaptureFixture) -> None:
    source = RandomWeights(tiny_config(dim=64, hidden_dim=96), 0)
    device = torch.device("cuda")
    plain = build_transformer(source, dtype=torch.bfloat16, quant="int4", device=device)
    assert isinstance(plain.blocks[0].mlp.w_down, TiledInt4Linear)
    ids = random_ids(40)
    a = run(captured(plain), plain.new_cache(), ids).log_softmax(-1)
    b = run(EagerStep(plain), plain.new_cache(), ids).log_softmax(-1)
    assert (b.exp() * (b - a)).sum(-1).mean() < 2e-3
    assert not caplog.records
