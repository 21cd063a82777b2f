"""One benchmark run, from loading the model to all figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median

import torch

import kvchat
from kvchat.bench import long_chat, peers, sampler_times, speed, texts, turns, worker_child
from kvchat.bench.bandwidth import bytes_read_per_token, read_bandwidth
from kvchat.bench.plan import LoadSettings, Plan
from kvchat.bench.result import BenchResult, Contestant, LongDecode, percentile_95
from kvchat.bench.task import Task
from kvchat.bench.worker_child import Errand
from kvchat.engine.engine import Engine
from kvchat.engine.errors import KvchatError
from kvchat.engine.token_ids import common_prefix
from kvchat.engine.types import SamplingParams
from kvchat.models.load import LanguageModel, load

SHARED_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that every program under comparison has under the same name."""


def run(
    settings: LoadSettings,
    plan: Plan,
    *,
    compare: Sequence[str] = (),
    peer_python: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Load a model and measure it.

    Args:
        settings: the model, and how to load it.
        plan: lengths and repeats.
        compare: names of other programs to run beside, see `kvchat.bench.peers.PEERS`.
        peer_python: an interpreter that has those that ours does not have.
        progress: called with what is being measured now.

    Raises:
        KvchatError: the model does not load, or a program to compare with is not there.
    """
    progress("loading the model")
    llm = load(settings.model, **settings.arguments())
    found = peers.interpreters(compare, llm.path, peer_python)
    # Other processes shall load this very file with this very number of threads.
    same = replace(settings, model=str(llm.path), threads=torch.get_num_threads())
    return measure(llm, same, plan, compare=found, progress=progress)


def measure(
    llm: LanguageModel,
    settings: LoadSettings,
    plan: Plan,
    *,
    compare: Mapping[str, str | None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure a loaded model.

    Args:
        llm: the model.
        settings: how other processes load the same one.
        plan: lengths and repeats.
        compare: programs to run beside, from `kvchat.bench.peers.interpreters`.
        progress: called with what is being measured now.
    """
    engine, tokenizer = llm.engine, llm.tokenizer
    asked, plan = plan, plan.fitted(engine.max_seq_len)
    params = llm.defaults.updated(seed=0)
    prefill_ids = texts.prompt(tokenizer, plan.prefill_tokens)
    decode_ids = texts.prompt(tokenizer, plan.decode_prompt, nth=1)

    progress("warming up")
    speed.reply(engine, decode_ids, params, tokens=2)
    progress(f"prefill of {plan.prefill_tokens:,} tokens")
    prefills = [speed.prefill_ms(engine, prefill_ids, params) for _ in range(plan.repeats)]
    progress(f"decode of {plan.decode_tokens:,} tokens")
    decodes = []
    for _ in range(plan.repeats):
        speed.forget(engine)
        decodes.append(speed.reply(engine, decode_ids, params, tokens=plan.decode_tokens))
    token_ms = [ms for each in decodes for ms in each.token_ms]
    decode_tps = median(each.decode_tps for each in decodes)

    progress("choosing tokens")
    sampler = sampler_times.measure()

    chat, longest, long, naive = _chat(llm, params, plan, progress)

    progress("switching branches")
    branch = texts.prompt(tokenizer, plan.branch_tokens, nth=2)
    switches = [speed.branch_switch(engine, decode_ids, branch) for _ in range(plan.repeats)]
    switch_ms = [each.switch_ms for each in switches if each.switch_ms is not None]

    progress("bookkeeping of 200 turns")
    bookkeeping_ms = long_chat.bookkeeping_ms(llm, turns=200, repeats=plan.light_repeats)

    task = Task(
        program="kvchat",
        load=asdict(settings),
        sampling={name: getattr(params, name) for name in SHARED_SAMPLING},
        prefill_ids=prefill_ids,
        decode_ids=decode_ids,
        decode_tokens=plan.decode_tokens,
    )
    progress("starting processes")
    starts = [peers.measure(task) for _ in range(plan.starts)]
    sent = worker_child.measure(Errand(asdict(settings), sends=plan.light_repeats))
    compared: list[Contestant] = []
    failures: list[str] = []
    if compare:
        try:
            ours, theirs = _beside(replace(task, repeats=plan.repeats), plan, chat, longest)
            compared = peers.compare(ours, theirs, compare, plan.rounds, progress)
        except KvchatError as error:  # what was measured so far shall not be lost
            failures.append(str(error))

    progress("reading memory")
    speed.forget(engine)
    bandwidth = read_bandwidth(engine.model.device)
    per_token = bytes_read_per_token(engine, plan.decode_prompt + plan.decode_tokens / 2)
    return BenchResult(
        kvchat=kvchat.__version__,
        torch=torch.__version__,
        model=llm.name,
        device=llm.device,
        dtype=llm.dtype,
        quant=llm.quant,
        threads=torch.get_num_threads(),
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        ready_s=median(start.ready_s for start in starts),
        peak_memory_bytes=starts[0].peak_memory_bytes,
        prefill_tps=plan.prefill_tokens / median(prefills) * 1e3,
        decode_tps=decode_tps,
        decode_ms_p50=median(token_ms),
        decode_ms_p95=percentile_95(token_ms),
        long_decodes=[_long_decode(engine, cached, each, bandwidth) for cached, each in long],
        sampler=sampler,
        ttft_ms_by_turn=[turn.cost.ttft_ms for turn in chat],
        reused_by_turn=[turn.cost.reused for turn in chat],
        new_by_turn=[turn.cost.new for turn in chat],
        bookkeeping_ms_by_turn=[turn.bookkeeping_ms for turn in chat],
        idle_tokens_by_turn=[turn.idle_tokens for turn in chat],
        idle_ms_by_turn=[turn.idle_ms for turn in chat],
        decode_tps_by_turn=[turn.cost.decode_tps for turn in chat],
        naive_ttft_ms_by_turn=[each.ttft_ms for each in naive],
        branch_switch_ms=median(switch_ms) if switch_ms else None,
        branch_prefill_ms=median(each.prefill_ms for each in switches),
        bookkeeping_ms_at_200_turns=bookkeeping_ms,
        send_to_first_event_ms=sent.send_to_first_event_ms,
        send_to_reply_started_ms=sent.send_to_reply_started_ms,
        bandwidth_gbps=bandwidth,
        bytes_per_token=per_token,
        bandwidth_fraction=per_token * decode_tps / (bandwidth * 1e9),
        compared=compared,
        plan=plan,
        notes=[*_notes(asked, plan, played=len(chat), stashed=bool(switch_ms)), *failures],
    )


def _chat(
    llm: LanguageModel, params: SamplingParams, plan: Plan, progress: Callable[[str], None]
) -> tuple[list[turns.Turn], list[int], list[tuple[int, speed.Reply]], list[speed.Reply]]:
    """Play the chat, decode on top of longer caches, then run its prompts without a cache.

    Returns:
        The turns; the ids of the longest cache, which begin with the chat; a reply for each of
        `plan.long_contexts`; a reply of one token for each turn.
    """
    chat: list[turns.Turn] = []
    script = turns.play(
        llm,
        params,
        turns=plan.turns,
        user_tokens=plan.user_tokens,
        reply_tokens=plan.reply_tokens,
    )
    for turn in script:
        chat.append(turn)
        progress(f"turn {len(chat)} of {plan.turns}")
    held, most = [*llm.engine.ids], max(plan.long_contexts, default=0)
    longest = [*held, *texts.tokens(llm.tokenizer, max(0, most - len(held)))]
    long: list[tuple[int, speed.Reply]] = []
    for cached in plan.long_contexts:
        progress(f"decode with {cached:,} tokens cached")
        ids = longest[:cached]
        speed.reply(llm.engine, ids, params, tokens=2)
        long.append((cached, speed.reply(llm.engine, ids, params, tokens=plan.decode_tokens)))
    naive: list[speed.Reply] = []
    for each in turns.without_cache(llm, params, [turn.prompt for turn in chat]):
        naive.append(each)
        progress(f"turn {len(naive)} of {len(chat)} without the cache")
    return chat, longest, long, naive


def _long_decode(
    engine: Engine, cached: int, reply: speed.Reply, bandwidth_gbps: float
) -> LongDecode:
    read = engine.kv_bytes_per_token * (cached + len(reply.token_ms) / 2)
    return LongDecode(
        cached=cached,
        decode_tps=reply.decode_tps,
        token_ms=median(reply.token_ms),
        cache_ms=read / bandwidth_gbps / 1e6,
    )


def _beside(
    task: Task, plan: Plan, chat: Sequence[turns.Turn], longest: Sequence[int]
) -> tuple[Task, Task]:
    """Return what kvchat and the others do when they are compared: the same ids.

    When the last turn begins, we hold what our chat held, the end of the last reply included,
    which was prefilled while the user would read. The others hold that reply up to its last token.
    """
    cached = min(plan.long_contexts, default=0)
    task = replace(task, long_ids=list(longest[:cached]))
    if len(chat) < 2:
        return task, task
    before, last = chat[-2:]
    held = common_prefix(last.prompt, [*before.prompt, *before.reply[:-1]])
    return (
        replace(task, turn_ids=last.prompt, turn_held=last.cost.reused),
        replace(task, turn_ids=last.prompt, turn_held=held),
    )


def _notes(asked: Plan, plan: Plan, *, played: int, stashed: bool) -> list[str]:
    notes = []
    shorter = [
        name for name in Plan.__dataclass_fields__ if getattr(asked, name) != getattr(plan, name)
    ]
    if shorter:
        notes.append(f"the context is too small for the asked {', '.join(shorter)}")
    if played < plan.turns:
        notes.append(f"the context was full after {played} of {plan.turns} turns")
    if not stashed:
        notes.append("the branch is larger than the stash, so coming back to it is a prefill")
    return notes
