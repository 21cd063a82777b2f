"""Packed weights on the disk: what a file's weights become for this processor is worked out once.

Each model has one safetensors file in the cache folder, mapped into memory when it is loaded and
never unpickled. Its name and metadata stand for everything the packing depends on, and its sums
for every byte; a file that differs in anything is left aside and made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import kvchat
from kvchat.engine import native
from kvchat.engine.linear import AnyLinear, Int4Linear, Int8Linear, PackedLinear

FOLDER = "packed"
"""Where in the cache folder packed weights are kept."""

BUDGET = 4 * 2**30
"""Bytes of disk for all models by default."""

SPARE = 2**30
"""Bytes that are left free on the disk."""

FORMAT = "2"
"""Changes when files of before can no longer be read."""

_ALIGNED = 64
"""Tensors begin at multiples of this, as in memory."""

_PADDING = "padding."

_PARTS: dict[type[AnyLinear], tuple[tuple[str, ...], tuple[str, ...]]] = {
    PackedLinear: (("blocks",), ("bits", "minima", "out_features", "in_features")),
    Int4Linear: (("packed", "scale_zero"), ()),
    Int8Linear: (("high", "high_scale_zero", "low", "low_scale_zero"), ()),
}
"""The tensors and the numbers that each class of layer is made of. Dense ones are not kept: their
weights are in the model's file as they are."""

_CLASSES = {kind.__name__: kind for kind in _PARTS}

_DTYPES = {torch.uint8: "U8", torch.bfloat16: "BF16"}
"""Names of the safetensors format."""


def made_from(paths: Sequence[Path], **how: object) -> str:
    """Name what packed weights depend on: the model's files, how they are packed, and with what."""
    files = [(str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns) for path in paths]
    kernels = native.home(Path()).name  # the processor and torch too
    instructions = torch.backends.cpu.get_cpu_capability()
    return json.dumps([FORMAT, kvchat.__version__, kernels, instructions, files, how], default=str)


class PackedLayers:
    """The packed layers of one model: those the disk has, and those that are made on the way.

    Args:
        folder: where files of packed weights are; it need not exist.
        key: what they depend on, from `made_from`.
        budget: bytes for all files in the folder; with 0 nothing is read or written.
    """

    def __init__(self, folder: Path, key: str, budget: int = BUDGET) -> None:
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.path = folder / f"{name}.safetensors"
        self._key = key
        self._budget = budget
        self._layers: dict[str, AnyLinear] = {}
        self._is_new = False
        if budget and self.path.exists():
            self._read()

    def take(self, name: str, bias: Tensor | None) -> AnyLinear | None:
        """Return a layer that the disk has, with its bias, which is not in there."""
        layer = self._layers.get(name)
        if layer is not None:
            layer.bias = bias
        return layer

    def put(self, name: str, layer: AnyLinear) -> None:
        """Have a layer that was just made kept, if it is a packed one."""
        if type(layer) in _PARTS:
            self._layers[name] = layer
            self._is_new = True

    def save(self) -> None:
        """Write what is new; where that is not possible, the next start packs again."""
        size = sum(tensor.nbytes for _, tensor in self._tensors())
        if not self._is_new or size > self._budget:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(self.path.parent, self._budget - size)
            if shutil.disk_usage(self.path.parent).free < size + SPARE:
                return
            handle, beside = tempfile.mkstemp(prefix=".packing-", dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.writelines(self._content())
                os.replace(beside, self.path)
            except BaseException:
                os.unlink(beside)
                raise

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [
            (f"{name}.{part}", getattr(layer, part))
            for name, layer in self._layers.items()
            for part in _PARTS[type(layer)][0]
        ]

    def _content(self) -> Iterable[Any]:
        """Yield the file's bytes, tensors as they lie in memory."""
        tensors = self._tensors()
        layers = {
            name: [type(layer).__name__, {n: getattr(layer, n) for n in _PARTS[type(layer)][1]}]
            for name, layer in self._layers.items()
        }
        content = json.dumps([layers, _described(tensors)])
        header: dict[str, Any] = {"__metadata__": _sealed(self._key, content)}
        data: list[Any] = []
        end = 0

        def add(name: str, dtype: str, shape: list[int], content: Any, size: int) -> None:
            nonlocal end
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            data.append(content)
            end += size

        for name, tensor in tensors:
            add(name, _DTYPES[tensor.dtype], list(tensor.shape), _bytes(tensor), tensor.nbytes)
            if gap := -end % _ALIGNED:
                add(f"{_PADDING}{name}", "U8", [gap], bytes(gap), gap)
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNED)
        return [struct.pack("<Q", len(text)) + text, *data]

    def _read(self) -> None:
        try:
            with safe_open(str(self.path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata != _sealed(self._key, metadata["content"]):
                    raise ValueError("it is damaged, or of something else")
                layers, table = json.loads(metadata["content"])
                tensors = {entry[0]: file.get_tensor(entry[0]) for entry in table}
            if _described([*tensors.items()]) != table:
                raise ValueError("it is damaged")
            for name, (kind, numbers) in layers.items():
                parts = {part: tensors[f"{name}.{part}"] for part in _PARTS[_CLASSES[kind]][0]}
                self._layers[name] = _CLASSES[kind](**parts, **numbers)
            os.utime(self.path)  # used last
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError):
            self._layers.clear()
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def kept(folder: Path) -> list[Path]:
    """Return the files of packed weights, those not used for longest first."""
    aged = []
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # another kvchat may remove them
            aged.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(aged)]


def _make_room(folder: Path, limit: int) -> None:
    """Remove what killed programs left, and files not used for longest, down to `limit` bytes."""
    for left in folder.glob(".packing-*"):
        left.unlink(missing_ok=True)
    paths = kept(folder)
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        if total <= limit:
            return
        total -= path.stat().st_size
        path.unlink(missing_ok=True)


def _sealed(key: str, content: str) -> dict[str, str]:
    return {
        "made_from": key,
        "content": content,
        "sha256": hashlib.sha256(f"{key}\n{content}".encode()).hexdigest(),
    }


def _described(tensors: Sequence[tuple[str, Tensor]]) -> list[list[Any]]:
    """Return name, type, shape and CRC-32 of each tensor."""
    with ThreadPoolExecutor() as pool:  # sums need no interpreter
        sums = pool.map(lambda named: zlib.crc32(_bytes(named[1])), tensors)
        return [
            [name, str(tensor.dtype), list(tensor.shape), crc]
            for (name, tensor), crc in zip(tensors, sums, strict=True)
        ]


def _bytes(tensor: Tensor) -> Any:
    """Return what a tensor holds, as something with a buffer; a view unless it has gaps."""
    return tensor.contiguous().view(torch.uint8).numpy()
