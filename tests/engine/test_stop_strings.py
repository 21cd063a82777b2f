from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvchat.engine.stop_strings import StopStrings
from kvchat.engine.types import Candidates, SamplingParams, TokenGenerated

NONE = Candidates(array("i"), array("f"))


def event(index: int, text: str) -> TokenGenerated:
    return TokenGenerated(index, index, text, 0.0, 0.0, NONE, NONE, SamplingParams())


def run(pieces: list[str], stop: tuple[str, ...]) -> tuple[list[list[int]], str | None]:
    """Return which events were let go after each piece, and the text before the stop string."""
    held = StopStrings()
    released = []
    for i, piece in enumerate(pieces):
        released.append([e.index for e in held.push(event(i, piece), stop)])
        at = held.match(stop)
        if at is not None:
            kept, rest = held.cut(at)
            released.append([e.index for e in kept])
            return released, rest
    released.append([e.index for e in held.release()])
    return released, None


def test_without_stop_strings_nothing_is_held():
    assert run(["a", "", "b"], ()) == ([[0], [1], [2], []], None)


def test_text_that_may_become_a_stop_string_is_held():
    assert run(["x", "E", "N", "x"], ("END",)) == ([[0], [], [], [1, 2, 3], []], None)


def test_a_stop_string_split_over_tokens_is_cut_out():
    assert run(["hi ", "E", "N", "D!"], ("END",)) == ([[0], [], [], [], []], "")


def test_text_before_a_stop_string_inside_a_token_is_kept_as_text():
    assert run(["one", " two.STOP more"], ("STOP",)) == ([[0], [], []], " two.")


def test_the_earliest_stop_string_counts():
    assert run(["abcd"], ("d", "b")) == ([[], []], "a")


def test_tokens_of_an_unfinished_character_stay_with_the_one_that_completes_it():
    assert run(["a", "", "", "。"], ("。",)) == ([[0], [], [], [], []], "")
    assert run(["a", "", "", "中"], ("。",)) == ([[0], [], [], [1, 2, 3], []], None)


@given(
    st.lists(st.text("abE", max_size=3), max_size=12),
    st.lists(st.text("abE", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_agrees_with_cutting_the_whole_text(pieces, stop):
    stop = tuple(stop)
    released, rest = run(pieces, stop)
    shown = "".join(pieces[i] for batch in released for i in batch)
    whole = "".join(pieces)
    # The text is cut at the first moment a stop string is complete, at the earliest match then.
    for end in range(len(pieces) + 1):
        sofar = "".join(pieces[:end])
        starts = [sofar.find(s) for s in stop if s in sofar]
        if starts:
            assert shown + (rest or "") == sofar[: min(starts)]
            return
    assert rest is None
    assert shown == whole
