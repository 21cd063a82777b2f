from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvchat.tui.widgets.wrapping import clusters, rows, whole_clusters, wrap

pieces = st.sampled_from(
    [
        *("a", "word", " ", "  ", "\t", "x" * 30, "-", "“", "’", "☃", "␀"),
        *("中", "文字", "，", "。", "（", "」", "한", "\u1100\u1161", "שלום", "عرب", "कि"),
        *("é", "e\u0301", "👨\u200d👩\u200d👧", "👍🏽", "🇩🇪", "🇫", "❤️"),
        *("\u200b", "\u200d", "\ufe0f", "\N{NO-BREAK SPACE}", "\N{SOFT HYPHEN}"),
    ]
)
texts = st.one_of(
    st.lists(pieces, max_size=60).map("".join),
    st.text(st.sampled_from("ab  ,.'"), max_size=80),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40),
)
widths = st.integers(2, 20)


def ends(text: str, starts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


@given(texts, widths, st.integers(0, 6))
def test_rows_fit_and_join_to_the_text(text: str, width: int, hang: int) -> None:
    starts = wrap(text, width, hang=hang)
    shown = ends(text, starts)

    assert "".join(shown) == text
    assert all(shown[1:])
    for number, row in enumerate(shown):
        room = max(2, width - hang) if number else width
        # A tab takes at least one cell, wherever it stands.
        assert cell_len(row.rstrip(" \t").replace("\t", " ")) <= room


@given(texts, widths)
def test_a_cluster_is_never_cut(text: str, width: int) -> None:
    bounds = {start for start, _, _ in clusters(text)}
    assert set(wrap(text, width)[1:]) <= bounds


@given(st.lists(texts, min_size=1, max_size=8), widths, st.integers(0, 6))
def test_growing_text_needs_only_its_last_row_wrapped_again(
    added: list[str], width: int, hang: int
) -> None:
    text = ""
    starts = [0]
    for piece in added:
        text += piece
        starts = starts[:-1] + wrap(text, width, hang=hang, start=starts[-1])
    assert starts == wrap(text, width, hang=hang)


@given(st.text(st.sampled_from("ab "), max_size=60), widths)
def test_both_ways_to_wrap_agree(text: str, width: int) -> None:
    """A character of one cell that the quick way leaves to the general one changes no row."""
    assert wrap(text.replace("b", "\u07cb"), width) == wrap(text, width)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("the quick brown fox", 9, ["the quick", "brown fox"]),
        ("the quick  brown", 9, ["the quick", "brown"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("ab abcdefghij", 4, ["ab", "abcd", "efgh", "ij"]),
        ("你好，世界。再见", 8, ["你好，世", "界。再见"]),
        ("一二三，四", 6, ["一二", "三，四"]),
        ("一二（三", 6, ["一二", "（三"]),
        ("🇩🇪🇫🇷🇮🇹", 4, ["🇩🇪🇫🇷", "🇮🇹"]),
        ("a\tb\tc", 6, ["a\tb", "c"]),
        ("    indented words", 10, ["    indent", "ed words"]),
        ("", 5, [""]),
    ],
)
def test_where_rows_end(text: str, width: int, expected: list[str]) -> None:
    assert rows(text, width) == expected


def test_a_piece_is_widened_to_whole_clusters() -> None:
    family = "👨\u200d👩\u200d👧"
    assert whole_clusters(f"a{family}b", 2, 3) == (1, 1 + len(family))
    assert whole_clusters("plain", 1, 99) == (1, 5)
