"""The commands, and how a line of arguments becomes a call of one.

A command is a function in a module of its own, listed in `COMMANDS`; a group of commands is a Typer
in `GROUPS`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvchat import __version__
from kvchat.cli import BAD_USAGE, DONE, INTERRUPTED
from kvchat.cli.ask import ask
from kvchat.cli.bench import bench
from kvchat.cli.chat import chat
from kvchat.cli.chats import chats
from kvchat.cli.config import config
from kvchat.cli.doctor import doctor
from kvchat.cli.models import models
from kvchat.cli.output import note
from kvchat.cli.pull import pull
from kvchat.cli.verify import verify

COMMANDS = (chat, ask, models, pull, bench, verify, doctor)

GROUPS = {"chats": chats, "config": config}

DEFAULT_COMMAND = "chat"
"""What runs when no command is named."""

_ROOT_FLAGS = ("--help", "-h", "--version")

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What arguments that cannot be parsed raise; typer exports only this subclass of it."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",  # the other modes keep a docstring's line breaks
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvchat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Chat with local language models in the terminal.

    Without a command it opens the chat, and takes the options of `kvchat chat`.
    """


for _command in COMMANDS:
    app.command()(_command)

for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def invoke(args: list[str]) -> int:
    """Run one command; return the exit status. What the command raises is passed on."""
    command = typer.main.get_command(app)
    try:
        # Not command.main(): it has its own ideas of how errors and closed pipes end.
        with command.make_context("kvchat", _with_default_command(args)) as context:
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
    known = {command.__name__ for command in COMMANDS}
    return [DEFAULT_COMMAND, *args] if DEFAULT_COMMAND in known else args or ["--help"]
