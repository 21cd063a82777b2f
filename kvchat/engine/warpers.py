"""Logits warpers: temperature, top-k, top-p and min-p, without sorting the vocabulary.

One ranking decides everything: greater logit first, lower id first among equals, read after the
penalties and before the temperature (which cannot reorder). Every warper keeps a leading part of
that ranking, so none of them has to sort the vocabulary: a lower bound for the k-th logit, or a
histogram of the probability mass, finds where to cut.

Probabilities are float64 and left unnormalised, the most probable token weighing 1: sums over
equal logits stay exact, and a token on the edge of top-p falls where a full sort would put it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvchat.engine.penalties import Scores
from kvchat.engine.types import SamplingParams

Weights = NDArray[np.float64]
"""Probabilities relative to the most probable token."""
Positions = NDArray[np.intp]
"""Indices into scores."""
Mask = NDArray[np.bool_]
"""True for the tokens that are kept."""

_LOWEST = np.finfo(np.float32).min
_GROUP = 32
"""Scores behind one maximum: small enough for many groups, large enough to spare most scores."""
_BINS = 2048
"""Of a histogram; counted in int16."""
_CHEAP_SORT = 1024
"""Sorting so few costs no more than a histogram."""


def distribution(
    scores: Scores, params: SamplingParams
) -> tuple[range | Positions, Scores, Weights]:
    """Apply temperature, top-k, top-p and min-p to penalised logits, (V,).

    top-p counts probabilities renormalised over what top-k kept.

    Returns:
        Ascending ids, their logits and their weights, all (n,); dropped tokens are either absent
        or weigh 0.
    """
    ids: range | Positions = range(len(scores))
    if 0 < params.top_k < len(scores):
        ids = top_k(scores, int(params.top_k))
        scores = scores[ids]
    weights = weigh(scores, 1.0 if params.temperature_last else params.temperature)
    kept: Mask | np.bool_ = np.True_
    if params.top_p < 1:
        kept = top_p(scores, weights, params.top_p)
    if params.min_p > 0:
        kept = kept & min_p(weights, params.min_p)
    if params.temperature_last:
        weights = weigh(scores, params.temperature)
    weights *= kept
    return ids, scores, weights


def weigh(scores: Scores, temperature: float) -> Weights:
    """Return exp((score - greatest score) / temperature), (n,) in float64."""
    weights = scores.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    return np.exp(weights, out=weights)


def top_k(scores: Scores, k: int) -> Positions:
    """Keep the k greatest scores and all equal to the k-th, but none of -inf.

    Returns:
        Ascending positions, at least k where so many are finite.
    """
    near: Positions = np.flatnonzero(scores >= max(_reached_by(scores, k), _LOWEST))
    if len(near) > k:
        values = scores[near]
        near = near[values >= np.partition(values, -k)[-k]]
    return near


def top_p(scores: Scores, weights: Weights, p: float) -> Mask:
    """Keep the fewest tokens, in order of rank, whose probabilities sum up to p or more.

    Nucleus sampling (arXiv 1904.09751, section 3.1): the token that crosses p stays, so at least
    one always does. Among equal scores at the cut the lowest positions stay.

    Args:
        scores: (n,) logits, which set the ranks.
        weights: (n,) of the same tokens.
        p: above 0, below 1.

    Returns:
        (n,), true for what is kept.
    """
    total = weights.sum()
    # Together, all tokens below a share of (1 - p) / n hold less than 1 - p: none is needed.
    needed = weights >= 0.5 * (1 - p) * total / len(weights)
    if needed.all():
        return _first_to_reach(p * total, scores, weights)
    pool = np.flatnonzero(needed)
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[pool] = _first_to_reach(p * total, scores[pool], weights[pool])
    return kept


def min_p(weights: Weights, p: float) -> Mask:
    """Keep tokens at least p times as probable as the most probable one, whose weight is 1.

    Source: arXiv 2407.01082, section 3. At least one token stays.
    """
    return weights >= p


def leading(scores: Scores, k: int) -> Positions:
    """Return the positions of the k first in rank, best first; fewer if fewer are finite."""
    near = top_k(scores, min(k, len(scores)))
    return near[np.argsort(-scores[near], kind="stable")[:k]]


def _first_to_reach(mass: float, scores: Scores, weights: Weights) -> Mask:
    """Keep the fewest tokens in order of rank that together weigh `mass`; scores are finite."""
    depth = scores.max() - scores
    span = depth.max()
    if len(scores) <= _CHEAP_SORT or not span:
        rank = np.argsort(-scores, kind="stable")
        kept: Mask = np.zeros(len(scores), dtype=np.bool_)
        kept[rank[: 1 + np.searchsorted(np.cumsum(weights[rank]), mass)]] = True
        return kept
    # Equal scores share a bin, so only the bin in which the mass is reached has to be ranked.
    depth /= span
    depth *= _BINS
    bins = np.minimum(depth, _BINS - 1, out=depth).astype(np.int16)
    reached = np.cumsum(torch.bincount(torch.from_numpy(bins), torch.from_numpy(weights)).numpy())
    crossed = min(int(np.searchsorted(reached, mass)), len(reached) - 1)
    before = reached[crossed - 1] if crossed else 0.0
    kept = bins < crossed
    pool = np.flatnonzero(bins == crossed)
    kept[pool] = _first_to_reach(mass - before, scores[pool], weights[pool])
    return kept


def _reached_by(scores: Scores, k: int) -> np.float32:
    """Return a number that at least k of the scores reach, and seldom many more.

    The k-th greatest of the maxima of more than k groups is one, and needs no selection among
    all scores.
    """
    groups = len(scores) // _GROUP
    if groups > k:
        scores = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    kth: np.float32 = np.partition(scores, -k)[-k]
    return kth
