"""`kvchat cache`: what is kept to make the next start quicker, and how to be rid of it."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from kvchat.models.catalog import size_text
from kvchat.settings import Settings, cache_dir


def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove it; the next start packs the weights again.")
    ] = False,
) -> None:
    """Show or remove the weights of models as they were packed for this processor.

    They make every start but the first quicker. The setting `packed_mb` limits the disk space
    that they take.
    """
    from kvchat.models.packed import FOLDER, kept

    folder = cache_dir() / FOLDER
    if clear:
        shutil.rmtree(folder, ignore_errors=True)
        typer.echo("The packed weights are removed.")
        return
    sizes = [path.stat().st_size for path in kept(folder)]
    limit = Settings.load()[0].packed_mb * 2**20
    typer.echo(
        f"Packed weights: {len(sizes)} {'file' if len(sizes) == 1 else 'files'}, "
        f"{size_text(sum(sizes))} of at most {size_text(limit)}, in {folder}"
    )
