"""Our own kernels: built here, agreeing with torch; a recorded step that equals the eager one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny import RandomWeights, tiny_config

from kvchat.engine import native
from kvchat.engine.linear import PackedLinear
from kvchat.engine.model import Transformer
from kvchat.engine.native.build import build, check
from kvchat.engine.step import EagerStep, RecordedStep
from kvchat.models.weights import Quant, build_transformer

pytestmark = [
    pytest.mark.skipif(not native.can_build(), reason="there is no C++ compiler, or no ninja"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    if not native.is_loaded():
        build(native.home(folder))
    assert native.is_loaded()
    return folder


def model(
    quant: Quant = "none", dtype: torch.dtype = torch.float32, **changes: object
) -> Transformer:
    source = RandomWeights(tiny_config(dim=64, hidden_dim=96, **changes), 0)
    device = torch.device("cpu")
    return build_transformer(source, dtype=dtype, quant=quant, device=device, kernels=True)


def test_products_agree_with_torch() -> None:
    check()


def test_what_was_built_is_found_again_for_this_machine_only(kernels: Path) -> None:
    if native.home(kernels).exists():
        assert native.load(kernels)
    assert not native.load(kernels / "elsewhere")


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"sliding_windows": (4, None)}, {"tied_embeddings": True}],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_a_recorded_step_is_the_eager_one(changes: dict[str, object]) -> None:
    """Also across growing memory, spans of the attention, and a cut."""
    plain = model(**changes)
    recorded, eager = RecordedStep(plain), EagerStep(plain)
    ours, theirs = plain.new_cache(), plain.new_cache()
    ids = torch.randint(0, 250, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for nth, token in enumerate(ids):
        if nth == 200:
            ours.truncate(150)
            theirs.truncate(150)
        a, b = recorded(token, ours), eager(token, theirs)
        assert torch.allclose(a, b, atol=1e-4), nth
        assert a.argmax() == b.argmax()
    assert ours.length == theirs.length == 250


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_packed_weights_are_stepped_as_they_are_run(quant: Quant) -> None:
    packed = model(quant, tied_embeddings=True)
    assert isinstance(packed.head, PackedLinear) and packed.head is packed.embedding
    assert packed.head.bits == 8
    assert isinstance(packed.blocks[0].mlp.w_down, PackedLinear)
    recorded, eager = RecordedStep(packed), EagerStep(packed)
    ours, theirs = packed.new_cache(), packed.new_cache()
    for token in (1, 2, 3, 250):
        assert torch.allclose(recorded(token, ours), eager(token, theirs), atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_and_few_rows_agree(bits: int) -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    layer = PackedLinear.quantise([weight], 50, bits)
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    few = torch.cat([layer(rows) for rows in x.split(8)])
    assert torch.allclose(layer(x).float(), few, atol=0.02 * few.abs().max())
    gap = (few - x @ weight.T).abs().max() / few.abs().max()
    assert gap < (0.15 if bits == 4 else 0.01)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 32), (16, 64), (37, 160)])
def test_unpacked_tiles_are_the_rounded_rows(bits: int, rows: int, inputs: int) -> None:
    """Bit for bit what looking up each row gives, whatever bits a file has for a scale."""
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(0, 2**bits, (rows, inputs), generator=generator).to(torch.uint8)
    any_bits = torch.randint(-(2**15), 2**15, (2, rows, inputs // 32), generator=generator)
    any_bits[:, -1, 0] = 0x7FFF  # a NaN that, rounded like a number, would become zero
    scale, minimum = any_bits.to(torch.int16).view(torch.float16)
    blocks = torch.ops.kvchat.pack(q, scale, minimum, bits)
    every = torch.ops.kvchat.embed(blocks, bits, rows, torch.arange(rows))
    unpacked = torch.ops.kvchat.unpack(blocks, bits, rows, 2)
    assert torch.equal(unpacked.isnan(), every.isnan()) and every.isnan().any()
    assert torch.equal(unpacked[~every.isnan()], every.bfloat16()[~every.isnan()])


def test_nan_is_not_lost_in_rounding() -> None:
    layer = PackedLinear.quantise([torch.ones(16, 32)], 16, 8)
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    assert layer(x).isnan().all()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("kvchat.engine.native.build.load", refuse)
    with pytest.raises(RuntimeError, match="no"):
        build(tmp_path / "kernels" / "key")
    assert not [path for path in (tmp_path / "kernels").iterdir() if path.is_dir()]
    shutil.rmtree(tmp_path / "kernels")
