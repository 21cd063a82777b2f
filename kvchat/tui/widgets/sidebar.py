"""The sidebar: sampling, cache and speed below each other, as roomy as the height allows."""

from __future__ import annotations

from textual import events, on
from textual.app import ComposeResult
from textual.containers import VerticalScroll

from kvchat.engine.errors import KvchatError
from kvchat.engine.types import SamplingParams
from kvchat.tui.glyphs import UNICODE, Glyphs
from kvchat.tui.presets import forget_preset, load_presets, save_preset
from kvchat.tui.widgets.cache_panel import CachePanel
from kvchat.tui.widgets.sampling import SamplingPanel
from kvchat.tui.widgets.speed_panel import SpeedPanel

_GAPS_FROM = 21
_PANELS_ROOMY_FROM = 31
_SLIDERS_ROOMY_FROM = 40
"""Rows of the sidebar from which there are gaps, whole panels, and sliders of two lines."""
_ROWS_BESIDE = 2
"""Rows of the terminal that header and footer take."""


class Sidebar(VerticalScroll, can_focus=False):
    """Holds the panels, and keeps the user's presets."""

    DEFAULT_CSS = """
    Sidebar {
        width: 34;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        & > * { margin: 0 0 1 0; }
        & > SpeedPanel { margin: 0; }
        &.-tight {
            & > * { margin: 0; }
            & > SpeedPanel { height: 1; }
        }
    }
    """

    def __init__(
        self,
        params: SamplingParams | None = None,
        *,
        glyphs: Glyphs = UNICODE,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        """Build the panels.

        Args:
            params: The sampling parameters to begin with.
            glyphs: Signs to draw with.
            id: The widget's id.
            classes: The widget's classes.
        """
        super().__init__(id=id, classes=classes)
        self.sampling = SamplingPanel(params, glyphs=glyphs, id="sampling")
        self.cache = CachePanel(glyphs=glyphs, id="cache")
        self.speed = SpeedPanel(glyphs=glyphs, id="speed")

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        self._fit(self.app.size.height - _ROWS_BESIDE)  # the first layout is right already
        yield self.sampling
        yield self.cache
        yield self.speed

    def on_mount(self) -> None:
        """Offer the user's presets."""
        self._offer_presets()

    def on_resize(self, event: events.Resize) -> None:
        """Use the rows there are."""
        self._fit(event.size.height)

    def _fit(self, rows: int) -> None:
        self.set_class(rows < _GAPS_FROM, "-tight")
        self.sampling.one_line = rows < _SLIDERS_ROOMY_FROM
        self.cache.compact = self.speed.compact = rows < _PANELS_ROOMY_FROM

    @on(SamplingPanel.PresetSaved)
    def _save_preset(self, event: SamplingPanel.PresetSaved) -> None:
        event.stop()
        try:
            save_preset(event.name, event.params)
        except KvchatError as error:
            self._complain(str(error))
        else:
            self._offer_presets()
            self.notify(f"Saved as '{event.name}'.", markup=False)

    @on(SamplingPanel.PresetForgotten)
    def _forget_preset(self, event: SamplingPanel.PresetForgotten) -> None:
        event.stop()
        try:
            forget_preset(event.name)
        except KvchatError as error:
            self._complain(str(error))
        else:
            self._offer_presets()

    def _offer_presets(self) -> None:
        try:
            presets, problems = load_presets()
        except KvchatError as error:
            presets, problems = [], [str(error)]
        self.sampling.set_presets(presets)
        for problem in problems:
            self._complain(problem)

    def _complain(self, text: str) -> None:
        self.notify(text, title="Presets", severity="error", markup=False)
