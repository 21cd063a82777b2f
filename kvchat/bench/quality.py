"""What the precision of the weights costs: how far predictions are from the float32 run's.

The loss is the Kullback-Leibler divergence of each next-token distribution from the one that the
same file gives in float32, in nats, averaged over a text. It is taken twice, for different kernels
run: in one prefill, and one token at a time, through `Engine.generate` as in a reply.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from kvchat.bench.plan import LoadSettings, QualityPlan
from kvchat.bench.result import rounded
from kvchat.engine.engine import Engine
from kvchat.engine.sampling import Draw
from kvchat.engine.types import Candidates, SamplingParams, TokenGenerated
from kvchat.models.load import LanguageModel, load

ROWS = 64
"""Distributions compared at a time."""

NONE = Candidates(array("i"), array("f"))


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to hold the weights."""

    name: str
    settings: dict[str, Any]
    """Fields of `LoadSettings` that differ from what was asked for."""


VARIANTS = (
    Variant("bfloat16", {"dtype": "bfloat16", "quant": "none"}),
    Variant("as set", {}),
    Variant("int8", {"dtype": "auto", "quant": "int8"}),
    Variant("int4", {"dtype": "auto", "quant": "int4"}),
)

GOALS = {"bfloat16": 0.002, "int8": 0.002, "int4": 0.005}
"""Most nats by class of the weights. That of int4 is for files that hold 4 bits themselves."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one variant loses."""

    name: str
    weights: str
    """Class of most of the weights."""
    weight_bytes: int
    prefill_kl: float
    decode_kl: float
    prefill_same_top: float
    """Share of positions whose most probable token is that of the float32 run."""
    decode_same_top: float
    goal: float | None
    """Most that either divergence should be."""

    @property
    def reached(self) -> bool:
        """Whether both are good enough, or nothing is asked for."""
        return self.goal is None or max(self.prefill_kl, self.decode_kl) <= self.goal


@dataclass(frozen=True, slots=True)
class QualityResult:
    """All variants; the fields are the keys of the JSON."""

    model: str
    threads: int
    tokens: int
    """Length of the text that was used."""
    variants: list[Loss]
    plan: QualityPlan

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


def measure(
    settings: LoadSettings,
    plan: QualityPlan,
    *,
    variants: Sequence[Variant] = VARIANTS,
    progress: Callable[[str], None] = lambda _: None,
) -> QualityResult:
    """Load a model once in float32 and once in each variant, and compare.

    Raises:
        KvchatError: the model does not load, or not in one of these ways.
    """
    progress("loading the model in float32")
    exact = _load(settings, {"dtype": "float32", "quant": "none"})
    windows = [*_windows(exact, plan)]
    losses = []
    for variant in variants:
        progress(f"{variant.name}: loading the model")
        llm = _load(settings, variant.settings)
        losses.append(_loss(variant, llm, exact, windows, progress))
        del llm
    return QualityResult(
        model=settings.model,
        threads=torch.get_num_threads(),
        tokens=sum(map(len, windows)),
        variants=losses,
        plan=plan,
    )


def text() -> str:
    """Return the text that all is measured over: prose, dialogue, lists, sums and code."""
    return files("kvchat.bench").joinpath("quality.txt").read_text("utf-8")


def divergence(exact: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Compare next-token distributions, both given as logits (n, vocab_size).

    Returns:
        Per row (n,): the Kullback-Leibler divergence of `other` from `exact` in nats, and whether
        the most probable tokens are the same.
    """
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)


def decoded(engine: Engine, ids: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits (vocab_size,) after each of `ids` but the last, from decode steps."""
    sampler, dictated = engine.sampler, _Dictated(ids[1:])
    engine.truncate(0)
    engine.stash.clear()
    engine.sampler = dictated  # type: ignore[assignment]
    params = SamplingParams(max_tokens=len(ids) - 1, temperature=0.0, repetition_penalty=1.0)
    try:
        for event in engine.generate(ids[:1], lambda: params, _Silent()):
            if isinstance(event, TokenGenerated):
                yield dictated.logits
    finally:
        engine.sampler = sampler


class _Dictated:
    """A sampler that draws what it is told and keeps the logits."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = iter(ids)
        self.logits: Tensor

    def sample(self, logits: Tensor, *_: Any) -> Draw:
        self.logits = logits.clone()
        return Draw(next(self._ids), 0.0, NONE, NONE)


class _Silent:
    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _load(settings: LoadSettings, differing: dict[str, Any]) -> LanguageModel:
    chosen = replace(settings, **differing)
    return load(chosen.model, **chosen.arguments())


def _windows(llm: LanguageModel, plan: QualityPlan) -> Iterator[list[int]]:
    """Cut the text; what is left over at its end is not used."""
    tokenizer = llm.tokenizer
    ids = tokenizer.encode_plain(text())[: plan.tokens]
    bos = [tokenizer.bos_id] if tokenizer.add_bos_default and tokenizer.bos_id is not None else []
    window = min(plan.window, llm.engine.max_seq_len - 1 - len(bos), len(ids))
    for start in range(0, len(ids) - window + 1, window):
        yield [*bos, *ids[start : start + window]]


def _loss(
    variant: Variant,
    llm: LanguageModel,
    exact: LanguageModel,
    windows: Sequence[Sequence[int]],
    progress: Callable[[str], None],
) -> Loss:
    prefill, decode = _Mean(), _Mean()
    for nth, ids in enumerate(windows, start=1):
        progress(f"{variant.name}: part {nth} of {len(windows)}")
        reference = exact.score(ids)[:-1]
        prefill.add(reference, llm.score(ids)[:-1])
        for row, logits in zip(reference, decoded(llm.engine, ids), strict=True):
            decode.add(row[None], logits[None])
    return Loss(
        name=variant.name,
        weights=llm.weights,
        weight_bytes=llm.engine.weight_bytes,
        prefill_kl=prefill.kl,
        decode_kl=decode.kl,
        prefill_same_top=prefill.same_top,
        decode_same_top=decode.same_top,
        goal=GOALS.get(llm.weights),
    )


class _Mean:
    """Means over all positions that were added."""

    def __init__(self) -> None:
        self._kl, self._same, self._n = 0.0, 0, 0

    def add(self, exact: Tensor, other: Tensor) -> None:
        for a, b in zip(exact.split(ROWS), other.split(ROWS), strict=True):
            kl, same = divergence(a.cpu(), b.cpu())
            self._kl += kl.sum().item()
            self._same += int(same.sum())
            self._n += len(kl)

    @property
    def kl(self) -> float:
        return self._kl / self._n

    @property
    def same_top(self) -> float:
        return self._same / self._n
