"""Packed weights on the disk: the same model again, and any damage only costs packing anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny import RandomWeights, tiny_config

from kvchat.cli import run
from kvchat.engine.errors import KvchatError
from kvchat.engine.linear import Int4Linear, Int8Linear
from kvchat.engine.model import Transformer
from kvchat.models import packed
from kvchat.models.packed import PackedLayers, kept, made_from
from kvchat.models.weights import Quant, build_transformer

IDS = torch.tensor([[1, 7, 30, 200, 5]])


class Weights(RandomWeights):
    """Random weights with biases, which tell what they are asked for."""

    def __init__(self, **changes: object) -> None:
        sizes = {"dim": 64, "hidden_dim": 96, "n_heads": 4, "head_dim": 16, "vocab_size": 272}
        sizes |= changes
        super().__init__(tiny_config(**sizes), 0)
        self.read: list[str] = []

    def dense(self, name: str, *rest: object) -> torch.Tensor:
        self.read.append(name)
        self.generator.manual_seed(sum(name.encode()))  # whatever was asked for before
        return super().dense(name, *rest)


def build(layers: PackedLayers | None, quant: Quant = "int8") -> tuple[Transformer, list[str]]:
    """Return a model, and which weights were read for it."""
    weights = Weights()
    device = torch.device("cpu")
    model = build_transformer(
        weights, dtype=torch.bfloat16, quant=quant, device=device, packed=layers
    )
    if layers is not None:
        layers.save()
    return model, weights.read


def linear(read: list[str]) -> list[str]:
    return [name for name in read if "norm" not in name and name != "embedding.weight"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of packed weights, made with the key `k`."""
    build(PackedLayers(tmp_path, "k"))
    (path,) = kept(tmp_path)
    return path


@pytest.mark.parametrize(("quant", "kind"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_the_second_start_packs_nothing_and_computes_the_same(
    tmp_path: Path, quant: Quant, kind: type
) -> None:
    plain, _ = build(None, quant)
    first, read = build(PackedLayers(tmp_path, "k"), quant)
    assert linear(read)
    second, read = build(PackedLayers(tmp_path, "k"), quant)
    assert not linear(read)
    assert isinstance(second.blocks[0].mlp.w_down, kind)
    wanted = plain(IDS)[0]
    assert torch.equal(first(IDS)[0], wanted) and torch.equal(second(IDS)[0], wanted)


def test_a_bias_belongs_to_the_model_and_not_to_the_packed_file(tmp_path: Path) -> None:
    weights = Weights()
    weights.has = lambda name: True  # type: ignore[method-assign]
    weights.shape = lambda name: (  # type: ignore[method-assign]
        (RandomWeights.shape(weights, name.replace("bias", "weight"))[0],)
        if name.endswith("bias")
        else RandomWeights.shape(weights, name)
    )
    logits = []
    for _ in range(2):
        layers = PackedLayers(tmp_path, "k")
        model = build_transformer(
            weights,
            dtype=torch.bfloat16,
            quant="int8",
            device=torch.device("cpu"),
            packed=layers,
        )
        layers.save()
        assert model.blocks[0].attention.wqkv.bias is not None
        logits.append(model(IDS)[0])
    assert torch.equal(*logits)


def damages(data: bytes) -> dict[str, bytes]:
    middle, head = len(data) // 2, 40
    return {
        "truncated": data[:-100],
        "empty": b"",
        "no safetensors": b"\xff" * len(data),
        "flipped in a tensor": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        "flipped in the metadata": data[:head] + bytes([data[head] ^ 1]) + data[head + 1 :],
        "other numbers": data.replace(b"int8", b"int9"),
    }


@pytest.mark.parametrize("how", damages(bytes(200)))
def test_a_damaged_file_is_packed_anew(written: Path, how: str) -> None:
    data = written.read_bytes()
    broken = damages(data)[how]
    assert broken != data
    written.write_bytes(broken)
    _, read = build(PackedLayers(written.parent, "k"))
    assert linear(read)
    _, read = build(PackedLayers(written.parent, "k"))
    assert not linear(read)


def test_a_file_of_something_else_is_left_aside(written: Path) -> None:
    theirs = PackedLayers(written.parent, "other")
    os.replace(written, theirs.path)
    _, read = build(PackedLayers(written.parent, "other"))
    assert linear(read)


def test_what_the_weights_depend_on_is_in_the_key(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    before = made_from([path], quant="int8")
    assert made_from([path], quant="int8") == before
    assert made_from([path], quant="int4") != before
    path.write_bytes(b"three")
    assert made_from([path], quant="int8") != before


def test_the_folder_stays_within_its_budget(written: Path) -> None:
    size = written.stat().st_size
    os.utime(written, (1, 1))
    build(PackedLayers(written.parent, "second", 2 * size + 1000))
    assert len(kept(written.parent)) == 2
    PackedLayers(written.parent, "k", 2 * size + 1000)  # is used, so the second goes first
    build(PackedLayers(written.parent, "third", 2 * size + 1000))
    assert {p.name for p in kept(written.parent)} == {
        PackedLayers(written.parent, key).path.name for key in ("k", "third")
    }


def test_what_is_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    build(PackedLayers(tmp_path, "k", 1000))
    build(PackedLayers(tmp_path, "k", 0))
    assert not kept(tmp_path)


def test_what_a_killed_program_left_is_removed(written: Path) -> None:
    left = written.with_name(".packing-abc")
    left.touch()
    build(PackedLayers(written.parent, "other"))
    assert not left.exists()


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_where_nothing_can_be_written_loading_goes_on(
    tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28 if trouble == "full" else 30, trouble)

    place = "os.replace" if trouble == "full" else "tempfile.mkstemp"
    monkeypatch.setattr(f"kvchat.models.packed.{place}", refuse)
    model, _ = build(PackedLayers(tmp_path / "new", "k"))
    assert model(IDS)[0].isfinite().all()
    assert not list((tmp_path / "new").iterdir())


def test_a_disk_that_is_nearly_full_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "SPARE", 2**60)
    build(PackedLayers(tmp_path, "k"))
    assert not kept(tmp_path)


def test_a_load_that_is_ended_leaves_no_file(tmp_path: Path) -> None:
    def end(_: object) -> None:
        raise KvchatError("enough")

    layers = PackedLayers(tmp_path, "k")
    with pytest.raises(KvchatError):
        build_transformer(
            Weights(),
            dtype=torch.bfloat16,
            quant="int8",
            device=torch.device("cpu"),
            packed=layers,
            progress=end,
        )
    assert not kept(tmp_path)


def test_the_command_shows_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCHAT_CACHE_DIR", str(tmp_path))
    assert run(["cache"]) == 0
    assert "0 files" in capsys.readouterr().out
    build(PackedLayers(tmp_path / packed.FOLDER, "k"))
    assert run(["cache"]) == 0
    assert "1 file, " in capsys.readouterr().out
    assert run(["cache", "--clear"]) == 0
    assert not kept(tmp_path / packed.FOLDER)
