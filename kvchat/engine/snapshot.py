"""KV snapshots: a cache written to a file, and read back only if it is this model's and sound.

A snapshot is a safetensors file: the tensors of each layer, cut to the positions in use, and last
of all a table of CRC-32 sums, one over the metadata and one over each tensor. The metadata hold
the ids and everything the keys and values depend on. It goes through memory one layer at a time,
so it can be given up between two of them, and nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvchat.engine.config import ModelConfig
from kvchat.engine.errors import SnapshotError
from kvchat.engine.kv_cache import KVCache

FORMAT = "1"
"""Changes when files of before can no longer be read."""

SUMS = "crc32"
"""Name of the table of checksums: U8, four bytes for each sum, little end first."""

_BESIDE = 1024
"""Bytes of a snapshot besides tensors and ids, roughly."""
_DIGITS = 7
"""Bytes that an id takes in the metadata, roughly."""

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Names of the safetensors format."""

Check = Callable[[], None]
"""Called between two layers; may raise `Cancelled`."""


def never() -> None:
    """A check that lets everything go on."""


def snapshot_bytes(cache: KVCache, n: int) -> int:
    """Return about how many bytes a snapshot of `n` positions takes."""
    tensors = sum(tensor.itemsize * prod(_shape(tensor, n)) for _, tensor in _parts(cache))
    return tensors + _DIGITS * n + _BESIDE


def fingerprint(cache: KVCache, config: ModelConfig) -> dict[str, str]:
    """Return what a cache's contents depend on, as far as its own model and layout go."""
    network = asdict(config)
    rope = network.pop("rope")
    network.pop("max_seq_len")
    layout = {
        name: [str(layers[0].dtype).removeprefix("torch."), len(layers), _shape(layers[0], 0)]
        for name, layers in cache.planes.items()
    }
    return {
        "format": FORMAT,
        "network": json.dumps(network, sort_keys=True),
        "rope": json.dumps(rope, sort_keys=True),
        "cache layout": json.dumps(layout, sort_keys=True),
    }


@torch.inference_mode()
def write_snapshot(
    path: str,
    cache: KVCache,
    ids: Sequence[int],
    made_with: Mapping[str, str],
    check: Check = never,
) -> None:
    """Write the first `len(ids)` positions of a cache.

    Args:
        path: the file; one that is there is overwritten.
        cache: what is written.
        ids: the tokens it was filled from.
        made_with: what a reader has to agree on, see `fingerprint`.
        check: called between two layers; what is written by then is no snapshot if it raises.

    Raises:
        OSError: the file cannot be written.
    """
    n = len(ids)
    metadata = {**made_with, "ids": json.dumps(list(ids))}
    parts = list(_parts(cache))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in parts:
        shape = _shape(tensor, n)
        begin, end = end, end + tensor.itemsize * prod(shape)
        header[name] = _entry(_DTYPES[tensor.dtype], shape, begin, end)
    sums = [_sum_of_metadata(metadata)]
    size = 4 * (1 + len(parts))
    header[SUMS] = _entry("U8", [size], end, end + size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in parts:
            check()
            data = _bytes(tensor[:, :n].cpu())
            sums.append(zlib.crc32(data))
            file.write(data)
        file.write(struct.pack(f"<{len(sums)}I", *sums))


@torch.inference_mode()
def read_snapshot(
    path: str, cache: KVCache, made_with: Mapping[str, str], check: Check = never
) -> list[int]:
    """Fill an empty cache with a snapshot and return the ids that it holds then.

    Whatever is raised, the cache stays empty.

    Raises:
        SnapshotError: it is damaged, cannot be read, or was written with something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = [name for name, _ in _parts(cache)]
            held = set(file.keys())
            sums = _table(file.get_tensor(SUMS)) if SUMS in held else []
            if not sums or sums[0] != _sum_of_metadata(metadata):
                raise SnapshotError("it is damaged", damaged=True)
            _agree(metadata, made_with)
            ids = _ids(metadata)
            if held != {*names, SUMS} or len(sums) != len(names) + 1:
                raise SnapshotError("it is damaged", damaged=True)
            if len(ids) > cache.max_seq_len:
                raise SnapshotError(
                    f"it holds {len(ids):,} tokens and the context {cache.max_seq_len:,}"
                )
            cache.reserve(len(ids))
            for (name, tensor), expected in zip(_parts(cache), sums[1:], strict=True):
                check()
                part = file.get_tensor(name)
                if (
                    part.dtype != tensor.dtype
                    or list(part.shape) != _shape(tensor, len(ids))
                    or zlib.crc32(_bytes(part)) != expected
                ):
                    raise SnapshotError("it is damaged", damaged=True)
                tensor[:, : len(ids)] = part.to(tensor.device)
    except OSError as error:
        raise SnapshotError(f"it cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SnapshotError("it is damaged", damaged=True) from error
    cache.advance(len(ids))
    return ids


def _parts(cache: KVCache) -> Iterator[tuple[str, Tensor]]:
    """Yield the cache's tensors with their names in a file, those of wide elements first.

    In that order each begins at a multiple of its elements' size.
    """
    planes = sorted(cache.planes.items(), key=lambda plane: -plane[1][0].itemsize)
    for name, layers in planes:
        for layer, tensor in enumerate(layers):
            yield f"{name}.{layer}", tensor


def _shape(tensor: Tensor, n: int) -> list[int]:
    """Return the shape of a layer's first n positions, which lie along axis 1."""
    return [tensor.shape[0], n, *tensor.shape[2:]]


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _bytes(tensor: Tensor) -> Any:
    """Return what a tensor in host memory holds, as something with a buffer."""
    return tensor.contiguous().view(torch.uint8).numpy()


def _table(tensor: Tensor) -> list[int]:
    data = bytes(_bytes(tensor))
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def _sum_of_metadata(metadata: Mapping[str, str]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())


def _agree(metadata: Mapping[str, str], expected: Mapping[str, str]) -> None:
    names = [*expected, *(name for name in metadata if name not in expected and name != "ids")]
    others = [name for name in names if metadata.get(name) != expected.get(name)]
    if others:
        raise SnapshotError(f"it was made with another {', '.join(others)}")


def _ids(metadata: Mapping[str, str]) -> list[int]:
    ids = json.loads(metadata["ids"])
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise ValueError("its ids are none")
    return ids
