"""What a refresh of some rows writes is what Textual's own compositor would write."""

from __future__ import annotations

import pytest
from running_chat import chat, dictate
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.widget import Widget

from kvchat.tui.compositor import RowCompositor

pytestmark = pytest.mark.usefixtures("own_folders")

COLUMNS, ROWS = 120, 40
REGIONS = [
    (3, 4, 20, 1),
    (0, 2, 80, 30),
    (100, 5, 10, 3),
    (118, 0, 2, 40),
    (0, 38, 120, 2),
    (40, 30, 40, 8),
]


def written(compositor: Compositor, regions: list[Region], widget: Widget) -> str:
    compositor._dirty_regions = set(regions)
    update = compositor.render_partial_update()
    assert isinstance(update, ChopsUpdate)
    return update.render_segments(widget.app.console)


async def test_rows_are_painted_as_textual_paints_them(llm):
    dictate(llm, "One.\n\n* two\n* three")
    async with chat((COLUMNS, ROWS)) as c:
        await c.say("Hi")
        ours = c.screen._compositor
        assert isinstance(ours, RowCompositor)
        textuals = Compositor()
        textuals.__dict__.update(ours.__dict__)
        singles = [[Region(*region)] for region in REGIONS]
        for regions in [*singles, [Region(*region) for region in REGIONS]]:
            expected = written(textuals, regions, c.screen)
            assert written(ours, regions, c.screen) == expected
            assert expected


async def test_the_text_alone_is_painted_without_the_sidebar(llm, monkeypatch):
    dictate(llm, "One.")
    async with chat((COLUMNS, ROWS)) as c:
        await c.say("Hi")
        painted: list[tuple[Widget, int]] = []
        render_lines = Widget.render_lines

        def noted(widget: Widget, crop: Region) -> object:
            painted.append((widget, crop.height))
            return render_lines(widget, crop)

        monkeypatch.setattr(Widget, "render_lines", noted)
        text = c.screen.transcript.region
        written(c.screen._compositor, [Region(text.x, text.y + 2, 20, 1)], c.screen)
        assert (c.screen.transcript, 1) in painted
        assert {height for _, height in painted} == {1}
        widgets = [widget for widget, _ in painted]
        assert not {c.screen.sidebar, c.screen.speed, c.screen.prompt} & {*widgets}
