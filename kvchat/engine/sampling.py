"""The sampler: from logits to the next token id.

Order: penalties, then greedy, or temperature, top-k, top-p, min-p and a draw. The draw walks the
kept ids in ascending order, whatever warpers kept them, so that a seed draws the same token from
the same distribution on every path.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvchat.engine.errors import GenerationError, SettingError
from kvchat.engine.penalties import Counts, Scores, penalise, penalty_counts
from kvchat.engine.shortlist import Known, everything, shortlist
from kvchat.engine.token_ids import as_ids
from kvchat.engine.types import CANDIDATES, Candidates, SamplingParams
from kvchat.engine.warpers import Weights, distribution, leading


@dataclass(frozen=True, slots=True)
class Draw:
    """A token id and what it was chosen from."""

    id: int
    logprob: float
    """Natural-log probability the model gave it, before the sampler."""
    before: Candidates
    """Top candidates as the model had them."""
    after: Candidates
    """Top candidates of the distribution drawn from, renormalised; none of probability 0."""


class Sampler:
    """Chooses one token after another by whatever parameters hold at that token.

    Args:
        exempt_ids: ids the penalties spare, unless `SamplingParams.penalise_all`.
    """

    def __init__(self, exempt_ids: Collection[int] = ()) -> None:
        self._exempt_ids = frozenset(exempt_ids)

    def sample(
        self,
        logits: Tensor,
        context: Sequence[int],
        params: SamplingParams,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Choose the next token.

        A greedy choice (the lowest id among equals) leaves the generator alone; any other takes
        exactly one number from it.

        Args:
            logits: (V,) or (1, V), any floating type and device; not modified. From another
                device they come over in one copy, only those that decide where that is known.
            context: ids of prompt and reply so far, for the penalties.
            params: how to choose.
            generator: source of the draw; None is torch's global one.

        Raises:
            GenerationError: no distribution can be made of the logits.
            SettingError: logits of another shape or type, or a context id they do not cover.
        """
        flat = _checked(logits)
        exempt_ids = () if params.penalise_all else self._exempt_ids
        counts = penalty_counts(context, params, exempt_ids, len(flat))
        known = None
        if flat.device.type != "cpu":
            known = shortlist(flat, counts, params)
        return _draw_from(known or everything(flat), counts, params, generator)


def sample_next_token(  # noqa: PLR0917 (callers outside pass these by position)
    logits: Tensor,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 0.9,
    repetition_penalty: float = 1.1,
    generated_ids: Sequence[int] | None = None,
    *,
    min_p: float = 0.0,
    exempt_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> int:
    """Choose the next token id from the logits of the last position: `Sampler` in one call.

    Args:
        logits: (V,) or (1, V), any floating type and device; not modified.
        temperature: divides the logits; at or below 1e-4 the most probable token is taken.
        top_k: keep the k most probable tokens and all that tie with the k-th; 0 is off.
        top_p: keep the fewest tokens whose probabilities reach p; 1 is off.
        repetition_penalty: weakens every id in `generated_ids`, once; 1 is off.
        generated_ids: ids of prompt and reply so far.
        min_p: drop tokens less probable than min_p times the most probable; 0 is off.
        exempt_ids: ids the penalty spares.
        generator: source of the draw; None is torch's global one.

    Raises:
        GenerationError: no distribution can be made of the logits.
        SettingError: a value is outside its range.
    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        penalty_window=-1,
    )
    context = as_ids(() if generated_ids is None else generated_ids)
    return Sampler(as_ids(exempt_ids)).sample(logits, context, params, generator).id


def _draw_from(
    known: Known, counts: Counts, params: SamplingParams, generator: torch.Generator | None
) -> Draw:
    """Choose one of the ids whose logits are known; `counts` are those of penalised ids."""
    if not _is_drawable(known.scores):
        raise GenerationError(
            "The model's output is not a number or infinite, so no token can be chosen from it; "
            "load it with another dtype, such as float32, or check the model's files."
        )
    scores = penalise(known.scores, known.positions(counts), params)
    if not _is_drawable(scores):
        raise GenerationError(
            "The penalties leave no token that can be chosen; bring them closer to neutral."
        )
    top = leading(known.scores, CANDIDATES)
    chosen, likely, likely_logprobs = _choose(scores, params, generator)
    depth = known.scores[top[0]] - known.scores[[chosen, *top]]
    logprobs = known.top_logprob - depth
    return Draw(
        id=int(known.ids[chosen]),
        logprob=float(logprobs[0]),
        before=_candidates((known.ids[i] for i in top), logprobs[1:]),
        after=_candidates((known.ids[i] for i in likely), likely_logprobs),
    )


def _choose(
    scores: Scores, params: SamplingParams, generator: torch.Generator | None
) -> tuple[int, Iterable[int], Iterable[float]]:
    """Return the next token's position in the penalised scores, and the top of what it is from."""
    if params.greedy:
        position = int(leading(scores, 1)[0])
        return position, [position], [0.0]
    positions, scores, weights = distribution(scores, params)
    position = positions[draw(weights, generator)]
    top = leading(scores, CANDIDATES)
    top = top[weights[top] > 0]
    return position, (positions[i] for i in top), np.log(weights[top] / weights.sum())


def draw(weights: Weights, generator: torch.Generator | None) -> int:
    """Return a position with probability proportional to its weight, by one uniform number."""
    device = "cpu" if generator is None else generator.device
    uniform = torch.rand((), dtype=torch.float64, generator=generator, device=device).item()
    bounds = torch.from_numpy(weights).cumsum(0).numpy()  # numpy's own is four times slower
    # Rounding must not carry the number past the last token that weighs anything.
    target = min(uniform * bounds[-1], math.nextafter(bounds[-1], 0.0))
    return int(np.searchsorted(bounds, target, side="right"))


def _checked(logits: Tensor) -> Tensor:
    """Return the logits as (V,), if they are logits."""
    if not isinstance(logits, Tensor):
        raise SettingError(f"Logits to sample from must be a tensor, not {type(logits).__name__}.")
    if not logits.is_floating_point() or logits.shape not in ((n := logits.numel(),), (1, n)):
        raise SettingError(
            "Logits to sample from must be floating-point numbers of shape (vocab_size,) or "
            f"(1, vocab_size), not {logits.dtype} of shape {tuple(logits.shape)}."
        )
    if not logits.numel():
        raise SettingError("There are no logits to sample from; the vocabulary is empty.")
    return logits.detach().reshape(-1)


def _is_drawable(scores: Scores) -> bool:
    """Whether there is no NaN, no +inf and not only -inf: the maximum tells at no further cost."""
    return math.isfinite(scores.max())


def _candidates(ids: Iterable[int], logprobs: Iterable[float]) -> Candidates:
    return Candidates(array("i", ids), array("f", logprobs))
