"""`kvchat kernels`: build the CPU kernels for this machine, or say how things stand."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from kvchat.engine.errors import KvchatError
from kvchat.settings import cache_dir


def kernels(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove the kernels; torch's operators go on alone.")
    ] = False,
) -> None:
    """Build kvchat's own CPU kernels for this machine, which takes about half a minute.

    They make replies quicker from the next start on. A C++ compiler and ninja are needed. They
    are used only after they have agreed with torch. A chat builds them by itself while it is
    idle, unless `kernels` is set otherwise.
    """
    from kvchat.engine import native

    folder = cache_dir() / native.FOLDER
    if clear:
        shutil.rmtree(folder, ignore_errors=True)
        typer.echo("The kernels are removed.")
        return
    if native.load(folder):
        typer.echo("The kernels for this machine are in place.")
        return
    if not native.can_build():
        raise KvchatError(
            "building the kernels takes a C++ compiler and ninja: install g++ or clang, and "
            "`pip install 'kvchat[kernels]'`; without them torch's own operators are used"
        )
    from kvchat.engine.native.build import build, cause

    typer.echo("Building the kernels for this machine…")
    try:
        build(native.home(folder))
    except native.BusyError as error:
        raise KvchatError(
            "another kvchat is building the kernels already; they are there in a minute"
        ) from error
    except (RuntimeError, OSError) as error:
        raise KvchatError(f"the kernels could not be built here: {cause(error)}") from error
    typer.echo("Done: they are used from the next start on.")
