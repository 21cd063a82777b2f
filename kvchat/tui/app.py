"""KvchatApp: themes, keys, the main screen, and the worker's life from first paint to exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events, on, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from kvchat.chat.commands import Load
from kvchat.chat.events import WorkerEvent
from kvchat.settings import Settings, log_file, remember, remembered
from kvchat.tui.ascii_filter import AsciiFilter, speaks_unicode
from kvchat.tui.bridge import EngineUpdate, EventBridge
from kvchat.tui.clipboard import fill_clipboard, osc52
from kvchat.tui.hangup import has_hung_up
from kvchat.tui.kept_cache import KeptCache
from kvchat.tui.keymap import Keymap
from kvchat.tui.main_screen import MainScreen
from kvchat.tui.modals.text_editor import TextEditor
from kvchat.tui.modals.theme_picker import ThemePicker
from kvchat.tui.native_output import native_output_to
from kvchat.tui.palette import palette_commands
from kvchat.tui.theming import load_themes

if TYPE_CHECKING:
    from kvchat.chat.keeper import Keeper
    from kvchat.chat.worker import Worker

log = logging.getLogger(__name__)

_ROWS_PER_PROBLEM = 6
"""Of the screen: more of them at once would cover the prompt; the log has all."""


_STDIN = 0
_HANGUP_SECONDS = 1.0
"""How often is looked whether the terminal is still there."""
_HUNG_UP = 128 + 1
"""The exit status after a hang-up, told by the signal or not."""

_NOTED = "theme_note"
"""What is remembered: what was told about the theme last, which need not be told again."""


class KvchatApp(App[None]):
    """The screen program.

    Args:
        settings: what the user has set.
        problems: what was wrong with the settings, to be told.
        resume: the chat to go on with, by the beginning of its id, or `kvchat.chat.keeper.LAST`.
    """

    TITLE = "kvchat"
    CSS_PATH = "kvchat.tcss"
    # Below 60 × 20 there is a sentence instead of the screen; from 100 columns on, a sidebar.
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (20, "-tall")]  # noqa: RUF012
    ESCAPE_TO_MINIMIZE = False
    ENABLE_COMMAND_PALETTE = False  # it has a key of our own: chat.commands

    BINDING_GROUP_TITLE = "Anywhere"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+q",
            "quit",
            "Quit",
            id="app.quit",
            show=False,
            priority=True,
            tooltip="Leave kvchat",
        ),
        Binding(
            "f3",
            "choose_theme",
            "Theme",
            id="app.theme",
            show=False,
            tooltip="Choose a colour theme",
        ),
    ]

    def __init__(
        self, settings: Settings, problems: Sequence[str] = (), *, resume: str | None = None
    ) -> None:
        # Without colours nothing but the terminal's own attributes; Textual alone would go grey.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.use_command_palette = True
        self.settings = settings
        self.speaks_unicode = speaks_unicode()
        """Whether the terminal shows more than ASCII."""
        self.keymap = Keymap.of(settings.keys)
        self.set_keymap(self.keymap.keys)
        self._problems = [*problems, *self.keymap.problems]
        self.themes = load_themes()
        self.themes.register(self)
        choice = self.themes.choose(
            settings.theme,
            color_system=self.console.color_system,
            no_color=self.no_color,
        )
        self.theme = choice.name
        self._problems += [*self.themes.problems, *filter(None, (choice.problem,))]
        if choice.note and remembered().get(_NOTED) != choice.note:
            remember(**{_NOTED: choice.note})
            self._problems.append(choice.note)
        self.bridge = EventBridge(self)
        self.worker: Worker | None = None
        self.keeper: Keeper | None = None
        self._resume = resume
        self._chat_screen: MainScreen | None = None
        self.last_words: list[str] = []
        """What to tell the user when the terminal is theirs again."""
        self._leaving = False
        self.fault = ""
        """What to tell the user after a fault of ours has ended the program."""

    def on_mount(self) -> None:
        """Show the screen, then start the engine thread behind it."""
        self._leave_when_told()
        self.push_screen(MainScreen(self.settings.stash_mb * 2**20))
        self._tell_problems()
        # The first paint must not wait for the interpreter lock that importing torch holds.
        self.call_after_refresh(self._start_worker)

    def _tell_problems(self) -> None:
        for problem in self._problems:
            log.warning("settings: %s", problem)
        shown = self._problems[: max(1, min(4, self.size.height // _ROWS_PER_PROBLEM - 1))]
        if more := len(self._problems) - len(shown):
            shown.append(f"And {more} more; they are in the log, which `kvchat doctor` names.")
        if shown:
            self.notify(
                "\n\n".join(shown),
                title="Settings",
                severity="warning",
                timeout=10 + 5 * len(shown),
                markup=False,
            )

    def _leave_when_told(self) -> None:
        """Give the terminal back when somebody ends the program from outside."""
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                with suppress(NotImplementedError, RuntimeError, ValueError):  # not here
                    loop.add_signal_handler(
                        number, partial(self.exit, return_code=128 + int(number))
                    )
        if not self.is_headless and os.isatty(_STDIN):
            self.set_interval(_HANGUP_SECONDS, self._leave_with_the_terminal)

    def _leave_with_the_terminal(self) -> None:
        if has_hung_up(_STDIN):
            log.warning("the terminal is gone")
            self.exit(return_code=_HUNG_UP)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return what changes lines before they are shown."""
        filters = super().get_line_filters()
        return filters if self.speaks_unicode else [*filters, AsciiFilter()]

    async def on_event(self, event: events.Event) -> None:
        """Let letters reach the prompt wherever the focus is."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            screen = self.screen
            if isinstance(screen, MainScreen):
                screen.make_way_for_letter(event)
        await super().on_event(event)

    @work
    async def _start_worker(self) -> None:
        # Imported here, behind the first paint.
        from kvchat.chat.keeper import Keeper
        from kvchat.chat.worker import Worker

        settings = self.settings
        keeper = self.keeper = Keeper(self._tell_about_saving, **settings.keeping_arguments())

        def take(event: WorkerEvent) -> None:
            keeper.note(event)
            self.bridge.put(event)

        screen = self._chat_screen = self._main_screen
        model = settings.model
        if self._resume is not None:
            model = await screen.chats.resume(self._resume)
        self.worker = Worker(
            take,
            sampling=settings.sampling,
            overflow=settings.overflow,
            system=settings.system or "",
            titles=settings.titles,
            kernels=settings.kernels == "auto",
            snapshots=keeper.snapshots,
        )
        screen.submit(Load(model, settings.load_arguments()))
        screen.submit_early_commands()

    def _tell_about_saving(self, text: str) -> None:
        if self._leaving:
            self.last_words.append(text)
            return
        self.notify(text, title="Saving", severity="warning", timeout=10, markup=False)

    def on_unmount(self) -> None:
        """End the engine thread."""
        if self.worker is not None:
            self.worker.shutdown()
        self._leaving = True
        if self._chat_screen is not None:
            self._chat_screen.chats.remember_tabs()
        if self.keeper is not None:
            self.keeper.close()

    @on(TextEditor.Edited)
    def _price_edit(self, event: TextEditor.Edited) -> None:
        # A dialog's messages come here and not to the screen below it.
        self._main_screen.messages.ask_price(event.editor, event.text)

    @on(EngineUpdate)
    def _take_events(self) -> None:
        self.bridge.drain(self._main_screen.handle_events)

    @property
    def _main_screen(self) -> MainScreen:
        return next(screen for screen in self.screen_stack if isinstance(screen, MainScreen))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the palette's commands: what has a key, the presets, the chat's snapshot."""
        main = self._main_screen
        nodes = (("", main), ("Message: ", main.transcript), ("", self))
        yield from palette_commands(nodes, self.keymap)
        for name in main.sampling.preset_names:
            use = partial(main.sampling.use_preset, name)
            yield SystemCommand(f"Preset: {name}", "Move the sliders to it", use)
        yield KeptCache(main).command()

    def _fatal_error(self) -> None:
        """Put the traceback into the log, not on the user's terminal."""
        log.error("the screen program failed", exc_info=self._exception)
        self.fault = f"kvchat: this should not have happened: {self._exception!r} ({log_file()})"
        self._close_messages_no_wait()

    def copy_to_clipboard(self, text: str) -> None:
        """Copy by the terminal's own way, and by this machine's clipboard program."""
        super().copy_to_clipboard(text)
        if self._driver is not None:
            self._driver.write(osc52(text))
        self.run_worker(partial(fill_clipboard, text), thread=True, exit_on_error=False)

    def action_choose_theme(self) -> None:
        """Choose a theme, for the next start too."""

        def chosen(name: str | None) -> None:
            if name is not None:
                remember(theme=name)

        self.push_screen(ThemePicker(self.themes), chosen)


def run(settings: Settings, problems: Sequence[str] = (), *, resume: str | None = None) -> int:
    """Run the screen program until the user leaves it; return the exit status."""
    with native_output_to(log_file()):
        app = KvchatApp(settings, problems, resume=resume)
        app.run()
    # The interpreter's last collection would walk all that torch has made, which takes a second.
    gc.freeze()
    for text in app.last_words:
        print(f"kvchat: {text}", file=sys.stderr)
    if app.fault:
        print(app.fault, file=sys.stderr)
    return app.return_code or 0
