"""KV snapshots as files: exact, refused when anything about them is wrong, given up at once."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ByteStream, tiny_engine, tiny_model

from kvchat.engine.config import ModelConfig, RopeConfig
from kvchat.engine.engine import Engine
from kvchat.engine.errors import Cancelled, SnapshotError
from kvchat.engine.snapshot import SUMS, snapshot_bytes
from kvchat.engine.types import GenerationFinished, SamplingParams, TokenGenerated

ABOUT = {"model": "a", "template": "b"}
GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=8)
IDS = [(7 * n) % 200 for n in range(50)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A snapshot of a tiny engine's cache."""
    engine, path = filled(), tmp_path / "chat.safetensors"
    engine.save(str(path), ABOUT)
    return path


def filled(ids: Sequence[int] = IDS) -> Engine:
    engine = tiny_engine()
    list(engine.prefill(ids))
    return engine


def reply(engine: Engine, ids: Sequence[int]) -> tuple[list[int], GenerationFinished]:
    events = list(engine.generate(ids, lambda: GREEDY, ByteStream()))
    end = events[-1]
    assert isinstance(end, GenerationFinished)
    return [event.id for event in events if isinstance(event, TokenGenerated)], end


def refused(path: Path, engine: Engine, about: dict[str, str] = ABOUT) -> SnapshotError:
    """A load that fails leaves nothing in the cache, and the engine as good as new."""
    with pytest.raises(SnapshotError) as caught:
        engine.load(str(path), about)
    assert len(engine.ids) == engine._context.cache.length == 0
    assert reply(engine, IDS)[0] == reply(Engine(engine.model), IDS)[0]
    return caught.value


def test_a_cache_comes_back_bit_for_bit(path: Path) -> None:
    before, after = filled(), tiny_engine()
    after.load(str(path), ABOUT)
    assert list(after.ids) == IDS
    for name, layers in before._context.cache.planes.items():
        for old, new in zip(layers, after._context.cache.planes[name], strict=True):
            assert torch.equal(old[:, : len(IDS)], new[:, : len(IDS)])
    prompt = [*IDS, 1, 2, 3]
    said, end = reply(after, prompt)
    assert (end.stats.reused, end.stats.new) == (len(IDS), 3)
    assert said == reply(tiny_engine(), prompt)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_of_cache_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    engine, path = tiny_engine(), str(tmp_path / "snapshot")
    engine._context.cache = cache = engine.model.new_cache(None)
    for layers in cache.planes.values():
        layers[:] = [torch.randn(2, 30, 8).to(dtype) for _ in layers]
    cache.dtype = dtype
    cache.advance(30)
    engine._context.ids[:] = IDS[:30]
    planes = {name: [layer.clone() for layer in layers] for name, layers in cache.planes.items()}
    engine.save(path, ABOUT)
    for layers in cache.planes.values():
        for layer in layers:
            layer.zero_()
    engine.load(path, ABOUT)
    for name, layers in planes.items():
        assert all(map(torch.equal, layers, [t[:, :30] for t in cache.planes[name]]))
    if dtype is torch.float32:
        return
    error = refused(Path(path), tiny_engine())
    assert str(error) == "it was made with another cache layout"
    assert not error.damaged


def test_other_programs_can_read_it_and_it_is_as_large_as_was_said(path: Path) -> None:
    tensors = load_file(path)
    assert tensors["keys.1"].shape == (2, len(IDS), 8)
    said = snapshot_bytes(filled()._context.cache, len(IDS))
    assert abs(said - path.stat().st_size) < 2048


def test_an_empty_cache_can_be_kept_too(tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    tiny_engine().save(path, ABOUT)
    engine = filled()
    engine.load(path, ABOUT)
    assert len(engine.ids) == 0


def test_what_was_held_before_goes_to_the_stash(path: Path) -> None:
    engine = filled([5] * 40)
    engine.load(str(path), ABOUT)
    assert list(engine.ids) == IDS
    assert engine.reusable([5] * 40) == 39


def test_any_flipped_bit_is_found(path: Path) -> None:
    """Every bit of the header and of the sums, and some of each tensor."""
    whole, engine = path.read_bytes(), tiny_engine()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    chosen = random.Random(0)
    spots = [*range(start), *chosen.sample(range(start, len(whole)), 400)]
    spots += range(len(whole) - 4 * 5, len(whole))
    for spot in spots:
        flipped = bytearray(whole)
        flipped[spot] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(SnapshotError) as caught:
            engine.load(str(path), ABOUT)
        assert caught.value.damaged, spot
        assert len(engine.ids) == engine._context.cache.length == 0


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_damaged(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert refused(path, tiny_engine()).damaged


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"{}", bytes(range(64)), struct.pack("<Q", 1 << 60) + b"{}"]
)
def test_something_else_is_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refused(path, tiny_engine()).damaged


def test_tensors_of_another_kind_are_damaged(path: Path) -> None:
    save_file({"keys.0": torch.zeros(3)}, path)
    assert refused(path, tiny_engine()).damaged
    save_file({SUMS: torch.zeros(0, dtype=torch.uint8)}, path)
    assert refused(path, tiny_engine()).damaged


def test_a_file_that_is_not_there_is_not_damaged(tmp_path: Path) -> None:
    assert not refused(tmp_path / "nothing", tiny_engine()).damaged


@pytest.mark.parametrize("name", [*ABOUT, "a third"])
def test_what_the_chat_says_about_it_must_be_the_same(path: Path, name: str) -> None:
    error = refused(path, tiny_engine(), {**ABOUT, name: "other"})
    assert str(error) == f"it was made with another {name}"
    assert not error.damaged


def test_what_nobody_asked_for_must_be_the_same_too(path: Path) -> None:
    assert str(refused(path, tiny_engine(), {"model": "a"})).endswith("another template")


OTHERS = {
    "cache layout": {"n_layers": 3},
    "network": {"n_heads": 8, "head_dim": 8},
    "rope": {"rope": RopeConfig(theta=500_000.0)},
    "rope scaling": {"rope": RopeConfig(scaling="linear", factor=2.0)},
    "norm": {"norm_eps": 1e-6},
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_must_be_this_network_s(path: Path, name: str) -> None:
    model = tiny_model(**OTHERS[name])
    with pytest.raises(SnapshotError, match="made with another") as caught:
        Engine(model).load(str(path), ABOUT)
    assert not caught.value.damaged
    expected = {"norm": "network", "rope scaling": "rope"}.get(name, name)
    assert expected in str(caught.value)


def test_every_field_of_the_config_counts_but_the_size_of_the_context(path: Path) -> None:
    changed = {
        "family": "qwen2",
        "sliding_windows": (4, None),
        "qk_norm": True,
        "tied_embeddings": True,
        "vocab_size": 300,
        "hidden_dim": 50,
    }
    for name, value in changed.items():
        engine = tiny_engine()
        engine.config = replace(engine.config, **{name: value})
        with pytest.raises(SnapshotError, match="another network"):
            engine.load(str(path), ABOUT)
    engine = tiny_engine()
    engine.config = replace(engine.config, max_seq_len=9999)
    engine.load(str(path), ABOUT)
    assert {*changed} <= {*ModelConfig.__dataclass_fields__}


def test_it_must_fit_into_the_context(path: Path) -> None:
    error = refused_small(path)
    assert str(error) == "it holds 50 tokens and the context 40"
    assert not error.damaged


def refused_small(path: Path) -> SnapshotError:
    engine = tiny_engine(max_seq_len=40)
    with pytest.raises(SnapshotError) as caught:
        engine.load(str(path), ABOUT)
    assert len(engine.ids) == engine._context.cache.length == 0
    return caught.value


def test_ids_that_the_model_does_not_know_are_damage(tmp_path: Path) -> None:
    engine, path = filled(), tmp_path / "snapshot"
    engine._context.ids[3] = 1_000_000
    engine.save(str(path), ABOUT)
    assert refused(path, tiny_engine()).damaged


def test_writing_and_reading_can_be_given_up_between_two_layers(path: Path) -> None:
    def after(layers: int) -> Iterator[None]:
        yield from (None for _ in range(layers))
        raise Cancelled

    engine = filled()
    for layers in range(4):
        steps = after(layers)
        with pytest.raises(Cancelled):
            engine.save(str(path.with_name("other")), ABOUT, lambda: next(steps))  # noqa: B023
        assert list(engine.ids) == IDS
        steps = after(layers)
        other = tiny_engine()
        with pytest.raises(Cancelled):
            other.load(str(path), ABOUT, lambda: next(steps))  # noqa: B023
        assert len(other.ids) == other._context.cache.length == 0
        assert reply(other, IDS)[0] == reply(tiny_engine(), IDS)[0]


def test_the_metadata_name_everything_it_was_made_with(path: Path) -> None:
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    metadata = json.loads(whole[8 : 8 + size])["__metadata__"]
    assert set(metadata) == {*ABOUT, "format", "network", "rope", "cache layout", "ids"}
    assert json.loads(metadata["ids"]) == IDS
