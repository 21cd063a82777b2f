"""A shortlist of logits stands for all of them: the same draw, to the last candidate."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.engine.errors import GenerationError
from kvchat.engine.penalties import penalty_counts
from kvchat.engine.sampling import Draw, _draw_from
from kvchat.engine.shortlist import everything, shortlist
from kvchat.engine.types import CANDIDATES, SamplingParams

V = 4000


def both(
    logits: torch.Tensor, context: list[int], params: SamplingParams, seed: int = 0
) -> tuple[Draw | None, Draw]:
    """What is drawn from the shortlist, if there is one, and from everything."""
    counts = penalty_counts(context, params, (), len(logits))
    draws = []
    for known in (shortlist(logits, counts, params), everything(logits)):
        generator = torch.Generator().manual_seed(seed)
        draws.append(known and _draw_from(known, counts, params, generator))
    assert draws[1] is not None
    return draws[0], draws[1]


def assert_equal(a: Draw, b: Draw) -> None:
    assert a.id == b.id
    assert (a.before.ids, a.after.ids) == (b.before.ids, b.after.ids)
    close(array("f", [a.logprob]), array("f", [b.logprob]))
    close(a.before.logprobs, b.before.logprobs)
    assert a.after.logprobs == b.after.logprobs  # what is drawn from is the same, bit by bit


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, atol=1e-5)


def normal(seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    seed=st.integers(0, 10**6),
    greedy=st.booleans(),
    top_k=st.integers(1, 60),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition=st.sampled_from([0.5, 1.0, 1.1, 3.0]),
    frequency=st.sampled_from([-1.0, 0.0, 0.5]),
    last=st.booleans(),
    context=st.lists(st.integers(0, V - 1), max_size=60),
    repeats_leaders=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=300, deadline=None)
def test_the_draw_is_that_of_all_logits(
    seed: int,
    greedy: bool,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    frequency: float,
    last: bool,
    context: list[int],
    repeats_leaders: bool,
    dtype: torch.dtype,
) -> None:
    logits = normal(seed).to(dtype)
    if repeats_leaders:
        context = [*context, *logits.float().topk(30).indices.tolist()]
    params = SamplingParams(
        temperature=0.0 if greedy else 0.9,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        temperature_last=last,
    )
    few, every = both(logits, context, params, seed)
    if dtype is torch.float32:
        assert few is not None
    if few is not None:
        assert_equal(few, every)


def test_it_is_small() -> None:
    context = list(range(100))
    params = SamplingParams(top_k=50)
    counts = penalty_counts(context, params, (), V)
    known = shortlist(normal(0), counts, params)
    assert known is not None and len(known.scores) <= 2 * (50 + 100) + 100
    assert list(known.ids) == sorted(set(known.ids))


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 0}, {"top_k": V // 16}, {"top_k": 10**9}, {"top_k": 1, "penalty_window": -1}],
    ids=str,
)
def test_there_is_none_where_more_may_matter(changes: dict[str, Any]) -> None:
    params = SamplingParams(**changes)
    counts = penalty_counts(list(range(V // 4)), params, (), V)
    assert shortlist(normal(0), counts, params) is None


def test_equal_logits_that_do_not_end_make_none() -> None:
    params = SamplingParams(top_k=5, repetition_penalty=1.0)
    assert shortlist(torch.zeros(V), {}, params) is None
    many = torch.where(torch.arange(V) < 5, 2.0, 1.0)  # five to draw from, but more to show
    assert len(torch.nonzero(many == 2)) < CANDIDATES
    assert shortlist(many, {}, params) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_refused_as_ever(value: float) -> None:
    logits = normal(0)
    logits[V // 2] = value
    params = SamplingParams(top_k=5)
    known = shortlist(logits, {}, params) or everything(logits)
    with pytest.raises(GenerationError, match="not a number or infinite"):
        _draw_from(known, {}, params, None)


def test_most_logits_may_be_minus_infinity() -> None:
    logits = torch.full((V,), -torch.inf)
    logits[100:150] = normal(1)[:50]
    few, every = both(logits, [], SamplingParams(top_k=10))
    assert few is not None
    assert_equal(few, every)
