"""The commands, and how a line of arguments becomes a call of one.

A command is a function in a module of the same name, listed in `COMMANDS`; a group of commands, in
`GROUPS`, is a Typer in such a module. Only the one that is named is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from kvchat import __version__
from kvchat.cli import BAD_USAGE, DONE, INTERRUPTED
from kvchat.cli.output import note

COMMANDS = ("chat", "ask", "models", "pull", "bench", "verify", "kernels", "cache", "doctor")

GROUPS = ("chats", "config")

DEFAULT_COMMAND = "chat"
"""What runs when no command is named."""

_ROOT_FLAGS = ("--help", "-h", "--version")

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What arguments that cannot be parsed raise; typer exports only this subclass of it."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvchat {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Chat with local language models in the terminal.

    Without a command it opens the chat, and takes the options of `kvchat chat`.
    """


def _app(wanted: str) -> typer.Typer:
    """Return the application with the command of this name, or with all if there is none."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",  # the other modes keep a docstring's line breaks
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in (wanted,) if wanted in COMMANDS + GROUPS else COMMANDS + GROUPS:
        command = getattr(import_module(f"kvchat.cli.{name}"), name)
        if name in GROUPS:
            app.add_typer(command, name=name)
        else:
            app.command()(command)
    return app


def invoke(args: list[str]) -> int:
    """Run one command; return the exit status. What the command raises is passed on."""
    args = _with_default_command(args)
    command = typer.main.get_command(_app(args[0]))
    try:
        # Not command.main(): it has its own ideas of how errors and closed pipes end.
        with command.make_context("kvchat", args) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        return INTERRUPTED
    except _UsageError as error:
        parsed = getattr(error, "ctx", None)
        path = parsed.command_path if parsed else "kvchat"
        message: str = error.format_message()  # type: ignore[attr-defined]
        note(f"{message.rstrip('.')}; see `{path} --help`")
        return BAD_USAGE
    return DONE


def _with_default_command(args: list[str]) -> list[str]:
    if args and (not args[0].startswith("-") or args[0] in _ROOT_FLAGS):
        return args
    return [DEFAULT_COMMAND, *args]
