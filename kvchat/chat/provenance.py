"""What a reply was written with: model, template, program and machine."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import kvchat

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel

log = logging.getLogger(__name__)

_ENDS = 1 << 20
_SAMPLES, _SAMPLE = 256, 1 << 12
"""Short pieces from everywhere: what was trained further often differs in few of its matrices."""
_WEIGHTS = (".gguf", ".safetensors", ".json")
_PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The circumstances in which a seed gives the same reply again."""

    model: str
    path: str
    fingerprint: str | None
    """Of the model's files, see `fingerprint`; None if they cannot be read."""
    template: str
    """SHA-256 of the chat template's source."""
    device: str
    dtype: str
    quant: str
    kvchat: str
    torch: str
    python: str

    @classmethod
    def of(cls, llm: LanguageModel) -> Provenance:
        """Describe a loaded model; reads a few MiB of its files."""
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = ""
        return cls(
            model=llm.name,
            path=str(llm.path),
            fingerprint=fingerprint(llm.path),
            template=llm.template.hash,
            device=llm.device,
            dtype=llm.dtype,
            quant=llm.quant,
            kvchat=kvchat.__version__,
            torch=torch,
            python=".".join(map(str, sys.version_info[:3])),
        )


def fingerprint(path: Path) -> str | None:
    """Tell a model's files from others without reading gigabytes.

    SHA-256 over the name, size, first and last MiB of the file and 256 pieces of 4 KiB between
    them, or of each file of weights and configuration in the folder; of a split file, of all its
    parts.
    """
    try:
        files = [file for file in _files(path) if file.suffix in _WEIGHTS]
        stats = [file.stat() for file in files]
        states = ((stat.st_size, stat.st_mtime_ns) for stat in stats)
        return _digest(tuple(zip(files, states, strict=True)))
    except OSError as error:
        log.info("no fingerprint of %s: %s", path, error)
        return None


def _files(path: Path) -> list[Path]:
    if not path.is_file():
        return sorted(path.iterdir())
    if split := _PART.search(path.name):
        return sorted(path.parent.glob(f"{escape(path.name[: split.start()])}-*{split[1]}"))
    return [path]


@lru_cache(maxsize=16)
def _digest(files: tuple[tuple[Path, tuple[int, int]], ...]) -> str:
    digest = hashlib.sha256()
    for path, (size, _) in files:
        digest.update(f"{path.name} {size} ".encode())
        pieces = [(0, _ENDS), (max(0, size - _ENDS), _ENDS)]
        pieces += [(size * nth // _SAMPLES, _SAMPLE) for nth in range(1, _SAMPLES)]
        with path.open("rb") as data:
            for start, length in pieces:
                data.seek(start)
                digest.update(data.read(length))
    return digest.hexdigest()
