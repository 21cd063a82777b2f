"""`kvchat ask`: one streamed answer."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from kvchat.chat.attachments import described, expand
from kvchat.cli import INTERRUPTED
from kvchat.cli.interrupts import Interrupts
from kvchat.cli.loading import load_model, make_available
from kvchat.cli.options import CHAT, MODEL, SAMPLING, takes_settings
from kvchat.cli.output import Output, is_terminal, note
from kvchat.cli.progress import Bar
from kvchat.engine.errors import KvchatError, SettingError
from kvchat.engine.types import (
    GenerationEvent,
    GenerationFinished,
    GenerationStats,
    PrefillFinished,
    PrefillProgress,
    TokenGenerated,
)
from kvchat.settings import Settings

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel

STDIN_LIMIT = 4 * 2**20
"""Bytes of stdin that are read at most: no context here holds as much."""

_NOTICE_SECONDS = 1.0


@takes_settings(MODEL, CHAT, SAMPLING)
def ask(  # noqa: PLR0917 (the command line passes them all by name)
    settings: Settings,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="The question; @path puts in a file's text, piped text comes after it.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write on from the text, without a chat template.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Read everything again for every token: slow.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON Lines instead of text.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on stderr what the answer cost.")
    ] = False,
) -> None:
    """Print one answer, as it is written."""
    output = Output()
    prompt, attached = _prompt(text or [], attach=not raw)
    make_available(settings.model)
    with Interrupts() as interrupts:
        llm = load_model(settings, interrupts)
        if llm.template.is_default and not raw:
            note(f"{settings.model} has no chat template of its own; --raw may suit it better")
        if no_cache:
            _forget_everything(llm)
        if attached:
            note(f"{attached}; the question has {len(llm.tokenizer.encode_plain(prompt)):,} tokens")
        params = llm.defaults.updated(**settings.sampling)
        from kvchat.chat.ask import ask as ask_model

        events = ask_model(llm, prompt, params, system=settings.system or "", raw=raw)
        writer = _JsonLines(output) if as_json else _Text(output, prompt if raw else "")
        events = _until_interrupted(events, llm.engine.cancel, interrupts)
        finished = _write(_without_cache(events) if no_cache else events, writer)
    if stats:
        note(_in_words(llm, finished.stats))
    if finished.reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _forget_everything(llm: LanguageModel) -> None:
    from kvchat.engine.naive import NaiveStep

    llm.engine.step = NaiveStep(llm.engine)
    llm.engine.pass_costs = None


def _without_cache(events: Iterator[GenerationEvent]) -> Iterator[GenerationEvent]:
    """The naive loop keeps nothing from token to token, whatever the engine has allocated."""
    for event in events:
        if isinstance(event, GenerationFinished):
            yield replace(event, stats=replace(event.stats, kv_bytes=0))
        else:
            yield event


def _write(events: Iterator[GenerationEvent], writer: _Writer) -> GenerationFinished:
    with Bar("tokens") as bar:
        for event in events:
            match event:
                case PrefillProgress():
                    bar.update("reading the prompt", event.done, event.new)
                case PrefillFinished():
                    bar.close()
            writer.take(event)
            if isinstance(event, GenerationFinished):
                return event
    raise AssertionError("a reply ends with GenerationFinished")


def _until_interrupted(
    events: Iterator[GenerationEvent], cancel: Callable[[], None], interrupts: Interrupts
) -> Iterator[GenerationEvent]:
    """Pass events on; Ctrl+C ends the reply in good order."""
    yield next(events)  # when it begins, the engine forgets earlier cancels
    interrupts.on_ask = cancel
    if interrupts.asked:
        cancel()
    yield from events


def _prompt(words: list[str], *, attach: bool) -> tuple[str, str]:
    """Join the arguments, the files they mention and what is piped in.

    Args:
        words: the arguments.
        attach: whether `@path` in them stands for a file's text.

    Returns:
        The prompt, and what is attached in words; "" if nothing is.

    Raises:
        SettingError: both are empty.
        KvchatError: stdin is not usable, or a file cannot be attached.
    """
    typed, attached = _typed(" ".join(words)), ""
    if attach:
        message = expand(typed, Path.cwd())
        if message.problems:
            raise KvchatError(" ".join(message.problems))
        typed, attached = message.text, described(message.attachments)
    parts = [typed, "" if is_terminal(sys.stdin) else _read_stdin()]
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise SettingError('there is nothing to ask; try `kvchat ask "Why is the sky blue?"`')
    return prompt, attached


def _typed(text: str) -> str:
    """Return an argument's text; where the locale says otherwise it is UTF-8 all the same."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise SettingError("the question is not UTF-8 text; check the terminal's locale") from error


def _read_stdin() -> str:
    if sys.stdin is None:
        return ""
    waiting = threading.Timer(
        _NOTICE_SECONDS, note, ["reading the rest of the question from stdin"]
    )
    waiting.daemon = True
    waiting.start()
    try:
        data = sys.stdin.buffer.read(STDIN_LIMIT + 1)
        text = data.decode("utf-8-sig")
    except OSError:
        return ""  # a closed or write-only stream has nothing to add
    except UnicodeDecodeError as error:
        raise KvchatError(
            f"stdin is not UTF-8 text (byte {error.start:,} is 0x{error.object[error.start]:02x}); "
            "convert it first, with iconv for example"
        ) from error
    finally:
        waiting.cancel()
    if len(data) > STDIN_LIMIT:
        raise KvchatError(
            f"stdin has more than {STDIN_LIMIT // 2**20} MiB, which no context holds; pass less"
        )
    return text.rstrip("\r\n")


class _Writer(Protocol):
    def take(self, event: GenerationEvent) -> None:
        """Write what there is to write about an event."""


class _Text:
    """The answer as text, after the echoed prompt if there is one."""

    def __init__(self, output: Output, echo: str) -> None:
        self.output = output
        self.echo = echo
        self.ends_line = True

    def take(self, event: GenerationEvent) -> None:
        self._write(self.echo)
        self.echo = ""
        if isinstance(event, TokenGenerated | GenerationFinished):
            self._write(event.text)
        if isinstance(event, GenerationFinished) and not self.ends_line:
            interrupted = event.reason == "cancelled"
            self._write("\n" if self.output.is_terminal or not interrupted else "")

    def _write(self, text: str) -> None:
        if text:
            self.output.write(text)
            self.ends_line = text.endswith("\n")


class _JsonLines:
    """Events as JSON objects, one a line.

    Text that belongs to no token (the end of an incomplete character, what stood before a stop
    string) goes with the last token, so that the texts join to the answer: tokens are written
    one event late.
    """

    def __init__(self, output: Output) -> None:
        self.output = output
        self.last: TokenGenerated | None = None

    def take(self, event: GenerationEvent) -> None:
        match event:
            case PrefillFinished():
                ms = round(event.ms, 2)
                self._write(event="prefill", reused=event.reused, new=event.new, ms=ms)
            case TokenGenerated():
                self._write_last()
                self.last = event
            case GenerationFinished():
                self._write_last(event.text)
                self._write_done(event)

    def _write_last(self, rest: str = "") -> None:
        if self.last is not None:
            token = self.last
            self._write_token(token.id, token.text + rest, round(token.logprob, 4), token.ms)
        elif rest:
            self._write_token(None, rest, None, 0.0)

    def _write_token(self, id_: int | None, text: str, logprob: float | None, ms: float) -> None:
        self._write(event="token", id=id_, text=text, logprob=logprob, ms=round(ms, 2))

    def _write_done(self, event: GenerationFinished) -> None:
        stats = event.stats
        drafts = {"proposed": stats.proposed, "accepted": stats.accepted} if stats.proposed else {}
        self._write(
            event="done",
            finish_reason=event.reason,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            ttft_ms=round(stats.ttft_ms, 2),
            prefill_tps=round(stats.prefill_tps, 2),
            decode_tps=round(stats.decode_tps, 2),
            kv_bytes=stats.kv_bytes,
            **drafts,
        )

    def _write(self, **fields: Any) -> None:
        self.output.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _in_words(llm: LanguageModel, stats: GenerationStats) -> str:
    drafts = f", {stats.accepted:,} of {stats.proposed:,} drafted" if stats.proposed else ""
    cache = f"cache {stats.kv_bytes / 2**20:,.1f} MiB" if stats.kv_bytes else "no cache"
    return (
        f"{stats.new:,} prompt tokens in {stats.prefill_ms:,.0f} ms "
        f"({stats.prefill_tps:,.0f} tok/s), first token after {stats.ttft_ms:,.0f} ms, "
        f"{stats.completion_tokens:,} tokens at {stats.decode_tps:,.1f} tok/s{drafts}, "
        f"{cache}; {llm.name}, {llm.weights}, {llm.device}"
    )
