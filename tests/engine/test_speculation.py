"""Drafts: where they come from, when they are run, and that they change no reply."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, ByteStream, tiny_engine

from kvchat.engine.engine import Engine
from kvchat.engine.errors import OutOfMemoryError
from kvchat.engine.penalties import penalise, penalty_counts
from kvchat.engine.sampling import Draw, Sampler
from kvchat.engine.speculation import SIZES, NgramIndex, Speculation, expected_tokens
from kvchat.engine.types import (
    GenerationEvent,
    GenerationFinished,
    SamplingParams,
    TokenGenerated,
)
from kvchat.engine.warpers import distribution

FREE = {4: 0.1, 8: 0.2, 16: 0.4}
"""Costs at which every draft pays."""
REAL = {4: 1.4, 8: 2.3, 16: 4.0}
GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=60)
PERIOD = 16
REPEATING = [*b"a cat on a mat, "] * 4

few_ids = st.lists(st.integers(0, 3), max_size=40)


class Parrot(Sampler):
    """The real sampler, inclined to draw what stood some tokens before: random weights never do."""

    def __init__(self, period: int = PERIOD) -> None:
        super().__init__()
        self.period = period

    def inclined(self, logits: torch.Tensor, context: Sequence[int]) -> torch.Tensor:
        logits = logits.clone()
        logits[context[-self.period]] += 7
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        params: SamplingParams,
        generator: torch.Generator | None = None,
    ) -> Draw:
        return super().sample(self.inclined(logits, context), context, params, generator)


def parrot(costs: dict[int, float] | None = None, *, period: int = PERIOD, **how: Any) -> Engine:
    engine = tiny_engine(**how)
    engine.sampler = Parrot(period)
    engine.pass_costs = costs
    return engine


def engines(costs: dict[int, float] = FREE, **how: Any) -> tuple[Engine, Engine]:
    """The same engine without and with speculation."""
    return parrot(**how), parrot(costs, **how)


def reply(
    engine: Engine, ids: list[int], params: SamplingParams | Callable[[], SamplingParams]
) -> list[GenerationEvent]:
    """Run a reply; at every event the cache holds the ids that were fed, and no others."""
    asked = params if callable(params) else lambda: params
    events, written = [], list(ids)
    for event in engine.generate(ids, asked, ByteStream()):
        events.append(event)
        if isinstance(event, TokenGenerated):
            written.append(event.id)
        assert engine._context.cache.length == len(engine.ids)
        assert len(engine.ids) >= len(ids) or not isinstance(event, TokenGenerated)
        assert list(engine.ids) == (written + list(engine.ids)[len(written) :])[: len(engine.ids)]
    return events


def tokens(events: list[GenerationEvent]) -> list[TokenGenerated]:
    return [event for event in events if isinstance(event, TokenGenerated)]


def finish(events: list[GenerationEvent]) -> GenerationFinished:
    assert isinstance(events[-1], GenerationFinished)
    return events[-1]


def same_reply(a: list[GenerationEvent], b: list[GenerationEvent]) -> None:
    """Ids, text, probabilities, candidates and ending are the same."""
    for one, other in zip(tokens(a), tokens(b), strict=True):
        assert (one.index, one.id, one.text, one.params) == (
            other.index,
            other.id,
            other.text,
            other.params,
        )
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        for mine, theirs in ((one.before, other.before), (one.after, other.after)):
            assert mine.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-4)
            assert len(mine.ids) == len(theirs.ids)
    ends = [(e.reason, e.text, e.stop_id) for e in (finish(a), finish(b))]
    assert ends[0] == ends[1]


def same_cache(a: Engine, b: Engine) -> None:
    assert list(a.ids) == list(b.ids)
    n = len(a.ids)
    mine, theirs = a._context.cache, b._context.cache
    for x, y in zip(mine.keys + mine.values, theirs.keys + theirs.values, strict=True):
        torch.testing.assert_close(x[:, :n], y[:, :n], atol=1e-4, rtol=1e-4)


# Where drafts come from


@given(few_ids, few_ids)
def test_the_index_finds_the_last_earlier_occurrence_of_the_longest_end(start, rest):
    index = NgramIndex(start)
    for token_id in rest:
        index.append(token_id)
    ids = start + rest
    expected = None
    for size, position in itertools.product(SIZES, range(len(ids) - 1, 0, -1)):
        if position >= size and ids[position - size : position] == ids[-size:]:
            expected = (position, size)
            break
    assert index.ids == ids
    assert index.find() == expected


def test_what_goes_on_past_the_end_repeats_itself():
    index = NgramIndex([7, 1, 2, 3, 1, 2])
    assert index.find() == (3, 2)
    assert index.continuation(3, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert index.continuation(3, 2) == [3, 1]


# When drafts are run


def test_drafting_stops_where_guesses_are_wrong_and_resumes_where_they_are_right():
    speculation = Speculation([1, 2, 3] * 10, REAL)
    speculation.append(1)
    assert speculation.draft(100)
    wrong = itertools.count(100)
    for _ in range(20):  # 1, 2 and then something new each time
        for token_id in (1, 2, next(wrong)):
            speculation.append(token_id)
    speculation.append(1)
    speculation.append(2)
    before = speculation.proposed
    assert speculation.draft(100) == []
    assert speculation.proposed == before
    for token_id in [5, 6] * 30:
        speculation.append(token_id)
    assert len(speculation.draft(100)) >= 7
    assert speculation.proposed > before


def test_a_dear_pass_is_run_only_where_guesses_are_nearly_always_right():
    dear = {4: 3.0, 8: 6.0, 16: 12.0}
    speculation = Speculation([1, 2, 3] * 10, dear)
    speculation.append(1)
    assert speculation.draft(100) == []
    for token_id in [2, 3, 1] * 30:
        speculation.append(token_id)
    assert len(speculation.draft(100)) == 3
    never = Speculation([1, 2, 3] * 40, {4: 4.0, 8: 8.0, 16: 16.0})
    never.append(1)
    for token_id in [2, 3, 1] * 200:
        never.append(token_id)
        assert never.draft(100) == []


def test_a_draft_keeps_to_the_room_and_ends_before_what_ends_a_reply():
    speculation = Speculation([1, 2, 9, 4] * 5, FREE, eog_ids={9})
    speculation.append(1)
    assert speculation.draft(100) == [2]
    speculation.append(2)
    assert speculation.draft(100) == []
    speculation.append(9)
    assert [len(speculation.draft(room)) for room in (100, 2, 1, 0, -1)] == [3, 2, 1, 0, 0]


def test_a_pass_yields_the_drawn_token_and_the_guesses_before_the_first_wrong_one():
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.5, 2) == 1.75


# That replies stay the same


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([1.0, 1.3]),
    st.integers(0, 2**32),
)
def test_a_seed_gives_the_reply_it_gives_without_drafts(part, times, temperature, penalty, seed):
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, seed=seed, max_tokens=40, top_k=5
    )
    plain, drafting = engines(period=len(part))
    for ids in (part * times, [*part, *part]):
        same_reply(reply(plain, ids, params), reply(drafting, ids, params))
        same_cache(plain, drafting)


@pytest.mark.parametrize("costs", [FREE, REAL])
def test_greedy_text_of_repeating_text_is_the_same_with_fewer_passes(costs):
    plain, drafting = engines(costs)
    passes = [0, 0]
    for nth, engine in enumerate((plain, drafting)):

        def count(*_: object, nth: int = nth) -> None:
            passes[nth] += 1

        engine.model.register_forward_hook(count)
    params = GREEDY.updated(max_tokens=200)
    a, b = (reply(engine, REPEATING, params) for engine in (plain, drafting))
    same_reply(a, b)
    same_cache(plain, drafting)
    stats = finish(b).stats
    assert 20 < stats.accepted <= stats.proposed
    assert passes[0] - passes[1] == stats.accepted
    assert (finish(a).stats.proposed, finish(a).stats.accepted) == (0, 0)


def test_joint_probabilities_are_those_of_the_model_step_by_step():
    params = SamplingParams(
        temperature=1.3, top_k=3, top_p=1.0, repetition_penalty=1.2, max_tokens=3
    )
    ids = [*b"123123123123"]
    drafting = parrot(FREE, period=3)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for drawn, p in expected.items():
            context = [*ids, *drawn]
            logits = drafting.sampler.inclined(drafting.score(context)[-1], context)
            counts = penalty_counts(context, params, (), len(logits))
            scores = penalise(logits.numpy(), counts, params)
            kept, _, weights = distribution(scores, params)
            for token_id, weight in zip(kept, weights / weights.sum(), strict=True):
                longer[*drawn, int(token_id)] = p * float(weight)
        expected = longer
    n = 1200
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(n):
        events = list(drafting.generate(ids, lambda s=seed: params.updated(seed=s), ByteStream()))
        seen[tuple(event.id for event in tokens(events))] += 1
        accepted += finish(events).stats.accepted
    assert set(seen) <= set(expected)
    rare = [drawn for drawn, p in expected.items() if p * n < 5]
    cells = [[drawn] for drawn in expected if drawn not in rare] + ([rare] if rare else [])
    chi2 = sum(
        (sum(seen[d] for d in cell) - (mean := n * sum(expected[d] for d in cell))) ** 2 / mean
        for cell in cells
    )
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root of chi² over its freedom is nearly normal.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert freedom > 5
    assert z < 3
    assert accepted > n / 10


def test_a_setting_acts_on_the_very_next_token_in_the_middle_of_a_draft():
    hot = SamplingParams(temperature=8.0, top_k=0, top_p=1.0, repetition_penalty=1, max_tokens=60)
    for change in range(20, 30):

        def schedule(change: int = change) -> Callable[[], SamplingParams]:
            asked = itertools.count(-1)  # once for the seed, then for each token
            return lambda: GREEDY if next(asked) < change else hot.updated(seed=1)

        plain, drafting = engines()
        a = reply(plain, REPEATING, schedule())
        b = reply(drafting, REPEATING, schedule())
        assert [e.params.temperature for e in tokens(b)] == [0.0] * change + [8.0] * (60 - change)
        assert finish(b).stats.accepted
        assert [e.params for e in tokens(a)] == [e.params for e in tokens(b)]
        assert [e.id for e in tokens(a)][:change] == [e.id for e in tokens(b)][:change]


@pytest.mark.parametrize("stop_after", range(1, 24))
def test_a_cancel_at_any_token_then_going_on_equals_fresh(stop_after):
    drafting = parrot(FREE)
    whole = [e.id for e in tokens(reply(parrot(), REPEATING, GREEDY))]
    written = []
    for event in drafting.generate(REPEATING, lambda: GREEDY, ByteStream()):
        if isinstance(event, TokenGenerated):
            written.append(event.id)
            if len(written) == stop_after:
                drafting.cancel()
    assert written == whole[:stop_after]
    assert list(drafting.ids) == REPEATING + written[:-1]
    rest = GREEDY.updated(max_tokens=60 - stop_after)
    events = reply(drafting, REPEATING + written, rest)
    assert written + [e.id for e in tokens(events)] == whole
    fresh = tiny_engine()
    list(fresh.prefill(drafting.ids))
    same_cache(drafting, fresh)


@pytest.mark.parametrize("abandon_after", range(1, 12))
def test_an_abandoned_generator_leaves_ids_and_cache_together(abandon_after):
    drafting = parrot(FREE)
    running = drafting.generate(REPEATING, lambda: GREEDY, ByteStream())
    drawn = list(itertools.islice((e for e in running if isinstance(e, TokenGenerated)), 40))
    running.close()
    assert list(drafting.ids) == REPEATING + [e.id for e in drawn[:-1]]
    fresh = tiny_engine()
    list(fresh.prefill(drafting.ids))
    same_cache(drafting, fresh)


def test_limits_end_a_reply_where_they_do_without_drafts():
    for limit in range(1, 30):
        plain, drafting = engines()
        params = GREEDY.updated(max_tokens=limit)
        same_reply(reply(plain, REPEATING, params), reply(drafting, REPEATING, params))
        same_cache(plain, drafting)
    for room in range(1, 30):
        plain, drafting = engines(max_seq_len=len(REPEATING) + room)
        a, b = (reply(e, REPEATING, GREEDY.updated(max_tokens=500)) for e in (plain, drafting))
        same_reply(a, b)
        same_cache(plain, drafting)
        assert len(tokens(b)) == room


def test_stop_strings_and_ending_ids_act_as_without_drafts():
    whole = reply(parrot(), REPEATING, GREEDY)
    text = "".join(e.text for e in tokens(whole))
    for start in range(3, 40, 4):
        params = GREEDY.updated(stop=(text[start : start + 3],))
        plain, drafting = engines()
        a, b = reply(plain, REPEATING, params), reply(drafting, REPEATING, params)
        same_reply(a, b)
        same_cache(plain, drafting)
    for token_id in {e.id for e in tokens(whole)}:
        plain, drafting = engines(eog_ids=(token_id,))
        a, b = reply(plain, REPEATING, GREEDY), reply(drafting, REPEATING, GREEDY)
        same_reply(a, b)
        same_cache(plain, drafting)
        assert finish(b).reason == "stop"


def test_a_pass_that_fails_leaves_ids_and_cache_together():
    drafting = parrot(FREE)

    def fail(_block: object, args: tuple[torch.Tensor, ...]) -> None:
        if len(drafting.ids) > len(REPEATING) and len(args[0]) > 1:
            raise torch.OutOfMemoryError

    hook = drafting.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemoryError):
        reply(drafting, REPEATING, GREEDY)
    hook.remove()
    assert drafting._context.cache.length == len(drafting.ids)
    again = [e.id for e in tokens(reply(drafting, REPEATING, GREEDY))]
    assert again == [e.id for e in tokens(reply(parrot(), REPEATING, GREEDY))]


def test_what_was_learnt_in_one_reply_does_not_act_on_the_next():
    drafting = parrot(REAL)
    params = SamplingParams(temperature=1.2, repetition_penalty=1, seed=5, max_tokens=50)
    first = finish(reply(drafting, REPEATING, params)).stats
    reply(drafting, [*range(60)], GREEDY)
    again = finish(reply(drafting, REPEATING, params)).stats
    assert (first.proposed, first.accepted) == (again.proposed, again.accepted)
