"""Loading a model for a command: fetched if it is the default one, with progress on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvchat.cli.interrupts import Interrupts
from kvchat.cli.output import note
from kvchat.cli.progress import Bar
from kvchat.engine.types import LoadProgress
from kvchat.models import catalog
from kvchat.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from kvchat.models.load import LanguageModel
    from kvchat.models.pull import PullProgress

BETTER = ("llama-3.2-3b", "qwen3-1.7b", "qwen3-4b")
"""What the first start recommends, of the catalogue."""


def load_model(settings: Settings, interrupts: Interrupts) -> LanguageModel:
    """Load the model of the settings, which `make_available` has seen to.

    Raises:
        KvchatError: with the cause and the remedy.
        KeyboardInterrupt: there was a Ctrl+C, noticed between two tensors.
    """
    with Bar("bytes") as bar:
        from kvchat.models.load import load

        def report(progress: LoadProgress | PullProgress) -> None:
            interrupts.check()
            bar.update(f"loading {settings.model}", progress.done, progress.total)

        interrupts.check()
        llm = load(settings.model, progress=report, **settings.load_arguments())
        interrupts.check()
        return llm


def make_available(name: str) -> None:
    """Fetch the default model if it is asked for and absent; refuse other absent models.

    Raises:
        KvchatError: there is no such model, or it cannot be fetched.
    """
    from kvchat.models.locate import locate, require

    if locate(name) is not None:
        return
    if name != Settings().model:
        require(name)
    fetch(name)
    better = [entry for alias in BETTER if (entry := catalog.find(alias)) is not None]
    names = ", ".join(f"{e.alias} ({size_text(e.size)}, {languages_text(e)})" for e in better)
    note(
        f"{name} is small and speaks English only. Better ones: {names}; `kvchat pull NAME` "
        "fetches one, `kvchat models` lists all."
    )


def fetch(name: str) -> Path:
    """Pull a model, with a progress bar or, without a terminal, a line for each phase."""
    from kvchat.models.pull import pull

    with Bar("bytes", delay=0.0, announce=True) as bar:

        def report(progress: PullProgress) -> None:
            bar.update(f"{progress.what} {name}", progress.done, progress.total)

        return pull(name, progress=report)


def size_text(n: int) -> str:
    """Return a number of bytes in megabytes or gigabytes."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def languages_text(entry: catalog.CatalogEntry) -> str:
    """Return the first languages of a model."""
    rest = len(entry.languages) - 2
    return "/".join(entry.languages[:2]) + (f" and {rest} more" if rest > 0 else "")
