"""From a name to files: our own models folder and the other stores on this disk."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvchat.engine.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from kvchat.models import catalog
from kvchat.settings import models_dir

Kind = Literal["gguf", "folder"]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""Reading these runs whatever code their author put inside."""

_WANTED = "Give a .gguf file or a folder with safetensors weights."

_GGUF_MAGIC = b"GGUF"
_NOT_A_MODEL = re.compile(r"^mmproj|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
"""Projectors of vision models, and all but the first part of a split file."""

_MANIFEST_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model found on this disk."""

    name: str
    """What `locate` takes."""
    path: Path
    kind: Kind
    bytes: int
    """Size of the weights."""
    source: str
    """Whose store it is in."""


def locate(name: str) -> Path | None:
    """The file or folder a name or path means, or None when this disk has none.

    The result is a GGUF file (Ollama's carry no suffix) or a folder with a config.json and
    safetensors weights.

    Raises:
        ModelFileError: a path exists but is empty, unreadable, or no model.
        UnsupportedModelError: a path holds pickled or otherwise foreign weights.
    """
    if not name.strip():
        return None
    if _looks_like_a_path(name):
        return _at_path(name) or _in_stores(name)
    found = _in_stores(name)
    return found if found or catalog.find(name) else _at_path(name)


def require(name: str) -> Path:
    """As `locate`, but raises `ModelNotFoundError` with near names and the command to fetch it."""
    found = locate(name)
    if found is not None:
        return found
    entry = catalog.find(name)
    if entry is not None:
        megabytes = entry.size / 1e6
        raise ModelNotFoundError(
            f"{entry.alias} is not on this disk yet. `kvchat pull {entry.alias}` fetches it "
            f"({megabytes:,.0f} MB)."
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        raise ModelNotFoundError(
            f"There is no model '{name}' on this disk. If it is a repository on the Hugging Face "
            f"Hub, `kvchat pull {name}` fetches it."
        )
    if _looks_like_a_path(name):
        raise ModelNotFoundError(f"There is no file or folder {name}. Check the path.")
    raise ModelNotFoundError(unknown_name(name))


def unknown_name(name: str) -> str:
    """Say that nothing is called `name`, with near names from this disk and the catalogue."""
    near = catalog.near(name, tuple(model.name for model in list_models()))
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"No model is called '{name}'.{hint} `kvchat models` lists all there are."


def list_models() -> list[LocalModel]:
    """Every model in our folder and the other stores, without looking inside the files."""
    found: dict[Path, LocalModel] = {}
    for source, search in _STORES:
        for model in search(source):
            found.setdefault(model.path, model)
    return list(found.values())


def kind_of(path: Path) -> Kind:
    """Whether a model is a GGUF file or a folder, from what is on disk.

    Raises `ModelFileError` or `UnsupportedModelError` when it is neither.
    """
    try:
        if path.is_dir():
            _check_folder(path)
            return "folder"
        if not path.is_file():  # opening a pipe would wait for a writer
            raise UnsupportedModelError(f"{path} is no regular file. {_WANTED}")
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ModelFileError(f"{path} cannot be read: {reason}. Check its permissions.") from error
    if magic == _GGUF_MAGIC:
        return "gguf"
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UnsupportedModelError(_pickled(path))
    if not magic:
        raise ModelFileError(f"{path} is empty. Fetch or copy it again.")
    if path.suffix.lower() == ".gguf":
        raise ModelFileError(f"{path} is not a GGUF file in spite of its name. Fetch it again.")
    if path.suffix.lower() == ".safetensors":
        raise UnsupportedModelError(
            f"{path} holds weights alone. Give the folder that also has config.json and "
            "tokenizer.json."
        )
    raise UnsupportedModelError(f"{path} is not a model. {_WANTED}")


def _check_folder(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    has_weights = any(name.endswith(".safetensors") for name in names)
    pickles = sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES))
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not has_weights and pickles:
        raise UnsupportedModelError(_pickled(path / pickles[0]))
    if not has_weights and ggufs:
        raise ModelFileError(f"{path} is a folder. Give one of its files: {', '.join(ggufs[:5])}.")
    missing = [] if "config.json" in names else ["config.json"]
    missing += [] if has_weights else [".safetensors weights"]
    if missing:
        raise ModelFileError(f"{path} is not a model folder: it has no {' and no '.join(missing)}.")


def _pickled(path: Path) -> str:
    return (
        f"{path} holds pickled weights, and opening such a file runs any code hidden in it. "
        "Use the model's safetensors or GGUF version instead."
    )


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith("~")
        or name in (".", "..")
        or "/" in name
        or os.sep in name
        or Path(name).suffix.lower() in (".gguf", ".safetensors", *PICKLE_SUFFIXES)
    )


def _at_path(name: str) -> Path | None:
    path = _expanded(name)
    try:
        path.stat()
    except PermissionError as error:
        raise ModelFileError(
            f"{path} cannot be read: permission denied. Check its permissions."
        ) from error
    except (OSError, ValueError):
        return None
    kind_of(path)
    return path


def _in_stores(name: str) -> Path | None:
    wanted = name.strip().casefold()
    entry = catalog.find(name)
    models = list_models()
    for model in models:
        if entry is not None and entry.file == model.path.name:
            return model.path
    for model in models:
        names = {model.name, model.path.name, model.path.stem, model.name.removesuffix(":latest")}
        if wanted in map(str.casefold, names):
            return model.path
    inside = [model.path for model in models if model.name.casefold().startswith(wanted + "/")]
    return inside[0] if len(inside) == 1 else None


def _expanded(path: str) -> Path:
    """Replace a leading `~`; where there is no such home it stays, and Path.expanduser raises."""
    return Path(os.path.expanduser(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _walk(root: Path, source: str, prefix: str = "") -> Iterator[LocalModel]:
    """GGUF files and model folders under `root`, named by `prefix` and their path below it."""
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(place)
        parts = [part for part in (prefix, *here.relative_to(root).parts) if part]
        weights = [_size(here / name) for name in files if name.endswith(".safetensors")]
        if parts and weights and all(weights) and "config.json" in files:
            yield LocalModel("/".join(parts), here, "folder", sum(weights), source)
        for name in sorted(files):
            size = _size(here / name)
            if size and name.lower().endswith(".gguf") and not _NOT_A_MODEL.search(name):
                yield LocalModel("/".join((*parts, name)), here / name, "gguf", size, source)


def _ours(source: str) -> Iterator[LocalModel]:
    for model in _walk(models_dir(), source):
        entry = catalog.find(model.path.name)
        yield replace(model, name=entry.alias if entry else model.name.removesuffix(".gguf"))


def _hub_cache(source: str) -> Iterator[LocalModel]:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    root = _expanded(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")
    for repo in _children(root):
        snapshots = _children(repo / "snapshots")
        if repo.name.startswith("models--") and snapshots:
            name = repo.name.removeprefix("models--").replace("--", "/")
            yield from _walk(max(snapshots, key=_modified), source, name)


def _lm_studio(source: str) -> Iterator[LocalModel]:
    for place in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        yield from _walk(_expanded(place), source)


def _llama_cpp(source: str) -> Iterator[LocalModel]:
    default = "~/Library/Caches/llama.cpp" if sys.platform == "darwin" else "~/.cache/llama.cpp"
    root = _expanded(os.environ.get("LLAMA_CACHE") or default)
    for model in _walk(root, source):
        if model.kind == "gguf":
            yield model


def _ollama(source: str) -> Iterator[LocalModel]:
    own = os.environ.get("OLLAMA_MODELS")
    service = "/usr/share/ollama/.ollama/models"
    for place in (own,) if own else ("~/.ollama/models", service):
        root = _expanded(place)
        for folder, folders, files in os.walk(root / "manifests"):
            folders.sort()
            for tag in sorted(files):
                manifest = Path(folder, tag)
                weights = _ollama_weights(manifest, root / "blobs")
                if weights is not None:
                    parts = manifest.parent.relative_to(root / "manifests").parts
                    name = "/".join(parts).removeprefix("registry.ollama.ai/")
                    name = f"{name.removeprefix('library/')}:{tag}"
                    yield LocalModel(name, weights, "gguf", _size(weights), source)


def _ollama_weights(manifest: Path, blobs: Path) -> Path | None:
    """The weights file a manifest names; None when the manifest or the file is not whole."""
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(_MANIFEST_LIMIT))["layers"]
        weights = [
            (layer["digest"], layer["size"])
            for layer in layers
            if layer["mediaType"] == "application/vnd.ollama.image.model"
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if len(weights) != 1 or not isinstance(weights[0][0], str):
        return None
    digest, size = weights[0]
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        return None
    blob = blobs / digest.replace(":", "-")
    return blob if size and _size(blob) == size else None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_STORES: tuple[tuple[str, Callable[[str], Iterator[LocalModel]]], ...] = (
    ("kvchat", _ours),
    ("Hugging Face", _hub_cache),
    ("LM Studio", _lm_studio),
    ("Ollama", _ollama),
    ("llama.cpp", _llama_cpp),
)
