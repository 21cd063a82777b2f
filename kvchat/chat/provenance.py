"""What a reply was written with: model, template, program and machine."""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import kvchat

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel

log = logging.getLogger(__name__)

_SAMPLE = 1 << 20
_WEIGHTS = (".gguf", ".safetensors", ".json")


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


@lru_cache(maxsize=16)
def fingerprint(path: Path) -> str | None:
    """Tell a model's files from others without reading gigabytes.

    SHA-256 over the name, size, first and last MiB of the file, or of each file of weights and
    configuration in the folder.
    """
    try:
        files = [path] if path.is_file() else sorted(path.iterdir())
        digest = hashlib.sha256()
        for file in files:
            if file.suffix not in _WEIGHTS:
                continue
            with file.open("rb") as data:
                size = data.seek(0, 2)
                digest.update(f"{file.name} {size} ".encode())
                for start in sorted({0, max(0, size - _SAMPLE)}):
                    data.seek(start)
                    digest.update(data.read(_SAMPLE))
    except OSError as error:
        log.info("no fingerprint of %s: %s", path, error)
        return None
    return digest.hexdigest()
