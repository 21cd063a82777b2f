"""The cache panel and the speed panel: what they show, also of strange figures."""

from __future__ import annotations

import pytest
from helpers import wait_until
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from kvchat.chat.ledger import Turn
from kvchat.tui.glyphs import ASCII, UNICODE, Glyphs
from kvchat.tui.widgets.cache_panel import CachePanel, TurnSpan, mebibytes, share_cells
from kvchat.tui.widgets.speed_panel import SpeedPanel, sparkline

MIB = 2**20


class Host(App[None]):
    def __init__(self, glyphs: Glyphs = UNICODE, width: int = 32) -> None:
        super().__init__()
        self.cache = CachePanel(glyphs=glyphs)
        self.speed = SpeedPanel(glyphs=glyphs)
        self.cache.styles.width = self.speed.styles.width = width

    def compose(self) -> ComposeResult:
        yield self.cache
        yield self.speed

    def rows(self) -> list[str]:
        """What the cache panel shows."""
        return [
            "".join(segment.text for segment in self.cache.render_line(y)).rstrip()
            for y in range(self.cache.size.height)
        ]

    def screen_text(self) -> str:
        """What the whole screen shows."""
        return "\n".join(
            "".join(segment.text for segment in strip)
            for strip in self.screen._compositor.render_strips()
        )


def turn(**changes) -> Turn:
    figures = {
        "reply_id": "x", "reused": 1412, "restored": 0, "new": 38, "decoded": 210,
        "finish_reason": "stop", "prefill_ms": 80.0, "ttft_ms": 90.0, "decode_tps": 131.0,
        "uncached_ttft_ms": 3190.0, "divergence": None,
    }  # fmt: skip
    return Turn(**(figures | changes))


def fill(panel: CachePanel) -> None:
    spans = [TurnSpan(256, "S"), TurnSpan(512, "1"), TurnSpan(256, "2")]
    panel.update_cache(spans, 4096, 45 * MIB, 12 * MIB, 512 * MIB)
    panel.update_turn(turn())


async def test_before_a_model_is_loaded() -> None:
    app = Host()
    async with app.run_test():
        assert app.rows()[:2] == ["CONTEXT             no model yet", "─" * 32]


async def test_the_whole_panel() -> None:
    app = Host()
    async with app.run_test() as pilot:
        fill(app.cache)
        await pilot.pause()
        assert app.rows() == [
            "CONTEXT           1,024 of 4,096",
            "━━════━━────────────────────────",
            "S━━━━━━━1═══════════════2━━━━━━━",
            "25% used              3,072 free",
            "KV cache                45.0 MiB",
            "stash            12.0 of 512 MiB",
            "",
            "LAST TURN      saved about 3.1 s",
            "reused                     1,412",
            "new                           38",
            "decoded                      210",
            "first token               0.09 s",
        ]


async def test_drafts_that_were_drawn_are_told() -> None:
    app = Host()
    async with app.run_test() as pilot:
        fill(app.cache)
        app.cache.update_turn(turn(decoded=2210, proposed=1600, accepted=1340))
        await pilot.pause()
        assert app.rows()[10] == "decoded  2,210 (61% from drafts)"


async def test_the_compact_panel_leaves_out_no_figure() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.cache.compact = True
        fill(app.cache)
        await wait_until(pilot, lambda: app.cache.size.height == 7)
        assert app.rows()[3:] == [
            "KV 45.0 MiB   stash 12.0/512 MiB",
            "reused 1,412 · new 38",
            "decoded 210          TTFT 0.09 s",
            "saved about 3.1 s",
        ]


async def test_neighbouring_turns_differ_in_more_than_colour() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.cache.update_cache([TurnSpan(100, "")] * 4, 400, 0, 0, 0)
        await pilot.pause()
        assert app.rows()[1] == "━" * 8 + "═" * 8 + "━" * 8 + "═" * 8
        styles = [segment.style.color for segment in app.cache.render_line(1) if segment.style]
        assert len(set(styles[:3])) == 3


async def test_what_came_back_from_the_stash_is_said() -> None:
    app = Host()
    async with app.run_test() as pilot:
        fill(app.cache)
        app.cache.update_turn(turn(restored=300))
        await pilot.pause()
        assert app.rows()[8] == "reused    1,412 (300 from stash)"
        app.cache.update_turn(turn(uncached_ttft_ms=None))
        await pilot.pause()
        assert app.rows()[7] == "LAST TURN"
        app.cache.update_turn(None)
        await pilot.pause()
        assert app.rows()[7:] == [""] * 5


@pytest.mark.parametrize("width", [0, 1, 7, 32])
@pytest.mark.parametrize("compact", [False, True])
async def test_strange_figures_and_widths(width: int, compact: bool) -> None:
    app = Host(width=width)
    async with app.run_test() as pilot:
        app.cache.compact = compact
        spans = [TurnSpan(10**9, "\x1b[31m\n[red]"), TurnSpan(0, "x"), *[TurnSpan(1, "中")] * 500]
        app.cache.update_cache(spans, 10, 2**60, 2**60, 0)
        app.cache.update_turn(turn(reused=10**12, ttft_ms=1e9))
        await pilot.pause()
        assert "\x1b" not in "".join(app.rows())
        assert len(app.rows()) == (7 if compact else 12)


async def test_panels_are_plain_ascii_where_that_is_all_there_is() -> None:
    app = Host(ASCII)
    async with app.run_test() as pilot:
        fill(app.cache)
        app.speed.add_tokens([8.0, 9.0, 30.0])
        await wait_until(pilot, lambda: "tok/s" in app.screen_text())
        assert app.screen_text().isascii()


@given(st.lists(st.integers(0, 10**6), max_size=50), st.integers(0, 10**6), st.integers(0, 100))
def test_cells_are_shared_to_scale(amounts: list[int], free: int, cells: int) -> None:
    total = max(sum(amounts) + free, 1)
    shared = share_cells(amounts, total, cells)
    assert len(shared) == len(amounts) and all(n >= 0 for n in shared)
    exact = sum(amounts) * cells / total
    assert abs(sum(shared) - exact) <= 1
    assert sum(shared) >= (1 if sum(amounts) and cells else 0)
    for n, amount in zip(shared, amounts, strict=True):
        assert abs(n - amount * cells / total) <= 1.0001 + (exact < 1)


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 MiB"), (MIB // 2, "0.5 MiB"), (512 * MIB, "512 MiB"), (20 * 2**30, "20.0 GiB")],
)
def test_bytes_as_people_read_them(n: int, text: str) -> None:
    assert mebibytes(n) == text


async def test_the_speed_is_that_of_the_last_tokens() -> None:
    app = Host()
    async with app.run_test() as pilot:
        assert app.speed.rate == 0
        app.speed.add_tokens([100.0] * 50)
        app.speed.add_tokens([8.0] * 32)
        assert app.speed.rate == pytest.approx(125)
        app.speed.phase("writing")
        await wait_until(pilot, lambda: "8.0 ms a token" in app.screen_text())
        app.speed.compact = True
        await wait_until(pilot, lambda: "125 tok/s · writing" in app.screen_text())
        app.speed.phase("[b]reading 1,203 of 3,400 \x1b[2J")
        await wait_until(pilot, lambda: "[b]reading" in app.screen_text())
        assert "\x1b" not in app.screen_text()
        app.speed.clear()
        app.speed.phase("idle")
        await wait_until(pilot, lambda: "tok/s" not in app.screen_text())


async def test_tokens_without_a_time_do_not_break_the_rate() -> None:
    app = Host()
    async with app.run_test() as pilot:
        app.speed.add_tokens([])
        app.speed.add_tokens([0.0, 0.0, -1.0])
        await pilot.pause()
        assert app.speed.rate == 0


def test_a_sparkline_starts_at_zero_and_cuts_off_what_is_far_above() -> None:
    assert sparkline([10, 20, 60, 1000, 0], 1, UNICODE.levels) == ["▁▃██▁"]
    assert sparkline([10.0] * 3, 1, UNICODE.levels) == ["▃▃▃"]
    assert sparkline([], 2, UNICODE.levels) == ["", ""]
    top, bottom = sparkline([10, 10, 100], 2, UNICODE.levels)
    assert (top, bottom) == ("  █", "▅▅█")


async def test_a_snapshot_on_the_disk_has_a_line() -> None:
    app = Host()
    async with app.run_test() as pilot:
        fill(app.cache)
        app.cache.update_snapshot(True, 0)
        await pilot.pause()
        assert app.rows()[6] == "snapshot on disk not written yet"
        app.cache.update_snapshot(True, 172 * MIB)
        app.cache.update_turn(turn(loaded=700))
        await pilot.pause()
        assert app.rows()[6] == "snapshot on disk         172 MiB"
        assert app.rows()[8] == "reused     1,412 (700 from disk)"
