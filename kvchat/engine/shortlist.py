"""What the sampler knows of the logits: all of them, or the few that can decide.

Where top-k or greediness decides, only the leading logits and those of penalised ids matter. A GPU
finds them; one small copy then brings them over, instead of the whole vocabulary. The sampler does
with them what it does with all, so a seed draws the same token from the same logits either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvchat.engine.penalties import Counts, Scores
from kvchat.engine.types import CANDIDATES, SamplingParams
from kvchat.engine.warpers import Positions

WORTH = 1 / 8
"""A longer part of the vocabulary is no quicker to find than to copy."""


@dataclass(frozen=True, slots=True)
class Known:
    """Logits of some ids, among them all that can be drawn or shown."""

    ids: range | Positions
    """Ascending."""
    scores: Scores
    """(n,), one for each id."""
    top_logprob: float
    """Log-probability of the greatest of all logits."""

    def positions(self, counts: Counts) -> Counts:
        """Return counts of ids as counts of their positions here."""
        if isinstance(self.ids, range):
            return counts
        found = np.searchsorted(self.ids, list(counts))
        return dict(zip(found.tolist(), counts.values(), strict=True))


def everything(logits: Tensor) -> Known:
    """Copy all logits, (V,) on any device, unless they are float32 on the CPU already."""
    host = logits.to("cpu", torch.float32)
    top_logprob = float(torch.log_softmax(host, dim=0).numpy().max())
    return Known(range(len(host)), host.numpy(), top_logprob)


def shortlist(logits: Tensor, penalised: Counts, params: SamplingParams) -> Known | None:
    """Find the logits that decide where they are, and copy them.

    Args:
        logits: (V,), on any device.
        penalised: ids whose logits the penalties will change.
        params: how the next token will be chosen.

    Returns:
        None if more logits may matter, as without top-k, or where many are equal.
    """
    k = 1 if params.greedy else int(params.top_k)
    # Penalties may push as many out of the lead as there are penalised ids, and equal logits have
    # to end within what is copied.
    n = 2 * (max(k, CANDIDATES) + len(penalised))
    if not k or n > WORTH * len(logits):
        return None
    logits = logits.float()
    extra = torch.tensor(list(penalised), dtype=torch.long).to(logits.device)
    top, top_ids = logits.topk(n)
    log_sum = (logits - top[0]).exp().sum().log()
    scores = torch.cat([top, logits[extra], log_sum[None]]).view(torch.int32)  # the bits
    host = torch.cat([scores, top_ids.to(torch.int32), extra.to(torch.int32)]).cpu().numpy()
    count = n + len(penalised)
    found = host[: count + 1].view(np.float32)
    ids, first = np.unique(host[count + 1 :], return_index=True)
    known = Known(ids.astype(np.intp), found[first], -float(found[count]))
    ahead = known.scores > found[n - 1]
    unpenalised = ~np.isin(known.ids, list(penalised))
    # What is not here is at most the last that is: more than enough have to be ahead of it.
    if ahead.sum() < CANDIDATES or (ahead & unpenalised).sum() < k:
        return None
    return known
