"""Composing a refresh from the rows that it is about."""

from __future__ import annotations

from collections.abc import Iterable

from textual._compositor import Compositor
from textual.geometry import Region
from textual.strip import Strip


class RowCompositor(Compositor):
    """Asks widgets only for the rows that change on the terminal.

    Textual's own asks every widget whose parent overlaps the change for all of its rows, so that a
    token at the end of the transcript costs as much as painting the whole screen.
    """

    def _get_renders(
        self, crop: Region | None = None
    ) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """Yield region, clip and strips of what is in the rows of `crop`, front to back."""
        crop = crop or self.size.region
        rows = Region(0, crop.y, self.size.width, crop.height)
        for widget, (region, clip) in self.visible_widgets.items():
            # In their whole width: where strips are cut was decided for whole widgets.
            shown = clip.intersection(rows)
            part = region.intersection(shown)
            if part and part.overlaps(crop):
                yield region, shown, widget.render_lines(part.translate(-region.offset))
