"""EventFeed: what the worker tells, shown on the screen."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat.chat.changes import heading
from kvchat.chat.commands import Command, GetPrice, Load, Open
from kvchat.chat.events import (
    BranchDeleted,
    CacheStatus,
    CommandFailed,
    CommandFinished,
    CommandStarted,
    ModelLoaded,
    Paused,
    Priced,
    ReplyStarted,
    TextAdded,
    TitleSuggested,
    TurnFinished,
    WorkerEvent,
)
from kvchat.chat.ledger import Turn
from kvchat.chat.plain_text import one_line
from kvchat.engine.types import (
    LoadProgress,
    PrefillFinished,
    PrefillProgress,
    SamplingParams,
    TokenGenerated,
)
from kvchat.models.catalog import better_than, size_text
from kvchat.models.pull_staging import PullProgress
from kvchat.settings import Settings
from kvchat.tui.prompt_price import price_text
from kvchat.tui.views import changes, turn_spans
from kvchat.tui.widgets.cache_panel import TurnSpan

if TYPE_CHECKING:
    from textual.timer import Timer

    from kvchat.chat.session import ChatSession
    from kvchat.tui.main_screen import MainScreen
    from kvchat.tui.widgets.chat_pane import ChatPane

SLOW = 0.3
"""Seconds of prefill after which its progress is shown."""

FIGURES_EVERY = 0.5
"""Seconds after which the sidebar follows a reply: painting the text alone takes less time."""

BAR = 24
"""Cells of the bar for what is being fetched or loaded."""


class EventFeed:
    """Takes batches of events and brings the widgets up to date, once a batch.

    What is told between a command's start and its end belongs to the pane of its chat, in view or
    not; the sidebar shows what the engine does, whichever chat it is for.

    Args:
        screen: whose widgets those are.
        stash_budget: host memory the stash may take, for the cache panel.
    """

    def __init__(self, screen: MainScreen, stash_budget: int) -> None:
        self.screen = screen
        self.session: ChatSession | None = None
        """The worker's, with the chat that a command was about last; None without a model."""
        self.running: Command | None = None
        """The command that is being carried out; None while the worker is idle."""
        self.cache: CacheStatus | None = None
        """What the worker has told of the session's cache last."""
        self._cache_shown: CacheStatus | None = None
        self._working: ChatPane | None = None
        self._stash_budget = stash_budget
        self._pieces: list[tuple[str, bool]] = []
        self._fresh: list[tuple[str, bool]] = []
        """Text whose token has not been told yet; a mark may have to stand before it."""
        self._ms: list[float] = []
        self._figures_due: Timer | None = None
        self._params: SamplingParams | None = None
        self._reading_since = 0.0
        self._fetched = False
        """The model that is being loaded had to be fetched first."""

    @property
    def writing(self) -> bool:
        """Whether a reply is being prepared or written, or a model loaded."""
        return self.running is not None and not isinstance(self.running, GetPrice)

    def handle(self, events: list[WorkerEvent]) -> None:
        """Show a batch of events."""
        for event in events:
            match event:
                case TextAdded():
                    self._fresh.append((event.text, event.thinking))
                case TokenGenerated():
                    self._token(event)
                case CacheStatus():
                    self.cache = event
                case _:
                    self._pieces += self._fresh
                    self._fresh = []
                    self._flush()
                    self._show_figures()
                    self._tell(event)
        self._flush()
        if not self._ms:
            self._show_figures()
        elif self._figures_due is None:
            self._figures_due = self.screen.set_timer(FIGURES_EVERY, self._show_figures)

    @property
    def pane(self) -> ChatPane:
        """The pane of the chat that a command was about last."""
        return self._working or self.screen.pane

    def _token(self, event: TokenGenerated) -> None:
        fresh, self._fresh = self._fresh, []
        if self._params is not None and event.params != self._params:
            self._flush()
            self.pane.transcript.mark(changes(self._params, event.params))
        self._params = event.params
        self._pieces += fresh
        self._ms.append(event.ms)

    def _flush(self) -> None:
        """Show the text that has come in, neighbouring pieces of one kind together."""
        pieces, self._pieces = self._pieces, []
        for thinking in (True, False):
            # Reasoning always comes before the answer it leads to.
            if text := "".join(piece for piece, kind in pieces if kind is thinking):
                self.pane.transcript.add(text, thinking)

    def _show_figures(self) -> None:
        """Bring speed and cache up to date."""
        if self._figures_due is not None:
            self._figures_due.stop()
            self._figures_due = None
        ms, self._ms = self._ms, []
        if ms:
            self.screen.speed.add_tokens(ms)
        if self.cache is not self._cache_shown:
            self._show_cache()

    def _tell(self, event: WorkerEvent) -> None:  # noqa: PLR0912 (one arm for each event)
        screen = self.screen
        match event:
            case PullProgress(done=done, total=total, what=what):
                self._fetched = True
                self._progress(what, done, total)
            case LoadProgress(done=done, total=total):
                self._progress("loading", done, total)
            case PrefillProgress():
                self._prefill(event)
            case PrefillFinished():
                self.pane.transcript.status(None)
                screen.speed.phase("writing")
            case CommandStarted(command=command):
                self._begin(command)
            case ReplyStarted():
                self._begin_reply(event)
            case TurnFinished(turn=turn):
                self._end_reply(turn)
            case Paused():
                screen.speed.phase("paused")
                pause, step = map(screen.app.keymap.first, ("chat.pause", "chat.step"))
                self.pane.transcript.status(f"paused · {pause} goes on, {step} takes one token")
            case CommandFinished(command=command):
                self._end(command)
            case CommandFailed(command=command, error=error):
                self._end(command)
                screen.command_failed(command, error)
            case ModelLoaded(session=session):
                self._model_loaded(session)
            case Priced(command=GetPrice(instead_of=None), price=price):
                self.pane.prompt.cost = price_text(price)
            case Priced(price=price):
                screen.messages.show_price(price_text(price))
            case BranchDeleted(deleted=deleted):
                self.pane.deleted = deleted
                screen.branch_deleted(deleted)
            case TitleSuggested(conversation=conversation, title=title):
                if pane := screen.tabs.of(conversation):
                    pane.suggested = title
                    screen.show_tabs()

    def _phase(self, text: str) -> None:
        self.screen.speed.phase(text)
        self.pane.transcript.status(text)

    def _progress(self, what: str, done: int, total: int | None) -> None:
        if not total:
            self._phase(what)
            return
        share = done / total
        self.screen.speed.phase(f"{what} {share:.0%}")
        self.pane.transcript.status(f"{bar(share)} {what} · {share:.0%} of {size_text(total)}")

    def _prefill(self, event: PrefillProgress) -> None:
        now = time.monotonic()
        if event.done == 0:
            self._reading_since = now
        text = f"reading {event.done:,} of {event.new:,} tokens"
        self.screen.speed.phase(text)
        elapsed = now - self._reading_since
        if self.writing and elapsed > SLOW and 0 < event.done < event.new:
            left = elapsed / event.done * (event.new - event.done)
            self.pane.transcript.status(f"{text} · about {left:.0f} s left")

    def _begin(self, command: Command) -> None:
        self.running = command
        self._working = self.screen.tabs.of(command.conversation) or self.screen.pane
        if isinstance(command, Open) and self.pane.conversation is not command.conversation:
            self.pane.open(command.conversation)
        if isinstance(command, Load):
            self._phase(f"loading {command.model}")
        self.screen.commands_changed()

    def _end(self, command: Command) -> None:
        self.running = None
        if not isinstance(command, GetPrice):
            pane = self.pane
            pane.transcript.status(None)
            self.screen.speed.phase("idle")
            pane.show_path()
            pane.show_found()
            self.screen.commands_changed()
            self.screen.price.ask()  # what is cached now makes it another one
        self.screen.tabs.let_go()

    def _begin_reply(self, event: ReplyStarted) -> None:
        pane = self.pane
        self._params = None
        views = pane.views(pane.conversation.path_to(event.reply_id))
        pane.transcript.show(views[:-1])
        reply = replace(views[-1], text=event.text, thinking=event.thinking)
        pane.transcript.begin_reply(reply)

    def _end_reply(self, turn: Turn) -> None:
        pane = self.pane
        pane.turns[turn.reply_id] = turn
        pane.unread = pane is not self.screen.pane
        [view] = pane.views([pane.conversation.node(turn.reply_id)])
        pane.transcript.end_reply(view)
        self.screen.cache.update_turn(turn)

    def _model_loaded(self, session: ChatSession) -> None:
        self.session = session
        llm, screen = session.llm, self.screen
        screen.cache.update_turn(self.pane.last_turn)
        if not isinstance(self.running, Load):
            return  # another chat with the same model
        for pane in screen.tabs.panes:
            pane.use_model(llm)
        facts = (llm.weights, llm.device, f"context {llm.engine.max_seq_len:,}")
        screen.header.show_model(llm.name, *facts)
        screen.sampling.set_defaults(llm.defaults)
        screen.sampling.params = session.params
        screen.personas.model_loaded(llm)
        if self._fetched and llm.name == screen.app.settings.model == Settings().model:
            text = f"{better_than(llm.name)} F4 lists all."
            screen.notify(text, title="A first model", timeout=15, markup=False)
        self._fetched = False
        if llm.template.is_default:
            screen.notify(
                "This model has no chat template of its own; a common one is used.",
                title=llm.name,
                markup=False,
            )

    def _show_cache(self) -> None:
        event = self._cache_shown = self.cache
        if self.session is None or event is None:
            return
        conversation = self.session.conversation
        spans = turn_spans(conversation, conversation.active_path())
        running = event.tokens - sum(span.tokens for span in spans)
        if self.writing and running > 0:
            spans.append(TurnSpan(running, str(len(spans) + 1)))
        self.screen.cache.update_cache(
            spans,
            event.max_seq_len,
            event.kv_bytes,
            event.stash_bytes,
            self._stash_budget,
        )
        self.screen.cache.update_snapshot(event.keeps_cache, event.snapshot_bytes)
        self.show_whose_cache()

    def show_whose_cache(self) -> None:
        """Say which chat the cache panel is about where that is not the one in view."""
        screen, session = self.screen, self.session
        if session is None or session.conversation is screen.pane.conversation:
            screen.cache.update_owner("", "")
            return
        pane = screen.tabs.of(session.conversation)
        title = pane.title if pane else one_line(heading(session.conversation))
        screen.cache.update_owner(title, "another tab" if pane else "closed")


def bar(share: float) -> str:
    """Return a bar of which a share is full."""
    full = round(BAR * share)
    return "━" * full + "─" * (BAR - full)
