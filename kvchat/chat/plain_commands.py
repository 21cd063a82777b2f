"""The slash commands of the plain chat."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat import sampling_text
from kvchat.chat.commands import (
    Continue,
    Edit,
    KeepCache,
    Regenerate,
    Restore,
    SetSystem,
    SetThinking,
    Switch,
    Truncate,
)
from kvchat.chat.ledger import Turn
from kvchat.chat.nodes import Node
from kvchat.chat.plain_text import one_line
from kvchat.chat.slash import SlashCommand, first_word
from kvchat.chat.snapshots import snapshot_text
from kvchat.chat.transfer.markdown import to_markdown
from kvchat.engine.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.chat.plain import PlainChat

_EXCERPT = 60

_THINKING = {"on": True, "off": False, "default": None}
_SWITCH = {"on": True, "off": False}


def set_sampling(chat: PlainChat, argument: str) -> None:
    """Change one sampling parameter, or list them all."""
    session = chat.session
    if not argument:
        for line in sampling_text.lines(session.params):
            chat.say(line)
        return
    name, value = first_word(argument)
    if not value:
        raise KvchatError(
            f"Write the value too: /set {name} VALUE; `off` and `default` are values."
        )
    params = sampling_text.updated(session.params, name, value, session.llm.defaults)
    chat.worker.params = params
    name = name.replace("-", "_").lower()
    chat.remark(f"{name} is {sampling_text.shown(getattr(params, name))} now.")


def regenerate(chat: PlainChat, _argument: str) -> None:
    """Write another reply; the old one stays on its branch."""
    with _undoable_by_going_back(chat, "new reply"):
        chat.answer(Regenerate())


def edit(chat: PlainChat, argument: str) -> None:
    """Change a message on a new branch."""
    number, text = first_word(argument)
    node = _message(chat, number, "/edit N TEXT")
    text = text or chat.ask("edit> ", node.content)
    if not text.strip():
        raise KvchatError("An edited message needs some text; /delete N takes a message out.")
    with _undoable_by_going_back(chat, "edit"):
        chat.answer(Edit(node.id, text))
    if node.role == "assistant":
        chat.remark("The reply is changed on a new branch; /continue goes on from it.")


def go_on(chat: PlainChat, _argument: str) -> None:
    """Go on with the last reply."""
    chat.perform(Continue())


def branch(chat: PlainChat, argument: str) -> None:
    """List the branches beside the messages of this chat, or go to one."""
    found = list(_branches(chat))
    if not found:
        raise KvchatError("There are no branches yet; /regen and /edit make some.")
    if not argument:
        path = [node.id for node in chat.conversation.active_path()]
        for nth, (at, place, node) in enumerate(found, start=1):
            here = "*" if node.id in path else " "
            chat.say(f"{here}{nth:>3}  message {at}, {place}: {_excerpt(node)}")
        return
    _, _, node = found[_number(argument, len(found), "branch", "/branch N") - 1]
    with _undoable_by_going_back(chat, "change of branch"):
        chat.perform(Switch(node.id))
    messages = chat.conversation.active_path()
    chat.remark(f"This branch has {len(messages)} messages and ends with: {_excerpt(messages[-1])}")


def system(chat: PlainChat, argument: str) -> None:
    """Show the system prompt, change it, or take it away."""
    old = chat.conversation.system
    if not argument:
        chat.say(old or "There is no system prompt; /system TEXT sets one.")
        return
    chat.perform(SetSystem("" if argument == "off" else argument))
    chat.undo.append(("change of the system prompt", SetSystem(old)))
    chat.remark("The system prompt is changed; the next turn reads the chat anew.")


def stats(chat: PlainChat, _argument: str) -> None:
    """Show what each turn cost, what the cache saved, and what it holds."""
    for nth, turn in enumerate(chat.session.ledger, start=1):
        for line in _turn_lines(nth, turn):
            chat.say(line)
    cache = chat.cache
    if cache is not None:
        chat.say(
            f"cache: {cache.tokens:,} of {cache.max_seq_len:,} tokens, "
            f"{cache.kv_bytes / 1e6:,.1f} MB; stash: {cache.stash_bytes / 1e6:,.1f} MB"
        )


def keep(chat: PlainChat, argument: str) -> None:
    """Keep a snapshot of the KV cache on the disk or no longer, or tell what it takes."""
    if argument not in ("", *_SWITCH):
        raise KvchatError("Write /keep on or /keep off; /keep alone tells what it takes.")
    if argument:
        chat.perform(KeepCache(_SWITCH[argument]))
    if chat.cache is not None:
        chat.say(snapshot_text(chat.cache))


def save(chat: PlainChat, argument: str) -> None:
    """Write the chat into a new Markdown file."""
    if not argument:
        raise KvchatError("Write where to: /save FILE.")
    path = Path(os.path.expanduser(argument))
    text = to_markdown(chat.conversation, chat.session.llm.name)
    try:
        file = path.open("x", encoding="utf-8", errors="replace", newline="\n")
    except FileExistsError:
        raise KvchatError(f"{path} exists already; choose another name.") from None
    except (OSError, ValueError) as error:
        raise KvchatError(f"{path} cannot be written: {error}") from error
    try:
        with file:
            file.write(text)
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # half a transcript would pass for a whole one
        raise KvchatError(f"{path} cannot be written: {error}") from error
    chat.remark(f"Saved as {path}.")


def history(chat: PlainChat, argument: str) -> None:
    """List the messages with their numbers, or show one in full."""
    if argument:
        chat.say(_message(chat, argument, "/history N").content)
        return
    path = chat.conversation.active_path()
    if not path:
        raise KvchatError("There are no messages yet.")
    unseen = len(chat.conversation.unseen(path))
    for nth, node in enumerate(path, start=1):
        who = "you" if node.role == "user" else "model"
        marks = _marks(chat, node, unseen=nth <= unseen)
        chat.say(f"{nth:>3}  {who}{marks}: {_excerpt(node)}")


def delete(chat: PlainChat, argument: str) -> None:
    """Take out a message and all that follows it."""
    chat.perform(Truncate(_message(chat, argument, "/delete N").id))
    if chat.deleted is not None:
        chat.undo.append(("deletion", Restore(chat.deleted)))
        chat.remark(f"{len(chat.deleted.nodes)} messages are deleted; /undo brings them back.")


def undo(chat: PlainChat, _argument: str) -> None:
    """Take back what was done last."""
    if not chat.undo:
        raise KvchatError("There is nothing to undo.")
    what, command = chat.undo.pop()
    chat.perform(command)
    chat.remark(f"Undone: {what}.")


def think(chat: PlainChat, argument: str) -> None:
    """Switch reasoning on or off."""
    if argument not in _THINKING:
        raise KvchatError("Write /think on, /think off or /think default.")
    if not chat.session.llm.template.supports_thinking_switch:
        raise KvchatError("This model's chat template has no switch for thinking.")
    chat.perform(SetThinking(_THINKING[argument]))
    chat.remark(f"Thinking: {argument}.")


def show_help(chat: PlainChat, _argument: str) -> None:
    """List the commands."""
    width = max(len(f"{c.name} {c.arguments}") for c in COMMANDS)
    for command in COMMANDS:
        chat.say(f"/{f'{command.name} {command.arguments}':<{width}}  {command.help}")
    chat.say("A line that ends in \\ goes on; one that begins with // is sent with one slash.")
    chat.say("Ctrl+C stops a reply, Ctrl+D ends the chat.")


def leave(chat: PlainChat, _argument: str) -> None:
    """End the chat."""
    chat.ended = True


COMMANDS = (
    SlashCommand("set", "[NAME VALUE]", "change a sampling parameter, or list them", set_sampling),
    SlashCommand("regen", "", "write another reply", regenerate),
    SlashCommand("edit", "N [TEXT]", "change message N on a new branch", edit),
    SlashCommand("continue", "", "go on with the last reply", go_on),
    SlashCommand("branch", "[N]", "list the branches, or go to one", branch),
    SlashCommand("system", "[TEXT|off]", "show or change the system prompt", system),
    SlashCommand("think", "on|off|default", "switch reasoning", think),
    SlashCommand("history", "[N]", "list the messages, or show one in full", history),
    SlashCommand("delete", "N", "take out message N and what follows it", delete),
    SlashCommand("undo", "", "take back the last change", undo),
    SlashCommand("stats", "", "what each turn cost and what the cache holds", stats),
    SlashCommand("keep", "[on|off]", "keep the cache of this chat on the disk", keep),
    SlashCommand("save", "FILE", "write the chat into a new Markdown file", save),
    SlashCommand("help", "", "list the commands", show_help),
    SlashCommand("quit", "", "end the chat", leave),
)


@contextmanager
def _undoable_by_going_back(chat: PlainChat, what: str) -> Iterator[None]:
    """Let `/undo` select the branch that was left, if one was."""
    before = chat.conversation.active_path()
    try:
        yield
    finally:
        after = chat.conversation.active_path()
        if before and after[-1:] != before[-1:]:
            chat.undo.append((what, Switch(before[-1].id)))


def _message(chat: PlainChat, number: str, usage: str) -> Node:
    path = chat.conversation.active_path()
    if not path:
        raise KvchatError("There are no messages yet.")
    return path[_number(number, len(path), "message", usage) - 1]


def _number(text: str, count: int, what: str, usage: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= count:
        return int(text)
    raise KvchatError(f"Write {usage}, with the number of a {what} from 1 to {count}.")


def _branches(chat: PlainChat) -> Iterator[tuple[int, str, Node]]:
    """Yield the messages that have siblings: number, place among them, and the message."""
    conversation = chat.conversation
    for at, node in enumerate(conversation.active_path(), start=1):
        among = conversation.children[node.parent]
        if len(among) > 1:
            for nth, sibling in enumerate(among, start=1):
                yield at, f"{nth} of {len(among)}", conversation.node(sibling)


def _marks(chat: PlainChat, node: Node, *, unseen: bool) -> str:
    index, count = chat.conversation.siblings(node.id)
    ending = node.reply.finish_reason if node.reply else None
    marks = {
        f"{index + 1} of {count}": count > 1,
        "edited": node.edited,
        "cut": ending in ("length", "cancelled") and not node.edited,
        "no longer seen by the model": unseen,
    }
    shown = ", ".join(mark for mark, holds in marks.items() if holds)
    return f" ({shown})" if shown else ""


def _excerpt(node: Node) -> str:
    text = one_line(node.content)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


def _turn_lines(nth: int, turn: Turn) -> Iterator[str]:
    stash = f" ({turn.restored:,} from the stash)" if turn.restored else ""
    yield f"turn {nth}: {turn.line()} · {turn.decoded:,} decoded{stash}, {turn.finish_reason}"
    if turn.divergence is not None:
        found = turn.divergence.found
        now = f"now there is {one_line(found)!r}" if found else "the prompt ends there"
        yield (
            f"  reuse stopped at token {turn.divergence.position:,}: cached was "
            f"{one_line(turn.divergence.expected)!r}, {now}"
        )
