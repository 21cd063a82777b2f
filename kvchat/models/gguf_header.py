"""Parses the header of one GGUF file: metadata and the table of tensors.

Format: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. Nothing in
the file is believed: every count, length and offset is checked against the size of the file
before it is used. Values are checked when the file is opened and decoded when they are asked
for, because a vocabulary is most of a header and not every caller wants it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from kvchat.engine.errors import ModelFileError, UnsupportedModelError
from kvchat.models.gguf_types import TYPE_BY_NUMBER, UNREADABLE, GGMLType

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_INTEGERS = _SCALARS.keys() - {6, 7, 12}
_SMALLEST = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()} | {
    _STRING: 8,
    _ARRAY: 12,
}
"""Fewest bytes a value of each kind takes in the file."""

_MAX_DIMS = 4
_MAX_NAME_BYTES = 65_535
_MAX_ITEMS = 1 << 24
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch has it; GGUF files store the reverse."""
    type: GGMLType
    offset: int
    """Of its first byte, from the start of its file."""
    nbytes: int


class Metadata(Mapping[str, Any]):
    r"""A file's key-value pairs, as plain int, float, bool, str and lists of these.

    A value is decoded each time it is asked for, from the open file: keep large ones, and take
    what is needed before the file is closed. A string that is not UTF-8 shows its odd bytes as
    `\xNN`; inside an array it is an error, since two tokens must never become one.
    """

    def __init__(self, data: mmap, path: Path, index: dict[str, tuple[int, int]]) -> None:
        self._data = data
        self._path = path
        self._index = index

    def __getitem__(self, key: str) -> Any:
        kind, start = self._index[key]
        check_size(self._data, self._path)
        return _Cursor(self._data, self._path, start).value(kind, key)

    def integer(self, key: str, default: int) -> int:
        """The whole number under `key`; raises `ModelFileError` if it is anything else."""
        kind = self._index.get(key, (None, 0))[0]
        if kind is None:
            return default
        if kind not in _INTEGERS:
            raise ModelFileError(
                f"{self._path} has {key!r:.80}, but not as a whole number. The file is badly "
                "converted; take another conversion of the model."
            )
        return int(self[key])

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def read_header(data: mmap, path: Path) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Parse and check the header of the file mapped as `data`; `path` is for the messages.

    Raises:
        ModelFileError: not a GGUF file, cut short, or contradicting itself.
        UnsupportedModelError: a version, byte order or tensor type that is not read here.
    """
    cursor = _Cursor(data, path)
    _check_magic_and_version(cursor)
    n_tensors, n_pairs = cursor.u64(), cursor.u64()
    metadata = _read_metadata(cursor, n_pairs)
    return metadata, _read_tensors(cursor, n_tensors, _alignment(metadata, path))


def check_size(data: mmap, path: Path) -> None:
    """Raise `ModelFileError` before reading what is no longer there, which would kill us."""
    if data.size() < len(data):
        raise ModelFileError(
            f"{path} has become shorter since it was opened. Let whatever is writing it finish, "
            "or download it again, then load the model anew."
        )


class _Cursor:
    """Reads little-endian values one after the other, never past the end of the file."""

    def __init__(self, data: mmap, path: Path, pos: int = 0) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.pos = pos

    def corrupt(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is damaged or cut short: {what}. Download or copy it again."
        )

    def take(self, n: int) -> int:
        """Step over n bytes and return where they begin."""
        start = self.pos
        if n > self.size - start:
            raise self.corrupt(f"byte {start} announces {n} more, but the file ends at {self.size}")
        self.pos = start + n
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.take(8))[0])

    def count(self, n: int, smallest: int, what: str) -> int:
        """Return n if so many items of at least `smallest` bytes can follow."""
        if n > (self.size - self.pos) // smallest:
            raise self.corrupt(f"it claims {n} {what}, more than the file has room for")
        return n

    def name(self) -> str:
        n = self.u64()
        if n > _MAX_NAME_BYTES:
            raise self.corrupt(f"a name at byte {self.pos} is said to be {n} bytes long")
        start = self.take(n)
        try:
            return str(self.data[start : start + n], "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"the name at byte {start} is not UTF-8 text") from None

    def skip(self, kind: int, key: str, depth: int = 0) -> None:
        """Check one value of the given kind and step over it."""
        if kind == _STRING:
            self.take(self.u64())
        elif kind == _ARRAY:
            item, n = self._array_head(key, depth)
            if item == _STRING:
                self._skip_strings(n)
            elif item == _ARRAY:
                for _ in range(n):
                    self.skip(_ARRAY, key, depth + 1)
            else:
                self.take(n * _SMALLEST[item])
        elif kind in _SCALARS:
            self.take(_SMALLEST[kind])
        else:
            raise self.corrupt(f"{key!r:.80} has a value of unknown kind {kind}")

    def value(self, kind: int, key: str) -> Any:
        """Decode one value of the given kind, which `skip` has been over."""
        if kind == _STRING:
            n = self.u64()
            start = self.take(n)
            return self.data[start : start + n].decode("utf-8", "backslashreplace")
        if kind == _ARRAY:
            item, n = self._array_head(key, depth=0)
            if item == _STRING:
                return self._strings(n, key)
            if item == _ARRAY:
                return [self.value(_ARRAY, key) for _ in range(n)]
            start = self.take(n * _SMALLEST[item])
            return list(struct.unpack_from(f"<{n}{_SCALARS[item]}", self.data, start))
        return struct.unpack_from("<" + _SCALARS[kind], self.data, self.take(_SMALLEST[kind]))[0]

    def _array_head(self, key: str, depth: int) -> tuple[int, int]:
        item, n = self.u32(), self.u64()
        if item not in _SMALLEST:
            raise self.corrupt(f"{key!r:.80} is an array of unknown kind {item}")
        if depth >= _MAX_DEPTH or n > _MAX_ITEMS:
            raise self.corrupt(f"{key!r:.80} is an array too deep or too long to be true")
        return item, self.count(n, _SMALLEST[item], f"items in {key!r:.80}")

    def _skip_strings(self, n: int) -> None:
        # A vocabulary is passed here on every open, so this loop calls nothing it can avoid.
        unpack, data, pos, last = _U64.unpack_from, self.data, self.pos, self.size - 8
        overrun = self.corrupt(f"a string in the array at byte {pos} runs past the end")
        for _ in range(n):
            if pos > last:
                raise overrun
            pos += 8 + unpack(data, pos)[0]
        if pos > self.size:
            raise overrun
        self.pos = pos

    def _strings(self, n: int, key: str) -> list[str]:
        unpack, data, pos = _U64.unpack_from, self.data, self.pos
        items = []
        for _ in range(n):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            items.append(data[start:pos])
        self.pos = pos
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError as error:
            raise ModelFileError(
                f"{self.path} holds {error.object!r:.80} in {key!r:.80}, which is not UTF-8 text. "
                "Download it again, or take another conversion of the model."
            ) from None


def _check_magic_and_version(cursor: _Cursor) -> None:
    if cursor.data[:4] != b"GGUF":
        raise ModelFileError(
            f"{cursor.path} is not a GGUF file: it does not begin with GGUF. It may be a failed "
            "download, a Git LFS pointer or another format; download it again or name another."
        )
    cursor.take(4)
    version = cursor.u32()
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        problem = "is written in big-endian byte order"
    else:
        problem = f"has GGUF version {version}"
    raise UnsupportedModelError(
        f"{cursor.path} {problem}; only little-endian GGUF versions 2 and 3 can be read. Take a "
        "newer conversion of the model."
    )


def _read_metadata(cursor: _Cursor, n_pairs: int) -> Metadata:
    cursor.count(n_pairs, 8 + 4 + 1, "metadata keys")
    index: dict[str, tuple[int, int]] = {}
    for _ in range(n_pairs):
        key = cursor.name()
        if key in index:
            raise cursor.corrupt(f"the key {key!r:.80} occurs twice")
        kind = cursor.u32()
        index[key] = (kind, cursor.pos)
        cursor.skip(kind, key)
    return Metadata(cursor.data, cursor.path, index)


def _alignment(metadata: Metadata, path: Path) -> int:
    alignment = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1):
        raise ModelFileError(
            f"{path} has general.alignment {alignment}, which must be a power of two from 8 on. "
            "The file is damaged or badly converted; download it again."
        )
    return alignment


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    cursor.count(n_tensors, 8 + 4 + 4 + 8, "tensors")
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for _ in range(n_tensors):
        name = cursor.name()
        if name in entries:
            raise cursor.corrupt(f"the tensor {name!r:.80} occurs twice")
        entries[name] = _read_tensor(cursor, name)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = {}
    for name, (shape, ggml_type, offset) in entries.items():
        start = data_start + offset
        nbytes = math.prod(shape) // ggml_type.block_elements * ggml_type.block_bytes
        end = start + nbytes
        if offset % alignment:
            raise cursor.corrupt(f"the tensor {name!r:.80} is not aligned to {alignment} bytes")
        if end > cursor.size:
            raise cursor.corrupt(
                f"the tensor {name!r:.80} should end at byte {end}, but the file ends at "
                f"{cursor.size}"
            )
        tensors[name] = TensorInfo(name, shape, ggml_type, start, nbytes)
    return tensors


def _read_tensor(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], GGMLType, int]:
    n_dims = cursor.u32()
    if n_dims > _MAX_DIMS:
        raise cursor.corrupt(f"the tensor {name!r:.80} is said to have {n_dims} dimensions")
    shape = tuple(cursor.u64() for _ in range(n_dims))[::-1]
    number, offset = cursor.u32(), cursor.u64()
    ggml_type = TYPE_BY_NUMBER.get(number)
    if ggml_type is None:
        unreadable = UNREADABLE.get(number, f"unknown type {number}")
        readable = ", ".join(t.name for t in GGMLType)
        raise UnsupportedModelError(
            f"{cursor.path} stores {name!r:.80} as {unreadable}, which this program cannot "
            f"read. Take a file quantised in one of: {readable}."
        )
    if 0 in shape:
        raise cursor.corrupt(f"the tensor {name!r:.80} has an empty dimension")
    if (shape[-1] if shape else 1) % ggml_type.block_elements:
        raise cursor.corrupt(
            f"the rows of the tensor {name!r:.80} do not fill blocks of {ggml_type.block_elements}"
        )
    return shape, ggml_type, offset
