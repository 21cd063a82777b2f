"""The sampling panel: a slider for each parameter of `SamplingParams`, and presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.reactive import reactive, var
from textual.widget import Widget
from textual.widgets import Input, Select, Static

from kvchat.engine.types import LIMITS, SamplingParams
from kvchat.tui.glyphs import UNICODE, Glyphs
from kvchat.tui.presets import BUILT_IN, Preset, models_own
from kvchat.tui.scale import Scale
from kvchat.tui.widgets.slider import ParamSlider


@dataclass(frozen=True, slots=True)
class Control:
    """How one parameter is shown."""

    name: str
    label: str
    short: str
    scale: Scale
    about: str


def _scale(name: str, low: float, high: float, step: float, **more: object) -> Scale:
    return Scale(low=low, high=high, step=step, limit=LIMITS[name], **more)  # type: ignore[arg-type]


_OFF_AT_0 = {0.0: "off"}
_OFF_AT_1 = {1.0: "off"}

CONTROLS = (
    Control(
        "temperature",
        "temperature",
        "temp",
        _scale("temperature", 0.0, 2.0, 0.05, words={0.0: "greedy"}),
        "how freely tokens are drawn; low keeps to the likely ones, 0 always takes the likeliest.",
    ),
    Control(
        "top_k",
        "top-k",
        "top-k",
        _scale("top_k", 1, 200, 1, log=True, words=_OFF_AT_0, beside=(0, "low")),
        "draw only from the k most probable tokens.",
    ),
    Control(
        "top_p",
        "top-p",
        "top-p",
        _scale("top_p", 0.01, 1.0, 0.01, words=_OFF_AT_1),
        "draw only from the fewest tokens whose probabilities together reach p.",
    ),
    Control(
        "min_p",
        "min-p",
        "min-p",
        _scale("min_p", 0.0, 0.5, 0.01, words=_OFF_AT_0),
        "leave out tokens less probable than this part of the most probable one.",
    ),
    Control(
        "repetition_penalty",
        "repetition penalty",
        "repeat",
        _scale("repetition_penalty", 1.0, 2.0, 0.01, words=_OFF_AT_1),
        "makes tokens that were said already less probable, by this factor.",
    ),
    Control(
        "presence_penalty",
        "presence penalty",
        "presence",
        _scale("presence_penalty", -2.0, 2.0, 0.05, words=_OFF_AT_0),
        "taken once from the score of each token that was said already.",
    ),
    Control(
        "frequency_penalty",
        "frequency penalty",
        "freq",
        _scale("frequency_penalty", -2.0, 2.0, 0.05, words=_OFF_AT_0),
        "taken from a token's score for each time it was said already.",
    ),
    Control(
        "max_tokens",
        "max tokens",
        "max tok",
        _scale(
            "max_tokens", 16, 8192, 1, log=True, words={None: "no limit"}, beside=(None, "high")
        ),
        "the longest reply, in tokens; without a limit, as long as the context holds.",
    ),
    Control(
        "seed",
        "seed",
        "seed",
        _scale("seed", 0, 9999, 1, words={None: "random"}, beside=(None, "low")),
        "the same seed and settings give the same reply again; random takes a new one each time.",
    ),
)
"""From top to bottom."""

_SHORT_WIDTH = max(len(control.short) for control in CONTROLS)
_CUSTOM, _SAVE, _FORGET = object(), object(), object()
"""What the menu of presets offers besides presets."""


class SamplingPanel(Widget):
    """Sliders for all sampling parameters, and presets for them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Slider above", show=False),
        Binding("down", "move(1)", "Slider below", show=False),
        Binding("escape", "drop_name", "Do not save", show=False),
    ]

    DEFAULT_CSS = """
    SamplingPanel {
        height: auto;
        layout: vertical;
        & > Horizontal { height: 1; }
        & .panel--title { width: 1fr; color: $foreground-muted; text-style: bold; }
        & Select { width: 16; height: 1; }
        & Select SelectCurrent { height: 1; background: transparent; padding: 0; }
        & Select SelectCurrent Static#label { text-align: right; color: $foreground; }
        & Select:focus > SelectCurrent {
            background-tint: $foreground 0%;
            & Static#label { color: $accent; text-style: bold underline; }
        }
        & Select > SelectOverlay { width: 22; }
        & > Input { display: none; margin: 0 0 0 2; }
        &.-naming > Input { display: block; }
    }
    """

    one_line: reactive[bool] = reactive(False)
    """Whether each slider takes one line."""
    _user_presets: var[tuple[Preset, ...]] = var(())

    class ParamsChanged(Message):
        """A slider was moved or a preset chosen.

        Attributes:
            params: All parameters as they are now.
        """

        def __init__(self, params: SamplingParams) -> None:
            super().__init__()
            self.params = params

    class PresetSaved(Message):
        """The user wants to keep the parameters under a name."""

        def __init__(self, name: str, params: SamplingParams) -> None:
            super().__init__()
            self.name = name
            self.params = params

    class PresetForgotten(Message):
        """The user wants a preset of theirs deleted."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(
        self,
        params: SamplingParams | None = None,
        *,
        defaults: SamplingParams | None = None,
        glyphs: Glyphs = UNICODE,
        id: str | None = None,
    ) -> None:
        """Build the panel.

        Args:
            params: The parameters to begin with.
            defaults: What a reset returns to.
            glyphs: Signs to draw with.
            id: The widget's id.
        """
        super().__init__(id=id)
        self._defaults = defaults or SamplingParams()
        self._params = params or self._defaults
        self._preset = ""
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        """Title and presets in one row, sliders below."""
        with Horizontal():
            yield Static("SAMPLING", classes="panel--title")
            yield Select[object](
                self._menu(), allow_blank=False, compact=True, tooltip="Sampling presets"
            )
        yield Input(placeholder="name it, then Enter", compact=True, max_length=32)
        for control in CONTROLS:
            slider = ParamSlider(
                control.label,
                control.scale,
                getattr(self._params, control.name),
                default=getattr(self._defaults, control.name),
                short=control.short,
                short_width=_SHORT_WIDTH,
                about=control.about,
                glyphs=self._glyphs,
                id=control.name,
            )
            slider.one_line = self.one_line
            yield slider

    def on_mount(self) -> None:
        """Show which preset this is."""
        self._show_preset()

    @property
    def params(self) -> SamplingParams:
        """All parameters as they are now; setting them moves the sliders and tells nobody."""
        return self._params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self._params = params
        with self.prevent(ParamSlider.Changed):
            for slider in self.query(ParamSlider):
                slider.value = getattr(params, str(slider.id))
        self._show_preset()

    def set_defaults(self, defaults: SamplingParams) -> None:
        """Take over what a model comes with as what a reset returns to."""
        self._defaults = defaults
        for slider in self.query(ParamSlider):
            slider.default = getattr(defaults, str(slider.id))
        self._show_menu()

    def set_presets(self, presets: Sequence[Preset]) -> None:
        """Offer these presets of the user besides those that come with the program."""
        self._user_presets = tuple(presets)
        if self.has_class("-naming"):
            self.action_drop_name()
        self._show_menu()

    def watch_one_line(self, one_line: bool) -> None:
        """Lay the sliders out."""
        for slider in self.query(ParamSlider):
            slider.one_line = one_line

    @on(ParamSlider.Changed)
    def _slider_moved(self, event: ParamSlider.Changed) -> None:
        event.stop()
        change: dict[str, Any] = {str(event.slider.id): event.value}
        self._params = replace(self._params, **change)
        self._show_preset()
        self.post_message(self.ParamsChanged(self._params))

    # Presets

    @property
    def preset(self) -> str:
        """The name of the preset that the sliders stand at; empty if they are at none."""
        return self._preset

    @property
    def preset_names(self) -> list[str]:
        """The names of all presets."""
        return [preset.name for preset in self._presets()]

    def use_preset(self, name: str) -> None:
        """Move the sliders to a preset, and tell."""
        for preset in self._presets():
            if preset.name == name:
                self._preset = name
                self.params = preset.applied(self._params)
                self.post_message(self.ParamsChanged(self._params))
        self._show_menu()

    def _presets(self) -> list[Preset]:
        return [models_own(self._defaults), *BUILT_IN, *self._user_presets]

    def _menu(self) -> list[tuple[Text, object]]:
        """Return texts that are never read as markup, and what they stand for."""
        entries: list[tuple[str, object]] = [] if self._preset else [("custom", _CUSTOM)]
        entries += [(preset.name, preset.name) for preset in self._presets()]
        entries.append((f"save as{self._glyphs.ellipsis}", _SAVE))
        if self._preset in (preset.name for preset in self._user_presets):
            entries.append((f"forget {self._preset}", _FORGET))
        return [(Text(text), value) for text, value in entries]

    def _show_menu(self) -> None:
        if self.is_mounted:
            with self.prevent(Select.Changed):
                self.query_one(Select).set_options(self._menu())
            self._show_preset()

    def _show_preset(self) -> None:
        """Show the name of the preset the sliders stand at: the chosen one, or the first."""
        if not self.is_mounted:
            return
        matching = [each.name for each in self._presets() if each.matches(self._params)]
        name = self._preset if self._preset in matching else (matching or [""])[0]
        select = self.query_one(Select)
        with self.prevent(Select.Changed):
            if name != self._preset:
                self._preset = name
                select.set_options(self._menu())
            select.value = name or _CUSTOM

    @on(Select.Changed)
    def _preset_chosen(self, event: Select.Changed) -> None:
        event.stop()
        if event.value is _SAVE:
            self._show_preset()
            self.add_class("-naming")
            field = self.query_one(Input)
            field.value = ""
            field.focus()
        elif event.value is _FORGET:
            self.post_message(self.PresetForgotten(self._preset))
            self._show_preset()
        else:
            self.use_preset(str(event.value))

    @on(Input.Submitted)
    def _preset_named(self, event: Input.Submitted) -> None:
        event.stop()
        name = event.value.strip()
        if name:
            self._preset = name
            self.post_message(self.PresetSaved(name, self._params))
        else:
            self.action_drop_name()

    def action_drop_name(self) -> None:
        """Close the field for a preset's name."""
        self.remove_class("-naming")
        self.query_one(Select).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Escape is ours only while a preset is being named."""
        return action != "drop_name" or self.has_class("-naming")

    def action_move(self, by: int) -> None:
        """Go to the slider above or below."""
        sliders = list(self.query(ParamSlider))
        focused = self.screen.focused
        if focused in sliders:
            at = sliders.index(focused) + by
            if 0 <= at < len(sliders):
                sliders[at].focus()
            elif at < 0:
                self.query_one(Select).focus()
