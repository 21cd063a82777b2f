"""A slider for one number: arrow keys, wheel, drag, click, or the number itself typed in."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import RenderResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive, var
from textual.style import Style
from textual.widget import Widget

from kvchat.tui.glyphs import UNICODE, Glyphs
from kvchat.tui.scale import Scale, Value

_MARK = 2
"""Columns before the label: where the focus is marked."""
_VALUE_WIDTH = 6
_LEAST_TRACK = 5
_LONGEST_ENTRY = 24


class ParamSlider(Widget, can_focus=True):
    """Shows and changes one value of a `Scale`.

    A hollow thumb stands at the default, a filled one elsewhere, with a tick where the default is.
    """

    BINDING_GROUP_TITLE = "Sliders"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Less", id="slider.less", show=False),
        Binding("right", "step(1)", "More", id="slider.more", show=False),
        Binding("shift+left", "step(-10)", "Much less", id="slider.much-less", show=False),
        Binding("shift+right", "step(10)", "Much more", id="slider.much-more", show=False),
        Binding("home", "first", "Lowest", id="slider.lowest", show=False),
        Binding("end", "last", "Highest", id="slider.highest", show=False),
        Binding(
            "r,backspace,delete",
            "reset",
            "Reset",
            id="slider.reset",
            tooltip="Back to the model's default",
        ),
        Binding("enter", "type", "Type a value", id="slider.type"),
    ]

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "param-slider--label",
        "param-slider--value",
        "param-slider--word",
        "param-slider--filled",
        "param-slider--rest",
        "param-slider--thumb",
        "param-slider--tick",
        "param-slider--entry",
        "param-slider--hint",
        "param-slider--error",
    }

    DEFAULT_CSS = """
    ParamSlider {
        height: 2;
        &.-one-line { height: 1; }
        & > .param-slider--label { color: $foreground 75%; }
        & > .param-slider--value { color: $foreground; }
        & > .param-slider--word { color: $foreground-muted; }
        & > .param-slider--filled { color: $primary; }
        & > .param-slider--rest { color: $foreground 25%; }
        & > .param-slider--thumb { color: $primary; text-style: bold; }
        & > .param-slider--tick { color: $foreground 50%; }
        & > .param-slider--entry { color: $foreground; text-style: bold underline; }
        & > .param-slider--hint { color: $foreground-muted; }
        & > .param-slider--error { color: $text-error; }
        &:hover > .param-slider--label { color: $foreground; }
        &:focus > .param-slider--label { color: $accent; text-style: bold; }
        &:focus > .param-slider--value { text-style: bold; }
        &:focus > .param-slider--word { color: $foreground; text-style: bold; }
        &:focus > .param-slider--thumb { color: $accent; }
        &:focus > .param-slider--filled { color: $accent; }
        &:disabled { opacity: 50%; }
    }
    """

    ALLOW_SELECT = False

    value: reactive[Value] = reactive(None, init=False)
    """The value now; setting it clamps it and posts `Changed`."""
    default: reactive[Value] = reactive(None, init=False)
    """What a reset returns to."""
    one_line: reactive[bool] = reactive(False, toggle_class="-one-line")
    """Label, track and value side by side instead of the track below."""
    entry: reactive[str | None] = reactive(None)
    """What has been typed so far; None while nothing is being typed."""
    error: reactive[str] = reactive("")
    """Why the typed text is no value."""
    _dragging = var(False)

    class Changed(Message):
        """The value has changed.

        Attributes:
            slider: The slider.
            value: Its new value.
        """

        def __init__(self, slider: ParamSlider, value: Value) -> None:
            super().__init__()
            self.slider = slider
            self.value = value

        @property
        def control(self) -> ParamSlider:
            """The slider."""
            return self.slider

    def __init__(
        self,
        label: str,
        scale: Scale,
        value: Value,
        *,
        default: Value,
        short: str = "",
        short_width: int = 0,
        about: str = "",
        glyphs: Glyphs = UNICODE,
        name: str | None = None,
        id: str | None = None,
        classes: str | None = None,
        disabled: bool = False,
    ) -> None:
        """Build a slider.

        Args:
            label: What the value is.
            scale: Its range and steps.
            value: The value to begin with.
            default: What a reset returns to.
            short: The label where everything stands in one line.
            short_width: Columns for it, so that sliders below each other align.
            about: One sentence that explains the value.
            glyphs: Signs to draw with.
            name: The widget's name.
            id: The widget's id.
            classes: The widget's classes.
            disabled: Whether it can be used.
        """
        super().__init__(name=name, id=id, classes=classes, disabled=disabled)
        self.label = label
        self.short = short or label
        self.scale = scale
        self.glyphs = glyphs
        self._short_width = max(short_width, len(self.short))
        self.set_reactive(ParamSlider.value, scale.clamp(value))
        self.set_reactive(ParamSlider.default, scale.clamp(default))
        if about:
            self.tooltip = f"{label}: {about}"
            self.HELP = (  # type: ignore[misc]  # each slider explains its own value
                f"## {label}\n\n{about}\n\nLeft and right change it, with Shift tenfold; digits "
                "type a value; `r` goes back to the model's default."
            )

    def validate_value(self, value: Value) -> Value:
        """Keep the value inside its limits."""
        return self.scale.clamp(value)

    def validate_default(self, value: Value) -> Value:
        """Keep the default inside the limits."""
        return self.scale.clamp(value)

    def watch_value(self, value: Value) -> None:
        """Tell of the change at once."""
        self.post_message(self.Changed(self, value))

    @property
    def text(self) -> str:
        """The value as it is written."""
        return self.scale.format(self.value)

    # Drawing

    def _track(self) -> tuple[int, int, int]:
        """Return the track's first column, width and row."""
        width = self.content_size.width
        if not self.one_line:
            return _MARK, max(0, width - _MARK), 1
        start = _MARK + self._short_width + 1
        room = width - start - 1
        value_width = max(_VALUE_WIDTH, min(len(self.text), room - _LEAST_TRACK))
        return start, max(0, room - value_width), 0

    def render(self) -> RenderResult:
        """Draw label, track and value."""
        width = self.content_size.width
        label = self.short.ljust(self._short_width) if self.one_line else self.label
        mark = self.glyphs.focus if self.has_focus else ""
        head = Content.styled(f"{mark:{_MARK}}{label} ", self._style("label"))
        room = max(0, width - head.cell_length)
        if self.entry is not None:
            return self._draw_entry(head, room)
        track = self._draw_track()
        if not self.one_line:
            return Content.assemble(head, *self._draw_value(room), "\n", " " * _MARK, track)
        return Content.assemble(head, track, *self._draw_value(room - track.cell_length))

    def _draw_value(self, room: int) -> tuple[str, Content]:
        text = self._cut(self.text, max(0, room - 1))
        style = self._style("word" if self.value in self.scale.words else "value")
        return " " * (room - len(text)), Content.styled(text, style)

    def _draw_track(self) -> Content:
        _, cells, _ = self._track()
        if cells < 2:
            return Content(" " * cells)
        thumb = self._cell(self.value, cells)
        tick = self._cell(self.default, cells)
        at_default = self.value == self.default
        parts: list[tuple[str, str]] = [(self.glyphs.filled, "filled")] * thumb
        parts.append((self.glyphs.thumb_at_default if at_default else self.glyphs.thumb, "thumb"))
        parts += [(self.glyphs.rest, "rest")] * (cells - thumb - 1)
        if tick != thumb:
            parts[tick] = (self.glyphs.default_tick, "tick")
        return Content.assemble(*((sign, self._style(part)) for sign, part in parts))

    def _draw_entry(self, head: Content, room: int) -> Content:
        typed = f"{self.entry}{self.glyphs.cursor}"[-room:] if room else ""
        hint = f"{'! ' if self.error else ''}{self.error or self.scale.range_text}"
        hint_style = self._style("error" if self.error else "hint")
        entry = Content.styled(typed, self._style("entry"))
        gap = room - len(typed)
        if not self.one_line:
            hint = self._cut(hint, max(0, self.content_size.width - _MARK))
            return Content.assemble(
                head, " " * gap, entry, "\n", " " * _MARK, Content.styled(hint, hint_style)
            )
        hint = self._cut(hint, max(0, gap - 1)).ljust(gap)
        return Content.assemble(head, Content.styled(hint, hint_style), entry)

    def _cell(self, value: Value, cells: int) -> int:
        return round(self.scale.position(value) * (cells - 1))

    def _cut(self, text: str, room: int) -> str:
        return text if len(text) <= room else text[: max(0, room - 1)] + self.glyphs.ellipsis[:room]

    def _style(self, part: str) -> Style:
        return self.get_visual_style(f"param-slider--{part}", partial=True)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a value is typed, keys belong to the text."""
        own = {"step", "first", "last", "reset", "type"}
        return not (action in own and self.entry is not None)

    def action_step(self, steps: int) -> None:
        """Change the value by some steps."""
        self.value = self.scale.stepped(self.value, steps)

    def action_first(self) -> None:
        """Go to the left end."""
        self.value = self.scale.first

    def action_last(self) -> None:
        """Go to the right end."""
        self.value = self.scale.last

    def action_reset(self) -> None:
        """Go back to the default."""
        self.value = self.default

    def action_type(self) -> None:
        """Begin to type a value."""
        self.entry = ""

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        """Digits begin an entry, and whatever can be printed belongs to one."""
        return character is not None and (
            character.isprintable() if self.entry is not None else _begins_number(character)
        )

    def on_key(self, event: events.Key) -> None:
        """Collect what is typed."""
        character = event.character if event.is_printable else None
        if self.entry is None:
            if not (character and _begins_number(character)):
                return
            self._enter_text(character)
        elif event.key == "enter":
            self._commit()
        elif event.key == "escape":
            self._leave_entry()
        elif event.key == "backspace":
            self.error = ""
            self.entry = self.entry[:-1]
        elif character:
            self._enter_text(character)
        else:
            return
        event.stop()
        event.prevent_default()

    def on_paste(self, event: events.Paste) -> None:
        """A pasted number is typed."""
        event.stop()
        self._enter_text(event.text.strip())

    def on_blur(self) -> None:
        """Leaving takes over what was typed, if it is a value."""
        if self.entry is not None:
            self._commit()
            self._leave_entry()

    def _enter_text(self, text: str) -> None:
        self.error = ""
        self.entry = ((self.entry or "") + "".join(filter(str.isprintable, text)))[:_LONGEST_ENTRY]

    def _commit(self) -> None:
        if not self.entry:
            self._leave_entry()
            return
        try:
            value = self.scale.parse(self.entry)
        except ValueError as problem:
            self.error = str(problem)
            return
        self._leave_entry()
        self.value = value

    def _leave_entry(self) -> None:
        self.error = ""
        self.entry = None

    # Mouse

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """On the track: set the value and begin to drag. On the value: begin to type."""
        offset = event.get_content_offset(self)
        if event.button != 1 or offset is None:
            return
        start, cells, row = self._track()
        if offset.y == row and start <= offset.x < start + cells:
            self._leave_entry()
            self._dragging = True
            self.capture_mouse()
            self._drag_to(offset.x)
        elif offset.x >= self.content_size.width - _VALUE_WIDTH and self.entry is None:
            self.action_type()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow the mouse while dragging."""
        if self._dragging:
            self._drag_to(event.get_content_offset_capture(self).x)

    def on_mouse_up(self) -> None:
        """End a drag."""
        if self._dragging:
            self._dragging = False
            self.release_mouse()

    def _drag_to(self, x: int) -> None:
        start, cells, _ = self._track()
        last = max(1, cells - 1)
        neutral = [value for value in self.scale.words if value != self.default]
        self.value = self.scale.value_at(
            (x - start) / last, resolution=1 / last, magnets=[self.default, *neutral]
        )

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Wheel up: more."""
        self._wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Wheel down: less."""
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, steps: int) -> None:
        # Where the surroundings scroll, a slider that happens to pass under the mouse must not
        # swallow the wheel, let alone change.
        scrolls = any(isinstance(node, Widget) and node.max_scroll_y for node in self.ancestors)
        if self.entry is None and (self.has_focus or not scrolls):
            event.stop()
            event.prevent_default()
            self.action_step(steps * (10 if event.shift else 1))


def _begins_number(character: str) -> bool:
    return character.isdecimal() or character in ".-"
