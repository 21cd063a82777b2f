"""Our own kernels: built here, agreeing with torch; a recorded step that equals the eager one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny import RandomWeights, tiny_config

from kvchat.engine import native
from kvchat.engine.linear import Blocks, PackedLinear, Stacked, in_slabs
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
    [
        {},
        {"qk_norm": True},
        {"sliding_windows": (4, None)},
        {"tied_embeddings": True},
        {"n_heads": 14, "n_kv_heads": 2, "head_dim": 64},
        {"n_heads": 5, "n_kv_heads": 5, "head_dim": 40},
    ],
    ids=lambda changes: next(iter(changes), "plain") + str(changes.get("head_dim", "")),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_recorded_step_is_the_eager_one(
    changes: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across growing memory, spans of the attention, and a cut."""
    # Both compute in float32, whatever the cache holds.
    monkeypatch.setattr("kvchat.engine.ops.multiplies_bfloat16", lambda: False)
    plain = model(**changes)
    plain.cache_dtype = dtype
    recorded, eager = RecordedStep(plain), EagerStep(plain)
    ours, theirs = plain.new_cache(), plain.new_cache()
    ids = torch.randint(0, 250, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for nth, token in enumerate(ids):
        if nth == 200:
            ours.truncate(150)
            theirs.truncate(150)
        a, b = recorded(token, ours), eager(token, theirs)
        # A key may be rounded to the other neighbour; that is all the two may differ in.
        assert torch.allclose(a, b, atol=1e-4 if dtype == torch.float32 else 0.03), nth
        assert a.argmax() == b.argmax() or dtype != torch.float32
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


@pytest.mark.parametrize(
    ("bits", "minima"), [(4, False), (4, True), (5, False), (5, True), (6, False), (8, False)]
)
@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 40])
def test_products_of_blocks(bits: int, minima: bool, T: int) -> None:
    """The largest numbers everywhere too: nothing is added in too few bits."""
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(0, 2**bits, (50, 96), generator=generator)
    q[:16], q[16:32] = 2**bits - 1, 0
    scale = torch.rand(50, 96 // (16 if bits == 6 else 32), generator=generator).half() / 8 + 0.01
    lowest = torch.randn(50, 3, generator=generator).half() if minima else None
    weight = (q.double() - (0 if minima else 2 ** (bits - 1))).view(*scale.shape, -1)
    weight = weight * scale.double()[..., None]
    if lowest is not None:
        weight = weight.view(50, 3, 32) + lowest.double()[..., None]
    weight = weight.reshape(50, 96)
    blocks = Blocks(q.to(torch.uint8), scale, lowest, bits)
    bias = torch.randn(50, generator=generator)
    layer = PackedLinear.pack(in_slabs(blocks), 50, bias)
    assert torch.allclose(layer.rows(torch.arange(50)).double(), weight, rtol=1e-6)
    x = torch.randn(T, 96, generator=generator)
    x[0] = 5.0
    exact = x.double() @ weight.T + bias
    bound = x.double().abs() @ weight.abs().T
    assert ((layer(x).double() - exact).abs() <= 2e-4 * bound + 1e-4).all()


def test_parts_of_several_forms_are_one_layer() -> None:
    class Mixed(RandomWeights):
        """Queries in 4 bits, keys and values in 6, as some files have them."""

        def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:  # type: ignore[override]
            bits = {"wq": 4, "wk": 6, "wv": 6}.get(name.split(".")[-2])
            if bits is None:
                return None
            height, width = self.shape(name)
            generator = torch.Generator().manual_seed(len(name) + bits)
            q = torch.randint(0, 2**bits, (height, width), generator=generator).to(torch.uint8)
            scale = torch.rand(height, width // (16 if bits == 6 else 32), generator=generator)
            return Blocks(q[rows], scale[rows] / 50, None, bits)

    source = Mixed(tiny_config(dim=64, hidden_dim=96), 0)
    mixed = build_transformer(
        source, dtype=torch.float32, quant="auto", device=torch.device("cpu"), kernels=True
    )
    wqkv = mixed.blocks[0].attention.wqkv
    assert isinstance(wqkv, Stacked)
    assert [part.bits for part in wqkv.parts] == [4, 6]
    recorded, eager = RecordedStep(mixed), EagerStep(mixed)
    ours, theirs = mixed.new_cache(), mixed.new_cache()
    for token in (1, 2, 3, 250):
        assert torch.allclose(recorded(token, ours), eager(token, theirs), atol=1e-3)


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
