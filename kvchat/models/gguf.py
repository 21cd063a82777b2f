"""Reads models from GGUF files, single or split into parts, through memory maps.

Opening a file reads its header only and loads no torch; tensors are views into the map, or
dequantised copies.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

from kvchat.engine.errors import ModelFileError, ModelNotFoundError
from kvchat.models.gguf_header import Metadata, TensorInfo, check_size, read_header

if TYPE_CHECKING:
    import torch


class GGUFFile:
    """A model in one GGUF file, or in all parts of a split one.

    Usable as a context manager. Views from `blocks` stay valid after `close`; metadata does not.

    Args:
        path: the file, or any part of a split model; the other parts are found next to it.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: a file is damaged, contradicts itself, or a part is missing.
        UnsupportedModelError: a version, byte order or tensor type that is not read here.
    """

    metadata: Metadata
    """Key-value pairs, of the first part where there are several."""
    tensors: Mapping[str, TensorInfo]
    """All tensors by name, in the order of the files."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._parts: list[_Part] = []
        self._part_of: dict[str, _Part] = {}
        try:
            self._open_parts()
            self._merge_tensors()
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their parts."""
        return [part.path for part in self._parts]

    def blocks(self, name: str) -> torch.Tensor:
        """The bytes of a tensor as stored, uint8 (rows, bytes per row), without a copy.

        Rows run along the last dimension; what is written into the view never reaches the file.

        Raises:
            ModelFileError: no tensor of that name, or the file has shrunk since it was opened.
        """
        import numpy as np
        import torch

        info, part = self._find(name)
        check_size(part.data, part.path)
        rows = math.prod(info.shape[:-1])
        raw = np.frombuffer(part.data, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return torch.from_numpy(raw).view(rows, -1)

    def tensor(self, name: str, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """A dequantised copy of a tensor, or of a part along its first dimension.

        Raises:
            ModelFileError: as `blocks`.
        """
        from kvchat.models.gguf_blocks import dequantize

        info, _ = self._find(name)
        blocks = self.blocks(name)
        if len(info.shape) != 2:
            whole = dequantize(blocks, info.type, dtype).view(info.shape)
            return whole[rows] if info.shape else whole
        return dequantize(blocks[rows], info.type, dtype)

    def release(self, name: str) -> None:
        """Let the system drop a tensor's pages from memory; they are read again when needed.

        Does nothing where the platform has no such call.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        info, part = self._find(name)
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        part.data.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def close(self) -> None:
        """Close the files; a map still seen by a view goes with the last view."""
        self._part_of.clear()
        while self._parts:
            with suppress(BufferError):
                self._parts.pop().data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_parts(self) -> None:
        given = _open_part(self.path)
        self._parts.append(given)
        if given.count > 1:
            for path in _other_paths(given):
                self._parts.append(_open_part(path))
            self._parts.sort(key=lambda part: part.number)
        for number, part in enumerate(self._parts):
            if (part.number, part.count) != (number, len(self._parts)):
                raise _mixed_up(part.path, f"says it is part {part.number + 1} of {part.count}")

    def _merge_tensors(self) -> None:
        tensors: dict[str, TensorInfo] = {}
        for part in self._parts:
            for name, info in part.tensors.items():
                if name in tensors:
                    raise _mixed_up(part.path, f"holds the tensor {name!r:.80} a second time")
                tensors[name] = info
                self._part_of[name] = part
        self.metadata = metadata = self._parts[0].metadata
        self.tensors = MappingProxyType(tensors)
        announced = metadata.integer("split.tensors.count", len(tensors))
        if len(self._parts) > 1 and announced != len(tensors):
            raise _mixed_up(
                self.path, f"has {len(tensors)} tensors where {announced} are announced"
            )

    def _find(self, name: str) -> tuple[TensorInfo, _Part]:
        part = self._part_of.get(name)
        if part is None:
            raise ModelFileError(
                f"{self.path} has no tensor {name!r:.80}. It is closed, incomplete, or of another "
                "kind than it says; take another conversion of the model."
            )
        return part.tensors[name], part


@dataclass(frozen=True, slots=True)
class _Part:
    """One open file."""

    path: Path
    data: mmap.mmap
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    number: int
    """Which part of a split model it is, from 0."""
    count: int
    """Of how many; 1 for a model in one file."""


def _open_part(path: Path) -> _Part:
    data = _map(path)
    try:
        metadata, tensors = read_header(data, path)
        number, count = _place(metadata, path)
    except BaseException:
        data.close()
        raise
    return _Part(path, data, metadata, tensors, number, count)


def _place(metadata: Metadata, path: Path) -> tuple[int, int]:
    """Which part of how many a file says it is; merging parts leaves a count of 0 behind."""
    count = metadata.integer("split.count", 1)
    if count in (0, 1):
        return 0, 1
    number = metadata.integer("split.no", 0)
    if not 0 <= number < count < 1 << 16:
        raise _mixed_up(path, f"says it is part {number + 1} of {count}")
    return number, count


def _map(path: Path) -> mmap.mmap:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or not info.st_size:
            raise ModelFileError(
                f"{path} is empty or not a file. Download it again, or name another."
            )
        with path.open("rb") as file:
            # Copy-on-write: torch only takes memory it could write to, and the file stays as it is.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"There is no file {path}. Check its name, or pull the model."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error}. Check its permissions and the disk."
        ) from None


def _other_paths(given: _Part) -> list[Path]:
    """The files next to `given` that hold the other parts of its model."""
    ending = f"-{given.number + 1:05d}-of-{given.count:05d}.gguf"
    if not given.path.name.endswith(ending):
        raise ModelFileError(
            f"{given.path} is part {given.number + 1} of a model in {given.count} files, so its "
            f"name must end in {ending}, with the others next to it. Give them their names back."
        )
    stem = given.path.name.removesuffix(ending)
    others = [
        given.path.with_name(f"{stem}-{number + 1:05d}-of-{given.count:05d}.gguf")
        for number in range(given.count)
        if number != given.number
    ]
    missing = [path for path in others if not path.exists()]
    if missing:
        raise ModelFileError(
            f"{given.path} is one of {given.count} files of a model; missing next to it: "
            f"{missing[0].name}{f' and {len(missing) - 1} more' * (len(missing) > 1)}. Download "
            "all of them into one folder."
        )
    return others


def _mixed_up(path: Path, what: str) -> ModelFileError:
    return ModelFileError(
        f"{path} {what}, which does not fit its other files or itself. Download all files of the "
        "model again."
    )
