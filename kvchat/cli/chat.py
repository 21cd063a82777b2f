"""`kvchat chat`: a conversation."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.cli import FAILED
from kvchat.cli.loading import make_available
from kvchat.cli.logs import log_to_file
from kvchat.cli.options import (
    CHAT,
    MODEL,
    SAMPLING,
    SAVING,
    SCREEN,
    preset_values,
    range_refusal,
    takes_settings,
)
from kvchat.cli.output import Output, is_terminal, note
from kvchat.engine.errors import KvchatError, SettingError
from kvchat.settings import Settings

if TYPE_CHECKING:
    from kvchat.chat.lines import Lines


@takes_settings(MODEL, CHAT, SCREEN, SAVING, SAMPLING)
def chat(
    settings: Settings,
    plain: Annotated[
        bool, typer.Option("--plain", help="Chat line by line, without a screen.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Go on with the chat that was changed last.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on with a chat, by its id or the beginning of it."),
    ] = None,
) -> None:
    """Chat with a model."""
    if go_on and resume:
        raise SettingError("--continue and --resume name two chats; give one of them")
    from kvchat.chat.keeper import LAST

    which = LAST if go_on else resume
    if not plain and _has_screen():
        on_screen(settings, which)
    else:
        line_by_line(settings, which)


def _has_screen() -> bool:
    """Whether the terminal can show more than lines, and is one."""
    return (
        is_terminal(sys.stdin)
        and is_terminal(sys.stdout)
        and os.environ.get("TERM", "") not in ("", "dumb")
    )


def on_screen(settings: Settings, resume: str | None = None) -> None:
    """Chat on the screen; the model is loaded, and fetched if need be, behind it."""
    log_to_file()
    from kvchat.tui.app import run

    # What was told on stderr is out of sight behind the screen, so it is told there again.
    _, problems = Settings.load({"persona": settings.persona}, preset_values, range_refusal)
    status = run(settings, problems, resume=resume)
    if status:
        raise typer.Exit(status)


def line_by_line(settings: Settings, resume: str | None = None) -> None:
    """Chat without a screen.

    Raises:
        KvchatError: the model or the chat to go on with cannot be loaded, or there is nowhere to
            read from or write to.
    """
    from kvchat.chat.keeper import Keeper
    from kvchat.chat.plain import PlainChat

    log_to_file()
    output = Output()
    lines = _lines(output)
    keeper = Keeper(note, **settings.keeping_arguments())
    plain = PlainChat(
        lines,
        output,
        note=note,
        progress=note if is_terminal(sys.stderr) else lambda _: None,
        system=settings.system or "",
        overflow=settings.overflow,
        sampling=settings.sampling,
        kernels=settings.kernels == "auto",
        keeper=keeper,
    )
    try:
        conversation = keeper.resume(resume)[0] if resume else None
        model = settings.model
        if conversation is not None and not settings.model_is_asked:
            model = keeper.model_of(conversation, model, note)
        make_available(model)
        plain.load(model, settings.load_arguments(), conversation)
        plain.run()
    finally:
        plain.close()
    if plain.failed and not lines.interactive:
        raise typer.Exit(FAILED)


def _lines(output: Output) -> Lines:
    from kvchat.chat.lines import Keyboard, Pipe

    if sys.stdin is None:
        raise KvchatError("standard input is closed, so there is nothing to read from")
    if is_terminal(sys.stdin):
        return Keyboard(output.write, on_stdout=output.is_terminal)
    return Pipe(sys.stdin.buffer)
