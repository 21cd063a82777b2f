"""The engine's promises: what is cached, what is run, what is drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, ByteStream, tiny_engine

from kvchat.engine import generate as generate_module
from kvchat.engine.engine import Engine, prefill_chunk_size
from kvchat.engine.errors import (
    ContextOverflowError,
    GenerationError,
    SettingError,
)
from kvchat.engine.naive import NaiveStep
from kvchat.engine.types import (
    GenerationFinished,
    PrefillFinished,
    PrefillProgress,
    SamplingParams,
    TokenGenerated,
)

GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=12)


def prompt(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()


def run(engine: Engine, ids: list[int], params: SamplingParams = GREEDY, stream=None):
    return list(engine.generate(ids, lambda: params, stream or ByteStream()))


def tokens(events) -> list[int]:
    return [e.id for e in events if isinstance(e, TokenGenerated)]


def finish(events) -> GenerationFinished:
    assert isinstance(events[-1], GenerationFinished)
    return events[-1]


def test_events_come_in_order_and_count_the_work():
    engine = tiny_engine()
    events = run(engine, prompt(40))
    progress = [e for e in events if isinstance(e, PrefillProgress)]
    assert [p.done for p in progress] == [0, 16, 32, 40]
    assert all((p.reused, p.new) == (0, 40) for p in progress)
    kinds = [type(e) for e in events]
    assert kinds == [PrefillProgress] * 4 + [PrefillFinished] + [TokenGenerated] * 12 + [
        GenerationFinished
    ]
    stats = finish(events).stats
    assert (stats.reused, stats.new, stats.completion_tokens) == (0, 40, 12)
    assert stats.kv_bytes == engine.kv_bytes > 0
    assert [e.index for e in events if isinstance(e, TokenGenerated)] == list(range(12))


def test_the_cache_holds_prompt_and_reply_but_not_the_last_drawn_id():
    engine = tiny_engine()
    ids = prompt(10)
    reply = tokens(run(engine, ids))
    assert list(engine.ids) == ids + reply[:-1]


def test_a_second_turn_runs_only_what_is_new():
    engine = tiny_engine()
    first = prompt(30)
    reply = tokens(run(engine, first))
    second = first + reply + prompt(9, seed=1)
    events = run(engine, second)
    stats = finish(events).stats
    # The last id of the reply was drawn but not fed yet, so it is new.
    assert (stats.reused, stats.new) == (30 + 11, 1 + 9)
    assert tokens(events) == tokens(run(tiny_engine(), second))


def test_the_same_prompt_again_runs_one_token():
    engine = tiny_engine()
    ids = prompt(30)
    first = tokens(run(engine, ids))
    events = run(engine, ids)
    assert (finish(events).stats.reused, finish(events).stats.new) == (29, 1)
    assert tokens(events) == first


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8))
def test_any_history_of_prompts_leaves_the_next_reply_as_a_cold_run_has_it(history):
    engine = tiny_engine(stash_budget=200_000)
    for seed, n in history:
        ids = prompt(20, seed=seed % 2) + prompt(n, seed=seed)
        events = run(engine, ids, GREEDY.updated(max_tokens=5))
        stats = finish(events).stats
        assert stats.reused + stats.new == len(ids)
        assert stats.new >= 1
        assert list(engine.ids) == (ids + tokens(events))[:-1]
        assert len(engine.ids) == engine._context.cache.length
        assert engine.stash_bytes <= 200_000
    assert tokens(events) == tokens(run(tiny_engine(), ids, GREEDY.updated(max_tokens=5)))


def test_every_end_of_generation_id_ends_the_reply():
    ids = prompt(10)
    reply = tokens(run(tiny_engine(), ids))
    distinct = [t for i, t in enumerate(reply) if t not in reply[:i]]
    for end in distinct:
        at = reply.index(end)
        events = run(tiny_engine(eog_ids={end, 999}), ids)
        assert tokens(events) == reply[:at]
        assert (finish(events).reason, finish(events).stop_id) == ("stop", end)


def test_a_stop_string_ends_text_and_cache_together():
    ids = prompt(10)
    reply = tokens(run(tiny_engine(), ids))
    stop = chr(reply[4]) + chr(reply[5])
    engine = tiny_engine()
    events = run(engine, ids, GREEDY.updated(stop=(stop,)))
    text = "".join(e.text for e in events if isinstance(e, TokenGenerated))
    assert text == "".join(map(chr, reply))[: "".join(map(chr, reply)).find(stop)]
    assert finish(events).reason == "stop"
    assert list(engine.ids) == ids + tokens(events)


class Pairs:
    """A stream whose every token has two characters."""

    def step(self, token_id: int) -> str:
        return f"{token_id % 7}{token_id % 5}"

    def flush(self) -> str:
        return ""


def test_a_stop_string_inside_a_token_leaves_the_text_before_it():
    ids = prompt(10)
    reply = tokens(run(tiny_engine(), ids))
    text = "".join(Pairs().step(t) for t in reply)
    stop = text[5:8]  # begins with the second character of the third token
    engine = tiny_engine()
    events = run(engine, ids, GREEDY.updated(stop=(stop,)), Pairs())
    shown = "".join(e.text for e in events if isinstance(e, TokenGenerated))
    assert shown + finish(events).text == text[: text.find(stop)]
    assert list(engine.ids) == ids + tokens(events)


def test_the_reply_ends_at_the_end_of_the_context():
    engine = tiny_engine(max_seq_len=20)
    events = run(engine, prompt(15), GREEDY.updated(max_tokens=100))
    assert finish(events).reason == "length"
    assert len(tokens(events)) == 5
    with pytest.raises(ContextOverflowError) as caught:
        run(engine, prompt(20))
    assert (caught.value.needed, caught.value.limit) == (21, 20)
    assert len(engine.ids) == 19  # nothing changed


def test_no_prompt_is_an_error_of_one_sentence():
    with pytest.raises(GenerationError, match="empty"):
        run(tiny_engine(), [])


def test_nan_in_the_logits_is_an_error_and_the_engine_stays_usable():
    engine = tiny_engine()
    norm = engine.model.norm.weight
    good = norm.clone()
    norm[0] = float("nan")
    with pytest.raises(GenerationError):
        run(engine, prompt(10))
    norm.copy_(good)
    assert tokens(run(engine, prompt(12, seed=3))) == tokens(run(tiny_engine(), prompt(12, seed=3)))


def test_settings_are_read_once_per_token():
    engine = tiny_engine()
    hot = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, repetition_penalty=1, seed=1)
    asked = itertools.count()

    def params() -> SamplingParams:
        return hot if next(asked) < 5 else GREEDY.updated(max_tokens=9)

    events = list(engine.generate(prompt(10), params, ByteStream()))
    used = [e.params.temperature for e in events if isinstance(e, TokenGenerated)]
    # The first reading is for the seed, then one for each token.
    assert used == [5.0] * 4 + [0] * 5
    assert next(asked) == 10


def test_a_seed_gives_the_same_reply_again_whatever_was_cached():
    params = SamplingParams(seed=7, max_tokens=20, temperature=1.5)
    cold = tokens(run(tiny_engine(), prompt(30), params))
    engine = tiny_engine()
    run(engine, prompt(25) + prompt(10, seed=2))
    assert tokens(run(engine, prompt(30), params)) == cold
    assert tokens(run(engine, prompt(30), params.updated(seed=8))) != cold


def test_an_unasked_seed_is_reported_and_gives_the_reply_again():
    params = SamplingParams(max_tokens=20, temperature=1.5)
    engine = tiny_engine()
    first = run(engine, prompt(30), params)
    second = run(engine, prompt(30), params)
    seeds = [e.seed for run_ in (first, second) for e in run_ if isinstance(e, PrefillFinished)]
    assert seeds[0] != seeds[1]
    assert tokens(run(engine, prompt(30), params.updated(seed=seeds[0]))) == tokens(first)


def test_a_reply_that_is_held_back_takes_no_longer(monkeypatch):
    engine, now = tiny_engine(), 0.0
    monkeypatch.setattr(generate_module.time, "perf_counter", lambda: now)
    step = engine.step

    def slow_step(*args):
        nonlocal now
        now += 0.5
        return step(*args)

    engine.step = slow_step
    events = []
    for event in engine.generate(prompt(8), lambda: GREEDY, ByteStream()):
        events.append(event)
        now += 100  # a reply is paused here
    stats = finish(events).stats
    assert (stats.ttft_ms, stats.decode_ms, stats.decode_tps) == (0, 11 * 500, 2)
    assert [e.ms for e in events if isinstance(e, TokenGenerated)] == [0] + [500] * 11


def test_every_token_carries_its_probability_and_twenty_candidates():
    engine = tiny_engine()
    ids = prompt(10)
    events = [e for e in run(engine, ids) if isinstance(e, TokenGenerated)]
    for i, event in enumerate(events):
        logits = engine.score(ids + [e.id for e in events[:i]])[-1]
        logprobs = logits.log_softmax(-1)
        top = logprobs.topk(20)
        assert event.before.ids.tolist() == top.indices.tolist()
        torch.testing.assert_close(
            torch.tensor(event.before.logprobs.tolist()), top.values, atol=1e-4, rtol=0
        )
        assert event.logprob == pytest.approx(logprobs[event.id].item(), abs=1e-4)
        assert event.after.ids.tolist() == [event.id]


@pytest.mark.parametrize("stop_after", range(12))
def test_a_cancel_at_any_token_then_going_on_equals_fresh(stop_after):
    ids = prompt(10)
    whole = tokens(run(tiny_engine(), ids))
    engine = tiny_engine()
    got = []
    for event in engine.generate(ids, lambda: GREEDY, ByteStream()):
        if isinstance(event, TokenGenerated):
            got.append(event.id)
            if len(got) == stop_after + 1:
                engine.cancel()
        last = event
    assert got == whole[: stop_after + 1]
    assert last.reason == ("cancelled" if stop_after < 11 else "length")
    rest = run(
        engine, ids + got, GREEDY.updated(max_tokens=12 - len(got)) if len(got) < 12 else GREEDY
    )
    assert (got + tokens(rest))[:12] == whole


def test_a_cancel_in_prefill_keeps_the_finished_chunks():
    engine = tiny_engine()
    ids = prompt(50)
    for event in engine.generate(ids, lambda: GREEDY, ByteStream()):
        if isinstance(event, PrefillProgress) and event.done == 32:
            engine.cancel()
        last = event
    assert (last.reason, last.stats.completion_tokens) == ("cancelled", 0)
    assert list(engine.ids) == ids[:32]
    events = run(engine, ids)
    assert finish(events).stats.reused == 32
    assert tokens(events) == tokens(run(tiny_engine(), ids))


def test_an_abandoned_generator_leaves_ids_and_cache_together():
    engine = tiny_engine()
    events = engine.generate(prompt(10), lambda: GREEDY, ByteStream())
    for event in events:
        if isinstance(event, TokenGenerated):
            break
    events.close()
    assert len(engine.ids) == engine._context.cache.length == 10


def test_going_back_to_a_branch_costs_a_copy_and_no_prefill():
    engine = tiny_engine()
    start = prompt(20)
    a, b = start + prompt(60, seed=1), start + prompt(50, seed=2)
    first = tokens(run(engine, a))
    run(engine, b)
    assert engine.stash_bytes > 0
    assert engine.reusable(a) == len(a) - 1
    events = run(engine, a)
    done = next(e for e in events if isinstance(e, PrefillFinished))
    assert (done.reused, done.new, done.restored) == (79, 1, 60)
    assert tokens(events) == first


def test_the_stash_keeps_to_its_budget_and_drops_the_oldest():
    engine = tiny_engine()
    per_token = engine.kv_bytes_per_token
    engine.stash.budget = per_token * 100
    start = prompt(20)
    branches = [start + prompt(40, seed=s) for s in range(1, 5)]
    for ids in branches:
        list(engine.prefill(ids))
    assert engine.stash_bytes <= per_token * 100
    assert [engine.reusable(ids) for ids in branches] == [20, 59, 59, 59]


def test_a_branch_that_was_restored_is_not_stashed_twice():
    engine = tiny_engine()
    start = prompt(20)
    a, b = start + prompt(60, seed=1), start + prompt(50, seed=2)
    for _ in range(4):
        for ids in (a, b):
            list(engine.prefill(ids))
    assert engine.stash_bytes == engine.kv_bytes_per_token * 110


def test_prefill_makes_the_cache_hold_exactly_the_ids():
    engine = tiny_engine()
    run(engine, prompt(40))
    ids = prompt(25) + prompt(5, seed=9)
    progress = list(engine.prefill(ids))
    assert list(engine.ids) == ids
    assert (progress[0].reused, progress[0].new, progress[-1].done) == (25, 5, 5)


def test_score_leaves_the_conversation_alone():
    engine = tiny_engine()
    run(engine, prompt(10))
    held = list(engine.ids)
    assert engine.score(prompt(6)).shape == (6, VOCAB)
    assert list(engine.ids) == held


def test_chunks_depend_on_sizes_alone():
    cpu = torch.device("cpu")
    sizes = [prefill_chunk_size(n, cpu) for n in (10**3, 10**8, 10**9, 10**11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 256
    assert sizes[-1] == 16
    assert all(n & (n - 1) == 0 for n in sizes)


def test_ids_may_come_as_an_array_or_a_tensor():
    expected = tokens(run(tiny_engine(), [1, 2, 3]))
    for ids in (torch.tensor([1, 2, 3]), np.array([1, 2, 3])):
        assert tokens(run(tiny_engine(), ids)) == expected
        assert torch.equal(tiny_engine().score(ids), tiny_engine().score([1, 2, 3]))


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1, 2]], torch.tensor([[1, 2]]), 5, None])
def test_what_is_no_sequence_of_ids_is_refused(ids):
    engine = tiny_engine()
    for call in (engine.score, lambda ids: run(engine, ids), lambda ids: list(engine.prefill(ids))):
        with pytest.raises(SettingError, match="whole numbers"):
            call(ids)


def test_the_naive_loop_says_the_same_and_hears_a_cancel_within_a_pass():
    ids = prompt(40)
    engine = tiny_engine()
    engine.step = NaiveStep(engine)
    assert tokens(run(engine, ids)) == tokens(run(tiny_engine(), ids))

    running = engine.generate(ids, lambda: GREEDY, ByteStream())
    first = next(event for event in running if isinstance(event, TokenGenerated))
    engine.model.blocks[0].register_forward_hook(lambda *_: engine.cancel())
    assert finish(list(running)).reason == "cancelled"
    engine.model.blocks[0]._forward_hooks.clear()
    assert list(engine.ids) == ids
    engine.step = tiny_engine().step
    assert tokens(run(engine, [*ids, first.id])) == tokens(run(tiny_engine(), [*ids, first.id]))
