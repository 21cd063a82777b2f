"""`kvchat chat`: a conversation."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvchat.chat.lines import Keyboard, Lines, Pipe
from kvchat.chat.plain import PlainChat
from kvchat.cli import FAILED
from kvchat.cli.loading import load_arguments, make_available
from kvchat.cli.logs import log_to_file
from kvchat.cli.options import CHAT, MODEL, SAMPLING, takes_settings
from kvchat.cli.output import Output, is_terminal, note
from kvchat.engine.errors import KvchatError
from kvchat.engine.types import SamplingParams
from kvchat.settings import Settings


@takes_settings(MODEL, CHAT, SAMPLING)
def chat(
    settings: Settings,
    plain: Annotated[
        bool, typer.Option("--plain", help="Chat line by line, without a screen.")
    ] = False,
) -> None:
    """Chat with a model."""
    SamplingParams().updated(**settings.sampling)  # refuses bad values before anything is loaded
    make_available(settings.model)
    line_by_line(settings)


def line_by_line(settings: Settings) -> None:
    """Chat without a screen.

    Raises:
        KvchatError: the model cannot be loaded, or there is nowhere to read from or write to.
    """
    log_to_file()
    output = Output()
    lines = _lines(output)
    plain = PlainChat(
        lines,
        output,
        note=note,
        progress=note if is_terminal(sys.stderr) else lambda _: None,
        system=settings.system or "",
        overflow=settings.overflow,
        sampling=settings.sampling,
    )
    try:
        plain.load(settings.model, load_arguments(settings))
        plain.run()
    finally:
        plain.close()
    if plain.failed and not lines.interactive:
        raise typer.Exit(FAILED)


def _lines(output: Output) -> Lines:
    if sys.stdin is None:
        raise KvchatError("standard input is closed, so there is nothing to read from")
    if is_terminal(sys.stdin):
        return Keyboard(output.write, on_stdout=output.is_terminal)
    return Pipe(sys.stdin.buffer)
