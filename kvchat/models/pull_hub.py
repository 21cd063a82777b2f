"""Models from the Hugging Face Hub: single GGUF files, or folders of safetensors."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvchat.engine.errors import UnsupportedModelError
from kvchat.models import pull_hub_child
from kvchat.models.locate import PICKLE_SUFFIXES
from kvchat.models.pull_staging import (
    Report,
    SourceError,
    check_space,
    files_in,
    is_exactly,
    run_watched,
)

_PREFIXES = ("https://huggingface.co/", "hf.co/", "huggingface.co/", "hf:")
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<quant>[\w.-]+)|(?:/(?:resolve|blob)/[\w.-]+)?/(?P<file>[^?#\\:]+))?(?:\?.*)?"
)
_QUANT_PREFERENCE = ("q4_k_m", "q4_0", "q4_1", "q4_k_s", "q5_k_m", "q6_k", "q8_0", "f16", "bf16")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_FOLDER_SUFFIXES = (".safetensors", ".json", ".model", ".jinja", ".txt")

_CAUSES = {
    "ImportError": "the package huggingface-hub is not installed",
    "OfflineModeIsEnabled": "the Hub is switched off by HF_HUB_OFFLINE",
    "GatedRepoError": (
        "{repo} wants its terms accepted first: do so at https://huggingface.co/{repo}, then "
        "log in with `hf auth login`"
    ),
    "RepositoryNotFoundError": (
        "the Hub has no public repository {repo}; if it is private, log in with `hf auth login`"
    ),
    "RevisionNotFoundError": "{repo} no longer has the commit that was asked for",
    "EntryNotFoundError": "{repo} no longer has that file",
    "HFValidationError": "'{repo}' is not a repository name",
    "HfHubHTTPError": "the Hub refused: {text}",
    "TransportError": "no network connection to the Hub",
    "ConnectionError": "no network connection to the Hub",
    "Timeout": "the Hub did not answer in time",
}
"""By the name of an exception or of one of its bases; the first in this order counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """What to fetch from the Hub."""

    repo: str
    file: str | None = None
    """A file in the repository; None leaves the choice to `choose`."""
    quant: str | None = None
    """The quantisation a GGUF file's name has to carry."""
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the Hub lists it."""

    name: str
    size: int
    sha256: str | None


def parse(name: str) -> HubName | None:
    """Read `org/name`, `org/name:QUANT`, `org/name/file.gguf` or the address of one of these."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    match = _NAME.fullmatch(name.rstrip("/"))
    if match is None:
        return None
    found = HubName(repo=match["repo"], file=match["file"], quant=match["quant"])
    return found if found.file is None or _is_safe(found.file) else None


def choose(wanted: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """Pick what to download: one GGUF file, or the files of a safetensors folder.

    Raises:
        SourceError: nothing fits, or more than one does.
        UnsupportedModelError: the repository has pickled weights only.
    """
    files = [file for file in files if _is_safe(file.name)]
    if wanted.file is not None:
        return [_named(wanted, files)]
    ggufs = [file for file in files if file.name.lower().endswith(".gguf")]
    whole = [file for file in ggufs if not _SPLIT.search(file.name)]
    top = [file for file in files if "/" not in file.name]
    names = {file.name for file in top}
    weights = any(name.endswith(".safetensors") for name in names)
    if weights and "config.json" in names and wanted.quant is None:
        return [
            file
            for file in top
            if file.name.endswith(_FOLDER_SUFFIXES) and not file.name.startswith("consolidated")
        ]
    for quant in (wanted.quant,) if wanted.quant else _QUANT_PREFERENCE:
        fits = [file for file in whole if _carries(file.name, quant)]
        if len(fits) == 1:
            return fits
    if len(whole) == 1 and wanted.quant is None:
        return whole
    if whole:
        shown = ", ".join(PurePosixPath(file.name).name for file in whole[:8])
        raise SourceError(f"say which file of {wanted.repo}, as {wanted.repo}/FILE: {shown}")
    if ggufs:
        raise SourceError(f"{wanted.repo} has its GGUF files in parts, which cannot be run here")
    if any(file.name.lower().endswith(PICKLE_SUFFIXES) for file in files):
        raise UnsupportedModelError(
            f"{wanted.repo} has pickled weights only, and opening such files runs any code hidden "
            "in them. Look for a safetensors or GGUF version of the model."
        )
    raise SourceError(f"{wanted.repo} holds no GGUF file and no safetensors model")


def look_up(wanted: HubName, folder: Path, report: Report) -> tuple[str, list[HubFile]]:
    """Ask the Hub for the newest commit and choose the files; raises as `choose` does."""
    request = {"action": "list", "repo": wanted.repo, "revision": wanted.revision}
    answer = _ask(request, folder, report, what="asking the Hub", total=None)
    return answer["commit"], choose(wanted, [HubFile(*file) for file in answer["files"]])


def download(
    wanted: HubName, commit: str, files: Sequence[HubFile], folder: Path, report: Report
) -> list[Path]:
    """Download files below `folder` and check them; what is there already is not fetched again.

    Raises:
        SourceError: the Hub cannot be reached, or a file is not the one it lists.
        OSError: the disk is full or not writable.
    """
    received = folder / "files"
    total = sum(file.size for file in files)
    check_space(total - sum(size for _, size in files_in(received)))
    request = {
        "action": "get",
        "repo": wanted.repo,
        "commit": commit,
        "folder": str(received),
        "files": [(file.name, file.size, file.sha256 is not None) for file in files],
    }
    _ask(request, folder, report, what="downloading", total=total)
    for file in files:
        path = received / file.name
        sound = path.stat().st_size == file.size and (
            file.sha256 is None or is_exactly(path, file.size, file.sha256, report)
        )
        if not sound:
            path.unlink()
            raise SourceError(
                f"{file.name} of {wanted.repo} did not arrive as it was published (its size or "
                "SHA-256 differs)"
            )
    return [received / file.name for file in files]


def _ask(
    request: dict[str, Any], folder: Path, report: Report, *, what: str, total: int | None
) -> Any:
    """Let the child process carry out a request and return its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as exchange:
        asked, answered, output = (Path(exchange, name) for name in ("asked", "answered", "output"))
        asked.write_text(json.dumps(request), "utf-8")
        run_watched(
            [sys.executable, "-P", pull_hub_child.__file__, str(asked), str(answered)],
            measure=lambda: sum(size for _, size in files_in(folder / "files")),
            total=total,
            what=what,
            report=report,
            output=output,
            environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        printed = output.read_text(errors="replace")
        reply = json.loads(answered.read_text("utf-8")) if answered.exists() else None
    if reply is None:
        last = next((line for line in reversed(printed.split("\n")) if line.strip()), "nothing")
        raise SourceError(f"the Hub's library failed, saying {last.strip()[:200]}")
    if "answer" in reply:
        return reply["answer"]
    if reply["errno"] in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        raise OSError(reply["errno"], os.strerror(reply["errno"]))
    text = next((line.strip() for line in reply["text"].splitlines() if line.strip()), "")[:200]
    for kind, cause in _CAUSES.items():
        if kind in reply["kinds"]:
            raise SourceError(cause.format(repo=request["repo"], text=text))
    raise SourceError(f"the Hub's library failed: {reply['kinds'][0]}: {text}")


def _named(wanted: HubName, files: Sequence[HubFile]) -> HubFile:
    name = wanted.file or ""
    if name.lower().endswith(PICKLE_SUFFIXES):
        raise UnsupportedModelError(
            f"{name} holds pickled weights, and opening such a file runs any code hidden in it. "
            "Look for a safetensors or GGUF version of the model."
        )
    for file in files:
        if name.casefold() in (file.name.casefold(), PurePosixPath(file.name).name.casefold()):
            return file
    ggufs = [file.name for file in files if file.name.lower().endswith(".gguf")]
    has = f"; it has {', '.join(ggufs[:8])}" if ggufs else ""
    raise SourceError(f"{wanted.repo} has no file {name}{has}")


def _carries(name: str, quant: str) -> bool:
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(quant.lower())}(?![a-z0-9_])", name.lower())
        is not None
    )


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and not set(name) & set("\\:\0")
