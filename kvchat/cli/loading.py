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
    note(f"{catalog.better_than(name)} `kvchat pull NAME` fetches one, `kvchat models` lists all.")


def fetch(name: str) -> Path:
    """Pull a model, with a progress bar or, without a terminal, a line for each phase."""
    from kvchat.models.pull import pull

    with Bar("bytes", delay=0.0, announce=True) as bar:

        def report(progress: PullProgress) -> None:
            bar.update(f"{progress.what} {name}", progress.done, progress.total)

        return pull(name, progress=report)
