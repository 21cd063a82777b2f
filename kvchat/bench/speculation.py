"""What n-gram speculation brings: the same replies with it and without it, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvchat.bench.plan import LoadSettings
from kvchat.bench.result import rounded
from kvchat.bench.speed import forget
from kvchat.engine.engine import Engine
from kvchat.engine.speculation import PassCosts
from kvchat.engine.types import (
    GenerationFinished,
    GenerationStats,
    SamplingParams,
    TokenGenerated,
)
from kvchat.models.load import LanguageModel, load

CODE = """\
def load_prices(path):
    prices = {}
    with open(path) as file:
        for line in file:
            name, price = line.strip().split(",")
            prices[name] = float(price)
    return prices


def total(order, prices):
    result = 0.0
    for name, count in order.items():
        result += prices[name] * count
    return result


def print_receipt(order, prices):
    for name, count in order.items():
        print(f"{name}: {count} x {prices[name]}")
    print(f"total: {total(order, prices)}")
"""

AGAIN = f"{CODE}\n\n# The same code again, with the function total renamed to order_total.\n\n"
STORY = "The old lighthouse keeper had not spoken to anyone for a year when the storm came. That"
ESSAY = "How a bicycle stays upright is less obvious than it seems. First of all,"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A text to go on from."""

    name: str
    prompt: str
    sampling: Mapping[str, Any]
    """What differs from the model's own settings."""


SCENARIOS = (
    Scenario("code again, greedy", AGAIN, {"temperature": 0, "repetition_penalty": 1}),
    Scenario("code again, sampled", AGAIN, {}),
    Scenario("a story, sampled", STORY, {}),
    Scenario("an essay, sampled", ESSAY, {}),
)


@dataclass(frozen=True, slots=True)
class Gain:
    """One scenario's figures; medians over all repeats."""

    name: str
    tokens: int
    plain_tps: float
    """Decode tok/s without speculation."""
    speculating_tps: float
    ratio: float
    """Of a run with speculation to the one without it that came before."""
    proposed: int
    """Tokens that were drafted and run in one reply."""
    accepted: int
    same_text: bool
    """Whether both ways gave the same reply; outside float32, kernels for more rows may differ in
    last bits."""


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """What a run found."""

    model: str
    device: str
    dtype: str
    quant: str
    threads: int
    executor: str
    pass_costs: PassCosts
    """What a pass over so many tokens costs, in decode steps."""
    repeats: int
    gains: list[Gain]

    def to_json(self) -> str:
        """Return one line of JSON; figures have five significant digits."""
        return json.dumps(rounded(asdict(self)), ensure_ascii=False)


def run(
    settings: LoadSettings, repeats: int, progress: Callable[[str], None] = lambda _: None
) -> SpeculationResult:
    """Load a model and measure it.

    Raises:
        KvchatError: the model does not load.
    """
    progress("loading the model")
    return measure(load(settings.model, **settings.arguments(), speculate=True), repeats, progress)


def measure(
    llm: LanguageModel, repeats: int, progress: Callable[[str], None] = lambda _: None
) -> SpeculationResult:
    """Measure a model that was loaded to speculate; afterwards it does so still."""
    costs = llm.engine.pass_costs or {}
    try:
        gains = [_gain(llm, costs, each, repeats, progress) for each in SCENARIOS]
    finally:
        llm.engine.pass_costs = costs
    return SpeculationResult(
        model=llm.name,
        device=llm.device,
        dtype=llm.dtype,
        quant=llm.quant,
        threads=torch.get_num_threads(),
        executor=type(llm.engine.step).__name__,
        pass_costs=costs,
        repeats=repeats,
        gains=gains,
    )


def _gain(
    llm: LanguageModel,
    costs: PassCosts,
    scenario: Scenario,
    repeats: int,
    progress: Callable[[str], None],
) -> Gain:
    # As long as the code: what goes on behind it could repeat itself, and flatter.
    room = llm.engine.max_seq_len // 2
    tokens = min(len(llm.tokenizer.encode_plain(CODE)), room)
    ids = llm.tokenizer.encode(scenario.prompt)[-room:]
    params = llm.defaults.updated(seed=0, max_tokens=tokens, **scenario.sampling)
    runs: dict[bool, list[tuple[list[int], GenerationStats]]] = {False: [], True: []}
    for nth in range(2 * (1 + repeats)):
        speculating = nth % 2 == 1
        progress(f"{scenario.name}, {'with' if speculating else 'without'} speculation")
        llm.engine.pass_costs = costs if speculating else None
        runs[speculating].append(_reply(llm.engine, ids, params))
    plain, with_drafts = ([stats.decode_tps for _, stats in runs[how][1:]] for how in runs)
    written, stats = runs[True][-1]
    return Gain(
        name=scenario.name,
        tokens=len(written),
        plain_tps=median(plain),
        speculating_tps=median(with_drafts),
        # Of neighbouring runs: a machine does not stay equally quick.
        ratio=median(b / a if a else 0.0 for a, b in zip(plain, with_drafts, strict=True)),
        proposed=stats.proposed,
        accepted=stats.accepted,
        same_text=written == runs[False][-1][0],
    )


def _reply(
    engine: Engine, ids: list[int], params: SamplingParams
) -> tuple[list[int], GenerationStats]:
    forget(engine)
    written: list[int] = []
    for event in engine.generate(ids, lambda: params, _Silent()):
        if isinstance(event, TokenGenerated):
            written.append(event.id)
        elif isinstance(event, GenerationFinished):
            stats = event.stats
    return written, stats


class _Silent:
    """A text stream for replies whose text nobody reads."""

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """A run on the terminal, for a rich console to print."""

    result: SpeculationResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the figures and what they rest on."""
        result = self.result
        yield Text(result.model, style="bold")
        threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
        how = f"{result.device}, {result.dtype}, quant {result.quant}, {threads}, {result.executor}"
        yield Text(how, style="dim")
        table = Table(box=None, pad_edge=False)
        table.add_column("decode, tok/s")
        for column in ("without", "with drafts", "ratio", "drafts drawn", "same text"):
            table.add_column(column, justify="right")
        for gain in result.gains:
            table.add_row(
                gain.name,
                f"{gain.plain_tps:,.1f}",
                f"{gain.speculating_tps:,.1f}",
                f"{gain.ratio:.2f}",
                f"{gain.accepted:,} of {gain.proposed:,}",
                "yes" if gain.same_text else "no",
            )
        yield table
        costs = ", ".join(f"{width} tokens {cost:.2f}" for width, cost in result.pass_costs.items())
        yield Text(f"A pass in decode steps: {costs or 'the context is too small for drafts'}")
        if not all(gain.same_text for gain in result.gains):
            yield Text(
                "Texts differ where a pass over several tokens rounds otherwise than a step."
            )
