"""`kvchat pull`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvchat.cli.loading import fetch
from kvchat.cli.output import Output, note


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name from `kvchat models`, or org/name, org/name:QUANT or "
            "org/name/file.gguf of the Hugging Face Hub.",
        ),
    ],
) -> None:
    """Fetch a model and print where it is; one that was cut off goes on where it stopped."""
    output = Output()
    path = fetch(name)
    output.write(f"{path}\n")
    note(f'ready; try `kvchat ask -m {name} "Hello"`')
