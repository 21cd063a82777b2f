"""From named weights in a file to a Transformer in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from kvchat.engine.config import ModelConfig
from kvchat.engine.cuda.int4 import TiledInt4Linear
from kvchat.engine.errors import ModelFileError
from kvchat.engine.layers import MLP, Attention, Block, RMSNorm
from kvchat.engine.linear import (
    ROWS_PER_TILE,
    SLAB,
    AnyEmbedding,
    AnyLinear,
    Blocks,
    Int4Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    Stacked,
    in_slabs,
)
from kvchat.engine.model import Transformer
from kvchat.engine.types import LoadProgress
from kvchat.models.packed import PackedLayers

Quant = Literal["auto", "none", "int8", "int4"]
"""Class of the linear weights: `auto` keeps blocks as they are where there are operators for
them, 4, 5, 6 and 8 bits with our own kernels, 4 without, and holds other quantised weights in
int8, `none` unpacks everything to the model's dtype, the others round what is not so
already. On CUDA there are 4 bits and the dtype, and nothing between."""

EIGHT_BITS = 9.0
"""Bits per number up to which a weight counts as quantised; Q8_0 takes 8.5 with its scales."""

ALL = slice(None)


class WeightSource(Protocol):
    """A model file: weights by our names, as in `kvchat.models.families`."""

    config: ModelConfig
    pairs: bool
    """Whether query and key rows have the two features of a rotation side by side."""
    nbytes: int
    """Bytes of all weights in the file."""
    paths: list[Path]
    """The files that the weights are read from."""

    def has(self, name: str) -> bool:
        """Whether the file holds a weight of this name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""

    def dense(self, name: str, dtype: torch.dtype, rows: slice = ALL) -> Tensor:
        """Return rows of a weight unpacked to `dtype`; a view of the mapped file if it is that."""

    def blocks(self, name: str, rows: slice = ALL) -> Blocks | None:
        """Return rows of a weight as whole numbers, or None when the file holds it otherwise."""

    def bits(self, name: str) -> float:
        """Return how many bits a number of a weight takes in the file, scales included."""

    def release(self, name: str) -> int:
        """Let go of the mapped pages of a weight; returns its bytes in the file."""


def build_transformer(
    source: WeightSource,
    *,
    dtype: torch.dtype,
    quant: Quant,
    device: torch.device,
    kernels: bool = False,
    packed: PackedLayers | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Transformer:
    """Read all weights and put the model together on its device.

    `kernels` says that our own are loaded: quantised weights then take their layout.
    `packed` has the layers that were packed at an earlier start, and keeps those that are new.
    `progress` is called after every weight and once at the end, then with `done` equal to
    `total`; an exception from it ends the load.

    Raises:
        ModelFileError: a weight is missing or has a shape that the configuration denies.
    """
    builder = _Builder(
        source,
        dtype=dtype,
        quant=quant,
        device=device,
        packs=kernels,
        packed=packed,
        progress=progress,
    )
    config = source.config
    embedding = builder.embedding()
    blocks = [builder.block(i) for i in range(config.n_layers)]
    norm = builder.norm("norm.weight", config.dim)
    head = builder.head(embedding)
    if progress is not None:  # a file may hold weights that this model has no use for
        progress(LoadProgress(source.nbytes, source.nbytes, "done"))
    return Transformer(
        config, embedding=embedding, blocks=blocks, norm=norm, head=head, dtype=dtype
    ).eval()


@dataclass(frozen=True, slots=True)
class _Rows:
    """One of the matrices that are stacked into one linear layer."""

    name: str
    out_features: int
    rotated: bool = False
    """Queries and keys: rows may have to be reordered."""
    biased: bool = True
    """Whether there may be a bias."""


_BITS = {"int8": 8, "int4": 4}

_KEPT_BITS: dict[Quant, tuple[int, ...]] = {
    "auto": (4, 5, 6, 8),
    "int4": (4,),
    "int8": (),
    "none": (),
}
"""Blocks of how many bits stay as they are."""

_Form = tuple[int, bool]
"""See `Blocks.form`."""


def _head_quant(quant: Quant) -> Quant:
    """The class of the embeddings: rounded to 4 bits they would lose more than all other layers."""
    return "int8" if quant == "int4" else quant


class _Builder:
    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        quant: Quant,
        device: torch.device,
        packs: bool,
        packed: PackedLayers | None,
        progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        self.source = source
        self.config = source.config
        self.dtype = dtype
        self.quant = quant
        self.device = device
        self.progress = progress
        self.done = 0
        self.packs = packs
        self.packed = packed
        self.int4 = Int4Linear if device.type == "cpu" else TiledInt4Linear

    def block(self, i: int) -> Block:
        c = self.config
        prefix = f"{i}."
        q_width, kv_width = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        wqkv = self.linear(
            [
                _Rows(f"{prefix}wq", q_width, rotated=True),
                _Rows(f"{prefix}wk", kv_width, rotated=True),
                _Rows(f"{prefix}wv", kv_width),
            ],
            c.dim,
        )
        attention = Attention(
            c,
            i,
            wqkv=wqkv,
            wo=self.linear([_Rows(f"{prefix}wo", c.dim)], q_width),
            q_norm=self.head_norm(f"{prefix}q_norm.weight") if c.qk_norm else None,
            k_norm=self.head_norm(f"{prefix}k_norm.weight") if c.qk_norm else None,
        )
        gate_up = [_Rows(f"{prefix}w_gate", c.hidden_dim), _Rows(f"{prefix}w_up", c.hidden_dim)]
        mlp = MLP(
            self.linear(gate_up, c.dim),
            self.linear([_Rows(f"{prefix}w_down", c.dim)], c.hidden_dim),
        )
        return Block(
            self.norm(f"{prefix}attention_norm.weight", c.dim),
            attention,
            self.norm(f"{prefix}mlp_norm.weight", c.dim),
            mlp,
        )

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self.dense(name, (width,), torch.float32), self.config.norm_eps)

    def head_norm(self, name: str) -> RMSNorm:
        weight = self.dense(name, (self.config.head_dim,), torch.float32)
        return RMSNorm(self._paired(weight), self.config.norm_eps)

    def linear(self, rows: list[_Rows], in_features: int, quant: Quant | None = None) -> AnyLinear:
        """Make one linear layer from stacked matrices, in the class that `quant` asks for."""
        for part in rows:
            self._check_shape(f"{part.name}.weight", (part.out_features, in_features))
        quant = quant or self.quant
        alike = groupby(rows, lambda part: self._form(part, in_features, quant))
        layers = [self._layer(list(parts), in_features, quant, form) for form, parts in alike]
        return layers[0] if len(layers) == 1 else Stacked(layers)

    def _layer(
        self, rows: list[_Rows], in_features: int, quant: Quant, form: _Form | None
    ) -> AnyLinear:
        bias = self._bias(rows)
        layer = self._kept(rows, bias, lambda: self._linear(rows, in_features, quant, form, bias))
        self._release(rows)
        return layer

    def _form(self, part: _Rows, in_features: int, quant: Quant) -> _Form | None:
        """The form of a weight's blocks if they are held as they are in the file, else None."""
        first = self.source.blocks(f"{part.name}.weight", slice(0, 1))
        if first is None or first.bits not in _KEPT_BITS[quant]:
            return None
        if self.packs:
            fits = PackedLinear.fits(in_features) and part.out_features % ROWS_PER_TILE == 0
        else:
            fits = first.bits == 4 and self.int4.fits(part.out_features, in_features)
        return first.form if fits else None

    def _kept(
        self, rows: list[_Rows], bias: Tensor | None, make: Callable[[], AnyLinear]
    ) -> AnyLinear:
        """Return a layer as an earlier start has packed it, or else made now."""
        if self.packed is None:
            return make()
        name = " ".join(part.name for part in rows)
        layer = self.packed.take(name, bias)
        if layer is None:
            layer = make()
            self.packed.put(name, layer)
        return layer

    def _linear(
        self,
        rows: list[_Rows],
        in_features: int,
        quant: Quant,
        form: _Form | None,
        bias: Tensor | None,
    ) -> AnyLinear:
        packs = self.packs and PackedLinear.fits(in_features)
        out_features = sum(part.out_features for part in rows)
        if form is not None:
            blocks = self._blocks(rows)
            if packs:
                return PackedLinear.pack(blocks, out_features, bias)
            return self.int4.pack((slab.to(self.device) for slab in blocks), bias)
        kind = self._class(quant, max(self._bits(part) for part in rows))
        if packs and kind != "none":
            slabs = self._slabs(rows, in_features)
            return PackedLinear.quantise(slabs, out_features, _BITS[kind], bias)
        if kind == "int8" and Int8Linear.fits(out_features, in_features):
            return Int8Linear.quantise(self._slabs(rows, in_features), bias)
        weight = torch.cat([self._dense_rows(part, in_features) for part in rows])
        if kind == "int4" and self.int4.fits(*weight.shape):
            return self.int4.quantise(weight, bias)
        return Linear(weight, bias)

    def embedding(self) -> AnyEmbedding:
        """Build the table of embeddings, which is the output head as well where they are tied."""
        c = self.config
        rows = [_Rows("embedding", c.vocab_size, biased=False)]
        if self.packs:
            layer = self.linear(rows, c.dim, _head_quant(self.quant))
            if isinstance(layer, Linear | PackedLinear):
                return layer
        return Linear(self.dense("embedding.weight", (c.vocab_size, c.dim)))

    def head(self, embedding: AnyEmbedding) -> AnyLinear:
        """Build the output head."""
        c = self.config
        if not c.tied_embeddings:
            return self.linear([_Rows("head", c.vocab_size)], c.dim)
        if not isinstance(embedding, Linear):
            return embedding
        # Rows are looked up in the dense table; the head reads all of it for every token, so its
        # class decides a good part of the speed.
        rows = _Rows("embedding", c.vocab_size)
        kind = self._class(_head_quant(self.quant), self._bits(rows))
        if kind != "int8" or not Int8Linear.fits(c.vocab_size, c.dim):
            return Linear(embedding.weight)
        return self._kept([rows], None, lambda: Int8Linear.quantise(self._slabs([rows], c.dim)))

    def _class(self, quant: Quant, bits: float) -> Quant:
        """Choose the class of a weight that takes so many bits a number in the file."""
        if quant == "auto":
            quant = "int8" if bits <= EIGHT_BITS else "none"
        return "none" if quant == "int8" and self.device.type != "cpu" else quant

    def _slabs(self, rows: list[_Rows], in_features: int) -> Iterator[Tensor]:
        """Yield stacked matrices in float32, a slab at a time: whole, a head would be the peak of
        all memory."""
        if any(part.out_features % ROWS_PER_TILE for part in rows[:-1]):
            parts = [self._dense_rows(part, in_features, torch.float32) for part in rows]
            yield from torch.cat(parts).split(SLAB)
            return
        for part in rows:
            name = f"{part.name}.weight"
            if part.rotated:
                yield self._dense_rows(part, in_features, torch.float32)
                continue
            self._check_shape(name, (part.out_features, in_features))
            for start in range(0, part.out_features, SLAB):
                yield self.source.dense(name, torch.float32, slice(start, start + SLAB))

    def _blocks(self, rows: list[_Rows]) -> Iterator[Blocks]:
        """Yield the blocks of stacked matrices, a slab at a time."""
        for part in rows:
            name = f"{part.name}.weight"
            if part.rotated:
                whole = cast(Blocks, self.source.blocks(name))
                yield from in_slabs(whole.at(self._paired(torch.arange(part.out_features))))
                continue
            for start in range(0, part.out_features, SLAB):
                yield cast(Blocks, self.source.blocks(name, slice(start, start + SLAB)))

    def _bits(self, part: _Rows) -> float:
        return self.source.bits(f"{part.name}.weight")

    def dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read one weight by itself."""
        tensor = self._read(name, shape, dtype or self.dtype).to(self.device)
        self._count(name)
        return tensor

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._check_shape(name, shape)
        return self.source.dense(name, dtype)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.source.has(name):
            raise ModelFileError(f"the model file lacks the weight {name}; fetch it again")
        found = tuple(self.source.shape(name))
        if found != shape:
            raise ModelFileError(
                f"the weight {name} has the shape {found} where the model's "
                f"configuration says {shape}; the file is damaged or of an unknown variant"
            )

    def _dense_rows(
        self, part: _Rows, in_features: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        shape = (part.out_features, in_features)
        weight = self._read(f"{part.name}.weight", shape, dtype or self.dtype)
        return (self._paired(weight) if part.rotated else weight).to(self.device)

    def _bias(self, rows: list[_Rows]) -> Tensor | None:
        if not any(part.biased and self.source.has(f"{part.name}.bias") for part in rows):
            return None
        biases = []
        for part in rows:
            bias = self._read(f"{part.name}.bias", (part.out_features,), self.dtype)
            biases.append(self._paired(bias) if part.rotated else bias)
            self._count(f"{part.name}.bias")
        return torch.cat(biases).to(self.device)

    def _paired(self, t: Tensor) -> Tensor:
        """Put the two features of each rotation side by side, head by head.

        Files that rotate feature i with i + head_dim / 2 are reordered once, here, so that the
        model knows one rotation. Blocks of quantised weights run along a row and move with it.
        """
        if self.source.pairs:
            return t
        halves = t.unflatten(0, (-1, 2, self.config.head_dim // 2))  # (heads, 2, head_dim / 2, …)
        paired: Tensor = halves.transpose(1, 2).flatten(0, 2)
        return paired

    def _release(self, rows: list[_Rows]) -> None:
        for part in rows:
            self._count(f"{part.name}.weight")

    def _count(self, name: str) -> None:
        self.done += self.source.release(name)
        if self.progress is not None:
            self.progress(LoadProgress(self.done, self.source.nbytes, name))
