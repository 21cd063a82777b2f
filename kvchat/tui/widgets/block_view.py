"""A view of blocks of lines: only what is in view is wrapped and painted."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar

from rich.style import Style
from textual.cache import LRUCache
from textual.geometry import Offset, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from kvchat.tui.widgets.message_block import Block, Place
from kvchat.tui.widgets.row_painter import MARGIN, paint, selected_part

WIDEST = 100
"""Cells of a row: longer ones are tiring to read."""

_BLOCK = 1 << 32
"""A line's number in the view is its block's times this, and its own in the block: selections
keep their place when the width changes."""


class BlockView(ScrollView, can_focus=True):
    """Shows blocks from top to bottom; their heights are estimated until they come into view.

    The view follows the end until the user scrolls away from it, and again once they return.
    What is in view never moves by itself otherwise.
    """

    ALLOW_SELECT = True

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "row--bullet",
        "row--code",
        "row--code-block",
        "row--code-builtin",
        "row--code-comment",
        "row--code-deleted",
        "row--code-keyword",
        "row--code-label",
        "row--code-name",
        "row--code-number",
        "row--code-string",
        "row--dropped",
        "row--em",
        "row--faint",
        "row--greeting",
        "row--heading",
        "row--key",
        "row--label-assistant",
        "row--label-system",
        "row--label-user",
        "row--link",
        "row--mark",
        "row--marker",
        "row--siblings",
        "row--status",
        "row--strong",
        "row--struck",
        "row--thinking",
    }

    DEFAULT_CSS = """
    BlockView {
        overflow-x: hidden;
        overflow-y: auto;
        scrollbar-gutter: stable;
        scrollbar-size-vertical: 1;
        & > .row--label-user { color: $text-primary; text-style: bold; }
        & > .row--label-assistant { color: $text-secondary; text-style: bold; }
        & > .row--label-system { color: $text-muted; text-style: bold; }
        & > .row--siblings { color: $text-accent; }
        & > .row--marker { color: $primary; }
        & > .row--thinking { color: $text-muted; text-style: italic; }
        & > .row--faint { color: $text-muted; }
        & > .row--mark { color: $text-muted; text-style: italic; }
        & > .row--heading { color: $text-primary; text-style: bold; }
        & > .row--strong { text-style: bold; }
        & > .row--em { text-style: italic; }
        & > .row--struck { text-style: strike; }
        & > .row--code { color: $text-accent; background: $foreground 6%; }
        & > .row--link { color: $text-accent; text-style: underline; }
        & > .row--bullet { color: $text-secondary; }
        & > .row--code-block { background: $foreground 6%; }
        & > .row--code-label { color: $text-muted; text-style: italic; }
        & > .row--code-comment { color: $text-muted; text-style: italic; }
        & > .row--code-keyword { color: $text-primary; text-style: bold; }
        & > .row--code-string { color: $text-success; }
        & > .row--code-number { color: $text-warning; }
        & > .row--code-name { color: $text-accent; }
        & > .row--code-builtin { color: $text-secondary; }
        & > .row--code-deleted { color: $text-error; }
        & > .row--dropped { color: $text-disabled; }
        & > .row--greeting { color: $text-primary; text-style: bold; }
        & > .row--key { color: $text-accent; text-style: bold; }
        & > .row--status { color: $text-muted; }
    }
    """

    def __init__(
        self, *, name: str | None = None, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._blocks: list[Block] = []
        self._starts = [0]
        """The first row of each block, and the number of all rows."""
        self._text_width = 0
        """Cells for text in a row; 0 while nothing is laid out, and `_starts` means nothing."""
        self._follow = True
        self._kept: tuple[Block, Place] | None = None
        self._settling = False
        self._strips: LRUCache[tuple[Block, int, bool], Strip] = LRUCache(1000)
        self._looks: dict[str, Style] = {}

    def blocks(self) -> list[Block]:
        """Return what is to be shown, from top to bottom."""
        return []

    def is_current(self, block: Block) -> bool:
        """Tell whether `block` has the marker."""
        return False

    # Changing blocks

    @contextmanager
    def changing(self, first: int = 0) -> Iterator[None]:
        """Keep what is at the top of the view in its place while blocks are changed.

        Args:
            first: The first block whose lines may become others.
        """
        held = self._held()
        kept = set(self._blocks[:first])
        yield
        self._deselect(first)
        for key in [key for key in self._strips.keys() if key[0] not in kept]:  # noqa: SIM118
            self._strips.discard(key)
        self._show_blocks(held)

    def grow(self, block: Block, first: int) -> None:
        """Take up rows that `block` got at its end, from `first` on."""
        if not self._text_width:
            return
        index = self._blocks.index(block)
        start, end = self._starts[index : index + 2]
        growth = block.lay_out(self._text_width) - (end - start)
        for row in range(first, len(block.rows)):
            self._strips.discard((block, row, False))
            self._strips.discard((block, row, True))
        self._starts[index + 1 :] = [later + growth for later in self._starts[index + 1 :]]
        if not growth:
            self.refresh_lines(start + first, end - start - first)
        elif self._follow:
            self._scroll(self._starts[-1])
        else:
            self._set_height(self._starts[-1])
            self.refresh_lines(start + first, self.size.height)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._follow = True
        self._settle(None)

    def reveal(self, block: Block) -> None:
        """Scroll to the start of a block, unless all of it is in view."""
        if not self._text_width:
            return
        index = self._blocks.index(block)
        top = round(self.scroll_y)
        start, end = self._starts[index : index + 2]
        if start < top or end > top + self.size.height:
            self._fix(index, 0, 0)
            self._follow = self.scroll_y >= self.max_scroll_y
        self.refresh()

    # Heights and places

    def _held(self) -> tuple[Block, Place] | None:
        """Return what is at the top of the view; None where the view follows the end."""
        if self._follow:
            return None
        if not self._text_width:
            return self._kept
        index, row = self._at(round(self.scroll_y))
        block = self._blocks[index]
        if self._kept and self._kept[0] is block and block.row_of(self._kept[1]) == row:
            return self._kept  # more exact than the start of its row: many resizes do not drift
        return block, block.place(row)

    def _at(self, row: int) -> tuple[int, int]:
        """Return the block that a row of the view is in, and the row there."""
        index = min(max(0, bisect_right(self._starts, row) - 1), len(self._blocks) - 1)
        return index, row - self._starts[index]

    def _show_blocks(self, held: tuple[Block, Place] | None) -> None:
        self._blocks = self.blocks()
        self._settle(held)

    def _settle(self, held: tuple[Block, Place] | None) -> None:
        """Lay out what is in view: from what is held on, or what is before the end."""
        self._kept = held
        if not self.size or not self._blocks:
            self._text_width = 0  # out of sight: all is laid out when it comes back
            return
        self._text_width = self._row_width
        if held and held[0] in self._blocks:
            block, place = held
            block.lay_out(self._text_width)
            self._fix(self._blocks.index(block), block.row_of(place), 0)
        else:
            self._follow = True
            self._fix(len(self._blocks) - 1, -1, self.size.height - 1)

    def _fix(self, index: int, row: int, at: int) -> None:
        """Scroll to where a row of a block is `at` rows below the top.

        Blocks in view are laid out first: their true heights may be others than was estimated,
        and what was in view must not move for that.
        """
        blocks, width = self._blocks, self._text_width
        height = blocks[index].lay_out(width)
        row = min(row, height - 1) if row >= 0 else height - 1
        above = at - row
        below = self.size.height - at - (height - row)
        first = last = index
        while above > 0 or below > 0:
            if above > 0 and first > 0:
                first -= 1
                above -= blocks[first].lay_out(width)
            elif below > 0 and last < len(blocks) - 1:
                last += 1
                below -= blocks[last].lay_out(width)
            elif above > 0 and last < len(blocks) - 1:
                above, below = 0, below + above
            elif below > 0 and first > 0:
                above, below = above + below, 0
            else:
                break
        self._starts = [0, *accumulate(block.height(width) for block in blocks)]
        self._scroll(self._starts[index] + row - at)

    def _scroll(self, top: int) -> None:
        self._settling = True
        self._set_height(self._starts[-1])
        top = max(0, min(top, self.max_scroll_y))
        self.scroll_target_y = self.scroll_y = top
        if self.max_scroll_y:
            self.vertical_scrollbar.position = top  # which a bar that is about to appear misses
        self._settling = False
        self.refresh()

    def _set_height(self, height: int) -> None:
        size = Size(self.size.width, height)
        if self.show_vertical_scrollbar == (height > self.size.height):
            # A new row of the reply must not lay out the whole screen again.
            self.set_reactive(BlockView.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = height
        else:
            self.virtual_size = size

    @property
    def _row_width(self) -> int:
        """Cells for text in a row."""
        return max(8, min(WIDEST, self.size.width - MARGIN - 1))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follow the end from now on, or no longer; keep rows in place that are still in view."""
        super().watch_scroll_y(old_value, new_value)
        if self._settling or not self._text_width:
            return
        old, new = round(old_value), round(new_value)
        self._follow = new >= self.max_scroll_y
        if self._follow:
            self._settle(None)
        elif abs(new - old) <= 2 * self.size.height:
            self._fix(*self._at(old), old - new)
        else:
            self._fix(*self._at(new), 0)

    def on_resize(self) -> None:
        """Wrap for the new width, what was at the top still there."""
        held = self._held()
        self._strips.clear()
        self._show_blocks(held)

    def scroll_to(self, x: float | None = None, y: float | None = None, **options: Any) -> None:
        """Scroll at once: heights that are still estimates leave nothing to animate towards."""
        super().scroll_to(x, y, **{**options, "animate": False})

    def action_scroll_end(self) -> None:
        """Go to the end and stay there."""
        self.follow()

    # How it is painted

    def render_line(self, y: int) -> Strip:
        """Return a row of the view."""
        index, row = self._at(round(self.scroll_y) + y)
        block = self._blocks[index] if self._blocks else None
        if block is None or row >= len(block.rows):
            return Strip.blank(self.size.width, self._look(""))
        marked = row > 0 and self.has_focus and self.is_current(block)
        line, start, end = block.rows[row]
        number = index * _BLOCK + line
        selection = self.text_selection
        if selection and selection.get_span(number) is None:
            selection = None
        key = (block, row, marked)
        strip = None if selection else self._strips.get(key)
        if strip is None:
            strip = paint(
                block.lines[line],
                start,
                end,
                number=number,
                width=self._text_width,
                style=self._dropped_look if block.dropped else self._look,
                marked=marked,
                selection=selection,
            ).adjust_cell_length(self.size.width, self._look(""))
            if not selection:
                self._strips[key] = strip
        return strip

    def _look(self, names: str) -> Style:
        """Return the style for names separated by spaces; later ones win."""
        if names not in self._looks:
            look = self.rich_style
            for name in names.split():
                look += self._part_look(name)
            self._looks[names] = look
        return self._looks[names]

    def _part_look(self, name: str) -> Style:
        """Return what the style of this name changes in those before it."""
        if name == "selected":
            return self.screen.get_component_rich_style("screen--selection")
        component = f"row--{name}"
        rules = self.get_component_rich_style(component, partial=True)
        blended = self.get_component_rich_style(component)
        return Style(
            color=blended.color if rules.color else None,
            bgcolor=blended.bgcolor if rules.bgcolor else None,
            bold=rules.bold,
            italic=rules.italic,
            underline=rules.underline,
            strike=rules.strike,
            dim=rules.dim,
        )

    def _dropped_look(self, names: str) -> Style:
        return self._look(names if names == "marker" else f"{names} dropped")

    def notify_style_update(self) -> None:
        """Paint with the new theme's colours."""
        super().notify_style_update()
        self._strips.clear()
        self._looks.clear()

    # Selecting and copying with the mouse

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the selected text with the line feeds of the original and no others."""
        held = self._held()
        first = selection.start.y // _BLOCK if selection.start else 0
        last = selection.end.y // _BLOCK if selection.end else len(self._blocks) - 1
        copied = []
        for index, block in enumerate(self._blocks[first : last + 1], first):
            block.lay_out(self._text_width)
            for number, line in enumerate(block.lines, index * _BLOCK):
                if line.copied and selection.get_span(number):
                    copied.append(line.copy(*selected_part(line, selection, number)))
        self._settle(held)
        return "\n".join(copied), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Paint anew."""
        self.refresh()

    def _deselect(self, index: int) -> None:
        """Forget a selection that reaches block `index`, whose lines become others."""
        selection = self.text_selection if self.is_attached else None
        if selection and (selection.end is None or selection.end.y >= index * _BLOCK):
            self.screen.clear_selection()

    def block_at(self, offset: Offset) -> Block | None:
        """Return the block of an offset that a cell carries."""
        index = offset.y // _BLOCK
        return self._blocks[index] if index < len(self._blocks) else None

    def select_around(self, offset: Offset, whole_line: bool) -> None:
        """Select the word, or the line, at an offset that a cell carries."""
        x, y = offset
        block = self.block_at(offset)
        text = block.lines[y % _BLOCK].text if block else ""
        start, end = 0, len(text)
        if not whole_line:
            words = (found.span() for found in re.finditer(r"\w+|\W", text))
            start, end = next(((a, b) for a, b in words if a <= x < b), (end, end))
        self.screen.selections = {self: Selection(Offset(start, y), Offset(end, y))}
